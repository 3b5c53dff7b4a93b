"""Whether click-through has fallen: what is compared with what, and what is taken for chance."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ncr_core.online.sequential_test import ClickThroughDrop, click_through_drop

Rows = NDArray[np.int64]
DAY = 24
TUNED = 2000


def hours(first: int, n: int, lists: int, rate: float) -> Rows:
    """The same number of lists in each hour, clicked at exactly the same rate."""
    return np.array([(first + i, lists, round(lists * rate)) for i in range(n)], dtype=np.int64)


def compared(before: Rows, since: Rows, usual: Rows | None = None) -> ClickThroughDrop:
    found = click_through_drop(before, since, before if usual is None else usual, TUNED)
    assert found is not None
    return found


def test_the_figures() -> None:
    found = compared(hours(0, 7 * DAY, 100, 0.1), hours(7 * DAY, 2 * DAY, 100, 0.07))
    assert (found.lists_before, found.lists, found.clicked) == (16_800, 4_800, 336)
    assert found.expected == pytest.approx(480)
    assert found.relative_drop == pytest.approx(0.3)
    assert found.dispersion == 1.0
    assert found.p < 0.01


def test_no_fall_has_no_small_p() -> None:
    for rate in (0.1, 0.15):
        found = compared(hours(0, 7 * DAY, 100, 0.1), hours(7 * DAY, 2 * DAY, 100, rate))
        assert found.p == 1.0
        assert found.relative_drop <= 0


def test_p_is_where_the_bound_is_passed() -> None:
    found = compared(hours(0, 7 * DAY, 100, 0.1), hours(7 * DAY, 2 * DAY, 100, 0.08))
    short = found.expected - found.clicked
    assert found.bound(found.p * 1.01) < short < found.bound(found.p * 0.99)


def test_night_is_compared_with_night() -> None:
    """A version that has seen only the night, when everything is clicked half as much."""
    week = np.array(
        [(h, 100, 20 if 8 <= h % DAY < 20 else 10) for h in range(7 * DAY)], dtype=np.int64
    )
    night = np.array([(7 * DAY + h, 1000, 100) for h in range(6)], dtype=np.int64)
    assert compared(week, night).p == 1.0
    day = night + np.array([10, 0, 0])
    assert compared(week, day).p < 1e-6


def test_hours_that_were_never_served_before_are_left_out() -> None:
    before = hours(0, 6, 500, 0.1)
    found = compared(before, np.array([[DAY + 1, 300, 30], [DAY + 8, 900, 0]], dtype=np.int64))
    assert (found.lists, found.clicked, found.lists_before) == (300, 30, 500)


def test_nothing_to_compare() -> None:
    none = np.zeros((0, 3), dtype=np.int64)
    some = hours(0, 3, 10, 0.1)
    assert click_through_drop(none, some, none, TUNED) is None
    assert click_through_drop(some, none, some, TUNED) is None
    assert click_through_drop(some, hours(12, 3, 10, 0.1), some, TUNED) is None


def test_no_clicks_at_all_is_no_fall() -> None:
    found = compared(hours(0, 7 * DAY, 100, 0.0), hours(7 * DAY, DAY, 100, 0.0))
    assert (found.relative_drop, found.p) == (0.0, 1.0)


def test_days_that_differ_by_themselves_make_it_less_sure() -> None:
    rng = np.random.default_rng(3)
    before = hours(0, 7 * DAY, 1000, 0.1)
    before[:, 2] = before[:, 2] * np.repeat(np.exp(rng.normal(0, 0.15, 7)), DAY)
    since = hours(7 * DAY, DAY, 1000, 0.085)
    steady, wild = compared(hours(0, 7 * DAY, 1000, 0.1), since), compared(before, since)
    assert wild.dispersion > 20 * steady.dispersion
    assert steady.p < 1e-6
    assert wild.p > 0.05


def test_where_no_week_is_known_only_a_steep_fall_counts() -> None:
    before = hours(0, DAY, 2000, 0.1)
    a_tenth, half = (hours(DAY, DAY, 2000, rate) for rate in (0.09, 0.05))
    assert compared(before, a_tenth).p > 0.05
    assert compared(before, half).p < 0.01
    usual = np.concatenate([hours(-6 * DAY, 6 * DAY, 2000, 0.1), before])
    assert compared(before, a_tenth, usual).p < 0.01


def test_looking_every_hour_rarely_sees_a_fall_where_there_is_none() -> None:
    """An ordinary test at 1 % would, looked at so often, in several times as many."""
    rng = np.random.default_rng(11)
    wrong, naive, runs = 0, 0, 60
    for _ in range(runs):
        every = np.stack(
            [np.arange(14 * DAY), np.full(14 * DAY, 50), rng.binomial(50, 0.1, 14 * DAY)], axis=1
        )
        before, after = every[: 7 * DAY], every[7 * DAY :]
        seen = [compared(before, after[:n]) for n in range(20, len(after), 4)]
        wrong += any(each.p < 0.01 for each in seen)
        naive += any(
            each.expected - each.clicked
            > 2.326 * np.hypot(np.sqrt(each.expected * 0.9), each.expected_std)
            for each in seen
        )
    assert wrong <= 1
    assert naive > wrong
