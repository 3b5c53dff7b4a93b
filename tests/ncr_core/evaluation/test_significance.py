"""Intervals, the t distribution against other people's values, and means over seeds."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from ncr_core.evaluation import significance
from ncr_core.evaluation.metrics import hit_of_each, hit_ratio, ndcg, ndcg_of_each
from ncr_core.evaluation.significance import (
    Evaluation,
    bootstrap_interval,
    holm,
    paired_t_test,
    sign_test_p,
    student_t_p,
    student_t_quantile,
)

# (t, degrees of freedom, p), two-sided: 2·scipy.stats.t.sf(|t|, ν) of SciPy 1.17, which agrees to
# 1e-12 with the regularised incomplete beta function of mpmath at 60 digits; p is the latter's.
KNOWN = [
    (0.0, 5, 1.0),
    (0.1, 1, 0.9365489651388929),
    (1.0, 1, 0.5),
    (1e6, 1, 6.366197723673691e-07),
    (12.706, 1, 0.05000080235813319),
    (-2.0, 3, 0.1393259685588432),
    (0.5, 0.5, 0.7573180729294366),
    (2.5, 10, 0.031446844236608804),
    (1e8, 4, 5.999999999999996e-32),
    (50.0, 20, 1.753338044924229e-22),
    (1e3, 30, 2.072003483111733e-69),
    (1.96, 100, 0.05277890136622967),
    (1e-8, 6039, 0.9999999920214847),
    (2.0, 6039, 0.04554496931997552),
    (-5.5, 6039, 3.9537818936926994e-08),
    (37.5, 6039, 7.201861843943463e-277),
    (3.0, 1_000_000, 0.002699862541421797),
]


def test_holm_by_hand() -> None:
    """4 · .01; max(.04, 3 · .02); 2 · .04, and 1 · .05 would be below it."""
    assert holm([0.04, 0.01, 0.05, 0.02]) == pytest.approx([0.08, 0.04, 0.08, 0.06])
    assert holm([0.3, 0.6]) == pytest.approx([0.6, 0.6])
    assert holm([0.7, 0.9]) == [1.0, 1.0]
    assert holm([0.5]) == [0.5]
    assert holm([]) == []


@pytest.mark.parametrize("t, degrees, p", KNOWN)
def test_student_t(t: float, degrees: float, p: float) -> None:
    assert student_t_p(t, degrees) == pytest.approx(p, rel=1e-10, abs=0)


def test_student_t_where_there_is_a_formula() -> None:
    for t in np.geomspace(1e-6, 1e6, 41).tolist():
        # one degree is Cauchy's distribution, two have an elementary one
        assert student_t_p(t, 1) == pytest.approx(2 / math.pi * math.atan2(1, t), rel=1e-11)
        root = math.sqrt(t * t + 2)
        assert student_t_p(t, 2) == pytest.approx(2 / (root * (root + t)), rel=1e-11)


def test_student_t_at_its_ends() -> None:
    assert student_t_p(math.inf, 7) == student_t_p(-math.inf, 7) == 0.0
    assert student_t_p(1e300, 7) == 0.0
    assert student_t_p(1e-300, 7) == 1.0
    ps = [student_t_p(t, 6039) for t in np.linspace(0, 45, 500).tolist()]
    assert all(0 <= later <= earlier <= 1 for earlier, later in itertools.pairwise(ps))
    for t, degrees in [(math.nan, 3), (1.0, 0), (1.0, -2), (1.0, math.inf), (1.0, math.nan)]:
        with pytest.raises(ValueError, match="has no p"):
            student_t_p(t, degrees)


@pytest.mark.parametrize("degrees", [1, 2.5, 29, 6039, 1_000_000])
def test_student_t_quantile_is_the_inverse(degrees: float) -> None:
    assert student_t_quantile(0.5, degrees) == pytest.approx(0, abs=1e-12)
    for p in (0.6, 0.975, 0.9999):
        assert student_t_p(student_t_quantile(p, degrees), degrees) == pytest.approx(2 * (1 - p))
    for p in (0.4, 1.0, math.nan):
        with pytest.raises(ValueError, match="not a probability"):
            student_t_quantile(p, degrees)


def test_sign_test() -> None:
    assert [sign_test_p(n, n) for n in (0, 7)] == [1.0, 1.0]
    assert sign_test_p(10, 0) == sign_test_p(0, 10) == pytest.approx(2 / 2**10)
    assert sign_test_p(8, 2) == pytest.approx(2 * (45 + 10 + 1) / 2**10)
    with pytest.raises(ValueError, match="cannot be"):
        sign_test_p(-1, 2)


def test_paired_t_test() -> None:
    """Against scipy.stats.ttest_rel."""
    a = np.array([0.1, 0.5, 0.9, 0.0, 1.0, 0.25, 0.7, 0.3])
    b = np.array([0.2, 0.4, 0.6, 0.0, 0.5, 0.2, 0.9, 0.1])
    test = paired_t_test(a, b)
    assert test.t == pytest.approx(1.339787690606471, rel=1e-12)
    assert test.p == pytest.approx(0.22217333372464765, rel=1e-12)
    assert test.mean_difference == pytest.approx(0.10625)
    assert test.n == 8
    other = paired_t_test(b, a)
    assert (other.t, other.p) == (-test.t, test.p)


def test_differences_without_variance() -> None:
    a = np.array([0.1, 0.2, 0.7, 0.3])
    same = paired_t_test(a, a)
    assert (same.t, same.p, same.mean_difference) == (0.0, 1.0, 0.0)
    # means over seeds that were added in another order differ by rounding only
    assert paired_t_test(a, a * (1 + 1e-16) + np.array([0, 1e-17, -2e-17, 1e-17])).p == 1.0
    zero = np.zeros(5)
    assert paired_t_test(zero, zero).p == 1.0
    above = paired_t_test(a + 0.1, a)  # 0.1 up to rounding
    assert (above.t, above.p) == (math.inf, 0.0)
    assert above.mean_difference == pytest.approx(0.1)
    assert paired_t_test(a, a + 0.1).t == -math.inf


def test_a_t_test_needs_the_same_users() -> None:
    for a, b in [(np.zeros(3), np.zeros(4)), (np.zeros(1), np.zeros(1)), (np.zeros((2, 2)),) * 2]:
        with pytest.raises(ValueError, match="two or more users"):
            paired_t_test(a, b)


def test_bootstrap_interval_is_that_of_the_normal_distribution_for_many_users() -> None:
    values = np.random.default_rng(3).random(2000)
    low, high = bootstrap_interval(values, resamples=4000)
    error = values.std() / math.sqrt(len(values))
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)
    assert bootstrap_interval(values, resamples=4000) == (low, high)
    assert bootstrap_interval(values, resamples=4000, seed=1) != (low, high)
    narrow = bootstrap_interval(values, level=0.5, resamples=4000)
    assert low < narrow[0] < values.mean() < narrow[1] < high


def test_bootstrap_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).random(101)
    at_once = bootstrap_interval(values)
    monkeypatch.setattr(significance, "_MAX_CELLS", 5000)  # 49 resamples at once
    assert bootstrap_interval(values) == pytest.approx(at_once, rel=0.02)
    monkeypatch.setattr(significance, "_MAX_CELLS", 1)
    assert bootstrap_interval(values, resamples=2000) == pytest.approx(at_once, rel=0.02)


def test_bootstrap_of_one_user_and_of_none() -> None:
    assert bootstrap_interval(np.array([0.25])) == (0.25, 0.25)
    assert bootstrap_interval(np.ones(50), resamples=10) == (1.0, 1.0)
    for values in (np.empty(0), np.zeros((2, 2))):
        with pytest.raises(ValueError, match="one value for each user"):
            bootstrap_interval(values)
    for level, resamples in [(0.0, 10), (1.0, 10), (95, 10), (0.95, 0)]:
        with pytest.raises(ValueError, match="not an interval"):
            bootstrap_interval(np.ones(3), level=level, resamples=resamples)


def test_metrics_of_each_user() -> None:
    ranks = np.array([2, 0, -1, 9])
    assert hit_of_each(ranks, 3).tolist() == [1.0, 1.0, 0.0, 0.0]
    for k in (1, 3, 10):
        assert hit_of_each(ranks, k).mean() == hit_ratio(ranks, k)
        assert ndcg_of_each(ranks, k).mean() == ndcg(ranks, k)


def test_evaluation_is_the_mean_over_seeds() -> None:
    result = Evaluation.of([np.array([0, -1, 4]), np.array([2, -1, 12])])
    assert result.hr.tolist() == [1.0, 0.0, 0.5]
    assert result.ndcg.tolist() == pytest.approx([(1 + 0.5) / 2, 0.0, 1 / math.log2(6) / 2])
    assert (result.k, result.seeds) == (10, 2)
    shown = json.loads(json.dumps(result.as_dict(resamples=200)))
    assert shown["hr"] == result.mean_hr == pytest.approx(0.5)
    assert shown["ndcg"] == result.mean_ndcg
    assert (shown["users"], shown["seeds"], shown["k"], shown["level"]) == (3, 2, 10, 0.95)
    for name in ("hr", "ndcg"):
        low, high = shown[f"{name}_interval"]
        assert 0 <= low <= shown[name] <= high <= 1
    assert Evaluation.of([np.array([0, -1, 4])], k=3).hr.tolist() == [1.0, 0.0, 0.0]


def test_evaluation_refuses_no_ranks_and_ranks_of_other_users() -> None:
    empty = np.empty(0, dtype=np.int64)
    for ranks in ([], [empty], [np.array([1, 2]), np.array([1])]):
        with pytest.raises(ValueError, match="ranks of the same users"):
            Evaluation.of(ranks)
