"""Runs cells, one after the other, each once: what was run already is read from its file."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from ncr_core.checkpoint import load_checkpoint, save_checkpoint
from ncr_core.data.interactions import IntArray
from ncr_core.data.splits import Split
from ncr_core.errors import CheckpointError, DataError
from ncr_core.evaluation.metrics import hit_ratio, ndcg
from ncr_core.evaluation.protocols import K, Ranks, full_candidates, ranks_of
from ncr_core.evaluation.significance import Evaluation, bootstrap_interval
from ncr_core.experiments.cell import FORMAT, Cell, ranks_as_text, read_result, write_result
from ncr_core.experiments.datasets import DataSet, load_data_set
from ncr_core.experiments.machine import commit, provenance
from ncr_core.experiments.methods import Fitted, Request, fit, resolved
from ncr_core.manifest import read_manifest
from ncr_core.models import DNCR, NBPR, PairwiseRanker
from ncr_core.training import OnProgress
from ncr_core.training.pretraining import Parts

NEGATIVE_SEEDS = (0, 1, 2)


@dataclass
class Watch:
    """Who is told of what happens; each may be left out."""

    cell: Callable[[Cell, int, int], None] = lambda cell, number, count: None
    progress: OnProgress | None = None
    users: Callable[[int, int], None] = lambda done, total: None
    skipped: Callable[[Cell], None] = lambda cell: None


class Runner:
    """Runs cells on the data sets under ``root``; results go to ``results``, models to ``work``.

    A cell whose result is there already, with the same configuration and the same data, is not run
    again. Raises DataError where a result or a model was made of other data.
    """

    def __init__(self, root: Path, results: Path, work: Path, watch: Watch | None = None) -> None:
        self._root = root
        self._results = results
        self._work = work
        self._watch = watch or Watch()
        commit()  # that of the code which runs: the checkout may change before the first result
        self._data: dict[str, tuple[DataSet, dict[str, Any]]] = {}

    def run(self, cells: Iterable[Cell]) -> list[dict[str, Any]]:
        """The results of these cells, in their order."""
        every = list(cells)
        for cell in every:
            self._check(cell)
        results = []
        for number, cell in enumerate(every, 1):
            found = self._stored(cell)
            if found is not None:
                self._watch.skipped(cell)
            else:
                self._watch.cell(cell, number, len(every))
                found = self._run(cell)
            results.append(found)
        return results

    def data(self, name: str) -> tuple[DataSet, dict[str, Any]]:
        """A data set and its description, read once."""
        if name not in self._data:
            data = load_data_set(name, self._root)
            self._data[name] = data, data.described()
        return self._data[name]

    def _check(self, cell: Cell) -> None:
        """Raises what would stop this cell, before time is spent on those before it."""
        resolved(cell.settings, cell.method, cell.factors)
        found = read_result(self._path(cell))
        _, described = self.data(cell.data)
        if found is not None and found["data"]["fingerprint"] != described["fingerprint"]:
            raise DataError(
                f"{self._path(cell)} was made of other data than {self._root} holds (fingerprint "
                f"{found['data']['fingerprint']}, here {described['fingerprint']}): give the "
                "folder it began with, or another folder for results"
            )
        for part in cell.parts or ():
            self._check(part)

    def _done(self, cell: Cell) -> dict[str, Any]:
        """The result of a cell that another one needs."""
        found = self._stored(cell)
        if found is None:
            self._watch.cell(cell, 0, 0)
            found = self._run(cell)
        return found

    def _stored(self, cell: Cell) -> dict[str, Any] | None:
        found = read_result(self._path(cell))
        if found is None or found["configuration"] != cell.configuration():
            return None  # other settings: the result is replaced
        if found.get("resolved") != resolved(cell.settings, cell.method, cell.factors):
            return None  # the same settings, of a version with other defaults
        if cell.test and ("full" if cell.full else "sampled") not in found.get("metrics", {}):
            return None
        return found

    def _run(self, cell: Cell) -> dict[str, Any]:
        data, described = self.data(cell.data)
        # A refit has nothing to validate on: it runs as many rounds as the fit before it chose.
        chosen = self._done(cell.before_refit()) if cell.refit else None
        request = Request(
            data.split.with_validation_in_train() if cell.refit else data.split,
            cell.factors,
            cell.settings,
            cell.seed,
            rounds=chosen["rounds"] if chosen else None,
            parts=self._parts(cell),
            on_progress=self._watch.progress,
        )
        fitted = fit(cell.method, request)
        if fitted.model is not None and cell.group == "cells":
            self._keep(cell, fitted.model, request.split, described)
        validation = fitted.validation.as_dict() if fitted.validation else None
        result: dict[str, Any] = {
            "format": FORMAT,
            "cell": cell.name,
            "configuration": cell.configuration(),
            "resolved": resolved(cell.settings, cell.method, cell.factors),
            "data": described,
            "validation": chosen["validation"] if chosen else validation,
            "rounds": chosen["rounds"] if chosen else fitted.rounds,
            "seconds": {"train": round(fitted.seconds, 1)},
            "history": [_rounded(vars(phase)) for phase in fitted.history],
        }
        if cell.test:
            started = time.perf_counter()
            result |= self._measure(cell, data, fitted)
            result["seconds"]["evaluate"] = round(time.perf_counter() - started, 1)
        result |= provenance()
        # Of a result that was there already, only the model was missing: its figures stay.
        return self._stored(cell) or self._written(cell, result)

    def _measure(self, cell: Cell, data: DataSet, fitted: Fitted) -> dict[str, Any]:
        sampled = [ranks_of(fitted.ranks, data.sampled(seed), K) for seed in NEGATIVE_SEEDS]
        texts: dict[str, Any] = {"sampled": [ranks_as_text(r) for r in sampled]}
        metrics = {"sampled": summary(sampled)}
        if cell.full:
            full = self._full_ranks(fitted.ranks, data)
            texts["full"] = ranks_as_text(full)
            metrics["full"] = summary([full])
        return {"metrics": metrics, "ranks": texts}

    def _full_ranks(self, ranks: Ranks, data: DataSet) -> IntArray:
        total = int((data.split.test >= 0).sum())
        parts: list[IntArray] = []
        done = 0
        for block in full_candidates(data.split, data.split.test, seed=0):
            parts.append(ranks_of(ranks, block, K))
            done += len(block.users)
            self._watch.users(done, total)
        return np.concatenate(parts)

    def _parts(self, cell: Cell) -> Parts | None:
        if cell.parts is None:
            return None
        models = []
        for part in cell.parts:
            if self._stored(part) is None or not self._is_kept(part):
                self._watch.cell(part, 0, 0)
                self._run(part)
            loaded = load_checkpoint(self._model_path(part))
            models.append(loaded.model.requires_grad_(True))
        return cast(NBPR, models[0]), cast(DNCR, models[1])

    def _written(self, cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
        write_result(self._path(cell), result)
        return result

    def _keep(
        self, cell: Cell, model: PairwiseRanker, split: Split, described: dict[str, Any]
    ) -> None:
        """Keeps a model for a NeuPR to start from, in place of one with other settings."""
        path = self._model_path(cell)
        if path.exists():
            shutil.rmtree(path)
        save_checkpoint(
            path,
            model,
            user_ids=split.train.user_ids,
            item_ids=split.train.item_ids,
            item_counts=split.train.item_counts(),
            training={
                "configuration": cell.configuration(),
                "resolved": resolved(cell.settings, cell.method, cell.factors),
            },
            data=described,
        )

    def _is_kept(self, cell: Cell) -> bool:
        """Whether the model of a cell is there, as this version and this data make it."""
        try:
            manifest = read_manifest(self._model_path(cell))
        except CheckpointError:
            return False
        _, described = self.data(cell.data)
        training = manifest["training"]
        return bool(
            manifest["data"].get("fingerprint") == described["fingerprint"]
            and training.get("configuration") == cell.configuration()
            and training.get("resolved") == resolved(cell.settings, cell.method, cell.factors)
        )

    def _path(self, cell: Cell) -> Path:
        return self._results / f"{cell.name}.json"

    def _model_path(self, cell: Cell) -> Path:
        return self._work / cell.name


def summary(ranks: list[IntArray]) -> dict[str, Any]:
    """HR@10 and NDCG@10, each the mean over seeds of negatives, with 95 % bootstrap intervals over
    users, and the figures of each seed."""
    every = Evaluation.of(ranks, K)
    return {
        "hr": round(every.mean_hr, 5),
        "hr_interval": [round(x, 5) for x in bootstrap_interval(every.hr)],
        "ndcg": round(every.mean_ndcg, 5),
        "ndcg_interval": [round(x, 5) for x in bootstrap_interval(every.ndcg)],
        "seeds": [{"hr": round(hit_ratio(r, K), 5), "ndcg": round(ndcg(r, K), 5)} for r in ranks],
        "users": len(every.hr),
    }


def _rounded(phase: dict[str, Any]) -> dict[str, Any]:
    """A phase with figures of a length that a file of results can bear."""
    return {
        key: [round(x, 5) for x in value] if isinstance(value, list) else value
        for key, value in phase.items()
    }
