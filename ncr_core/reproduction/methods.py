"""One way to fit every compared method, our models and the baselines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ncr_core.data.splits import NextItemSplit, Split
from ncr_core.errors import ConfigError
from ncr_core.evaluation.protocols import (
    NEGATIVES,
    CandidateSet,
    Metrics,
    ModelRanks,
    Ranks,
    evaluate_full,
    evaluate_sampled,
    of_random_users,
)
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.optional_imports import require
from ncr_core.recipes import Recipe, from_sections
from ncr_core.reproduction.baselines.als import EALSConfig, IALSConfig, fit_eals, fit_ials
from ncr_core.reproduction.baselines.neumf import NeuMFConfig, fit_neumf
from ncr_core.reproduction.baselines.sasrec import SASRecConfig, fit_sasrec
from ncr_core.reproduction.baselines.scoring import (
    GraphFilter,
    Markov,
    Popularity,
    ScoreModel,
    fit_cornac_bpr,
    fit_ease,
    fit_linear_next_item,
    fit_pure_svd,
)
from ncr_core.reproduction.datasets import fingerprint
from ncr_core.training import History, OnProgress, train_model
from ncr_core.training.pretraining import Parts, pretrains
from ncr_core.training.trainer import remember
from ncr_core.training.validation import (
    FULL_VALIDATION_USERS,
    validated_users,
    validation_candidates,
)

MethodSettings = Mapping[str, Any]


@dataclass
class FittedMethod:
    """A fitted method with its ranking, its seconds of training and its validation metrics."""

    ranks: Ranks
    seconds: float
    validation: Metrics | None = None

    cpu_seconds: float | None = None
    """Processor seconds of all threads; None if not measured."""

    rounds: int | None = None
    """The epoch or iteration that the validation items chose, for a refit without them."""

    history: list[History] = field(default_factory=list)
    model: PairwiseRanker | None = None


@dataclass(frozen=True)
class FitRequest:
    """The data, the settings and the seed to fit a method with."""

    split: Split
    factors: int
    settings: MethodSettings
    seed: int

    rounds: int | None = None
    """Fixes the number of epochs or iterations, for a refit."""

    parts: Parts | None = None
    on_progress: OnProgress | None = None

    progress_file: Path | None = None
    """The file that stores the state of a long training after each epoch, to resume from."""


def _requested_recipe(request: FitRequest) -> Recipe:
    """The recipe of one of our models, with the seed and the rounds of the request."""
    recipe = from_sections("run", request.settings, request.factors).with_(seed=request.seed)
    if request.rounds is None:
        return recipe
    last_phase = "fine_tune_epochs" if pretrains(recipe.model, recipe.training) else "epochs"
    return recipe.with_(**{last_phase: request.rounds})


def _fit_ranker(request: FitRequest) -> FittedMethod:
    """Fits a PairwiseRanker by ``train_model``."""
    recipe = _requested_recipe(request)
    started, cpu_started = time.perf_counter(), time.process_time()
    trained = train_model(
        recipe.model, recipe.training, request.split, request.on_progress, request.parts
    )
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    last = trained.history[-1]
    return FittedMethod(
        ModelRanks(trained.model),
        seconds,
        _best_epoch_metrics(
            last, request.split, recipe.model if recipe.training.validation == "full" else None
        ),
        cpu_seconds,
        last.best_epoch,
        trained.history,
        trained.model,
    )


def with_test_input(fitted: FittedMethod, split: NextItemSplit) -> Ranks:
    """The ranking of a fitted method by users' training items and validation items.

    The parameters do not change. A model that pools users' vectors from their items pools them
    anew. A model with a free vector for each user does not see the validation item.
    """
    if fitted.model is not None:
        remember(fitted.model, split.test_input)
        return ModelRanks(fitted.model)
    if isinstance(fitted.ranks, ScoreModel):
        return fitted.ranks.with_input(split.test_input)
    return fitted.ranks


def _fit_popularity(request: FitRequest) -> FittedMethod:
    return _timed(request, lambda: Popularity(request.split.train))


def _fit_ease(request: FitRequest) -> FittedMethod:
    return _timed(request, lambda: fit_ease(request.split.train, **request.settings))


def _fit_markov(request: FitRequest) -> FittedMethod:
    return _timed(request, lambda: Markov(request.split.train))


def _fit_linear_next_item(request: FitRequest) -> FittedMethod:
    return _timed(request, lambda: fit_linear_next_item(request.split.train, **request.settings))


def _fit_pure_svd(request: FitRequest) -> FittedMethod:
    return _timed(request, lambda: fit_pure_svd(request.split.train, request.factors, request.seed))


def _fit_graph_filter(request: FitRequest) -> FittedMethod:
    alpha = float(request.settings["alpha"])
    return _timed(
        request,
        lambda: GraphFilter(request.split.train, request.factors, alpha, request.seed),
    )


def _fit_cornac(request: FitRequest) -> FittedMethod:
    fitted = _timed(
        request,
        lambda: fit_cornac_bpr(
            request.split.train, request.factors, seed=request.seed, **request.settings
        ),
    )
    seconds = getattr(fitted.ranks, "seconds", fitted.seconds)
    return FittedMethod(fitted.ranks, seconds, fitted.validation)


def _fit_eals(request: FitRequest) -> FittedMethod:
    config = EALSConfig(**_iterative_settings(request))
    return _best_iteration(
        request, lambda on_iteration: fit_eals(request.split.train, config, on_iteration)
    )


def _fit_ials(request: FitRequest) -> FittedMethod:
    config = IALSConfig(**_iterative_settings(request))
    return _best_iteration(
        request, lambda on_iteration: fit_ials(request.split.train, config, on_iteration)
    )


def _iterative_settings(request: FitRequest) -> dict[str, Any]:
    """The settings of a method that trains by iterations."""
    settings = dict(request.settings, factors=request.factors, seed=request.seed)
    if request.rounds is not None:
        settings["iterations"] = request.rounds
    return settings


def _fit_neumf(request: FitRequest) -> FittedMethod:
    settings = dict(request.settings, factors=request.factors, seed=request.seed)
    if request.rounds is not None:
        last = "fine_tune_epochs" if settings.get("pretrain", True) else "epochs"
        settings[last] = request.rounds
    started = time.perf_counter()
    fitted = fit_neumf(request.split, NeuMFConfig(**settings), request.on_progress)
    seconds = time.perf_counter() - started
    last_phase = fitted.history[-1]
    return FittedMethod(
        fitted,
        seconds,
        _best_epoch_metrics(last_phase, request.split),
        None,
        last_phase.best_epoch,
        list(fitted.history),
    )


def _fit_sasrec(request: FitRequest) -> FittedMethod:
    settings = dict(request.settings, factors=request.factors, seed=request.seed)
    if request.rounds is not None:
        settings["epochs"] = request.rounds
    cpu_started = time.process_time()
    fitted = fit_sasrec(
        request.split,
        SASRecConfig(**settings),
        request.on_progress,
        request.progress_file,
        fingerprint(request.split),
    )
    # The processor time of epochs before a stop is not known.
    cpu_seconds = time.process_time() - cpu_started if request.progress_file is None else None
    return FittedMethod(
        fitted.model,
        sum(fitted.history.seconds),
        fitted.validation,
        cpu_seconds,
        fitted.history.best_epoch,
        [fitted.history],
    )


def resolved_settings(settings: MethodSettings, method: str, factors: int) -> dict[str, Any]:
    """All settings of a method that is to be fitted, see `with_defaults`.

    Raises ConfigError if the settings do not fit, or a library is not installed.
    """
    if method in _EXTRAS:
        require(*_EXTRAS[method])
    return with_defaults(settings, method, factors)


def with_defaults(settings: MethodSettings, method: str, factors: int) -> dict[str, Any]:
    """All settings of a method, including the defaults, as JSON values.

    Raises ConfigError if the settings do not fit.
    """
    if "model" in settings:
        recipe = from_sections(method, settings, factors)
        every: dict[str, Any] = {
            "model": recipe.model.as_dict(),
            "training": recipe.training.as_dict(),
        }
    else:
        every = dict(settings)
        if method in _CONFIGS:
            every = asdict(_CONFIGS[method](**{**settings, "factors": factors}))
    plain: dict[str, Any] = json.loads(json.dumps(every))
    return plain


_EXTRAS = {"iALS": ("implicit", "research"), "cornac BPR": ("cornac", "cornac")}
_CONFIGS: dict[str, Callable[..., Any]] = {
    "eALS": EALSConfig,
    "iALS": IALSConfig,
    "NeuMF": NeuMFConfig,
    "SASRec": SASRecConfig,
    "SASRec CE": SASRecConfig,
    "gSASRec": SASRecConfig,
}
FITS: dict[str, Callable[[FitRequest], FittedMethod]] = {
    "ItemPop": _fit_popularity,
    "EASE": _fit_ease,
    "EASE by recency": _fit_ease,
    "Markov": _fit_markov,
    "linear next-item": _fit_linear_next_item,
    "PureSVD": _fit_pure_svd,
    "GF-CF": _fit_graph_filter,
    "eALS": _fit_eals,
    "iALS": _fit_ials,
    "NeuMF": _fit_neumf,
    "cornac BPR": _fit_cornac,
    "SASRec": _fit_sasrec,
    "SASRec CE": _fit_sasrec,
    "gSASRec": _fit_sasrec,
}


def fit_method(method: str, request: FitRequest) -> FittedMethod:
    """Fits one of our models, whose settings have a section ``model``, or a baseline by its name.

    Raises ConfigError if no baseline has the name.
    """
    if "model" in request.settings:
        return _fit_ranker(request)
    if method not in FITS:
        raise ConfigError(f"unknown method {method!r}: {', '.join(FITS)}, or one of ours")
    return FITS[method](request)


def _timed(request: FitRequest, make: Callable[[], Ranks]) -> FittedMethod:
    started, cpu_started = time.perf_counter(), time.process_time()
    ranks = make()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    if isinstance(request.split, NextItemSplit):
        validation: Metrics | None = _full_validation(ranks, request.split)
    else:
        held_out = _validation(request)
        validation = evaluate_sampled(ranks, held_out) if held_out else None
    return FittedMethod(ranks, seconds, validation, cpu_seconds)


def _full_validation(ranks: Ranks, split: Split) -> Metrics:
    """Validation metrics over the whole catalogue, for the users of full validation in training."""
    held_out = of_random_users(split.validation, FULL_VALIDATION_USERS)
    return evaluate_full(ranks, split, held_out, seed=0)


def _best_iteration(
    request: FitRequest, run: Callable[[Callable[[Any, int], bool] | None], Ranks]
) -> FittedMethod:
    """Keeps the best of the first and every second iteration, by validation NDCG@10."""
    held_out = _validation(request)
    best: dict[str, Any] = {"ndcg": -1.0}
    evaluation_seconds = 0.0

    def on_iteration(model: Any, iteration: int) -> bool:
        nonlocal evaluation_seconds
        if held_out is None or (iteration % 2 and iteration > 1):
            return False
        started = time.perf_counter()
        metrics = evaluate_sampled(model, held_out)
        if metrics.ndcg > best["ndcg"]:
            best.update(ndcg=metrics.ndcg, metrics=metrics, model=model, iteration=iteration)
        evaluation_seconds += time.perf_counter() - started
        return False

    started = time.perf_counter()
    last = run(on_iteration if held_out is not None else None)
    seconds = time.perf_counter() - started - evaluation_seconds
    if held_out is None:
        return FittedMethod(last, seconds)
    return FittedMethod(best["model"], seconds, best["metrics"], None, best["iteration"])


def _validation(request: FitRequest) -> CandidateSet | None:
    if not (request.split.validation >= 0).any():
        return None
    return validation_candidates(request.split, request.seed)


def _best_epoch_metrics(
    history: History, split: Split, in_full: ModelConfig | None = None
) -> Metrics | None:
    """The metrics of the best epoch; ``in_full`` is the model of a validation over all items."""
    if history.best is None:
        return None
    best_ndcg, best_hr = history.best
    items = NEGATIVES + 1 if in_full is None else split.train.n_items
    return Metrics(best_hr, best_ndcg, validated_users(split, in_full), items)
