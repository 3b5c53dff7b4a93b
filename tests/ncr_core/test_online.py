"""Team draft and credit by hand and by properties; what is taken for a drop, and for chance."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ncr_core.online import (
    ArmCounts,
    ClickThroughDrop,
    Draft,
    Teams,
    click_through_difference,
    click_through_drop,
    credit,
    interleaving_over_time,
    interleaving_result,
    outcome_of,
    planned_clicked,
    team_draft,
)


class Tosses:
    """A coin whose sides are given: A or B chooses first."""

    def __init__(self, sides: str) -> None:
        self._sides = iter(sides)

    def random(self) -> float:
        return 0.25 if next(self._sides) == "B" else 0.75


def draft(a: str, b: str, n: int, sides: str) -> Draft[str]:
    return team_draft(list(a), list(b), n, Tosses(sides))


@pytest.mark.parametrize(
    ("sides", "merged", "of_a", "of_b"),
    [
        ("AA", "abcd", "ac", "bd"),
        ("AB", "abdc", "ac", "bd"),
        ("BA", "bacd", "ac", "bd"),
        ("BB", "badc", "ac", "bd"),
    ],
)
def test_two_rounds_by_hand(sides: str, merged: str, of_a: str, of_b: str) -> None:
    assert draft("abcg", "bdef", 4, sides) == (list(merged), (list(of_a), list(of_b)))


def test_equal_rankings_are_shown_as_they_are_and_shared() -> None:
    shown, teams = draft("abcd", "abcd", 4, "AB")
    assert "".join(shown) == "abcd"
    assert teams == (["a", "d"], ["b", "c"])


def test_an_odd_number_leaves_the_last_round_unfinished() -> None:
    assert draft("abc", "xyz", 3, "AB") == (["a", "x", "y"], (["a"], ["x", "y"]))


def test_what_follows_a_used_up_ranking_is_nobodys() -> None:
    assert draft("a", "bcde", 4, "AA") == (["a", "b", "c", "d"], (["a"], ["b"]))
    assert draft("abcd", "", 3, "A") == (["a", "b", "c"], ([], []))
    assert draft("ab", "ab", 5, "AA") == (["a", "b"], (["a"], ["b"]))


rankings = st.lists(st.integers(0, 30), unique=True, max_size=20)


@given(rankings, rankings, st.integers(0, 25), st.integers(0, 2**32))
def test_every_draft(a: list[int], b: list[int], n: int, seed: int) -> None:
    merged, teams = team_draft(a, b, n, random.Random(seed))
    assert len(merged) == len(set(merged)) == min(n, len({*a, *b}))
    assert abs(len(teams.a) - len(teams.b)) <= 1
    assert not set(teams.a) & set(teams.b)
    for team, ranking in ((teams.a, a), (teams.b, b)):
        assert team == [item for item in ranking if item in team]
        assert team == [item for item in merged if item in team]
    if min(len(a), len(b)) >= n:
        assert {*teams.a, *teams.b} == set(merged)


@given(rankings, st.integers(0, 2**32))
def test_one_ranking_with_itself_is_that_ranking(a: list[int], seed: int) -> None:
    assert team_draft(a, a, len(a), random.Random(seed)).merged == a


def test_each_goes_first_as_often_and_gets_as_many_of_the_shared_items() -> None:
    """Over all tosses that there are."""
    first = [0, 0]
    shared = [0, 0]
    for sides in itertools.product("AB", repeat=3):
        _, teams = draft("abcdef", "abxyzd", 6, "".join(sides))
        first[0] += "a" in teams.a
        first[1] += "a" in teams.b
        shared[0] += "b" in teams.a
        shared[1] += "b" in teams.b
    assert first == [4, 4]
    assert shared == [4, 4]


def test_credit_counts_clicked_items_of_each_team_once() -> None:
    teams = Teams([1, 3], [2, 4])
    assert credit({1, 2, 3}, teams) == (2, 1)
    assert credit(set(), teams) == (0, 0)
    assert credit({9}, teams) == (0, 0)


def users(rows: Iterable[tuple[int, int, int]]) -> NDArray[np.int64]:
    return np.array(list(rows), dtype=np.int64).reshape(-1, 3)


def test_nothing_clicked_is_no_preference() -> None:
    for rows in ([], [(0, 0, 0)]):
        found = interleaving_result(users(rows))
        assert (found.difference, found.interval, found.p, found.better) == (None,) * 4


def test_difference_by_hand() -> None:
    found = interleaving_result(users([(1, 2, 1), (0, 1, 1), (0, 0, 0)]))
    assert (found.wins_a, found.wins_b, found.ties, found.users) == (1, 3, 2, 2)
    assert found.difference == pytest.approx(4 / 6 - 1 / 2)
    assert found.p == pytest.approx(0.5)  # two votes of two


def test_independent_lists_get_wilsons_interval() -> None:
    """60 and 40 of 100 users with a list each: 0.5020 to 0.6906 by Wilson; a bit more by t."""
    found = interleaving_result(users([(0, 1, 0)] * 60 + [(1, 0, 0)] * 40))
    assert found.interval is not None
    assert found.interval == pytest.approx((0.0020, 0.1906), abs=0.002)
    assert found.p == pytest.approx(0.0569, abs=1e-4)
    assert found.better is None


def test_both_sides_are_treated_alike() -> None:
    rows = users([(0, 3, 1), (2, 1, 0), (0, 2, 2), (1, 1, 0), (0, 5, 0)] * 6)
    one, other = interleaving_result(rows), interleaving_result(rows[:, [1, 0, 2]])
    assert one.interval is not None
    assert other.interval is not None
    assert one.difference == pytest.approx(-(other.difference or 0))
    assert one.interval == pytest.approx((-other.interval[1], -other.interval[0]))
    assert one.p == other.p
    assert (one.better, other.better) == ("b", "a")


def test_one_user_with_many_lists_decides_nothing() -> None:
    found = interleaving_result(users([(0, 1000, 0)]))
    assert found.interval == (-0.5, 0.5)
    assert found.p == 1.0
    assert found.better is None


def test_lists_of_few_users_say_less_than_as_many_of_many() -> None:
    few = interleaving_result(users([(0, 30, 0)] * 6 + [(30, 0, 0)] * 4))
    many = interleaving_result(users([(0, 1, 0)] * 180 + [(1, 0, 0)] * 120))
    assert few.difference == many.difference == pytest.approx(0.1)
    assert few.interval is not None
    assert many.interval is not None
    assert few.interval[0] < -0.2
    assert many.interval[0] > 0
    assert (few.better, many.better) == (None, "b")


def test_all_alike_has_an_interval_with_a_width() -> None:
    for rows in ([(0, 1, 0)] * 30, [(0, 0, 1)] * 30, [(1, 0, 0)] * 2):
        found = interleaving_result(users(rows))
        assert found.interval is not None
        assert -0.5 <= found.interval[0] < found.interval[1] <= 0.5
        assert found.interval[0] <= (found.difference or 0.0) <= found.interval[1]


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Users differ in what they prefer, and a tenth of them come thirty times as often."""
    rng = np.random.default_rng(7)
    tries = covered = wrong = 0
    for _ in range(400):
        taste = rng.beta(3, 2, 60)  # for B; 0.6 on average
        lists = np.where(rng.random(60) < 0.1, 30, 1)
        b = rng.binomial(lists, taste)
        found = interleaving_result(np.stack([lists - b, b, np.zeros_like(b)], axis=1))
        assert found.interval is not None
        covered += found.interval[0] <= 0.1 <= found.interval[1]
        even = rng.beta(2.5, 2.5, 60)
        b = rng.binomial(lists, even)
        wrong += (
            interleaving_result(np.stack([lists - b, b, np.zeros_like(b)], axis=1)).better
            is not None
        )
        tries += 1
    assert covered / tries > 0.91
    assert wrong / tries < 0.07


