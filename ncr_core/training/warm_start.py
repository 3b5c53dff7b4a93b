"""Warm start: training continues from a model's parameters, on newer interactions.

Known users and items begin with their own vectors. A new item begins at the mean of the known
items. The fold-in then gives a new user a vector by the user's evidence. Training moves all these
vectors. As most parameters have converged, the passes are few and the rate is low.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ncr_core.checkpoint import EvaluationSnapshot
from ncr_core.data.interactions import IntArray, row_indices
from ncr_core.data.splits import Split
from ncr_core.errors import ConfigError
from ncr_core.fold_in import FoldIn
from ncr_core.fold_in.evidence import user_evidence
from ncr_core.models import NBPR, ModelConfig, PairwiseRanker, build_model
from ncr_core.recipes import MANY_FACTORS, affordable_start_factors
from ncr_core.train_config import TrainConfig
from ncr_core.training.kept_start import without_start
from ncr_core.training.pretraining import TrainingResult, joined
from ncr_core.training.trainer import (
    OnProgress,
    PhaseRunner,
    TrainingPhase,
    model_for,
    seeded,
    train_loop,
)

EPOCHS = 8
ROWS_AT_ONCE = 2**18  # rows that are copied at once
RATE = 3e-3  # a third of what training from scratch takes; measured by benchmarks/gate.py


@dataclass(frozen=True)
class StartingPoint:
    """A model to begin from, and the ids of its rows."""

    model: PairwiseRanker
    user_ids: Sequence[str]
    item_ids: Sequence[str]


def evaluated_starting_point(
    model: PairwiseRanker,
    evaluated: EvaluationSnapshot,
    user_ids: Sequence[str],
    item_ids: Sequence[str],
) -> StartingPoint:
    """The starting point of a model to be measured, which has not learned the held-out items.

    All parameters are those of the evaluation snapshot. Users that the snapshot lacks have their
    vectors from ``model``, which learned the held-out items of the other users later.
    """
    config = model.config
    before = evaluated.model.state_dict()
    of_users = _tables(config).users
    rows = torch.from_numpy(evaluated.rows).to(model.device)
    base = build_model(config, model.n_users, model.n_items).to(model.device)
    base.load_state_dict(model.state_dict())
    for name, value in base.state_dict().items():
        if name in of_users:
            value[rows] = before[name].to(model.device)
        else:
            value.copy_(before[name])
    return StartingPoint(base, user_ids, item_ids)


def train_warm(
    base: StartingPoint,
    config: TrainConfig,
    split: Split,
    on_progress: OnProgress | None = None,
    run_phase: PhaseRunner | None = None,
) -> TrainingResult:
    """Trains a model on ``split`` with the architecture of the base, from the base's parameters.

    The training has at most ``EPOCHS`` passes and at most the peak rate ``RATE``; ``config`` may
    lower both. ``run_phase`` is as in `train_model`.
    """
    architecture = base.model.config
    if architecture.start_factors:
        base = replace(base, model=without_start(cast(NBPR, base.model)))
    model = grown_model(base, split, config.seed).to(config.torch_device())
    if not model.shares_negatives:
        config = replace(config, shared_negatives=0)
    kind = model.config.kind
    epochs = min(EPOCHS, config.epochs)
    phase = TrainingPhase(f"go on with {kind}", epochs, min(RATE, config.learning_rate))
    run = run_phase or train_loop
    with seeded(config):
        history = run(model, split, config, phase, on_progress)
    if architecture.start_factors:
        train = split.train
        most = replace(architecture, start_factors=MANY_FACTORS)
        kept = affordable_start_factors(most, train.n_remembered, train.n_items, train.nnz)
        model = joined(model, kept, split, config, history) if kept else model
    return TrainingResult(model, [history])


def grown_model(base: StartingPoint, split: Split, seed: int) -> PairwiseRanker:
    """A model for the split's users and items with the base's parameters.

    Raises ConfigError if the base knows none of the users or none of the items.
    """
    config, train = base.model.config, split.train
    model = model_for(config, train, seed)
    tables = _tables(config)
    users = row_indices(train.user_ids[: model.n_users], base.user_ids)
    items = row_indices(train.item_ids, base.item_ids)
    theirs = base.model.state_dict()
    for name, value in model.state_dict().items():
        rows = users if name in tables.users else items if name in tables.items else None
        if rows is None:
            value.copy_(theirs[name])
        else:
            _copy_rows(theirs[name].cpu(), rows, value)
    _fold_in(model, split, np.flatnonzero(users < 0))
    return model


@torch.no_grad()
def _fold_in(model: PairwiseRanker, split: Split, new: IntArray) -> None:
    """Gives new users vectors by their evidence; pooled users need no fold-in."""
    if model.config.users == "history" or len(new) == 0:
        return
    wanted = {name: value.requires_grad for name, value in model.named_parameters()}
    model.requires_grad_(False)
    vectors = FoldIn(model)(user_evidence(split.train, new.tolist()))
    rows, first = torch.from_numpy(new), 0
    for part in model.user_parts():
        size = part.weight.shape[1]
        part.weight[rows] = vectors[:, first : first + size]
        first += size
    for name, value in model.named_parameters():
        value.requires_grad_(wanted[name])


def _copy_rows(table: Tensor, rows: IntArray, to: Tensor) -> None:
    """Copies rows of a table by number, some at a time; the mean of the known rows for −1."""
    known = rows[rows >= 0]
    if not len(known):
        raise ConfigError("the starting model knows none of the users or items of the data")
    shares = [
        table[torch.from_numpy(some)].mean(dim=0) * (len(some) / len(known))
        for some in np.split(known, range(ROWS_AT_ONCE, len(known), ROWS_AT_ONCE))
    ]
    mean = torch.stack(shares).sum(dim=0)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = torch.from_numpy(rows[first : first + ROWS_AT_ONCE])
        copied = to[first : first + ROWS_AT_ONCE]
        copied.copy_(table[some.clamp(min=0)])
        copied[some < 0] = mean


@dataclass(frozen=True)
class _Tables:
    users: frozenset[str]
    items: frozenset[str]


def _tables(config: ModelConfig) -> _Tables:
    """The parameters that have a row for each user, and the parameters that have one for each item.

    The function finds them by building models with one more user or item.
    """
    with torch.random.fork_rng(devices=[]):
        shapes = [
            {name: value.shape for name, value in build_model(config, u, i).state_dict().items()}
            for u, i in ((1, 1), (2, 1), (1, 2))
        ]
    one, more_users, more_items = shapes
    return _Tables(
        frozenset(name for name in one if more_users[name] != one[name]),
        frozenset(name for name in one if more_items[name] != one[name]),
    )
