"""What has come of a trial so far."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from app.events.attribution import Attribution
from app.trials.repository import TrialRepository
from app.trials.schemas import TrialRow
from ncr_core.evaluation.agreement import RBO_P
from ncr_core.evaluation.interleaving import Teams, credit, preference


class Reports:
    """Reads what was observed in a trial."""

    def __init__(self, repository: TrialRepository, attribution: Attribution) -> None:
        self._repository = repository
        self._attribution = attribution

    async def of(self, row: TrialRow) -> dict[str, Any]:
        """The report of a trial, for JSON."""
        if row.kind == "shadow":
            return _shadow(await self._repository.sums(row.trial_id))
        return await self._interleaving(row)

    async def _interleaving(self, row: TrialRow) -> dict[str, Any]:
        lists = await self._repository.count_impressions(row.trial_id)
        given: Counter[str] = Counter()
        # By user: wins of A, wins of B, ties. A list of someone without a row is someone else's.
        tallies: dict[int | str, list[int]] = {}
        async for clicked in self._attribution.clicks(row.trial_id):
            for name, user, teams in await self._repository.impressions(row.trial_id, clicked):
                a, b = credit(clicked[name], Teams(teams["a"], teams["b"]))
                if not a and not b:
                    continue
                given.update(a=a, b=b)
                tally = tallies.setdefault(name if user is None else user, [0, 0, 0])
                tally[0 if a > b else 1 if b > a else 2] += 1
        found = preference(np.array(list(tallies.values()), dtype=np.int64).reshape(-1, 3))
        better = {"a": row.version_a, "b": row.version_b, None: None}[found.better]
        return {
            "lists": lists,
            "clicked": found.wins_a + found.wins_b + found.ties,
            "credit_a": given["a"],
            "credit_b": given["b"],
            **found.as_dict(),
            "better": better,
        }


def _shadow(sums: dict[str, float]) -> dict[str, Any]:
    requests = sums.get("requests", 0.0)
    means = {
        name: sums.get(name, 0.0) / requests if requests else None
        for name in ("overlap", "same_first", "rbo")
    }
    return {"requests": int(requests), **means, "rbo_p": RBO_P}
