"""Runs methods one after the other, and skips runs whose results are stored."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from ncr_core.checkpoint import load_checkpoint, save_checkpoint
from ncr_core.data.interactions import IntArray
from ncr_core.data.splits import ItemSetSplit, NextItemSplit, Split, TemporalSplit
from ncr_core.errors import CheckpointError, DataError
from ncr_core.evaluation.beyond_accuracy import list_statistics
from ncr_core.evaluation.by_gap import metrics_by_gap
from ncr_core.evaluation.metrics import (
    held_out_ranks,
    hit_ratio,
    hits_of_each,
    ndcg,
    recall_of_each,
    set_ndcg_of_each,
)
from ncr_core.evaluation.protocols import (
    K,
    Metrics,
    Ranks,
    evaluate_full,
    full_lists,
    ranks_of,
)
from ncr_core.evaluation.significance import Evaluation, bootstrap_interval
from ncr_core.manifest import read_manifest
from ncr_core.models import DNCR, NBPR, ModelConfig, PairwiseRanker
from ncr_core.ranking.ranker import PAD
from ncr_core.reproduction.datasets import BenchmarkDataset, load_dataset
from ncr_core.reproduction.methods import (
    FitRequest,
    FittedMethod,
    fit_method,
    resolved_settings,
    with_test_input,
)
from ncr_core.reproduction.results_store import (
    FORMAT,
    Payload,
    ResultsStore,
    commit,
    hits_as_text,
    provenance,
    ranks_as_text,
)
from ncr_core.reproduction.suites import RunSpec
from ncr_core.train_config import TrainConfig
from ncr_core.training import OnProgress
from ncr_core.training.pretraining import Parts

NEGATIVE_SEEDS = (0, 1, 2)
SET_K = 20  # of Recall@20 and NDCG@20 in the papers on sets of test items


@dataclass
class RunnerCallbacks:
    """Functions that a runner calls to report its progress; each is optional."""

    started: Callable[[RunSpec, int, int], None] = lambda run, number, count: None
    """Gets a run, its number from 1 and the number of runs; 0 and 0 if another run needs it."""

    progress: OnProgress | None = None
    """Gets the progress after each epoch of a training."""

    ranked: Callable[[int, int], None] = lambda done, total: None
    """Gets the number of users with a ranked catalogue so far, and the number of test users."""

    skipped: Callable[[RunSpec], None] = lambda run: None
    """Gets a run whose result is stored already."""


class Runner:
    """Runs methods on the data sets under ``root``.

    Results go to the folder ``results``, models to ``work``. The runner does not repeat a run whose
    result is stored with the same configuration and the same data.
    """

    def __init__(
        self, root: Path, results: Path, work: Path, callbacks: RunnerCallbacks | None = None
    ) -> None:
        self._root = root
        self._results = ResultsStore(results)
        self._work = work
        self._callbacks = callbacks or RunnerCallbacks()
        commit()  # that of the code which runs: the checkout may change before the first result
        self._data: dict[str, tuple[BenchmarkDataset, dict[str, Any]]] = {}

    def run(self, runs: Iterable[RunSpec]) -> list[Payload]:
        """Returns the results of the runs, in their order.

        Raises ConfigError if settings do not fit or a library is not installed, and DataError if a
        stored result is from other data. The runner makes these checks before the first run.
        """
        specs = list(runs)
        for spec in specs:
            self._check(spec)
        results = []
        for number, spec in enumerate(specs, 1):
            result = self._stored(spec)
            if result is None:
                self._callbacks.started(spec, number, len(specs))
                result = self._run(spec)
            else:
                self._callbacks.skipped(spec)
            results.append(result)
        return results

    def data(self, name: str) -> tuple[BenchmarkDataset, dict[str, Any]]:
        """A data set and its description; the runner reads each data set once."""
        if name not in self._data:
            data = load_dataset(name, self._root)
            self._data[name] = data, data.description()
        return self._data[name]

    def _check(self, spec: RunSpec) -> None:
        """Checks a run and its parts before any run takes time.

        Raises ConfigError or DataError.
        """
        _resolved(spec)
        result = self._results.read(spec.name)
        _, description = self.data(spec.data)
        if result is not None and result["data"]["fingerprint"] != description["fingerprint"]:
            raise DataError(
                f"{self._results.path(spec.name)}: {spec.name} was made of other data than "
                f"{self._root} holds (fingerprint {result['data']['fingerprint']}, here "
                f"{description['fingerprint']}): give the folder it began with, or another folder "
                "for results"
            )
        for part in spec.parts or ():
            self._check(part)

    def _required(self, spec: RunSpec) -> Payload:
        """The result of a run that another run needs, stored or from a new run."""
        result = self._stored(spec)
        if result is None:
            self._callbacks.started(spec, 0, 0)
            result = self._run(spec)
        return result

    def _stored(self, spec: RunSpec) -> Payload | None:
        """The result of a run, with all that the run measures."""
        result = self._with_same_settings(spec)
        if result is None:
            return None
        if spec.test and ("lists" if spec.full else "sampled") not in result.get("metrics", {}):
            return None
        if spec.validates_in_full and "validation_full" not in result:
            return None
        return result

    def _with_same_settings(self, spec: RunSpec) -> Payload | None:
        result = self._results.read(spec.name)
        if result is None or result["configuration"] != spec.configuration():
            return None  # other settings: the result is replaced
        if not _is_same(result.get("resolved", {}), _resolved(spec)):
            return None  # the same settings, of a version with other defaults
        return result

    def _run(self, spec: RunSpec) -> Payload:
        data, description = self.data(spec.data)
        # A refit has nothing to validate on: it runs as many rounds as the fit before it chose.
        chosen = self._required(spec.before_refit()) if spec.refit else None
        request = FitRequest(
            data.split.with_validation_in_train() if spec.refit else data.split,
            spec.factors,
            spec.settings,
            spec.seed,
            rounds=chosen["rounds"] if chosen else None,
            parts=self._parts(spec),
            on_progress=self._callbacks.progress,
            progress_file=self._work / f"{spec.name}.progress",
        )
        fitted = fit_method(spec.method, request)
        if fitted.model is not None and spec.group == "cells":
            self._save_model(spec, fitted.model, request.split, description)
        validation = fitted.validation.as_dict() if fitted.validation else None
        result: Payload = {
            "format": FORMAT,
            "cell": spec.name,
            "configuration": spec.configuration(),
            "resolved": _resolved(spec),
            "data": description,
            "validation": chosen["validation"] if chosen else validation,
            "rounds": chosen["rounds"] if chosen else fitted.rounds,
            "seconds": _seconds(fitted),
            "history": [_rounded(vars(phase)) for phase in fitted.history],
        }
        if spec.validates_in_full:
            over_all = evaluate_full(fitted.ranks, data.split, data.split.validation, 0)
            result["validation_full"] = _rounded_metrics(over_all)
        if spec.test:
            started = time.perf_counter()
            result |= self._measure(spec, data, fitted)
            result["seconds"]["evaluate"] = round(time.perf_counter() - started, 1)
        result |= provenance()
        # Where a result was there already, only the model was missing: its figures stay.
        stored = self._stored(spec)
        if stored is None:
            stored = with_lists(self._with_same_settings(spec), result)
            self._results.write(stored)
        return stored

    def _measure(self, spec: RunSpec, data: BenchmarkDataset, fitted: FittedMethod) -> Payload:
        if isinstance(data.split, NextItemSplit):
            return self._measure_full(with_test_input(fitted, data.split), data)
        if isinstance(data.split, ItemSetSplit):
            return self._measure_sets(fitted.ranks, data, data.split)
        sampled = [ranks_of(fitted.ranks, data.sampled(seed), K) for seed in NEGATIVE_SEEDS]
        texts: dict[str, Any] = {"sampled": [ranks_as_text(ranks) for ranks in sampled]}
        metrics = {"sampled": summary(sampled)}
        if spec.full:
            over_all = self._measure_full(fitted.ranks, data)
            metrics |= over_all["metrics"]
            texts |= over_all["ranks"]
        return {"metrics": metrics, "ranks": texts}

    def _measure_full(self, ranks: Ranks, data: BenchmarkDataset) -> Payload:
        lists = self._full_lists(ranks, data)
        users = np.flatnonzero(data.split.test >= 0)
        full = held_out_ranks(lists, data.split.test[users])
        statistics = list_statistics(users, lists, data.split.train).as_dict()
        of_lists = {name: round(value, 5) for name, value in statistics.items()}
        metrics = {"full": summary([full]), "lists": of_lists}
        if isinstance(data.split, TemporalSplit):
            by_gap = metrics_by_gap(full, data.split.gaps[users], data.split.train.n_items)
            metrics["gaps"] = {name: _rounded_metrics(of_gap) for name, of_gap in by_gap.items()}
        return {"metrics": metrics, "ranks": {"full": ranks_as_text(full)}}

    def _measure_sets(self, ranks: Ranks, data: BenchmarkDataset, split: ItemSetSplit) -> Payload:
        lists = self._full_lists(ranks, data, SET_K)
        users = np.flatnonzero(split.test >= 0)
        sizes = np.diff(split.test_items.indptr)[users]
        indptr = np.concatenate([[0], np.cumsum(sizes)])
        hits = hits_of_each(lists, split.test_items.items, indptr)
        of_sets: dict[str, Any] = {"users": len(users)}
        for name, each in (
            ("recall", recall_of_each(hits, sizes)),
            ("ndcg", set_ndcg_of_each(hits, sizes)),
        ):
            of_sets[name] = round(float(each.mean()), 5)
            of_sets[f"{name}_interval"] = [round(x, 5) for x in bootstrap_interval(each)]
        statistics = list_statistics(users, lists[:, :K], split.train).as_dict()
        of_lists = {name: round(value, 5) for name, value in statistics.items()}
        texts = {"sets": hits_as_text(hits)}
        return {"metrics": {"sets": of_sets, "lists": of_lists}, "ranks": texts}

    def _full_lists(self, ranks: Ranks, data: BenchmarkDataset, k: int = K) -> IntArray:
        """(n, k) the best of all unseen items for each test user, padded with −1."""
        total = int((data.split.test >= 0).sum())
        lists = np.full((total, k), PAD, dtype=np.int64)
        done = 0
        for _, ranked in full_lists(ranks, data.split, data.split.test, 0, k):
            lists[done : done + len(ranked), : ranked.shape[1]] = ranked
            done += len(ranked)
            self._callbacks.ranked(done, total)
        return lists

    def _parts(self, spec: RunSpec) -> Parts | None:
        if spec.parts is None:
            return None
        models = []
        for part in spec.parts:
            if self._stored(part) is None or not self._has_model(part):
                self._callbacks.started(part, 0, 0)
                self._run(part)
            loaded = load_checkpoint(self._model_folder(part))
            models.append(loaded.model.requires_grad_(True))
        return cast(NBPR, models[0]), cast(DNCR, models[1])

    def _save_model(
        self, spec: RunSpec, model: PairwiseRanker, split: Split, description: dict[str, Any]
    ) -> None:
        """Saves a model for a NeuPR to start from, in place of an older model of the run."""
        folder = self._model_folder(spec)
        if folder.exists():
            shutil.rmtree(folder)
        save_checkpoint(
            folder,
            model,
            user_ids=split.train.user_ids,
            item_ids=split.train.item_ids,
            item_counts=split.train.item_counts(),
            training={"configuration": spec.configuration(), "resolved": _resolved(spec)},
            data=description,
        )

    def _has_model(self, spec: RunSpec) -> bool:
        """Whether the stored model of a run has its data, configuration and resolved settings."""
        try:
            manifest = read_manifest(self._model_folder(spec))
        except CheckpointError:
            return False
        _, description = self.data(spec.data)
        training = manifest["training"]
        return bool(
            manifest["data"].get("fingerprint") == description["fingerprint"]
            and training.get("configuration") == spec.configuration()
            and training.get("resolved") == _resolved(spec)
        )

    def _model_folder(self, spec: RunSpec) -> Path:
        return self._work / spec.name


def with_lists(stored: Payload | None, result: Payload) -> Payload:
    """The new result of a run, or only its lists for a result from before lists were described.

    The figures of such a stored result stay, because other results are compared with them. If its
    ranks differ, ``lists_of`` says which training the lists are of.
    """
    measured = {} if stored is None else stored.get("metrics", {})
    lists = result.get("metrics", {}).get("lists")
    if stored is None or lists is None or "lists" in measured or "full" not in measured:
        return result
    completed = stored | {"metrics": measured | {"lists": lists}}
    if stored["ranks"]["full"] == result["ranks"]["full"]:
        return completed
    of_training = {"full": result["metrics"]["full"], "commit": result["commit"]}
    return completed | {"lists_of": of_training}


def _is_same(stored: Mapping[str, Any], resolved: Mapping[str, Any]) -> bool:
    """Whether a result has these choices, where newer choices have their defaults."""
    defaults: dict[str, dict[str, Any]] = json.loads(
        json.dumps({"model": ModelConfig().as_dict(), "training": TrainConfig().as_dict()})
    )
    for name, value in resolved.items():
        if name in defaults and isinstance(value, dict):  # NeuMF has a setting `model`
            if defaults[name] | stored.get(name, {}) != value:
                return False
        elif stored.get(name, value) != value:
            return False
    return stored.keys() <= resolved.keys()


def _resolved(spec: RunSpec) -> dict[str, Any]:
    return resolved_settings(spec.settings, spec.method, spec.factors)


def _seconds(fitted: FittedMethod) -> dict[str, float]:
    seconds = {"train": round(fitted.seconds, 1)}
    if fitted.cpu_seconds is not None:
        seconds["cpu"] = round(fitted.cpu_seconds, 1)
    return seconds


def summary(ranks: list[IntArray]) -> dict[str, Any]:
    """HR@10 and NDCG@10 of the ranks by each seed of negatives.

    Returns:
        The means over the seeds, with 95 % bootstrap intervals over users, and each seed's figures.
    """
    evaluation = Evaluation.of(ranks, K)
    return {
        "hr": round(evaluation.mean_hr, 5),
        "hr_interval": [round(x, 5) for x in bootstrap_interval(evaluation.hr)],
        "ndcg": round(evaluation.mean_ndcg, 5),
        "ndcg_interval": [round(x, 5) for x in bootstrap_interval(evaluation.ndcg)],
        "seeds": [{"hr": round(hit_ratio(r, K), 5), "ndcg": round(ndcg(r, K), 5)} for r in ranks],
        "users": len(evaluation.hr),
    }


def _rounded_metrics(metrics: Metrics) -> dict[str, float | int]:
    return {"hr": round(metrics.hr, 5), "ndcg": round(metrics.ndcg, 5), "users": metrics.users}


def _rounded(phase: dict[str, Any]) -> dict[str, Any]:
    """A phase with its figures rounded to five decimal places."""
    return {
        key: [round(x, 5) for x in value] if isinstance(value, list) else value
        for key, value in phase.items()
    }
