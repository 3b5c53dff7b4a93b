"""SASRec and gSASRec: causal self-attention over a user's latest items.

Kang & McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018; Petrov & Macdonald,
"gSASRec", RecSys 2023; Klenitskiy & Vasilev, "Turning Dross Into Gold Loss", RecSys 2023 (SASRec
with cross-entropy over the whole catalogue, "SASRec+").

Places count from the oldest item of the window, and the weights of the attention start from
Xavier's distribution, as in the code of Klenitskiy & Vasilev, whose figures the results stand
beside. Attention and loss ignore the padding. A training takes hours to days on a CPU, can stop
after any epoch, and resumes from a file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import (
    cross_entropy,
    dropout,
    embedding,
    logsigmoid,
    relu,
    scaled_dot_product_attention,
)

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.data.splits import Split
from ncr_core.errors import ConfigError, DataError, TrainingError
from ncr_core.evaluation.protocols import Metrics, Ranks, evaluate_full, of_random_users
from ncr_core.reproduction.baselines.scoring import FactorModel
from ncr_core.train_config import resolve_device
from ncr_core.training.trainer import History, OnProgress, Progress
from ncr_core.training.validation import FULL_VALIDATION_USERS

Loss = Literal["bce", "gbce", "ce"]
INIT_STD = 0.02
NORM_EPSILON = 1e-8
FORM = 2  # of the model: a stored training of another form begins anew
ATTENTION_GAIN = 0.5**0.5  # query, key and value start as one layer of three times the width
USERS_AT_ONCE = 128
MAX_SCORES = 2**22  # of positions by items at once: 16 MiB, half the time of 128 MiB on a CPU
MAX_GPU_SCORES = 2**25


@dataclass(frozen=True)
class SASRecConfig:
    """Settings, by default those of SASRec with BCE in Klenitskiy & Vasilev on MovieLens 1M."""

    factors: int = 64
    loss: Loss = "bce"
    """``bce``: one negative; ``gbce``: many negatives, calibrated positive; ``ce``: all items."""
    negatives: int = 1
    calibration: float = 0.75
    """t of gBCE: 0 is BCE, 1 makes the scores calibrated as if all items were negatives."""
    window: int = 200
    """The number of latest items that the model sees."""
    blocks: int = 2
    heads: int = 1
    dropout: float = 0.1
    learning_rate: float = 1e-3
    batch_size: int = 128
    epochs: int = 100
    patience: int = 10
    """Epochs without a better validation NDCG@10 until training stops."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the values, and raises ConfigError if a value is out of bounds."""
        if self.loss not in ("bce", "gbce", "ce"):
            raise ConfigError(f"loss must be bce, gbce or ce, not {self.loss!r}")
        counts = ("factors", "negatives", "window", "blocks", "heads", "batch_size", "epochs")
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.factors % self.heads:
            raise ConfigError(f"{self.heads} heads do not share {self.factors} factors out evenly")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be from 0 to below 1, not {self.dropout}")
        if not 0 <= self.calibration <= 1:
            raise ConfigError(f"calibration must be from 0 to 1, not {self.calibration}")


class _Block(nn.Module):
    """y = LN(LN(x) + Attention(LN(x), x, x)); y + W₂ relu(W₁ y), as in the authors' code."""

    def __init__(self, size: int, heads: int, rate: float) -> None:
        super().__init__()
        self.heads, self.rate = heads, rate
        self.attention_norm = nn.LayerNorm(size, eps=NORM_EPSILON)
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.output = nn.Linear(size, size)
        self.dense_norm = nn.LayerNorm(size, eps=NORM_EPSILON)
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """(B, L, size) vectors, (B, 1, L, L) mask of visible columns → (B, L, size) vectors."""
        normed = self.attention_norm(x)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(normed), self.key(x), self.value(x))
        )
        rate = self.rate if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, visible, rate)
        y = self.dense_norm(normed + self.output(mixed.transpose(1, 2).flatten(2)))
        hidden = relu(dropout(self.first(y), self.rate, self.training))
        result: Tensor = y + dropout(self.second(hidden), self.rate, self.training)
        return result


