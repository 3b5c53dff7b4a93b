"""The training loop, one for every model."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ncr_core.data.interactions import Interactions
from ncr_core.data.samplers import NegativeSampler
from ncr_core.data.splits import Split
from ncr_core.errors import DataError, TrainingError
from ncr_core.evaluation.protocols import (
    CandidateSet,
    Metrics,
    ModelRanks,
    evaluate_sampled,
    sampled_candidates,
)
from ncr_core.models.ranker import PairwiseRanker
from ncr_core.training.config import TrainConfig
from ncr_core.training.losses import LOSSES

PAPER_IMPROVEMENT = 1e-3  # "until the loss does not decrease (by 0.1%)", §4.2
VALIDATION_USERS = 10_000
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
    """What each epoch of a phase gave, and which one was kept."""

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
    optimizer = _adam(model, schedule.rate)
    batches = Batches(split.train, config, device)
    one_cycle = (
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=schedule.rate, total_steps=schedule.epochs * len(batches)
        )
        if config.schedule == "one-cycle"
        else None
    )
    held_out = validation_candidates(split, config.seed)
    history = History(schedule.phase)
    best, kept = -1.0, copy.deepcopy(model.state_dict())
    for epoch in range(1, schedule.epochs + 1):
        started = time.perf_counter()
        mean_loss = _one_epoch(model, batches, config, optimizer, one_cycle)
        if not math.isfinite(mean_loss):
            model.load_state_dict(kept)
            raise TrainingError(
                f"the loss became {mean_loss} in epoch {epoch} of {schedule.phase} at learning "
                f"rate {schedule.rate:g}: try a smaller rate or smaller l2"
            )
        metrics = validate(model, held_out)
        history.loss.append(mean_loss)
        history.ndcg.append(metrics.ndcg)
        history.hr.append(metrics.hr)
        history.seconds.append(time.perf_counter() - started)
        if metrics.ndcg > best or config.stopping == "paper":
            best, history.best_epoch = metrics.ndcg, epoch
            kept = copy.deepcopy(model.state_dict())
        if on_progress is not None:
            left = schedule.epochs - epoch
            eta = (left + later_phases) * sum(history.seconds) / epoch
            on_progress(
                Progress(schedule.phase, epoch, schedule.epochs, mean_loss, metrics.ndcg, eta)
            )
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
    batches = Batches(interactions, config, model.device)
    epochs = max(2, -(-HELD_OUT_STEPS // len(batches)))
    model.requires_grad_(True)
    if not model.config.learn_weights:
        model.get_parameter("weight").requires_grad_(False)
    optimizer = _adam(model, config.fine_tune_rate)
    for _ in range(epochs):
        loss = _one_epoch(model, batches, config, optimizer, None)
        if not math.isfinite(loss):
            raise TrainingError(f"the loss became {loss} while the held-out items were learned")
    model.eval()


def _adam(model: PairwiseRanker, rate: float) -> torch.optim.Adam:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate, fused=True)


def _one_epoch(
    model: PairwiseRanker,
    batches: Batches,
    config: TrainConfig,
    optimizer: torch.optim.Optimizer,
    one_cycle: torch.optim.lr_scheduler.OneCycleLR | None,
) -> float:
    """One pass over the positives; the mean loss of its batches, without the l2 term."""
    loss_of = LOSSES[config.loss]
    model.train()
    total = torch.zeros((), device=model.device)
    for users, i, j in batches:
        optimizer.zero_grad(set_to_none=True)
        vectors = model.user_vectors(users)
        loss = loss_of(*model.pair_logits(vectors, i, j))
        total += loss.detach()
        if config.l2:
            loss = loss + config.l2 * _batch_l2(model, vectors, i, j)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if one_cycle is not None:
            one_cycle.step()
    return float(total) / len(batches)


class Batches:
    """Positives in random order with fresh negatives: (B,) users, (B,) items, (B, n) negatives."""

    def __init__(self, train: Interactions, config: TrainConfig, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(config.seed)
        lengths = train.indptr[1:] - train.indptr[:-1]
        useful = (lengths < train.n_items)[train.users]
        if not useful.any():
            raise DataError(
                "every user has interacted with every item: there is nothing to compare with"
                if train.nnz
                else "there are no interactions to learn from"
            )
        # A user who has seen every item has no negatives, so nothing to learn from.
        learned = train if useful.all() else train.select(useful)
        self._users = torch.from_numpy(learned.users).to(device)
        self._items = torch.from_numpy(learned.items).to(device)
        self._sampler = NegativeSampler(learned, device, generator)
        self._generator = generator
        self._batch_size = config.batch_size_for(len(self._users))
        self._negatives = config.negatives
        self._device = device

    def __len__(self) -> int:
        return -(-len(self._users) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        order = torch.randperm(len(self._users), generator=self._generator, device=self._device)
        for part in torch.split(order, self._batch_size):
            users = self._users[part]
            yield users, self._items[part], self._sampler.sample(users, self._negatives)


def validation_candidates(split: Split, seed: int) -> CandidateSet:
    """Sampled candidates of the validation items, of at most ``VALIDATION_USERS`` users."""
    every = sampled_candidates(split, split.validation, seed)
    if len(every.users) <= VALIDATION_USERS:
        return every
    generator = torch.Generator().manual_seed(seed)
    some = torch.randperm(len(every.users), generator=generator)[:VALIDATION_USERS].numpy()
    return CandidateSet(every.users[some], every.held_out[some], every.candidates[some])


def validate(model: PairwiseRanker, held_out: CandidateSet) -> Metrics:
    """HR@10 and NDCG@10 of a model in training."""
    model.eval()
    return evaluate_sampled(ModelRanks(model), held_out)


def _should_stop(history: History, config: TrainConfig) -> bool:
    epoch = len(history.loss)
    if config.stopping == "validation":
        return epoch - history.best_epoch >= config.patience
    if epoch < 2:
        return False
    return history.loss[-2] - history.loss[-1] < PAPER_IMPROVEMENT * history.loss[-2]


def _batch_l2(model: PairwiseRanker, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """‖Θ‖² of the batch's embeddings, the mean over its pairs."""
    of_users = users.square().sum()
    of_i = model.item_vectors(i).square().sum()
    of_j = model.item_vectors(j).square().sum()
    return (of_users + of_i) / len(users) + of_j / j.numel()
