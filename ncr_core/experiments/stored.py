"""All stored results of a folder, to be asked for what a page needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ncr_core.errors import DataError
from ncr_core.evaluation.metrics import FloatArray, hit_of_each, hit_ratio, ndcg, ndcg_of_each
from ncr_core.evaluation.protocols import K
from ncr_core.evaluation.significance import PairedTest, paired_t_test
from ncr_core.experiments.cell import Cell, ranks_from_text, read_result


@dataclass(frozen=True)
class Result:
    """A stored result."""

    stored: dict[str, Any]

    @property
    def name(self) -> str:
        """The file's name: method, size and variant."""
        return str(self.stored["cell"].rpartition("/")[2])

    @property
    def method(self) -> str:
        return str(self.stored["configuration"]["method"])

    @property
    def factors(self) -> int:
        return int(self.stored["configuration"]["factors"])

    @property
    def refit(self) -> bool:
        return bool(self.stored["configuration"]["refit"])

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.stored["configuration"]["settings"])

    @property
    def validation(self) -> float | None:
        """NDCG@10 on the validation items."""
        found = self.stored["validation"]
        return None if found is None else float(found["ndcg"])

    @property
    def seconds(self) -> float:
        return float(self.stored["seconds"]["train"])

    def metric(self, kind: str, name: str) -> float | None:
        """``kind`` is sampled or full, ``name`` hr or ndcg."""
        found = self.stored.get("metrics", {}).get(kind)
        return None if found is None else float(found[name])

    def interval(self, kind: str, name: str) -> tuple[float, float] | None:
        found = self.stored.get("metrics", {}).get(kind)
        return None if found is None else tuple(found[f"{name}_interval"])

    def of_each(self, kind: str, name: str) -> FloatArray:
        """(n,) a user's HR@10 or NDCG@10, the mean over the seeds of negatives."""
        value = hit_of_each if name == "hr" else ndcg_of_each
        texts = self.stored["ranks"][kind]
        every = [texts] if isinstance(texts, str) else texts
        mean: FloatArray = np.mean([value(ranks_from_text(text), K) for text in every], axis=0)
        return mean

    def top(self, name: str) -> list[float]:
        """HR@k or NDCG@k for k from 1 to 10, sampled, the mean over the seeds of negatives."""
        value = hit_ratio if name == "hr" else ndcg
        every = [ranks_from_text(text) for text in self.stored["ranks"]["sampled"]]
        return [float(np.mean([value(ranks, k) for ranks in every])) for k in range(1, K + 1)]

    def against(self, other: Result, kind: str, name: str) -> PairedTest:
        """Paired t-test over users of this result against another."""
        return paired_t_test(self.of_each(kind, name), other.of_each(kind, name))


class Stored:
    """The results under a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fingerprints: dict[str, str] = {}

    def of(self, cell: Cell) -> Result | None:
        """The result of a cell, None where it was not run, or with other settings."""
        found = read_result(self.folder / f"{cell.name}.json")
        if found is None or found["configuration"] != cell.configuration():
            return None
        self._check_data(found)
        return Result(found)

    def _check_data(self, found: dict[str, Any]) -> None:
        """Results on one data set must be of the same data: users are compared one by one."""
        name, own = found["data"]["name"], found["data"]["fingerprint"]
        first = self._fingerprints.setdefault(name, own)
        if own != first:
            raise DataError(
                f"{self.folder} holds results of different versions of {name} ({first}, {own})"
            )

    def every(self) -> Iterator[Result]:
        """All results, by name."""
        for path in sorted(self.folder.glob("*/*/*.json")):
            found = read_result(path)
            if found is not None:
                yield Result(found)
