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
from ncr_core.evaluation.distributions import student_t_p
from ncr_core.evaluation.metrics import FloatArray, hit_of_each, ndcg_of_each
from ncr_core.evaluation.protocols import NEGATIVES, K, Ranks, ranks_of, sampled_candidates

_CELLS = 2**21  # resampled values at once: 16 MiB of indices and as much of values
_ROUNDING = 16 * float(np.finfo(np.float64).eps)


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