lists_in_order = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=30)


@given(lists_in_order, st.lists(st.floats(0, 1), max_size=5))
def test_over_time_each_result_is_that_of_the_lists_so_far(
    lists: list[tuple[int, int]], shares: list[float]
) -> None:
    counts = [int(share * len(lists)) for share in shares]
    rows = np.array(lists, dtype=np.int64).reshape(-1, 2)
    results = interleaving_over_time(rows[:, 0], rows[:, 1], counts)
    for count, result in zip(counts, results, strict=True):
        tallies = np.zeros((5, 3), dtype=np.int64)
        for user, outcome in lists[:count]:
            tallies[user, outcome] += 1
        assert result == interleaving_result(tallies)


def test_who_won() -> None:
    assert [outcome_of(*pair) for pair in ((2, 1), (0, 1), (1, 1))] == [0, 1, 2]


@pytest.mark.slow
def test_the_planned_size_finds_its_difference_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    n, found, trials = planned_clicked(0.05), 0, 400
    for _ in range(trials):
        wins = random.random(n) < 0.55
        result = interleaving_result(np.stack([~wins, wins, 0 * wins], axis=1).astype(np.int64))
        assert result.interval is not None
        found += result.interval[0] > 0
    assert found / trials == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize(("difference", "power"), [(0, 0.8), (0.5, 0.8), (0.1, 1.0), (0.1, 0.0)])
def test_no_size_finds_nothing_or_everything(difference: float, power: float) -> None:
    with pytest.raises(ValueError):
        planned_clicked(difference, power)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="wins of A"):
        interleaving_result(np.zeros((3, 2), dtype=np.int64))


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


def arm(lists: Iterable[int], clicked: Iterable[int]) -> ArmCounts:
    """The counts of users with so many lists and clicked lists."""
    x, y = np.array(list(lists)), np.array(list(clicked))
    used = x > 0
    x, y = x[used], y[used]
    sums = (x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum())
    return ArmCounts(len(x), *(int(each) for each in sums))


