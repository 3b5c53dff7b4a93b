"""Schedules as cron writes them."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest

from app.core.cron import CronSchedule
from app.core.errors import SettingsError
from app.core.settings import load_settings

NOW = datetime(2026, 11, 22, 4, 59, 30, tzinfo=UTC)  # a Sunday


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"{text}+00:00")


@pytest.mark.parametrize(
    ("schedule", "following"),
    [
        ("* * * * *", "2026-11-22 05:00"),
        ("*/15 * * * *", "2026-11-22 05:00"),
        ("59 4 * * *", "2026-11-23 04:59"),
        ("30 3 * * *", "2026-11-23 03:30"),
        ("0 */6 * * *", "2026-11-22 06:00"),
        ("0 */6 * * mon-fri", "2026-11-23 00:00"),
        ("0 0 * * 7", "2026-11-29 00:00"),
        ("0 0 * * 0", "2026-11-29 00:00"),
        ("0 0 * * FRI-sun", "2026-11-27 00:00"),
        ("0 0 * * sun-sun", "2026-11-29 00:00"),
        ("0 0 * * sun-mon", "2026-11-23 00:00"),
        ("0 0 * * 0-7", "2026-11-23 00:00"),
        ("15,45 8-9 1 * *", "2026-12-01 08:15"),
        ("5/20 1-3,7 * jan sun", "2027-01-03 01:05"),
        ("0 12 31 * *", "2026-12-31 12:00"),
        ("0 0 29 2 *", "2028-02-29 00:00"),
        # Both days are given: either will do, as in cron.
        ("0 0 13 * fri", "2026-11-27 00:00"),
        ("0 0 23 * fri", "2026-11-23 00:00"),
        # A field that begins with a star restricts nothing by itself: both have to be true.
        ("0 0 */13 * mon", "2026-12-14 00:00"),
    ],
)
def test_next_time_of_a_schedule(schedule: str, following: str) -> None:
    assert CronSchedule.parse(schedule).after(NOW) == at(following)


def test_the_next_time_is_strictly_later() -> None:
    schedule = CronSchedule.parse("0 5 * * *")
    assert schedule.after(at("2026-11-22 05:00")) == at("2026-11-23 05:00")
    assert schedule.after(at("2026-11-22 04:59:59")) == at("2026-11-22 05:00")


@pytest.mark.slow
def test_next_times_agree_with_a_search_over_minutes() -> None:
    rng = random.Random(0)

    def field(first: int, last: int) -> tuple[str, set[int]]:
        kind = rng.randrange(4)
        low, high = sorted(rng.choices(range(first, last + 1), k=2))
        if kind == 0:
            return "*", set(range(first, last + 1))
        if kind == 1:
            return f"{low}-{high}", set(range(low, high + 1))
        if kind == 2:
            return f"{low},{high}", {low, high}
        return f"{low}-{high}/5", set(range(low, high + 1, 5))

    for _ in range(60):
        texts, values = zip(*(field(*ends) for ends in _ENDS), strict=True)
        moment = NOW + timedelta(minutes=rng.randrange(60 * 24 * 400))
        found = CronSchedule.parse(" ".join(texts)).after(moment)
        step, last = moment.replace(second=0) + timedelta(minutes=1), moment + timedelta(days=20)
        while step < last and not _matches(step, texts, values):
            step += timedelta(minutes=1)
        assert found is not None
        assert found == step if step < last else found >= step


_ENDS = ((0, 59), (0, 23), (1, 28), (1, 12), (0, 6))


def _matches(moment: datetime, texts: tuple[str, ...], values: tuple[set[int], ...]) -> bool:
    minute, hour, day, month, weekday = values
    if not (moment.minute in minute and moment.hour in hour and moment.month in month):
        return False
    days = moment.day in day, moment.isoweekday() % 7 in weekday
    return all(days) if "*" in (texts[2], texts[4]) else any(days)


@pytest.mark.parametrize(
    "schedule",
    [
        "daily", "@daily", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *",
        "* * 32 * *", "* * * 13 * ", "* * * * 8", "*/0 * * * *", "5-3 * * * *", "1, * * * *",
        "-1 * * * *", "1.5 * * * *", "* * * foo *", "* * * * jan", "0 0 31 2 *", "0 0 30 2,2 *",
        "٣ * * * *", "* * * * mon-", "1--2 * * * *",
    ],
)  # fmt: skip
def test_an_invalid_schedule_is_a_settings_error_of_one_line(schedule: str) -> None:
    with pytest.raises(SettingsError, match="NCR_TRAIN_SCHEDULE: ") as caught:
        load_settings(train_schedule=schedule)
    assert "\n" not in str(caught.value)


def test_an_empty_schedule_is_none() -> None:
    assert load_settings(train_schedule="").train_schedule is None
