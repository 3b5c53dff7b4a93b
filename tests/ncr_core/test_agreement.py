"""How far lists agree: by hand, and beside the definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncr_core.evaluation.agreement import overlap, rank_biased_overlap

lists = st.lists(st.integers(0, 15), unique=True, max_size=12)


def test_overlap() -> None:
    assert overlap([1, 2, 3, 4], [4, 3, 9, 8]) == 0.5
    assert overlap([1, 2], [1]) == 0.5
    assert overlap([], []) == 1.0
    assert overlap([1], []) == 0.0


def test_rbo_by_hand() -> None:
    """Agreement 0, 1, 2/3 at depths 1 to 3, and 2/3 below; p = 1/2."""
    expected = 0 / 1 * 0.5 + 2 / 2 * 0.25 + 2 / 3 * 0.125 + 2 / 3 * 0.125
    assert rank_biased_overlap("abc", "bad", 0.5) == pytest.approx(expected)


def test_rbo_of_lists_of_two_lengths_by_hand() -> None:
    """Beyond the short list's end its agreement of 1/2 is taken to go on (eq. 32), p = 1/2."""
    # X = 1, 1, 1, 2; l = 4, s = 2: depths 3 and 4 get X_s (d − s)/s more.
    within = 1 / 1 * 0.5 + 1 / 2 * 0.25 + 1 / 3 * 0.125 + 2 / 4 * 0.0625
    beyond = 1 * 1 / (2 * 3) * 0.125 + 1 * 2 / (2 * 4) * 0.0625
    rest = ((2 - 1) / 4 + 1 / 2) * 0.0625
    expected = within + beyond + rest
    assert rank_biased_overlap("ab", "acdb", 0.5) == pytest.approx(expected)


@given(lists, lists, st.sampled_from([0.3, 0.9]))
def test_rbo_is_symmetric_and_between_0_and_1(a: list[int], b: list[int], p: float) -> None:
    found = rank_biased_overlap(a, b, p)
    assert -1e-12 <= found <= 1 + 1e-12
    assert found == pytest.approx(rank_biased_overlap(b, a, p))
    assert rank_biased_overlap(a, a, p) == pytest.approx(1.0)
    if a and b and not set(a) & set(b):
        assert found == 0.0


@given(lists.filter(len), lists.filter(len))
def test_rbo_is_the_definition_where_lists_go_on_for_long(a: list[int], b: list[int]) -> None:
    """Eq. 4, with p so small that nothing below the lists weighs anything."""
    p, depth = 1e-3, min(len(a), len(b))
    sums = sum(len(set(a[:d]) & set(b[:d])) / d * p ** (d - 1) for d in range(1, depth + 1))
    least = max(2 * p**depth, 1e-12)
    assert rank_biased_overlap(a, b, p) == pytest.approx((1 - p) * sums, abs=least)


def test_rbo_weighs_the_top_most() -> None:
    ten = list(range(10))
    swapped_first, swapped_last = [1, 0, *ten[2:]], [*ten[:8], 9, 8]
    assert rank_biased_overlap(ten, swapped_first) < rank_biased_overlap(ten, swapped_last) < 1


@pytest.mark.parametrize("p", [0.0, 1.0, -1.0])
def test_rbo_needs_a_probability(p: float) -> None:
    with pytest.raises(ValueError):
        rank_biased_overlap([1], [1], p)
