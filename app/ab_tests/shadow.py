"""Shadow trials: another version also ranks requests, and its lists are not shown.

The module is optional. Only `app.wiring` constructs `ShadowTrials`. Without the
module, the service refuses trials of this kind.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from app.ab_tests.impressions import ImpressionBuffer
from app.ab_tests.repository import ABTestRepository
from app.ab_tests.schemas import ABTestRow, Kind, RunningABTest
from app.core.database import Database
from ncr_core.evaluation.metrics import RBO_P, overlap, rank_biased_overlap


class ShadowTrials:
    """Decides which requests take part, and sums up the agreement of both versions' lists."""

    kind: Kind = "shadow"

    def __init__(self, database: Database, impressions: ImpressionBuffer) -> None:
        self._repository = ABTestRepository(database)
        self._impressions = impressions
        self._random = random.Random()  # noqa: S311 - it is no secret who takes part
        self.running: RunningABTest | None = None
        """The running trial, as `ABTestService.refresh` last read it."""

    def includes(self, trial: RunningABTest) -> bool:
        """Draws whether a request takes part."""
        return self._random.random() < trial.share

    def record(self, trial: RunningABTest, ids_a: Sequence[int], ids_b: Sequence[int]) -> None:
        """Adds the agreement of the two versions' lists for one request."""
        same_first = list(ids_a[:1]) == list(ids_b[:1])
        values = {
            "requests": 1.0,
            "overlap": overlap(ids_a, ids_b),
            "same_first": float(same_first),
            "rbo": rank_biased_overlap(ids_a, ids_b),
        }
        self._impressions.add_sums(trial.trial_id, values)

    async def report(self, trial: ABTestRow) -> dict[str, Any]:
        """The number of requests, and the mean of each measure of agreement."""
        sums = await self._repository.sums(trial.trial_id)
        requests = sums.get("requests", 0.0)
        means = {
            name: sums.get(name, 0.0) / requests if requests else None
            for name in ("overlap", "same_first", "rbo")
        }
        return {"requests": int(requests), **means, "rbo_p": RBO_P}