def test_the_difference_of_independent_lists_by_hand() -> None:
    """100 users of one list each: the variance is the binomial's, with n − 1 for n."""
    a, b = arm([1] * 100, [1] * 20 + [0] * 80), arm([1] * 100, [1] * 50 + [0] * 50)
    found = click_through_difference(a, b, planned_lists=200)
    assert found is not None
    assert (found.rate_a, found.difference, found.relative) == (0.2, 0.3, pytest.approx(1.5))
    assert found.std == pytest.approx(math.sqrt((0.2 * 0.8 + 0.5 * 0.5) / 99), rel=0.02)
    # At the planned number √(2(s + 1)/s · ln(√(s + 1)/0.05)), s = −2 ln 0.05 + ln(1 − 2 ln 0.05).
    half = (found.interval[1] - found.interval[0]) / 2 / found.std
    assert half == pytest.approx(3.035, abs=0.005)
    assert found.better == "b"
    assert click_through_difference(b, a, 200).better == "a"  # type: ignore[union-attr]
    assert found.p < 0.01


def test_users_with_many_lists_say_less_than_as_many_users() -> None:
    many = arm([1] * 1_000, [1] * 100 + [0] * 900)
    few = arm([10] * 100, [10] * 10 + [0] * 90)  # the same lists, all of a user alike
    wide, narrow = (click_through_difference(each, each, 2_000) for each in (few, many))
    assert wide is not None
    assert narrow is not None
    assert wide.std / narrow.std == pytest.approx(math.sqrt(10), rel=0.02)


def test_few_users_and_no_clicks_show_nothing() -> None:
    assert click_through_difference(arm([9] * 29, [9] * 29), arm([9] * 50, [0] * 50), 100) is None
    nothing = arm([1] * 50, [0] * 50)
    found = click_through_difference(nothing, nothing, 100)
    assert found is not None
    assert found.interval[0] < 0 < found.interval[1]
    assert (found.better, found.relative, found.detectable) == (None, None, None)


def drawn_arm(seed: int, n_users: int, rate: float) -> ArmCounts:
    """Users with up to 20 lists each, of which they click some."""
    rng = np.random.default_rng(seed)
    lists = rng.integers(1, 21, n_users)
    return arm(lists, rng.binomial(lists, rate))


some_users = st.builds(drawn_arm, st.integers(0, 2**32), st.integers(30, 99), st.floats(0, 1))


@given(some_users, some_users, st.integers(100, 10**6))
def test_interval_and_p_agree_and_both_arms_are_treated_alike(
    a: ArmCounts, b: ArmCounts, planned: int
) -> None:
    found, mirrored = (
        click_through_difference(*arms, planned_lists=planned) for arms in ((a, b), (b, a))
    )
    assert found is not None
    assert mirrored is not None
    low, high = found.interval
    assert -1 <= low <= found.difference <= high <= 1
    assert low < high
    assert mirrored.interval == pytest.approx((-high, -low))
    assert 0 < found.p <= 1
    if min(abs(low), abs(high)) > 1e-9 and low > -1 and high < 1:
        assert (found.p < 0.05) == (found.better is not None)
    # Looking late or early only widens it.
    best = click_through_difference(a, b, planned_lists=a.lists + b.lists)
    assert best is not None
    assert best.interval[1] - best.interval[0] <= 1.0001 * (high - low)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_users", "rate", "share", "planned"),
    [(200, 0.1, 0.5, 2_000), (1_000, 0.02, 0.1, 10_000), (1_000, 0.1, 0.9, 500)],
)
def test_looking_every_day_rarely_sees_a_difference_where_there_is_none(
    n_users: int, rate: float, share: float, planned: int
) -> None:
    """Users differ in their visits and in how often they click, which is what makes it hard."""
    rng = np.random.default_rng(0)
    runs, seen = 100, 0
    for _ in range(runs):
        own_rate = rng.beta(rate * 5, (1 - rate) * 5, n_users)
        visits = 0.5 * rng.lognormal(0, 1, n_users)
        in_b = rng.random(n_users) < share
        lists, clicked = np.zeros(n_users, np.int64), np.zeros(n_users, np.int64)
        for _ in range(40):
            today = rng.poisson(visits)
            lists += today
            clicked += rng.binomial(today, own_rate)
            arms = [arm(lists[side], clicked[side]) for side in (~in_b, in_b)]
            found = click_through_difference(*arms, planned_lists=planned)
            if found is not None and found.better is not None:
                seen += 1
                break
    assert seen <= 5


def test_a_difference_is_found_about_as_often_as_planned() -> None:
    rng = np.random.default_rng(0)
    n, lists, runs, found = 2_000, np.full(2_000, 5), 100, 0
    half = n // 2
    probe = arm(lists[:half], rng.binomial(5, 0.1, half))
    planned = click_through_difference(probe, probe, 2 * probe.lists)
    assert planned is not None
    assert planned.detectable is not None
    more = 0.1 * (1 + planned.detectable)
    for _ in range(runs):
        a = arm(lists[:half], rng.binomial(5, 0.1, half))
        b = arm(lists[half:], rng.binomial(5, more, half))
        result = click_through_difference(a, b, 2 * probe.lists)
        found += result is not None and result.better == "b"
    assert 65 <= found <= 95
