"""How sure a figure is: bootstrap intervals, the paired t-test, and means over drawn negatives.

Everything is per user: two models are compared on the same users, and P1 draws its negatives, so
that one draw moves the figures by some thousandths; the mean of several draws moves less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ncr_core.data.interactions import IntArray
from ncr_core.data.splits import Split
from ncr_core.evaluation.metrics import FloatArray, hit_of_each, ndcg_of_each
from ncr_core.evaluation.protocols import NEGATIVES, K, Ranks, ranks_of, sampled_candidates

_CELLS = 2**21  # resampled values at once: 16 MiB of indices and as much of values
_ROUNDING = 16 * float(np.finfo(np.float64).eps)
_TINY = 1e-300
_MOST_TERMS = 100_000
_STIRLING_FROM = 20.0
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188)


def bootstrap_interval(
    values: FloatArray, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean of (n,) values, one a user (Efron 1979).

    The ends are the (1 ∓ ``level``)/2 quantiles of the means of ``resamples`` samples of n users
    drawn with replacement. Raises ValueError when there are no values or ``level`` is not between
    0 and 1.
    """
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"one value for each user is needed, not an array of {values.shape}")
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"a level of {level} with {resamples} resamples is no interval")
    rng = np.random.default_rng(seed)
    n = len(values)
    means = np.empty(resamples)
    at_once = max(1, _CELLS // n)
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
    """Whether two models differ, by (n,) values of the same users in the same order (Student 1908).

    Differences that are all the same up to rounding have no variance to measure by: p is then 1
    where they are 0, else 0 (and t infinite). Raises ValueError unless both have one value for each
    of two or more users.
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


def student_t_p(t: float, degrees: float) -> float:
    """P(|T| ≥ |t|) for Student's t with ``degrees`` of freedom: I_x(ν/2, 1/2), x = ν/(ν + t²).

    (Abramowitz & Stegun 26.7.1; DLMF 8.17.) The relative error is below 1e-12 up to 10⁴ degrees and
    below 1e-10 up to 10⁶, in the tails too. Raises ValueError where there is no such distribution.
    """
    if math.isnan(t) or not 0 < degrees < math.inf:
        raise ValueError(f"t = {t} with {degrees} degrees of freedom has no p")
    ratio = abs(t) / math.sqrt(degrees)
    # x and y = 1 − x each from what is small, so that neither cancels nor overflows.
    if ratio > 1:
        small = (1 / ratio) ** 2
        x, y = small / (1 + small), 1 / (1 + small)
    else:
        small = ratio**2
        x, y = 1 / (1 + small), small / (1 + small)
    return _regularised_beta(degrees / 2, 0.5, x, y)


def _regularised_beta(a: float, b: float, x: float, y: float) -> float:
    """I_x(a, b) with y = 1 − x, by the continued fraction of DLMF 8.17.22.

    The fraction converges fast for x < (a + 1)/(a + b + 2); beyond, I_x(a, b) = 1 − I_y(b, a).
    """
    if x <= 0 or y <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _regularised_beta(b, a, y, x)
    log_x = math.log1p(-y) if x > 0.5 else math.log(x)
    log_y = math.log1p(-x) if y > 0.5 else math.log(y)
    front = math.exp(a * log_x + b * log_y - _log_beta(a, b)) / a
    return min(1.0, front / _beta_fraction(a, b, x))


def _beta_fraction(a: float, b: float, x: float) -> float:
    """1 + d₁/(1 + d₂/(1 + …)) by the modified method of Lentz (Thompson & Barnett 1986)."""
    value, upper, lower = 1.0, 1.0, 0.0
    for term in range(1, _MOST_TERMS):
        m = term // 2
        if term % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / ((1 + d * lower) or _TINY)
        upper = (1 + d / upper) or _TINY
        value *= upper * lower
        if abs(upper * lower - 1) < 1e-16:
            break
    return value


def _log_beta(a: float, b: float) -> float:
    """ln B(a, b), without the cancellation of large ln Γ (Stirling's series, DLMF 5.11.1)."""
    p, q = min(a, b), max(a, b)
    if q < _STIRLING_FROM:
        return math.lgamma(p) + math.lgamma(q) - math.lgamma(p + q)
    # ln Γ(q) − ln Γ(p + q), their leading terms subtracted by hand.
    leading = p - (q - 0.5) * math.log1p(p / q) - p * math.log(p + q)
    return math.lgamma(p) + leading + _stirling_tail(q) - _stirling_tail(p + q)


def _stirling_tail(z: float) -> float:
    return sum(c / z ** (2 * i + 1) for i, c in enumerate(_STIRLING))


def sampled_over_seeds(
    model: Ranks,
    split: Split,
    held_out: IntArray,
    seeds: Sequence[int],
    *,
    k: int = K,
    negatives: int = NEGATIVES,
) -> list[IntArray]:
    """P1 with the negatives drawn anew by each seed: for each, (n,) ranks as of ``ranks_of``.

    The n users are those with a held-out item, in the same order for every seed and every model.
    """
    return [
        ranks_of(model, sampled_candidates(split, held_out, seed, negatives), k) for seed in seeds
    ]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """(n,) HR@k and (n,) NDCG@k of each user, the means over ``seeds`` draws of negatives."""

    hr: FloatArray
    ndcg: FloatArray
    k: int
    seeds: int

    @classmethod
    def of(cls, ranks: Sequence[IntArray], k: int = K) -> Evaluation:
        """From the (n,) ranks of each seed. Raises ValueError when there are none."""
        if not ranks or any(one.shape != ranks[0].shape for one in ranks) or not len(ranks[0]):
            raise ValueError("ranks of the same users are needed for one seed or more")
        hr = np.mean([hit_of_each(one, k) for one in ranks], axis=0)
        ndcg = np.mean([ndcg_of_each(one, k) for one in ranks], axis=0)
        return cls(hr, ndcg, k, len(ranks))

    @property
    def mean_hr(self) -> float:
        return float(self.hr.mean())

    @property
    def mean_ndcg(self) -> float:
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
