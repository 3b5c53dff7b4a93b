"""Every method that is compared, ours and theirs, behind one way of fitting."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from ncr_core.data.splits import Split
from ncr_core.errors import ConfigError
from ncr_core.evaluation.protocols import (
    CandidateSet,
    Metrics,
    ModelRanks,
    Ranks,
    evaluate_sampled,
)
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.models.baselines.cornac_bpr import fit_cornac_bpr
from ncr_core.models.baselines.eals import EALSConfig, fit_eals
from ncr_core.models.baselines.ease import fit_ease
from ncr_core.models.baselines.extras import require
from ncr_core.models.baselines.ials import IALSConfig, fit_ials
from ncr_core.models.baselines.neumf_config import NeuMFConfig
from ncr_core.models.baselines.neumf_training import fit_neumf
from ncr_core.models.baselines.popularity import Popularity
from ncr_core.training import History, OnProgress, TrainConfig, train_model
from ncr_core.training.loop import validation_candidates
from ncr_core.training.pretraining import Parts

Settings = Mapping[str, Any]


@dataclass
class Fitted:
    """A fitted method: how it ranks, what it took, and how it did on validation.

    ``rounds`` is the epoch or iteration that validation chose, for a refit without it.
    """

    ranks: Ranks
    seconds: float
    validation: Metrics | None = None
    rounds: int | None = None
    history: list[History] = field(default_factory=list)
    model: PairwiseRanker | None = None


@dataclass(frozen=True)
class Request:
    """What to fit. ``rounds`` fixes the number of epochs or iterations, for a refit."""

    split: Split
    factors: int
    settings: Settings
    seed: int
    rounds: int | None = None
    parts: Parts | None = None
    on_progress: OnProgress | None = None


def configs(request: Request) -> tuple[ModelConfig, TrainConfig]:
    """The two configurations of a method of ours."""
    model = ModelConfig.from_dict({**request.settings["model"], "factors": request.factors})
    training = {**request.settings.get("training", {}), "seed": request.seed}
    if request.rounds is not None:
        name = "epochs"
        if model.kind == "neupr" and training.get("pretrain", True):
            name = "fine_tune_epochs"
        training[name] = request.rounds
    return model, TrainConfig(**training)


def fit_ours(request: Request) -> Fitted:
    """A PairwiseRanker by ``train_model``."""
    model_config, config = configs(request)
    started = time.perf_counter()
    trained = train_model(model_config, config, request.split, request.on_progress, request.parts)
    seconds = time.perf_counter() - started
    last = trained.history[-1]
    return Fitted(
        ModelRanks(trained.model),
        seconds,
        _best_of(last, request.split),
        last.best_epoch,
        trained.history,
        trained.model,
    )


def _fit_popularity(request: Request) -> Fitted:
    return _timed(request, lambda: Popularity(request.split.train))


def _fit_ease(request: Request) -> Fitted:
    return _timed(request, lambda: fit_ease(request.split.train, **request.settings))


def _fit_cornac(request: Request) -> Fitted:
    fitted = _timed(
        request, lambda: fit_cornac_bpr(request.split.train, request.factors, seed=request.seed)
    )
    seconds = getattr(fitted.ranks, "seconds", fitted.seconds)
    return Fitted(fitted.ranks, seconds, fitted.validation)


def _fit_eals(request: Request) -> Fitted:
    config = EALSConfig(**_iterations(request))
    return _by_iteration(request, lambda look: fit_eals(request.split.train, config, look))


def _fit_ials(request: Request) -> Fitted:
    config = IALSConfig(**_iterations(request))
    return _by_iteration(request, lambda look: fit_ials(request.split.train, config, look))


def _iterations(request: Request) -> dict[str, Any]:
    """The settings of a method that goes by iterations."""
    settings = dict(request.settings, factors=request.factors, seed=request.seed)
    if request.rounds is not None:
        settings["iterations"] = request.rounds
    return settings


def _fit_neumf(request: Request) -> Fitted:
    settings = dict(request.settings, factors=request.factors, seed=request.seed)
    if request.rounds is not None:
        last = "fine_tune_epochs" if settings.get("pretrain", True) else "epochs"
        settings[last] = request.rounds
    started = time.perf_counter()
    fitted = fit_neumf(request.split, NeuMFConfig(**settings), request.on_progress)
    seconds = time.perf_counter() - started
    last_phase = fitted.history[-1]
    return Fitted(
        fitted,
        seconds,
        _best_of(last_phase, request.split),
        last_phase.best_epoch,
        list(fitted.history),
    )


def resolved(cell_settings: Settings, method: str, factors: int) -> dict[str, Any]:
    """Every choice a method is run with, defaults included. Raises ConfigError, before any time is
    spent, for what does not fit or is not installed."""
    if "model" in cell_settings:
        model, training = configs(Request(cast(Split, None), factors, cell_settings, 0))
        every: dict[str, Any] = {"model": model.as_dict(), "training": training.as_dict()}
    else:
        if method in _EXTRAS:
            require(*_EXTRAS[method])
        every = dict(cell_settings)
        if method in _CONFIGS:
            every = asdict(_CONFIGS[method](**{**cell_settings, "factors": factors}))
    plain: dict[str, Any] = json.loads(json.dumps(every))
    return plain


_EXTRAS = {"iALS": ("implicit", "research"), "cornac BPR": ("cornac", "cornac")}
_CONFIGS: dict[str, Callable[..., Any]] = {
    "eALS": EALSConfig,
    "iALS": IALSConfig,
    "NeuMF": NeuMFConfig,
}
FITS: dict[str, Callable[[Request], Fitted]] = {
    "ItemPop": _fit_popularity,
    "EASE": _fit_ease,
    "EASE by recency": _fit_ease,
    "eALS": _fit_eals,
    "iALS": _fit_ials,
    "NeuMF": _fit_neumf,
    "cornac BPR": _fit_cornac,
}


def fit(method: str, request: Request) -> Fitted:
    """Fits a baseline by its name, or a model of ours by settings that have a ``model``."""
    if "model" in request.settings:
        return fit_ours(request)
    if method not in FITS:
        raise ConfigError(f"unknown method {method!r}: {', '.join(FITS)}, or one of ours")
    return FITS[method](request)


def _timed(request: Request, make: Callable[[], Ranks]) -> Fitted:
    started = time.perf_counter()
    ranks = make()
    seconds = time.perf_counter() - started
    held_out = _validation(request)
    return Fitted(ranks, seconds, evaluate_sampled(ranks, held_out) if held_out else None)


def _by_iteration(
    request: Request, run: Callable[[Callable[[Any, int], bool] | None], Ranks]
) -> Fitted:
    """Keeps the best iteration by validation NDCG@10, looked at every second one and the first."""
    held_out = _validation(request)
    best: dict[str, Any] = {"ndcg": -1.0}
    spent = [0.0]

    def look(model: Any, iteration: int) -> bool:
        if held_out is None or (iteration % 2 and iteration > 1):
            return False
        started = time.perf_counter()
        metrics = evaluate_sampled(model, held_out)
        if metrics.ndcg > best["ndcg"]:
            best.update(ndcg=metrics.ndcg, metrics=metrics, model=model, iteration=iteration)
        spent[0] += time.perf_counter() - started
        return False

    started = time.perf_counter()
    last = run(look if held_out is not None else None)
    seconds = time.perf_counter() - started - spent[0]
    if held_out is None:
        return Fitted(last, seconds)
    return Fitted(best["model"], seconds, best["metrics"], best["iteration"])


def _validation(request: Request) -> CandidateSet | None:
    if not (request.split.validation >= 0).any():
        return None
    return validation_candidates(request.split, request.seed)


def _best_of(history: History, split: Split) -> Metrics | None:
    if not history.ndcg:
        return None
    at = history.best_epoch - 1
    users = int((split.validation >= 0).sum())
    return Metrics(history.hr[at], history.ndcg[at], users, 101)
