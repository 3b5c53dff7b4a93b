"""From interactions to a trained model: one phase, or more for a pre-trained model.

A pre-trained NeuPR has three phases (§4.7), a DNCR that starts as a product has two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import numpy as np
import torch

from ncr_core.checkpoint import EvaluationSnapshot
from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.data.splits import Split
from ncr_core.errors import ConfigError, DataError
from ncr_core.model_config import Kind
from ncr_core.models import DNCR, NBPR, ModelConfig, NeuPR, PairwiseRanker, build_model
from ncr_core.recipes import Recipe, check_tower_start
from ncr_core.train_config import TrainConfig
from ncr_core.training.gaps import learn_gaps
from ncr_core.training.initializers import STARTS
from ncr_core.training.kept_start import silence, start_factors_of, with_start, without_start
from ncr_core.training.newcomers import has_few_newcomers, shrink_newcomers
from ncr_core.training.next_item import next_item_factors
from ncr_core.training.product_tower import start_as_product
from ncr_core.training.proposal import Proposal
from ncr_core.training.rank_engine import RankEngine
from ncr_core.training.trainer import (
    Adam,
    History,
    OnProgress,
    PhaseRunner,
    TrainingPhase,
    learn_held_out,
    make_batches,
    model_for,
    remember,
    seeded,
    train_epoch,
    train_loop,
)
from ncr_core.training.validation import validation_figures

# What an epoch takes beside one of NBPR's, as measured at d = 8; only for the time left.
EPOCH_COST = {"nbpr": 1.0, "dncr": 4.5, "neupr": 5.0}
TOWER_BATCH = 1024  # activations of more positives leave the processor's cache
PROBE_STEPS = 8  # of each phase, to estimate what an epoch takes


Parts = tuple[NBPR, DNCR]


@dataclass(frozen=True)
class TrainingResult:
    """A trained model and the history of each of its phases."""

    model: PairwiseRanker
    history: list[History]
    shrunk: bool = False
    """Whether `shrink_newcomers` brought the lists of newcomers nearer to popularity."""


def train_model(
    model_config: ModelConfig,
    config: TrainConfig,
    split: Split,
    on_progress: OnProgress | None = None,
    parts: Parts | None = None,
    start: PairwiseRanker | None = None,
    shrink: bool | None = None,
    run_phase: PhaseRunner | None = None,
    start_factors: int | None = None,
) -> TrainingResult:
    """Trains a model from scratch; NeuPR with ``config.pretrain`` by eq. 26.

    A DNCR with ``config.tower_start`` "product" starts from a trained NBPR, see `start_as_product`.

    ``parts`` are a trained NBPR and a trained DNCR for NeuPR to start from. ``start`` is a model of
    one phase at its start, and the training changes it in place. ``shrink`` says whether to
    `shrink_newcomers`, and ``start_factors`` how many factors of its start the model keeps; by
    default the data decide. ``config.seed`` makes the training repeatable on one device.
    ``run_phase`` trains the phases that have epochs, for example with several ranks. The default is
    `train_loop`, which alone trains a tower that starts as a product. Raises ConfigError, DataError
    or TrainingError.
    """

    def run(*arguments: Any) -> History:
        elsewhere = run_phase is not None and arguments[3].epochs > 0
        return run_phase(*arguments) if elsewhere and run_phase else train_loop(*arguments)

    check_tower_start(model_config, config)
    if isinstance(run_phase, RankEngine):  # before the parts are trained
        run_phase.check(model_config)
    if split.train.n_users < 2:
        raise DataError(
            f"{split.train.n_users} user is too few: a model learns from what users have in common"
        )
    with seeded(config):
        return _trained(
            model_config, config, split, on_progress, parts, start, shrink, run, start_factors
        )


def _trained(
    model_config: ModelConfig,
    config: TrainConfig,
    split: Split,
    on_progress: OnProgress | None,
    parts: Parts | None,
    start: PairwiseRanker | None,
    shrink: bool | None,
    run: Callable[..., History],
    start_factors: int | None,
) -> TrainingResult:
    if not pretrains(model_config, config):
        if start_factors is None:
            start_factors = start_factors_of(model_config, config, split.train)
        model = start or start_model(model_config, config, split, start_factors)
        phase = TrainingPhase(f"train {model_config.kind}", config.epochs, config.learning_rate)
        history = run(model, split, config, phase, on_progress)
        shrink = has_few_newcomers(split.train) if shrink is None else shrink
        shrunk = shrink and history.best_epoch > 0 and shrink_newcomers(model, split.train)
        if start_factors:
            if history.best_epoch == 0:  # the factors of the start would count twice
                silence(cast(NBPR, model))
            model = joined(model, start_factors, split, config, history)
        elif shrunk:
            remember(model, split.train)
        return TrainingResult(model, [history], shrunk)

    histories: list[History] = []
    fine_tuning = config.fine_tune_epochs * EPOCH_COST["neupr"]
    dncr_part = 0 if model_config.kind == "dncr" else config.epochs * EPOCH_COST["dncr"]
    later = {"nbpr": dncr_part + fine_tuning, "dncr": fine_tuning}

    def pretrained(kind: Kind) -> PairwiseRanker:
        part = start_model(part_config(model_config, kind), config, split)
        phase = TrainingPhase(f"pre-train {kind}", config.epochs, config.learning_rate)
        left = later[kind] / EPOCH_COST[kind]
        phase_config = config if part.shares_negatives else replace(config, shared_negatives=0)
        histories.append(run(part, split, phase_config, phase, on_progress, left))
        return part

    if model_config.kind == "dncr":
        nbpr = cast(NBPR, pretrained("nbpr")).to(config.torch_device())
        dncr = cast(DNCR, _build(model_config, split, config.seed).to(nbpr.device))
        start_as_product(dncr, nbpr)
        remember(dncr, split.train)
        phase = TrainingPhase("train dncr", config.fine_tune_epochs, config.fine_tune_rate)
        phase_config = _tower_config(config, split)
        proposal = Proposal(nbpr, config.negatives, config.seed)
        history = train_loop(dncr, split, phase_config, phase, on_progress, proposal=proposal)
        return TrainingResult(dncr, [*histories, history])
    if parts is None:
        parts = (cast(NBPR, pretrained("nbpr")), cast(DNCR, pretrained("dncr")))
    neupr = cast(NeuPR, _build(model_config, split, config.seed).to(parts[0].device))
    neupr.start_from(*parts, config.alpha)
    phase = TrainingPhase("train neupr", config.fine_tune_epochs, config.fine_tune_rate)
    phase_config = replace(config, shared_negatives=0)
    histories.append(run(neupr, split, phase_config, phase, on_progress))
    return TrainingResult(neupr, histories)


def joined(
    model: PairwiseRanker, start_factors: int, split: Split, config: TrainConfig, history: History
) -> PairwiseRanker:
    """A trained NBPR with its start beside it, see `with_start`; ``history`` gets its figures."""
    whole = with_start(cast(NBPR, model), start_factors, split.train, config.seed)
    if history.best is not None:
        history.joined = [*validation_figures(whole, split, config)]
    return whole


def _tower_config(config: TrainConfig, split: Split) -> TrainConfig:
    """The configuration of the phase of a tower that starts as a product."""
    return replace(config, batch_size=min(TOWER_BATCH, config.batch_size_for(split.train.nnz)))


def estimated_seconds(
    model_config: ModelConfig, config: TrainConfig, split: Split, *, started: bool = False
) -> float:
    """Estimates the seconds of ``train_model`` by the starts and a few batches of each phase.

    The estimate leaves out validation, and the draws for a tower that starts as a product. It also
    leaves out a start that exists already (``started``).
    """
    phases = [(model_config, config.epochs)]
    if pretrains(model_config, config):
        kinds: list[Kind] = ["nbpr"] if model_config.kind == "dncr" else ["nbpr", "dncr"]
        phases = [(part_config(model_config, kind), config.epochs) for kind in kinds]
        phases.append((model_config, config.fine_tune_epochs))
    seconds = sum(
        epochs * _seconds_an_epoch(phase, config, split) for phase, epochs in phases if epochs
    )
    if config.start != "random" and not started:
        began = time.perf_counter()
        for phase, _ in phases[:-1] or phases:  # fine-tuning starts from those before it
            start_model(phase, config, split)
        seconds += time.perf_counter() - began
    return seconds


def _seconds_an_epoch(model_config: ModelConfig, config: TrainConfig, split: Split) -> float:
    model = _build(model_config, split, config.seed).to(config.torch_device())
    if not model.shares_negatives:
        config = replace(config, shared_negatives=0)
    batches = make_batches(model, split.train, config, model.device)
    optimizer = Adam(model, config, config.learning_rate, None)
    seconds = []
    started = time.perf_counter()
    for rows in islice(batches, PROBE_STEPS):
        train_epoch(model, [rows], batches.n_items, config, optimizer)
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
    return statistics.median(seconds) * len(batches)


def refit_config(
    model_config: ModelConfig, config: TrainConfig, history: list[History]
) -> TrainConfig:
    """The configuration of a fit without validation items: as many epochs as ``history`` chose."""
    last = history[-1].best_epoch
    if not pretrains(model_config, config):
        return replace(config, epochs=last)
    parts = [phase.best_epoch for phase in history[:-1]]
    return replace(config, epochs=max(parts, default=config.epochs), fine_tune_epochs=last)


def evaluation_snapshot(
    model: PairwiseRanker, rows: IntArray, held_out: IntArray
) -> EvaluationSnapshot:
    """A copy of a measured model before `learn_everything`, with the users of ``rows`` alone.

    Args:
        model: the model, before it learns the held-out items.
        rows: (n,) rows of users, ascending.
        held_out: (n, 2) held-out item rows of each user, −1 where there is none.
    """
    tables = {part.weight.data_ptr() for part in model.user_parts()}
    index = torch.from_numpy(rows).to(model.device)
    with torch.random.fork_rng(devices=[]):
        copy = build_model(model.config, len(rows), model.n_items)
    copy.load_state_dict(
        {
            name: value[index] if value.data_ptr() in tables else value
            for name, value in model.state_dict().items()
        }
    )
    return EvaluationSnapshot(copy.requires_grad_(False).eval(), rows, held_out)


MIN_REFIT_SHARE = 0.01  # of the interactions, held out


def learn_everything(
    recipe: Recipe,
    trained: TrainingResult,
    split: Split,
    interactions: Interactions,
    *,
    warm: bool = False,
    run_phase: PhaseRunner | None = None,
) -> PairwiseRanker:
    """Returns the model to serve: a measured model that also learned its held-out items.

    The first case that applies decides:

    - Without ``warm``, a next-item start without epochs, an ALS start that no epoch improved, and
      a tower that started as a product are fitted again.
    - A model from the next-item start stays as it is if at most ``MIN_REFIT_SHARE`` of the
      interactions were held out. Only the vectors of its users are made anew from their items.
    - Without ``warm``, any other model from the next-item start is fitted again, with the chosen
      number of epochs.
    - All other models get a few more passes: models from other starts, and ``warm`` models, which
      started from another model. A start beside trained factors is left out of these passes, and is
      made anew.

    At the end the model learns the effect of breaks, see `learn_gaps`. ``run_phase`` is as in
    `train_model`.
    """
    model = _with_held_out(recipe, trained, split, interactions, warm, run_phase)
    learn_gaps(model, interactions, recipe.training.seed)
    return model


def _with_held_out(
    recipe: Recipe,
    trained: TrainingResult,
    split: Split,
    interactions: Interactions,
    warm: bool,
    run_phase: PhaseRunner | None,
) -> PairwiseRanker:
    config = recipe.training
    if config.start == "next-item" and (warm or config.epochs > 0):
        held_out = int((split.validation >= 0).sum() + (split.test >= 0).sum())
        if held_out <= MIN_REFIT_SHARE * split.train.nnz:
            remember(trained.model, interactions)
            return trained.model
    again = refit_config(recipe.model, config, trained.history)
    closed_form = config.start == "next-item" or (config.start == "als" and again.epochs == 0)
    # A few passes against uniform items would make the lists of such a tower worse.
    is_product = config.tower_start == "product"
    if warm or not (closed_form or is_product):
        model = trained.model
        if model.config.start_factors:
            model = without_start(cast(NBPR, model))
        with seeded(config):
            learn_held_out(model, interactions, config, run_phase)
        kept = trained.model.config.start_factors
        return with_start(cast(NBPR, model), kept, interactions, config.seed) if kept else model
    nothing = np.full(interactions.n_users, -1, dtype=np.int64)
    # The times are for `learn_gaps` alone.
    everything = Split(replace(interactions, times=None), nothing, nothing)
    return train_model(
        recipe.model,
        again,
        everything,
        shrink=trained.shrunk,
        run_phase=run_phase,
        start_factors=trained.model.config.start_factors,
    ).model


def pretrains(model_config: ModelConfig, config: TrainConfig) -> bool:
    """Whether a training begins with other models; shared embeddings leave no parts to copy."""
    if model_config.kind == "dncr":
        return config.tower_start == "product"
    return model_config.kind == "neupr" and config.pretrain and not model_config.shared_embeddings


def part_config(model_config: ModelConfig, kind: Kind) -> ModelConfig:
    """The configuration of a NeuPR's part, or of the NBPR whose product a DNCR starts as."""
    is_nbpr = kind == "nbpr"
    factors = model_config.product_factors or model_config.factors
    return replace(
        model_config,
        kind=kind,
        factors=factors if is_nbpr else model_config.deep_factors,
        tower_factors=0,
        item_bias=model_config.item_bias and is_nbpr,
    )


def start_model(
    config: ModelConfig, training: TrainConfig, split: Split, start_factors: int | None = None
) -> PairwiseRanker:
    """A model at its start, before training, without ``start_factors``.

    A next-item start has the first of the ``start_factors`` that the model will keep; by default
    the data decide how many.

    Raises ConfigError or DataError if the start does not fit the model or the data.
    """
    model = _build(config, split, training.seed)
    if training.start != "random":
        if config.init == "paper":
            raise ConfigError('init="paper" is N(0, 0.01²) everywhere: start must be "random"')
        model.to(training.torch_device())
        if start_factors is None:
            start_factors = start_factors_of(config, training, split.train)
        if start_factors:
            next_item_factors(split.train, start_factors, training.seed)  # which remembers them
        STARTS[training.start](model, split.train, training.seed)
    return model


def _build(config: ModelConfig, split: Split, seed: int) -> PairwiseRanker:
    return model_for(replace(config, start_factors=0), split.train, seed)
