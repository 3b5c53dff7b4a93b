"""The training loop, one for every model."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ncr_core.data.interactions import Interactions
from ncr_core.data.splits import Split
from ncr_core.errors import ConfigError, TrainingError
from ncr_core.evaluation.metrics import hit_ratio, ndcg
from ncr_core.evaluation.protocols import (
    CandidateSet,
    K,
    Metrics,
    ModelRanks,
    sampled_candidates,
)
from ncr_core.models.ranker import PairwiseRanker
from ncr_core.training.batches import Batches, Rows, SharedRows
from ncr_core.training.config import TrainConfig
from ncr_core.training.losses import LOSSES, SHARED_LOSSES
from ncr_core.training.optimizers import Adam
from ncr_core.training.stated import StatedRows

PAPER_IMPROVEMENT = 1e-3  # "until the loss does not decrease (by 0.1%)", §4.2
VALIDATION_USERS = 10_000
USERS_AT_ONCE = 1024
HELD_OUT_STEPS = 300


@dataclass(frozen=True)
class Progress:
    """Where training stands. ``epoch`` counts from 1; ``ndcg`` is NDCG@10 on validation."""

    phase: str
    epoch: int
    epochs: int
    loss: float
    ndcg: float | None
    eta_s: float


@dataclass
class History:
    """What each epoch of a phase gave, and which one was kept.

    ``ndcg`` and ``hr`` are on validation, and empty where there were no validation items.
    """

    phase: str
    loss: list[float] = field(default_factory=list)
    ndcg: list[float] = field(default_factory=list)
    hr: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    best_epoch: int = 0


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Schedule:
    """The part of a TrainConfig that differs between the phases of pre-training."""

    phase: str
    epochs: int
    rate: float


def train_loop(
    model: PairwiseRanker,
    split: Split,
    config: TrainConfig,
    schedule: Schedule,
    on_progress: OnProgress | None = None,
    later_phases: float = 0.0,
) -> History:
    """Trains ``model`` in place on ``split.train`` and leaves it at its best epoch.

    ``later_phases`` is the work that follows this phase, in epochs of this one: for the time left.
    Raises TrainingError when the loss is not finite; the model is then at its last good epoch.
    """
    device = config.torch_device()
    model.to(device)
    batches = _batches(model, split.train, config, device)
    total_steps = schedule.epochs * len(batches) if config.schedule == "one-cycle" else None
    optimizer = Adam(model, config, schedule.rate, total_steps)
    # Without validation items, as when a chosen configuration is refitted on everything, all epochs
    # are run and the last is kept.
    validated = bool((split.validation >= 0).any())
    held_out = validation_candidates(split, config.seed) if validated else None
    history = History(schedule.phase)
    best, kept = -1.0, copy.deepcopy(model.state_dict())
    for epoch in range(1, schedule.epochs + 1):
        started = time.perf_counter()
        mean_loss = _one_epoch(model, batches, batches.n_items, config, optimizer)
        if not (math.isfinite(mean_loss) and _finite(model)):
            model.load_state_dict(kept)
            grown = "a parameter" if math.isfinite(mean_loss) else "the loss"
            value = math.inf if math.isfinite(mean_loss) else mean_loss
            raise TrainingError(
                f"{grown} became {value} in epoch {epoch} of {schedule.phase} at learning "
                f"rate {schedule.rate:g}: try a smaller rate or smaller l2",
                *((model, history) if history.best_epoch else ()),
            )
        remember(model, split.train)
        metrics = None if held_out is None else validate(model, held_out)
        history.loss.append(mean_loss)
        if metrics is not None:
            history.ndcg.append(metrics.ndcg)
            history.hr.append(metrics.hr)
        history.seconds.append(time.perf_counter() - started)
        if metrics is None or metrics.ndcg > best or config.stopping == "paper":
            best, history.best_epoch = metrics.ndcg if metrics else best, epoch
            kept = copy.deepcopy(model.state_dict())
        if on_progress is not None:
            left = schedule.epochs - epoch
            eta = (left + later_phases) * sum(history.seconds) / epoch
            ndcg = metrics.ndcg if metrics else None
            on_progress(Progress(schedule.phase, epoch, schedule.epochs, mean_loss, ndcg, eta))
        if _should_stop(history, config):
            break
    model.load_state_dict(kept)
    model.eval()
    return history


def learn_held_out(model: PairwiseRanker, interactions: Interactions, config: TrainConfig) -> None:
    """A few passes over everything, held-out items included, at the rate of fine-tuning.

    For a model that was measured and is to serve: what it was measured on are the latest things
    that its users did. There is nothing left to validate on, so the passes are few and fixed: two,
    or as many as make ``HELD_OUT_STEPS`` steps.
    """
    if not model.shares_negatives:
        config = replace(config, shared_negatives=0)
    batches = _batches(model, interactions, config, model.device)
    epochs = max(2, -(-HELD_OUT_STEPS // len(batches)))
    model.requires_grad_(True)
    if not model.config.learn_weights:
        model.get_parameter("weight").requires_grad_(False)
    optimizer = Adam(model, config, config.fine_tune_rate, None)
    for _ in range(epochs):
        loss = _one_epoch(model, batches, batches.n_items, config, optimizer)
        if not (math.isfinite(loss) and _finite(model)):
            grown = "a parameter" if math.isfinite(loss) else "the loss"
            raise TrainingError(f"{grown} became infinite while the held-out items were learned")
    remember(model, interactions)
    model.eval()


def _finite(model: PairwiseRanker) -> bool:
    """Whether every parameter is a number: the last step of an epoch shows in no loss."""
    return all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def remember(model: PairwiseRanker, interactions: Interactions) -> None:
    """Recomputes the user vectors of a model that pools them from these interactions."""
    lengths = interactions.indptr[1:] - interactions.indptr[:-1]
    weights = interactions.weights
    model.remember(
        torch.from_numpy(interactions.items),
        torch.from_numpy(lengths),
        None if weights is None else torch.from_numpy(weights),
    )


def epoch_of(
    model: PairwiseRanker,
    train: Interactions,
    config: TrainConfig,
    through: Callable[[Iterator[Rows | SharedRows]], Iterable[Rows | SharedRows]],
) -> float:
    """One pass over those batches that ``through`` lets pass, at a constant rate; the mean loss.

    For measuring: ``train_loop`` is what trains.
    """
    batches = _batches(model, train, config, model.device)
    optimizer = Adam(model, config, config.learning_rate, None)
    return _one_epoch(model, through(iter(batches)), batches.n_items, config, optimizer)


def _batches(
    model: PairwiseRanker, train: Interactions, config: TrainConfig, device: torch.device
) -> Batches:
    if config.shared_negatives and not model.shares_negatives:
        raise ConfigError(f"shared negatives are for nbpr, not {model.config.kind}")
    return Batches(train, config, device, histories=model.config.users == "history")


def _one_epoch(
    model: PairwiseRanker,
    batches: Iterable[Rows | SharedRows],
    n_items: int,
    config: TrainConfig,
    optimizer: Adam,
) -> float:
    """One pass over the positives; the mean loss of its batches, without the l2 term."""
    model.train()
    total, steps = torch.zeros((), device=model.device), 0
    for rows in batches:
        optimizer.zero_grad()
        vectors = model.training_vectors(rows.users, rows.histories)
        if config.dropout:
            vectors = torch.nn.functional.dropout(vectors, config.dropout)
        if isinstance(rows, SharedRows):
            s_i, s_j = model.shared_scores(vectors, rows.row, rows.items, rows.negatives)
            shared_loss = SHARED_LOSSES[config.loss]
            loss = shared_loss(s_i, s_j, rows.valid, rows.row, n_items, rows.weights)
        else:
            both = model.pair_logits(vectors, rows.items, rows.negatives)
            loss = LOSSES[config.loss](*both, n_items, rows.weights)
        if rows.stated is not None and config.stated_weight:
            loss = _with_stated(model, loss, rows, rows.stated, config)
        total += loss.detach()
        if config.l2:
            loss = loss + config.l2 * _batch_l2(model, vectors, rows.items, rows.negatives)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps += 1
    return float(total) / steps


def _with_stated(
    model: PairwiseRanker,
    loss: Tensor,
    rows: Rows | SharedRows,
    stated: StatedRows,
    config: TrainConfig,
) -> Tensor:
    """The mean of the positives' loss and that of the stated pairs, each pair like a positive."""
    vectors = model.training_vectors(stated.users, stated.histories)
    if config.dropout:
        vectors = torch.nn.functional.dropout(vectors, config.dropout)
    z_uij, z_uji = model.pair_logits(vectors, stated.winners, stated.losers.unsqueeze(1))
    if isinstance(rows, SharedRows):
        # As those pairs: by the half margin alone.
        half = (z_uij - z_uji) / 2
        z_uij, z_uji = half, -half
    own_loss = LOSSES[config.loss](z_uij, z_uji, 0, stated.weights)
    counts = len(rows.items) if rows.weights is None else rows.weights.sum()
    stated_counts = config.stated_weight * stated.weights.sum()
    return (counts * loss + stated_counts * own_loss) / (counts + stated_counts)


