"""Interleaving trials: lists drafted from two versions, and which version gets the clicks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from app.ab_tests.impressions import ImpressionBuffer
from app.ab_tests.repository import ABTestRepository
from app.ab_tests.schemas import ABTestRow, Kind, RunningABTest
from app.core.database import Database
from app.events.click_attribution import ClickAttribution
from ncr_core.online import Teams, credit, interleaving_result

_HASHES = 2**64


class InterleavingTrials:
    """Decides which users take part, records their lists, and reports which version they prefer."""

    kind: Kind = "interleaving"

    def __init__(
        self, database: Database, attribution: ClickAttribution, impressions: ImpressionBuffer
    ) -> None:
        self._repository = ABTestRepository(database)
        self._attribution = attribution
        self._impressions = impressions
        self.running: RunningABTest | None = None
        """The running trial, as `ABTestService.refresh` last read it."""

    def includes(self, trial: RunningABTest, user: str) -> bool:
        """Whether a user takes part: always in the whole trial, or never."""
        digest = hashlib.blake2b(
            f"{trial.trial_id}\0{user}".encode("utf-8", "surrogatepass"), digest_size=8
        ).digest()
        return int.from_bytes(digest, "big") < trial.share * _HASHES

    def record(
        self,
        recommendation_id: str,
        trial: RunningABTest,
        user_id: int | None,
        team_a: Sequence[int],
        team_b: Sequence[int],
    ) -> None:
        """Records which version contributed which item (internal ids) to an interleaved list."""
        self._impressions.add_impression(recommendation_id, trial.trial_id, user_id, team_a, team_b)

    async def report(self, trial: ABTestRow) -> dict[str, Any]:
        """The clicks of a trial, by version and by user, and a test of the difference."""
        lists = await self._repository.count_impressions(trial.trial_id)
        credit_sums: Counter[str] = Counter()
        # Per user: wins of A, wins of B, ties. Each list of an unknown user is a user of its own.
        tallies: dict[int | str, list[int]] = {}
        async for clicked in self._attribution.clicks(trial.trial_id):
            impressions = await self._repository.impressions(trial.trial_id, clicked)
            for recommendation_id, user, teams in impressions:
                a, b = credit(clicked[recommendation_id], Teams(teams["a"], teams["b"]))
                if not a and not b:
                    continue
                credit_sums.update(a=a, b=b)
                tally = tallies.setdefault(recommendation_id if user is None else user, [0, 0, 0])
                tally[0 if a > b else 1 if b > a else 2] += 1
        result = interleaving_result(
            np.array(list(tallies.values()), dtype=np.int64).reshape(-1, 3)
        )
        better = {"a": trial.version_a, "b": trial.version_b, None: None}[result.better]
        return {
            "lists": lists,
            "clicked": result.wins_a + result.wins_b + result.ties,
            "credit_a": credit_sums["a"],
            "credit_b": credit_sums["b"],
            **result.as_dict(),
            "better": better,
        }
