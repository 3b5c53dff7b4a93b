"""Significance of figures: bootstrap intervals, the paired t-test and the sign test.

All statistics are over users, and a comparison of two models takes the same users. P1 draws its
negatives, and one draw moves the figures by some thousandths. The mean of several draws varies
less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ncr_core.data.interactions import IntArray
from ncr_core.evaluation.metrics import FloatArray, K, hit_of_each, ndcg_of_each

_MAX_CELLS = 2**21  # resampled values at once: 16 MiB of indices and as much of values
_ROUNDING = 16 * float(np.finfo(np.float64).eps)


def bootstrap_interval(
    values: FloatArray, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean of (n,) values, one a user (Efron 1979).

    The ends are the (1 ∓ ``level``)/2 quantiles of the means of ``resamples`` samples of n users
    drawn with replacement. Raises ValueError if there are no values, ``level`` is not between 0 and
    1, or ``resamples`` is below 1.
    """
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"one value for each user is needed, not an array of {values.shape}")
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"a level of {level} with {resamples} resamples is not an interval")
    rng = np.random.default_rng(seed)
    n = len(values)
    means = np.empty(resamples)
    at_once = max(1, _MAX_CELLS // n)
    for start in range(0, resamples, at_once):
        part = means[start : start + at_once]
        part[:] = values[rng.integers(n, size=(len(part), n))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class PairedTest:
    """A two-sided paired t-test: the mean of a − b over ``n`` users, ``t`` and ``p``."""

    t: float
    p: float
    mean_difference: float
    n: int


def paired_t_test(a: FloatArray, b: FloatArray) -> PairedTest:
    """Test whether two models differ by (n,) values of the same users in order (Student 1908).

    Differences that are all equal up to rounding have no variance. p is then 1 if the differences
    are 0; otherwise p is 0 and t infinite. Raises ValueError unless ``a`` and ``b`` have one value
    for each of two or more users.
    """
    if a.shape != b.shape or a.ndim != 1 or len(a) < 2:
        raise ValueError(
            f"the same two or more users are needed on both sides, not {a.shape} and {b.shape}"
        )
    n = len(a)
    difference = a - b
    mean = float(difference.mean())
    rounding = _ROUNDING * float(max(np.abs(a).max(), np.abs(b).max()))
    if np.ptp(difference) <= rounding:
        if abs(mean) <= rounding:
            return PairedTest(0.0, 1.0, mean, n)
        return PairedTest(math.copysign(math.inf, mean), 0.0, mean, n)
    t = mean / (float(difference.std(ddof=1)) / math.sqrt(n))
    return PairedTest(t, student_t_p(t, n - 1), mean, n)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of several tests, adjusted for the number of tests (Holm 1979).

    If each adjusted p-value below a level counts as a difference, the probability of any false
    difference is at most that level. The bound also holds for dependent tests. The i-th smallest of
    m p-values is multiplied by m − i + 1. An adjusted p-value is at least the one before, and at
    most 1.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    factors = np.arange(len(p), 0, -1)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(factors * p[order]))
    return [float(x) for x in adjusted]


def student_t_p(t: float, degrees: float) -> float:
    """P(|T| ≥ |t|) for Student's t with ``degrees`` of freedom.

    P is I_x(ν/2, 1/2) with x = ν/(ν + t²) (Abramowitz & Stegun 26.7.1). For small t the code takes
    the complement, because `scipy.stats.t` is off by up to 1e-9 there. Raises ValueError if
    ``degrees`` is not above 0 and finite, or ``t`` is not a number.
    """
    from scipy.special import betainc, betaincc

    if math.isnan(t) or not 0 < degrees < math.inf:
        raise ValueError(f"t = {t} with {degrees} degrees of freedom has no p")
    square = abs(t) / math.sqrt(degrees)
    square *= square
    if square < 1:
        return float(betaincc(0.5, degrees / 2, square / (1 + square)))
    return float(betainc(degrees / 2, 0.5, 1 / (1 + square)))


def student_t_quantile(p: float, degrees: float) -> float:
    """The t with P(T ≤ t) = ``p`` for Student's t with ``degrees`` of freedom.

    Raises ValueError unless 1/2 ≤ ``p`` < 1.
    """
    from scipy.special import stdtrit

    if not 0.5 <= p < 1:
        raise ValueError(f"{p} is not a probability from 1/2 to below 1")
    return float(stdtrit(degrees, p))


def sign_test_p(above: int, below: int) -> float:
    """The p-value of the exact two-sided sign test (Arbuthnot 1710); ties take no part.

    p is min(1, 2 P(X ≥ max(above, below))), where X is binomial with n = above + below and 1/2.
    Raises ValueError if a count is negative.
    """
    from scipy.special import bdtrc

    if min(above, below) < 0:
        raise ValueError(f"{above} above and {below} below cannot be")
    if above == below:
        return 1.0
    return min(1.0, float(2 * bdtrc(max(above, below) - 1, above + below, 0.5)))


@dataclass(frozen=True, eq=False)
class Evaluation:
    """(n,) HR@k and (n,) NDCG@k of each user, the means over ``seeds`` draws of negatives."""

    hr: FloatArray
    ndcg: FloatArray
    k: int
    seeds: int

    @classmethod
    def of(cls, ranks: Sequence[IntArray], k: int = K) -> Evaluation:
        """The evaluation of the (n,) ranks of each seed.

        Raises ValueError if there are no ranks, or the ranks of the seeds differ in length.
        """
        if not ranks or any(r.shape != ranks[0].shape for r in ranks) or not len(ranks[0]):
            raise ValueError("ranks of the same users are needed for one seed or more")
        hr = np.mean([hit_of_each(r, k) for r in ranks], axis=0)
        ndcg = np.mean([ndcg_of_each(r, k) for r in ranks], axis=0)
        return cls(hr, ndcg, k, len(ranks))

    @property
    def mean_hr(self) -> float:
        """The mean HR@k over users."""
        return float(self.hr.mean())

    @property
    def mean_ndcg(self) -> float:
        """The mean NDCG@k over users."""
        return float(self.ndcg.mean())

    def as_dict(self, *, level: float = 0.95, resamples: int = 10_000) -> dict[str, Any]:
        """Means with their bootstrap intervals over users, for JSON."""
        intervals = [
            list(bootstrap_interval(values, level=level, resamples=resamples))
            for values in (self.hr, self.ndcg)
        ]
        return {
            "hr": self.mean_hr,
            "hr_interval": intervals[0],
            "ndcg": self.mean_ndcg,
            "ndcg_interval": intervals[1],
            "level": level,
            "k": self.k,
            "users": len(self.hr),
            "seeds": self.seeds,
        }