def validation_candidates(split: Split, seed: int) -> CandidateSet:
    """Sampled candidates of the validation items, of at most ``VALIDATION_USERS`` users."""
    every = sampled_candidates(split, split.validation, seed)
    if len(every.users) <= VALIDATION_USERS:
        return every
    generator = torch.Generator().manual_seed(seed)
    some = torch.randperm(len(every.users), generator=generator)[:VALIDATION_USERS].numpy()
    return CandidateSet(every.users[some], every.held_out[some], every.candidates[some])


def validate(model: PairwiseRanker, held_out: CandidateSet) -> Metrics:
    """HR@10 and NDCG@10 of a model in training, by the candidates that beat the held-out item."""
    model.eval()
    ranks = ModelRanks(model)
    places = np.concatenate(
        [
            ranks.places(
                held_out.users[at : at + USERS_AT_ONCE],
                held_out.held_out[at : at + USERS_AT_ONCE],
                held_out.candidates[at : at + USERS_AT_ONCE],
            )
            for at in range(0, len(held_out.users), USERS_AT_ONCE)
        ]
    )
    items = held_out.candidates.shape[1]
    return Metrics(hit_ratio(places, K), ndcg(places, K), len(places), items)


def _should_stop(history: History, config: TrainConfig) -> bool:
    epoch = len(history.loss)
    if config.stopping == "validation":
        return epoch - history.best_epoch >= config.patience
    if epoch < 2:
        return False
    return history.loss[-2] - history.loss[-1] < PAPER_IMPROVEMENT * history.loss[-2]


def _batch_l2(model: PairwiseRanker, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """‖Θ‖² of the batch's embeddings, the mean over its users, its positives and its negatives."""
    of_users = users.square().sum() / len(users)
    of_i = model.item_vectors(i).square().sum() / len(i)
    return of_users + of_i + model.item_vectors(j).square().sum() / j.numel()