class SASRecEncoder(nn.Module):
    """Encodes (B, L) items, padded on the left with ``n_items``, as (B, L, size) vectors."""

    def __init__(self, n_items: int, config: SASRecConfig) -> None:
        super().__init__()
        self.n_items, self.rate = n_items, config.dropout
        self.items = nn.Embedding(n_items + 1, config.factors, padding_idx=n_items)
        self.places = nn.Embedding(config.window, config.factors)
        blocks = [
            _Block(config.factors, config.heads, config.dropout) for _ in range(config.blocks)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.last_norm = nn.LayerNorm(config.factors, eps=NORM_EPSILON)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for block in blocks:
            for layer in (block.query, block.key, block.value):
                nn.init.xavier_uniform_(layer.weight, ATTENTION_GAIN)
        with torch.no_grad():
            self.items.weight[n_items] = 0.0

    def forward(self, items: Tensor) -> Tensor:
        """(B, L) items → (B, L, size) vectors."""
        length = items.shape[1]
        real = (items != self.n_items).unsqueeze(-1)
        # The oldest item has the first place, however long the padding of the batch is.
        places = self.places((real.squeeze(-1).cumsum(1) - 1).clamp(min=0))
        x = self.items(items) * math.sqrt(self.items.embedding_dim) + places
        x = dropout(x, self.rate, self.training) * real
        earlier = torch.ones(length, length, dtype=torch.bool, device=items.device).tril()
        # An item always sees itself: a softmax over nothing is not a number.
        itself = torch.eye(length, dtype=torch.bool, device=items.device)
        visible = (earlier & real.transpose(1, 2)) | itself
        for block in self.blocks:
            x = block(x, visible.unsqueeze(1)) * real
        encoded: Tensor = self.last_norm(x)
        return encoded

    def catalogue(self) -> Tensor:
        """(n_items, size) vectors of the items, without the row of the padding."""
        return self.items.weight[: self.n_items]

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.items.weight.device


class SASRec(FactorModel):
    """A trained encoder; the vector of the latest item is the user's vector."""

    def __init__(self, encoder: SASRecEncoder, window: int, interactions: Interactions) -> None:
        self.encoder, self._window = encoder.eval(), window
        users = user_vectors(encoder, window, interactions)
        super().__init__(users, encoder.catalogue().detach().cpu().numpy())

    def with_input(self, interactions: Interactions) -> SASRec:
        """See `ScoreModel.with_input`."""
        return SASRec(self.encoder, self._window, interactions)


@torch.no_grad()
def user_vectors(encoder: SASRecEncoder, window: int, interactions: Interactions) -> Any:
    """(n_users, size) vectors of the users' latest items; zeros for users without items."""
    encoder.eval()
    size = encoder.items.embedding_dim
    vectors = np.zeros((interactions.n_users, size), dtype=np.float32)
    lengths = np.diff(interactions.indptr)
    users = np.flatnonzero(lengths)
    users = users[np.argsort(lengths[users], kind="stable")]  # little is padding
    for start in range(0, len(users), USERS_AT_ONCE):
        part = users[start : start + USERS_AT_ONCE]
        batch = padded([interactions.items_of(user)[-window:] for user in part], encoder.n_items)
        items = torch.from_numpy(batch).to(encoder.device)
        vectors[part] = encoder(items)[:, -1].cpu().numpy()
    return vectors


def padded(sequences: list[IntArray], padding: int) -> IntArray:
    """(B, L) sequences with padding on the left, where L is the largest length."""
    width = max(map(len, sequences))
    rows = np.full((len(sequences), width), padding, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        rows[row, width - len(sequence) :] = sequence
    return rows


def loss_of(
    config: SASRecConfig, vectors: Tensor, catalogue: Tensor, targets: Tensor, negatives: Tensor
) -> Tensor:
    """The sum over P positions of the losses of the items that follow.

    Args:
        config: names the loss.
        vectors: (P, size) of the positions.
        catalogue: (n_items, size) of the items.
        targets: (P,) the items that follow.
        negatives: (P, n) negative items; n is 0 for ``ce``.
    """
    if config.loss == "ce":
        return cross_entropy(vectors @ catalogue.T, targets, reduction="sum")
    if config.loss == "gbce":
        scores = vectors @ catalogue.T  # cheaper on a CPU than so many rows of the catalogue
        positive = scores.gather(1, targets.unsqueeze(1)).squeeze(1)
        negative = scores.gather(1, negatives)
    else:
        positive = (vectors * embedding(targets, catalogue)).sum(-1)
        negative = (vectors.unsqueeze(1) * embedding(negatives, catalogue)).sum(-1)
    beta = _positive_power(config, len(catalogue))
    return -(beta * logsigmoid(positive) + logsigmoid(-negative).sum(-1)).sum()


def _positive_power(config: SASRecConfig, n_items: int) -> float:
    """β of gBCE, with the sampling rate α = n / (items − 1); 1 for BCE."""
    if config.loss != "gbce":
        return 1.0
    alpha = min(1.0, config.negatives / max(1, n_items - 1))
    t = config.calibration
    return alpha * (t * (1 - 1 / alpha) + 1 / alpha)


@dataclass
class _State:
    """The state of a training."""

    encoder: SASRecEncoder
    optimizer: torch.optim.Adam
    history: History = field(default_factory=lambda: History("train SASRec"))
    best: dict[str, Tensor] = field(default_factory=dict)

    def save(self, path: Path, identity: dict[str, Any]) -> None:
        """Replaces the file of the state, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".part")
        torch.save(
            {
                "identity": identity,
                "encoder": self.encoder.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "history": asdict(self.history),
                "best": self.best,
                "torch": torch.get_rng_state(),
                "cuda": _cuda_states(self.encoder.device),
            },
            aside,
        )
        aside.replace(path)

    def load(self, path: Path, identity: dict[str, Any]) -> None:
        """Restores the state from a file; with other settings the training begins anew.

        Raises DataError if the file is of other data, or damaged.
        """
        try:
            saved = torch.load(path, weights_only=True, map_location=self.encoder.device)
            of_data, settings = saved["identity"]["data"], saved["identity"]["settings"]
        except Exception:
            raise DataError(f"{path} is damaged: remove it to train from the start") from None
        if of_data != identity["data"]:
            raise DataError(
                f"{path} is of a training on other data (fingerprint {of_data}, here "
                f"{identity['data']}): give the data it began with, or remove it"
            )
        if settings != identity["settings"]:
            return
        self.encoder.load_state_dict(saved["encoder"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.history, self.best = History(**saved["history"]), saved["best"]
        torch.set_rng_state(saved["torch"].cpu())
        if self.encoder.device.type == "cuda":
            for state in saved.get("cuda", ()):
                torch.cuda.set_rng_state(state.cpu(), self.encoder.device)


def _cuda_states(device: torch.device) -> list[Tensor]:
    return [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []


@dataclass(frozen=True)
class SASRecFit:
    """A trained model, its validation metrics, and the history of its epochs."""

    model: SASRec
    validation: Metrics | None
    history: History


def fit_sasrec(
    split: Split,
    config: SASRecConfig,
    on_progress: OnProgress | None = None,
    progress_file: Path | None = None,
    fingerprint: str = "",
    should_stop: Callable[[], bool] = lambda: False,
    device: str = "auto",
) -> SASRecFit:
    """Trains SASRec to predict the next item after each training item of a user but the last.

    The model is that of the epoch with the best full NDCG@10 on validation items. Without
    validation items the model is that of the last epoch.

    Args:
        split: training and validation items.
        config: the settings.
        on_progress: called after each epoch.
        progress_file: the file of the state after each epoch, from which the training resumes.
        fingerprint: the fingerprint of the data; a training resumes only on the same data.
        should_stop: called after each epoch; True ends the training, which can resume later.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        ConfigError: the device does not exist.
        DataError: no user has two training items, or ``progress_file`` is damaged or of other data.
        TrainingError: the loss is not a finite number.
    """
    train = split.train
    users = np.flatnonzero(np.diff(train.indptr) >= 2)
    if not len(users):
        raise DataError("no user has two training items, and training needs a next item")
    on = resolve_device(device)
    with torch.random.fork_rng(devices=[on] if on.type == "cuda" else []):
        torch.manual_seed(config.seed)
        encoder = SASRecEncoder(train.n_items, config).to(on)
        optimizer = torch.optim.Adam(encoder.parameters(), config.learning_rate, fused=True)
        state = _State(encoder, optimizer)
        identity = {"data": fingerprint, "settings": asdict(config) | {"form": FORM}}
        if progress_file is not None and progress_file.exists():
            state.load(progress_file, identity)
        validated = bool((split.validation >= 0).any())
        while not _finished(state.history, config, validated):
            _epoch(state, split, config, users, validated)
            if progress_file is not None:
                state.save(progress_file, identity)
            if on_progress is not None:
                on_progress(_progress(state.history, config))
            if should_stop():
                break
        history = state.history
        encoder.load_state_dict(state.best)
    measured = history.best if validated else None
    metrics = None
    if measured is not None:
        n_users = min(FULL_VALIDATION_USERS, int((split.validation >= 0).sum()))
        metrics = Metrics(measured[1], measured[0], n_users, train.n_items)
    return SASRecFit(SASRec(encoder, config.window, train), metrics, history)


def _finished(history: History, config: SASRecConfig, validated: bool) -> bool:
    done = len(history.loss)
    waited = validated and done - history.best_epoch >= config.patience
    return done >= config.epochs or (done > 0 and waited)


def _epoch(
    state: _State, split: Split, config: SASRecConfig, users: IntArray, validated: bool
) -> None:
    started = time.perf_counter()
    history, encoder = state.history, state.encoder
    encoder.train()
    total, positions = 0.0, 0
    # By seed and epoch alone, so that a training that goes on draws what it would have drawn.
    rng = np.random.default_rng((config.seed, len(history.loss)))
    negatives = _Negatives(config, split.train, rng, len(history.loss), encoder.device)
    for items, targets in _batches(split.train, config, users, rng, encoder.n_items):
        loss, count = _step(state, config, items, targets, negatives)
        total, positions = total + loss, positions + count
    mean = total / positions
    if not math.isfinite(mean):
        raise TrainingError(f"the loss became {mean} in epoch {len(history.loss) + 1} of SASRec")
    history.loss.append(mean)
    if validated:
        ranks: Ranks = SASRec(encoder, config.window, split.train)
        held_out = of_random_users(split.validation, FULL_VALIDATION_USERS)
        metrics = evaluate_full(ranks, split, held_out, seed=0)
        history.ndcg.append(metrics.ndcg)
        history.hr.append(metrics.hr)
    history.seconds.append(time.perf_counter() - started)
    if not validated or history.ndcg[-1] > max([-1.0, *history.ndcg[:-1]]):
        history.best_epoch = len(history.loss)
        state.best = {name: value.clone() for name, value in encoder.state_dict().items()}


Batch = tuple[tuple[IntArray, IntArray], IntArray]


def _batches(
    train: Interactions,
    config: SASRecConfig,
    users: IntArray,
    rng: np.random.Generator,
    padding: int,
) -> Iterator[Batch]:
    """The users with their (B, L) padded items, and the (B, L) items that follow each item."""
    order = rng.permutation(users)
    for start in range(0, len(order), config.batch_size):
        part = order[start : start + config.batch_size]
        latest = [train.items_of(user)[-config.window - 1 :] for user in part]
        items = padded([sequence[:-1] for sequence in latest], padding)
        targets = padded([sequence[1:] for sequence in latest], padding)
        yield (part, items), targets


def _step(
    state: _State,
    config: SASRecConfig,
    batch: tuple[IntArray, IntArray],
    following: IntArray,
    negatives: _Negatives,
) -> tuple[float, int]:
    """Trains one step; returns the sum of the losses and the number of positions."""
    users, items = batch
    encoder = state.encoder
    at = np.nonzero(following != encoder.n_items)
    targets = following[at]
    drawn = negatives.of(users[at[0]])
    state.optimizer.zero_grad()
    row, place, target = (torch.from_numpy(x).to(encoder.device) for x in (*at, targets))
    vectors = encoder(torch.from_numpy(items).to(encoder.device))[row, place]
    # Scores of all positions and items at once may not fit: their gradients are summed in parts.
    leaf = vectors.detach().requires_grad_()
    most = MAX_SCORES if encoder.device.type == "cpu" else MAX_GPU_SCORES
    scored = config.negatives + 1 if config.loss == "bce" else encoder.n_items
    rows = max(1, most // scored)
    total = vectors.new_zeros(())
    for start in range(0, len(targets), rows):
        part = slice(start, start + rows)
        loss = loss_of(config, leaf[part], encoder.catalogue(), target[part], drawn[part])
        (loss / len(targets)).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    vectors.backward(leaf.grad)
    state.optimizer.step()
    return float(total), len(targets)


class _Negatives:
    """Draws the negatives of an epoch: uniform items.

    For BCE, none of them is the user's own. For gBCE, any item may come, as in its paper.
    """

    def __init__(
        self,
        config: SASRecConfig,
        train: Interactions,
        rng: np.random.Generator,
        epoch: int,
        device: torch.device,
    ) -> None:
        self._config, self._train, self._rng = config, train, rng
        seed = int(np.random.default_rng((config.seed, epoch, 1)).integers(2**31))
        self._generator = torch.Generator(device).manual_seed(seed)

    def of(self, users: IntArray) -> Tensor:
        """(P,) users of the positions → (P, n) items on the device; n is 0 for ``ce``."""
        n, n_items, device = self._config.negatives, self._train.n_items, self._generator.device
        if self._config.loss == "ce":
            return torch.zeros((len(users), 0), dtype=torch.long, device=device)
        if self._config.loss == "gbce":  # millions a batch, which a GPU draws itself
            size = (len(users), n)
            return torch.randint(n_items, size, generator=self._generator, device=device)
        drawn = self._rng.integers(n_items, size=(len(users), n))
        rows = np.broadcast_to(users[:, None], drawn.shape)
        for _ in range(100):  # who has nearly all items may keep some
            own = self._train.contains(rows, drawn)
            if not own.any():
                break
            drawn[own] = self._rng.integers(n_items, size=int(own.sum()))
        return torch.from_numpy(drawn).to(device)


def _progress(history: History, config: SASRecConfig) -> Progress:
    done = len(history.loss)
    left = (config.epochs - done) * sum(history.seconds) / done
    ndcg = history.ndcg[-1] if history.ndcg else None
    return Progress(history.phase, done, config.epochs, history.loss[-1], ndcg, left)
