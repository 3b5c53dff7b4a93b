"""Rules by type and age, and what was shown and not taken, against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import SettingsError, Unprocessable
from app.core.settings import load_settings
from app.events.event_weights import EventWeights
from app.events.profile import Profile
from app.events.schemas import NewEvent
from app.events.seen_rule import (
    ALWAYS_SEEN,
    MAX_TYPES,
    NEVER_BACK,
    SeenRule,
    hidden_time_of,
    parse_rule,
    read_seen_rule,
    seen_rule_of,
    settings_hidden_time,
    settings_rule,
)
from app.events.shown_lists import ShownList, hidden_items
from app.wiring import Services

HOUR_US = 3_600_000_000
TYPES = ["buy", "view", "dislike", "other"]


def test_ages_are_written_in_four_units() -> None:
    rule = parse_rule({"a": "90s", "b": "30m", "c": "6h", "d": "14d", "e": 5, "f": 0, "*": "1d"})
    seconds = {name: age // 1_000_000 for name, age in rule.types.items()}
    assert seconds == {"a": 90, "b": 1800, "c": 21_600, "d": 1_209_600, "e": 5, "f": 0}
    assert rule.other == 86_400 * 1_000_000
    assert parse_rule({"a": "forever"}).never_ends
    assert parse_rule({}).never_ends
    assert not rule.never_ends
    assert hidden_time_of("6h") == 6 * HOUR_US == hidden_time_of(21_600) == hidden_time_of("21600")
    assert hidden_time_of("0") == 0
    assert hidden_time_of(None) is None


BAD_AGES: list[Any] = [
    *("-1d", "1.5d", "d", "", "1w", "14 d", "36501d", "99999999999d", "٣d", "1d\n", "never", "01d"),
    *(-1, 1.5, True, None, [], {}, float("nan"), 10**400),
]


@pytest.mark.parametrize("age", BAD_AGES)
def test_a_bad_age_is_one_clear_problem(age: Any) -> None:
    with pytest.raises(Unprocessable) as refused:
        seen_rule_of({"purchase": age})
    assert refused.value.code == "invalid_seen"
    assert "the age of 'purchase' must be" in refused.value.detail
    if age is not None:
        with pytest.raises(Unprocessable) as refused:
            hidden_time_of(age)
        assert refused.value.code == "invalid_hide_shown"


def test_other_bad_rules() -> None:
    for value in (
        *([], "purchase", 3, None, {"": "1d"}, {"x" * 65: "1d"}, {"a\0": "1d"}),
        {f"t{n}": "1d" for n in range(MAX_TYPES + 1)},
    ):
        with pytest.raises(Unprocessable, match=r"^seen: "):
            seen_rule_of(value)
    for text in ("", "{", "[]", '{"a":"1d","a":"2d"}', "x" * 5000, "[" * 3000):
        with pytest.raises(Unprocessable, match=r"^seen: "):
            read_seen_rule(text)
    assert read_seen_rule('{"a":"1d"}') == parse_rule({"a": "1d"})
    for name, value in (("seen", '{"a":"-1d"}'), ("seen", "no"), ("hide_shown", "31d")):
        read = settings_rule if name == "seen" else settings_hidden_time
        with pytest.raises(SettingsError, match=f"^NCR_{name.upper()}: "):
            read(load_settings(**{name: value}))
    assert settings_rule(load_settings()) is ALWAYS_SEEN
    assert settings_hidden_time(load_settings()) == 0


def expected(
    events: list[tuple[str, str, int]], rule: SeenRule, disliked: set[str], at_us: int
) -> set[str]:
    """The items that are still left out, as the rule is worded."""
    left = set()
    for item, kind, time in events:
        never = kind == "dislike" and item in disliked and kind not in rule.types
        age = NEVER_BACK if never else rule.types.get(kind, rule.other)
        if age == NEVER_BACK or time + age > at_us:
            left.add(item)
    return left


@pytest.mark.anyio
async def test_what_comes_back_is_what_the_rule_says(services: Services) -> None:
    """Random events, ages and moments, before and after more of them, and after a deletion."""
    rng = np.random.default_rng(8)
    begin = 1_700_000_000_000_000
    items = [f"i{n}" for n in range(9)]
    done: dict[str, list[tuple[str, str, int]]] = {}
    profiles, histories = services.events.profiles, services.events.seen_histories
    for turn in range(3):
        rows = []
        for user in (f"u{n}" for n in range(12)):
            for number in range(int(rng.integers(1, 14))):
                item, kind = str(rng.choice(items)), str(rng.choice(TYPES))
                time = begin + int(rng.integers(0, 100)) * HOUR_US
                rows.append(NewEvent(f"{turn} {user} {number}", user, item, kind, None, time))
                done.setdefault(user, []).append((item, kind, time))
        await services.events.import_rows(rows)
        if turn == 2:
            for event in rows[:5]:
                await services.events.delete_event(event.event_id)
                done[event.user].remove((event.item, event.type, event.timestamp))
        catalogue = await services.catalog.catalogue()
        names = catalogue.external_ids
        for user, events in done.items():
            profile = await profiles.get(user)
            disliked = {names[item] for item in profile.disliked.tolist()}
            for _ in range(12):
                ages = {
                    kind: int(rng.choice([0, 5, 30, NEVER_BACK // HOUR_US])) * HOUR_US
                    for kind in TYPES
                    if rng.random() < 0.5
                }
                ages = {k: NEVER_BACK if v > 100 * HOUR_US else v for k, v in ages.items()}
                other = int(rng.choice([0, 20 * HOUR_US, NEVER_BACK]))
                rule = SeenRule(ages, other)
                at_us = begin + int(rng.integers(0, 140)) * HOUR_US
                history = await histories.get(user, profile)
                assert history.last_seq == profile.last_seq
                times = history.return_times(rule, profile.disliked)
                left = {names[item] for item in times.items[times.returned(at_us) :].tolist()}
                assert left == expected(events, rule, disliked, at_us), (user, rule, at_us)


@pytest.mark.anyio
async def test_a_long_history_goes_on_from_what_is_known(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.events.seen_history.MIN_KEPT_ROWS", 10)
    begin = 1_700_000_000_000_000

    async def add(first: int, n: int, kind: str) -> None:
        await services.events.import_rows(
            [
                NewEvent(f"{kind} {k}", "long", f"i{k}", kind, None, begin + k)
                for k in range(first, first + n)
            ]
        )

    async def left(at_us: int) -> tuple[int, int]:
        profile = await services.events.profiles.get("long")
        history = await services.events.seen_histories.get("long", profile)
        assert history.last_seq == profile.last_seq
        times = history.return_times(rule, profile.disliked)
        return len(times.items) - times.returned(at_us), history.added

    rule = parse_rule({"buy": "1h", "*": "0s"})
    await add(0, 40, "buy")
    assert await left(begin + HOUR_US + 9) == (30, 0)
    await add(0, 5, "view")
    await add(100, 3, "buy")
    assert await left(begin + HOUR_US + 9) == (33, 8)
    row = {"user": "long", "winner": "i1", "loser": "i2"}
    await services.events.add_preferences([row], begin)
    assert await left(begin + HOUR_US + 9) == (33, 8)
    await services.events.delete_event("buy 102")
    assert await left(begin + HOUR_US + 9) == (32, 0)  # it is read anew


SHOWN = st.lists(
    st.builds(
        ShownList,
        st.integers(0, 50),
        st.integers(0, 30),
        st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True),
    ),
    max_size=8,
)
EVENTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=12)


@given(SHOWN, EVENTS, st.integers(0, 60), st.integers(0, 60))
def test_shown_and_not_taken(
    lists: list[ShownList], events: list[tuple[int, int]], window: int, at: int
) -> None:
    by_seq = dict(events)
    seqs = sorted(by_seq)
    seen = np.array([by_seq[seq] for seq in seqs], dtype=np.int64)
    profile = Profile(
        1,
        max(seqs, default=0),
        seen,
        np.array(seqs, dtype=np.int64),
        np.ones(len(seqs), dtype=np.float32),
        np.zeros(len(seqs), dtype=np.int64),
        np.zeros((0, 4), dtype=np.int64),
        99,
        0,
        EventWeights.parse(None),
    )
    hidden = {
        item
        for shown in lists
        for item in shown.items
        if at - window < shown.shown_at <= at
        and not any(by_seq[seq] == item and seq > shown.seq for seq in seqs)
    }
    found = hidden_items(lists, profile, at - window, at)
    assert sorted(found.tolist()) == sorted(hidden)
