"""The training loop, one for every model, and Adam by whole tables or by the rows of each batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ncr_core.data.interactions import Interactions
from ncr_core.data.splits import Split
from ncr_core.errors import ConfigError, TrainingError
from ncr_core.model_config import ModelConfig
from ncr_core.models import build_model
from ncr_core.models.base import PairwiseRanker
from ncr_core.models.lookups import is_sharded
from ncr_core.models.user_embeddings import PooledUsers
from ncr_core.train_config import TrainConfig
from ncr_core.training.batches import (
    WHOLE,
    Batches,
    PreferenceRows,
    Rows,
    Share,
    SharedRows,
    learned_lengths,
)
from ncr_core.training.captured_gradients import CapturedGradients
from ncr_core.training.epoch_checkpoints import EpochCheckpoints
from ncr_core.training.losses import LOSSES, SHARED_LOSSES, drawn_listwise_loss
from ncr_core.training.proposal import Proposal
from ncr_core.training.ranks import ONE_RANK, Count, Ranks, without_pooled
from ncr_core.training.validation import ValidationPositions, figures_of

MIN_SPARSE_RATIO = 20  # table rows for each row of a batch, as benchmarks/training.py measures it
MIN_GPU_SPARSE_RATIO = 400  # a GPU goes through a whole table in the time of a few small steps


class Adam:
    """Dense Adam, and Adam by rows (lazy: rows outside the batch keep their moments).

    ``total_steps`` gives the one-cycle schedule its length; None is a constant rate.
    """

    def __init__(
        self,
        model: PairwiseRanker,
        config: TrainConfig,
        rate: float,
        total_steps: int | None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self._choose(model, config, ranks)
        by_rows = {id(p) for p in model.sparse_tables()}
        dense = [p for p in model.parameters() if p.requires_grad and id(p) not in by_rows]
        sparse = [p for p in model.parameters() if p.requires_grad and id(p) in by_rows]
        self._optimizers: list[torch.optim.Optimizer] = []
        # Sharded tables and whole tensors are never of one step.
        for whole in (True, False):
            if same := [p for p in dense if is_sharded(p) is not whole]:
                self._optimizers.append(torch.optim.Adam(same, rate, fused=True))
        if sparse:
            self._optimizers.append(torch.optim.SparseAdam(sparse, rate))
        self._schedules = [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps)
            for optimizer in self._optimizers
            if total_steps is not None
        ]
        self._steps_left = total_steps

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Updates the parameters, and moves the learning rate along its schedule."""
        for optimizer in self._optimizers:
            optimizer.step()
        # A schedule refuses more steps than it was told of.
        if self._steps_left is not None and self._steps_left > 1:
            self._steps_left -= 1
            for schedule in self._schedules:
                schedule.step()

    def tensors(self) -> dict[str, Tensor]:
        """The moments and steps by name, to store and restore; the method creates missing ones."""
        tensors: dict[str, Tensor] = {}
        for number, optimizer in enumerate(self._optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for index, parameter in enumerate(parameters):
                state = optimizer.state[parameter]
                if not state:
                    sparse = isinstance(optimizer, torch.optim.SparseAdam)
                    zero = torch.zeros((), device=parameter.device)
                    state["step"] = 0 if sparse else zero
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        tensors[f"{number}.{index}.{name}"] = value.detach()
        return tensors

    def position(self) -> dict[str, Any]:
        """The state of the schedules and of the steps by rows, for JSON."""
        return {
            "steps_left": self._steps_left,
            "schedules": [schedule.state_dict() for schedule in self._schedules],
            "groups": [
                [{k: v for k, v in group.items() if k != "params"} for group in each.param_groups]
                for each in self._optimizers
            ],
            "row_steps": [
                [state["step"] for state in each.state.values()]
                if isinstance(each, torch.optim.SparseAdam)
                else []
                for each in self._optimizers
            ],
        }

    def go_to(self, position: dict[str, Any]) -> None:
        """Continues from a ``position``, after the ``tensors`` were restored in place."""
        self._steps_left = position["steps_left"]
        for schedule, state in zip(self._schedules, position["schedules"], strict=True):
            schedule.load_state_dict(state)
        for optimizer, groups in zip(self._optimizers, position["groups"], strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
        for optimizer, steps in zip(self._optimizers, position["row_steps"], strict=True):
            for state, step in zip(optimizer.state.values(), steps, strict=False):
                state["step"] = step

    @staticmethod
    def _choose(model: PairwiseRanker, config: TrainConfig, ranks: Ranks) -> None:
        batch = config.batch_size or 4096
        items = batch + (config.shared_negatives or batch * config.negatives)
        by_device = MIN_SPARSE_RATIO if model.device.type == "cpu" else MIN_GPU_SPARSE_RATIO
        min_ratio = {"auto": by_device, "dense": float("inf"), "sparse": 1}[config.optimizer]
        model.sparse_users = ranks.sparse_gradients and model.n_users > min_ratio * batch
        model.sparse_items = ranks.sparse_gradients and model.n_items > min_ratio * items
        # The histories of a batch have about as many items as the batch has rows.
        are_many = model.n_items > min_ratio * batch
        is_pooled = model.config.users == "history"
        model.sparse_pooled_items = ranks.sparse_gradients and is_pooled and are_many


PAPER_IMPROVEMENT = 1e-3  # "until the loss does not decrease (by 0.1%)", §4.2
HELD_OUT_STEPS = 300


@dataclass(frozen=True)
class Progress:
    """The state of a training after an epoch.

    ``epoch`` counts from 1, ``ndcg`` is NDCG@10 on validation, and ``eta_s`` is the estimated time
    left in seconds.
    """

    phase: str
    epoch: int
    epochs: int
    loss: float
    ndcg: float | None
    eta_s: float


@dataclass
class History:
    """The figures of each epoch of a phase, and the epoch that was kept.

    ``ndcg`` and ``hr`` are NDCG@10 and HR@10 on validation, and empty without validation items.
    ``best_epoch`` counts from 1; 0 is the start, whose NDCG@10 and HR@10 are ``start``.
    """

    phase: str
    loss: list[float] = field(default_factory=list)
    ndcg: list[float] = field(default_factory=list)
    hr: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    best_epoch: int = 0
    start: list[float] = field(default_factory=list)
    joined: list[float] = field(default_factory=list)
    """NDCG@10 and HR@10 of that epoch with its start beside it, see `kept_start`; empty without."""

    @property
    def best(self) -> tuple[float, float] | None:
        """NDCG@10 and HR@10 on validation of the model that was kept."""
        if self.joined:
            return self.joined[0], self.joined[1]
        if self.best_epoch == 0 or not self.ndcg:
            return (self.start[0], self.start[1]) if self.start else None
        return self.ndcg[self.best_epoch - 1], self.hr[self.best_epoch - 1]


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class TrainingPhase:
    """The part of a TrainConfig that differs between the phases of pre-training."""

    name: str
    epochs: int
    learning_rate: float


class PhaseRunner(Protocol):
    """Trains a model in place, as `train_loop` does in this process."""

    def __call__(
        self,
        model: PairwiseRanker,
        split: Split,
        config: TrainConfig,
        phase: TrainingPhase,
        on_progress: OnProgress | None = None,
        later_phases: float = 0.0,
    ) -> History:
        """Trains the phase and returns its history. Raises TrainingError."""
        ...


def train_loop(
    model: PairwiseRanker,
    split: Split,
    config: TrainConfig,
    phase: TrainingPhase,
    on_progress: OnProgress | None = None,
    later_phases: float = 0.0,
    ranks: Ranks = ONE_RANK,
    checkpoints: EpochCheckpoints | None = None,
    proposal: Proposal | None = None,
) -> History:
    """Trains ``model`` in place on ``split.train`` and leaves it at its best epoch.

    A start that is not random counts as an epoch, and so does a model with a ``proposal``: the loop
    undoes a training that makes it worse.

    Args:
        model: The model at its start.
        split: Training items, and validation items that choose the best epoch. A rank with a
            `TrainingPart` trains on the part, and its split has the validated users alone.
        config: The training configuration.
        phase: The part of the configuration that differs between phases.
        on_progress: Called after each epoch, by rank 0.
        later_phases: The work after this phase, in epochs of this phase, to estimate the time left.
        ranks: The ranks that train. Every rank calls this function with the same model and
            configuration. At the end rank 0 alone has the model at its best epoch.
            Of several ranks, no model has the vectors of pooled users that `remember` computes.
        checkpoints: The checkpoints of each epoch, from which a training resumes.
        proposal: Draws the negatives of each positive from those that a batch shares, for one rank.

    Raises:
        ConfigError: The negatives of ``config`` do not fit the model or the data.
        DataError: The data have no interaction to learn from.
        TrainingError: The loss or a parameter is not finite; the model is then at its best epoch so
            far.
    """
    device = config.torch_device()
    ranks.prepare(model, device)
    # Without validation items, as when a chosen configuration is refitted on everything, all epochs
    # are run and the last is kept.
    validation = _ValidationFigures(model, split, config, ranks)
    history = History(phase.name)
    if phase.epochs == 0:  # no negatives are drawn
        learned_lengths(ranks.learned(split))  # raises an error without any
        history.start = [*(validation(model) or [])]
        model.eval()
        return history
    learned = ranks.learned(split)
    batches = make_batches(model, learned, config, device, ranks.share, proposal is not None)
    total_steps = phase.epochs * len(batches) if config.schedule == "one-cycle" else None
    optimizer = Adam(model, config, phase.learning_rate, total_steps or None, ranks)
    best = -1.0
    stored = None if checkpoints is None else checkpoints.latest(ranks)
    if stored is None and (config.start != "random" or proposal is not None):
        start = validation(model)
        if start is not None:
            history.start = [*start]
            best = start[0] if config.stopping == "validation" else best
    best_state = ranks.copied(model)
    if checkpoints is not None and stored is not None:
        tensors = _stored_tensors(model, best_state, optimizer, batches, ranks)
        values = checkpoints.load(stored, tensors, ranks)
        history, best = History(**values["history"]), values["best"]
        optimizer.go_to(values["optimizer"])
        _set_generators(batches, tensors, ranks, device)
        del tensors  # they have the best epoch
    captured = CapturedGradients(model) if ranks.size == 1 and proposal is None else None
    epoch = len(history.loss)
    while epoch < phase.epochs and not (epoch and _should_stop(history, config)):
        epoch += 1
        started = time.perf_counter()
        loss = train_epoch(
            model, batches, batches.n_items, config, optimizer, ranks, captured, proposal
        )
        (mean_loss,) = ranks.agreed([loss])
        if not (ranks.all_finite(model) and math.isfinite(mean_loss)):
            ranks.restore(model, best_state)
            diverged = "a parameter" if math.isfinite(mean_loss) else "the loss"
            value = math.inf if math.isfinite(mean_loss) else mean_loss
            raise TrainingError(
                f"{diverged} became {value} in epoch {epoch} of {phase.name} at learning "
                f"rate {phase.learning_rate:g}: try a smaller rate or smaller l2",
                *((model, history) if history.best_epoch else ()),
            )
        measured = validation(model)
        history.loss.append(mean_loss)
        if measured is not None:
            history.ndcg.append(measured[0])
            history.hr.append(measured[1])
        history.seconds.append(time.perf_counter() - started)
        if measured is None or measured[0] > best or config.stopping == "paper":
            best, history.best_epoch = measured[0] if measured else best, epoch
            best_state.clear()  # two copies at once would be the most that a rank holds
            best_state = ranks.copied(model)
        if checkpoints is not None:
            values = {
                "history": vars(history),
                "best": best,
                "optimizer": optimizer.position(),
            }
            stored_tensors = _stored_tensors(model, best_state, optimizer, batches, ranks)
            checkpoints.save(epoch, stored_tensors, values, ranks)
            del stored_tensors
        if on_progress is not None and ranks.is_first:
            left = phase.epochs - epoch
            eta = (left + later_phases) * sum(history.seconds) / epoch
            ndcg = measured[0] if measured else None
            on_progress(Progress(phase.name, epoch, phase.epochs, mean_loss, ndcg, eta))
    ranks.restore(model, best_state)
    model.eval()
    return history


def _stored_tensors(
    model: PairwiseRanker,
    best_state: dict[str, Tensor],
    optimizer: Adam,
    batches: Batches,
    ranks: Ranks,
) -> dict[str, Tensor]:
    """All tensors that a training needs to continue as if it had not been interrupted."""
    tensors = {f"model.{name}": value for name, value in without_pooled(model).items()}
    tensors |= {f"best.{name}": value for name, value in best_state.items()}
    tensors |= {f"optimizer.{name}": value for name, value in optimizer.tensors().items()}
    tensors[f"random.{ranks.rank}"] = torch.get_rng_state()
    if model.device.type == "cuda":
        tensors[f"random.cuda.{ranks.rank}"] = torch.cuda.get_rng_state(model.device)
    for number, generator in enumerate(batches.generators()):
        tensors[f"batches.{number}"] = generator.get_state()
    return tensors


def _set_generators(
    batches: Batches, tensors: dict[str, Tensor], ranks: Ranks, device: torch.device
) -> None:
    torch.set_rng_state(tensors[f"random.{ranks.rank}"])
    if device.type == "cuda":  # which draws dropout
        torch.cuda.set_rng_state(tensors[f"random.cuda.{ranks.rank}"], device)
    for number, generator in enumerate(batches.generators()):
        generator.set_state(tensors[f"batches.{number}"])


class _ValidationFigures:
    """The figures of a model in training on the validation items."""

    def __init__(
        self, model: PairwiseRanker, split: Split, config: TrainConfig, ranks: Ranks
    ) -> None:
        self._ranks = ranks
        self._train = split.train
        self._positions: ValidationPositions | None = None
        if (split.validation >= 0).any():
            self._positions = ValidationPositions(model, split, config, ranks)
            self._train = self._positions.train

    def __call__(self, model: PairwiseRanker) -> tuple[float, float] | None:
        """NDCG@10 and HR@10 on every rank, or None if there are no validation items.

        The call recomputes the vectors of pooled users. Every rank has to call it.
        """
        if self._positions is None and self._ranks.size > 1:
            return None  # of several ranks, nobody reads these vectors
        whole = self._ranks.whole(model, self._train.n_remembered)
        if whole is not None:
            remember(whole, self._train)
        if self._positions is None:
            return None
        positions = np.zeros(self._positions.n_users, np.int64)
        if whole is not None:
            positions = self._positions(whole)
        ndcg, hr = self._ranks.agreed([*figures_of(self._ranks.summed(positions))])
        return ndcg, hr


@contextmanager
def seeded(config: TrainConfig) -> Iterator[None]:
    """Draws dropout by the seed of a configuration, and leaves the caller's generators alone."""
    device = config.torch_device()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        yield


def learn_held_out(
    model: PairwiseRanker,
    interactions: Interactions,
    config: TrainConfig,
    run_phase: PhaseRunner | None = None,
) -> None:
    """Trains a few passes over all interactions, held-out items included, at the fine-tuning rate.

    The function is for a measured model that is to serve: the held-out items are the latest items
    of its users. No items are left for validation, so the passes are few and fixed: two, or as many
    as make ``HELD_OUT_STEPS`` steps. ``run_phase`` trains the passes elsewhere; by default this
    process does. Raises TrainingError if the loss or a parameter is not finite.
    """
    if not model.shares_negatives:
        config = replace(config, shared_negatives=0)
    if run_phase is not None:
        positives = int(learned_lengths(interactions).sum())
        steps = -(-positives // config.batch_size_for(positives))
        epochs = max(2, -(-HELD_OUT_STEPS // steps))
        nothing = np.full(interactions.n_users, -1, dtype=np.int64)
        config = replace(config, schedule="constant", stopping="validation")
        phase = TrainingPhase("learn the held-out items", epochs, config.fine_tune_rate)
        run_phase(model, Split(interactions, nothing, nothing), config, phase)
        return
    batches = make_batches(model, interactions, config, model.device)
    epochs = max(2, -(-HELD_OUT_STEPS // len(batches)))
    model.requires_grad_(True)
    if not model.config.learn_weights:
        model.get_parameter("weight").requires_grad_(False)
    optimizer = Adam(model, config, config.fine_tune_rate, None)
    for _ in range(epochs):
        loss = train_epoch(model, batches, batches.n_items, config, optimizer)
        if not (math.isfinite(loss) and ONE_RANK.all_finite(model)):
            diverged = "a parameter" if math.isfinite(loss) else "the loss"
            raise TrainingError(f"{diverged} became infinite while the held-out items were learned")
    remember(model, interactions)
    model.eval()


def remember(model: PairwiseRanker, interactions: Interactions) -> None:
    """Recomputes the vectors of the model's pooled users from their items, without dropout.

    The users are the first ones of these interactions.
    """
    pooled = [part for part in model.user_parts() if isinstance(part, PooledUsers)]
    if not pooled:
        return
    indptr, weights = interactions.indptr[: len(pooled[0].weight) + 1], interactions.weights
    is_training = model.training
    model.eval()
    model.remember(
        torch.from_numpy(interactions.items[: indptr[-1]]),
        torch.from_numpy(np.diff(indptr)),
        None if weights is None else torch.from_numpy(weights[: indptr[-1]]),
    )
    model.train(is_training)


def model_for(config: ModelConfig, interactions: Interactions, seed: int) -> PairwiseRanker:
    """A model with random parameters for these users and items.

    The vectors of pooled users are zeros in the storage of the interactions, and `remember` makes
    them of the interactions. The model has those of ``interactions.n_remembered`` users alone.
    """
    n_users, n_items = interactions.n_users, interactions.n_items
    if config.users == "history":
        n_users = interactions.n_remembered
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(config, n_users, n_items)
    for part in model.user_parts():
        if isinstance(part, PooledUsers):
            vectors = interactions.storage.zeros(tuple(part.weight.shape), np.float32)
            part.weight = torch.from_numpy(vectors)
    return model


def make_batches(
    model: PairwiseRanker,
    train: Interactions,
    config: TrainConfig,
    device: torch.device,
    share: Share = WHOLE,
    for_proposal: bool = False,
) -> Batches:
    """The batches of an epoch of this model.

    ``for_proposal`` says that a proposal draws the negatives from those that a batch shares.

    Raises ConfigError if the negatives of ``config`` do not fit the model or the data, and
    DataError if there is no interaction to learn from.
    """
    if config.shared_negatives and not (model.shares_negatives or for_proposal):
        raise ConfigError(f"shared negatives are for nbpr, not {model.config.kind}")
    return Batches(train, config, device, histories=model.config.users == "history", share=share)


def train_epoch(
    model: PairwiseRanker,
    batches: Iterable[Rows | SharedRows],
    n_items: int,
    config: TrainConfig,
    optimizer: Adam,
    ranks: Ranks = ONE_RANK,
    captured: CapturedGradients | None = None,
    proposal: Proposal | None = None,
) -> float:
    """Trains one pass over the positives; returns the batches' mean loss without the L2 term.

    ``captured`` holds the CUDA graph of a training of several passes with one rank. ``proposal`` is
    as in `train_loop`.
    """
    model.train()
    total, steps = torch.zeros((), device=model.device), 0

    def gradients(rows: Rows | SharedRows) -> Tensor:
        vectors = model.training_vectors(rows.users, rows.histories)
        if config.dropout:
            vectors = torch.nn.functional.dropout(vectors, config.dropout)
        loss = ranks.part(*_positive_loss(model, vectors, rows, n_items, config, proposal))
        if rows.preferences is not None and config.stated_weight:
            loss = _with_preferences(model, loss, rows, rows.preferences, config, ranks)
        without_l2 = loss.detach()
        if config.l2:
            loss = loss + config.l2 * _batch_l2(model, vectors, rows.items, rows.negatives, ranks)
        if loss.requires_grad:  # a rank may have no row of a batch
            loss.backward()  # type: ignore[no-untyped-call]
        return without_l2

    compute = gradients if captured is None else captured.of(gradients)
    for rows in batches:
        optimizer.zero_grad()
        total += compute(rows)
        ranks.reduce_gradients(model)
        optimizer.step()
        steps += 1
    return float(ranks.total(total)) / steps


def _positive_loss(
    model: PairwiseRanker,
    vectors: Tensor,
    rows: Rows | SharedRows,
    n_items: int,
    config: TrainConfig,
    proposal: Proposal | None,
) -> tuple[Tensor, Count]:
    """The mean loss of the positives, and a function that counts the terms of the mean."""
    if proposal is not None and isinstance(rows, SharedRows):
        drawn, log_counts = proposal.draw(rows, n_items)
        both = model.pair_logits(vectors[rows.row], rows.items, drawn)
        return drawn_listwise_loss(*both, log_counts, rows.weights), partial(_positives, rows)
    if not isinstance(rows, SharedRows):
        both = model.pair_logits(vectors, rows.items, rows.negatives)
        return LOSSES[config.loss](*both, n_items, rows.weights), partial(_positives, rows)
    s_i, s_j = model.shared_scores(vectors, rows.row, rows.items, rows.negatives)
    shared_loss = SHARED_LOSSES[config.loss]
    loss = shared_loss(s_i, s_j, rows.valid, rows.row, n_items, rows.weights)
    return loss, partial(_positives if config.loss == "listwise" else _compared, rows)


def _positives(rows: Rows | SharedRows) -> Tensor | float:
    """The number of positives, by their weights."""
    return len(rows.items) if rows.weights is None else rows.weights.sum()


def _compared(rows: SharedRows) -> Tensor:
    """The number of pairs of positives and shared negatives that count, by their weights."""
    counts = rows.valid.sum(1)[rows.row]
    return counts.sum() if rows.weights is None else (counts * rows.weights).sum()


def _with_preferences(
    model: PairwiseRanker,
    loss: Tensor,
    rows: Rows | SharedRows,
    preferences: PreferenceRows,
    config: TrainConfig,
    ranks: Ranks,
) -> Tensor:
    """The mean of the losses of positives and stated pairs.

    A stated pair counts ``stated_weight`` times its own weight, a positive its own weight.
    """
    vectors = model.training_vectors(preferences.users, preferences.histories)
    if config.dropout:
        vectors = torch.nn.functional.dropout(vectors, config.dropout)
    z_uij, z_uji = model.pair_logits(vectors, preferences.winners, preferences.losers.unsqueeze(1))
    if isinstance(rows, SharedRows):
        # As those pairs: by the half margin alone.
        half = (z_uij - z_uji) / 2
        z_uij, z_uji = half, -half
    preference_loss = ranks.part(
        LOSSES[config.loss](z_uij, z_uji, 0, preferences.weights), preferences.weights.sum
    )
    positive_count = ranks.total(_positives(rows))
    preference_count = config.stated_weight * ranks.total(preferences.weights.sum())
    return (positive_count * loss + preference_count * preference_loss) / (
        positive_count + preference_count
    )


def _should_stop(history: History, config: TrainConfig) -> bool:
    epoch = len(history.loss)
    if config.stopping == "validation":
        # Not since the start, which may be better than epochs that still improve at a high rate.
        best = int(np.argmax(history.ndcg)) + 1 if history.ndcg else epoch
        return epoch - best >= config.patience
    if epoch < 2:
        return False
    return history.loss[-2] - history.loss[-1] < PAPER_IMPROVEMENT * history.loss[-2]


def _batch_l2(model: PairwiseRanker, users: Tensor, i: Tensor, j: Tensor, ranks: Ranks) -> Tensor:
    """‖Θ‖² of the batch's embeddings: the means over users, positives and negatives, added up."""

    def mean(vectors: Tensor, n: int) -> Tensor:
        return ranks.part(vectors.square().sum() / max(n, 1), lambda: n)

    positive_norm = mean(model.item_vectors(i), len(i))
    return mean(users, len(users)) + positive_norm + mean(model.item_vectors(j), j.numel())
