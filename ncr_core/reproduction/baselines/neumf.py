"""GMF, MLP and NeuMF of He et al., "Neural Collaborative Filtering", WWW 2017.

Equation numbers are those of that paper. The models give logits: ŷ_ui = σ(logit). The prediction
layer has a bias, as in the authors' code. The bias is the same for every item, so the order of the
items does not depend on it.

Training is pointwise, with the pre-training of the paper (§3.4.1). The original trains with batches
of 256 and Adam at 1e-3, and after pre-training with SGD. Here the batches are larger and the
learning rate follows one cycle, so training is several times faster. By default Adam also trains
after pre-training; ``fine_tune_optimizer="sgd"`` follows the original. On MovieLens 1M at d = 8,
SGD gave a validation NDCG@10 of 0.371 and Adam gave 0.377.
"""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.data.splits import Split
from ncr_core.errors import ConfigError, DataError, TrainingError
from ncr_core.evaluation.protocols import Ranks, evaluate_sampled
from ncr_core.model_config import MAX_FACTORS
from ncr_core.parameters import check_parameters, parameter
from ncr_core.reproduction.baselines.scoring import ScoreModel
from ncr_core.train_config import resolve_device
from ncr_core.training.batches import NegativeSampler
from ncr_core.training.trainer import History, Progress
from ncr_core.training.validation import validation_candidates

EMBEDDING_STD = 0.01  # §4.1
BLOCK_CELLS = 2**20  # numbers of a hidden layer that are held at once: 4 MiB stay in the cache

Scorer = Callable[[int], Tensor]
"""A function user → (n_items,) logits."""

Part = Literal["gmf", "mlp", "neumf"]
RateSchedule = Literal["one-cycle", "constant"]
PhaseOptimizer = Literal["adam", "sgd"]


@dataclass(frozen=True)
class NeuMFConfig:
    """Choices of a NeuMF and of its training.

    Raises ConfigError if a value is not one of the choices, or out of bounds.
    """

    model: Part = parameter("neumf")
    """neumf, or one of its parts alone: gmf, mlp."""

    factors: int = parameter(8, ge=1)
    """d, the predictive factors: GMF's embedding and the width of the tower's last layer."""

    layers: int = parameter(3, ge=2)
    """Hidden layers of the tower; the concatenation counts as the first."""

    epochs: int = parameter(12, ge=1)
    """Passes over the positives, at most: of each part, or of NeuMF without pre-training."""

    batch_size: int = parameter(2048, ge=1)
    """Positives a step, each with its negatives (the original: 256 of both together)."""

    negatives: int = parameter(4, ge=1)
    """Negatives a positive, drawn anew each epoch."""

    learning_rate: float = parameter(1e-2, gt=0)
    """The rate of Adam, and the peak of the one-cycle schedule (the original: 1e-3, constant)."""

    schedule: RateSchedule = parameter("one-cycle")
    """``one-cycle`` warms up and cools down over the epochs; ``constant`` is the original's."""

    l2: float = parameter(1e-3, ge=0)
    """λ of λ‖Θ‖² on the embeddings of each batch; more factors need a larger λ, 1e-2 at d = 64."""

    pretrain: bool = parameter(True)
    """Whether NeuMF starts from a trained GMF and MLP (eq. 13)."""

    alpha: float = parameter(0.5, ge=0, le=1)
    """α of eq. 13, the share of the GMF part."""

    fine_tune_epochs: int = parameter(8, ge=1)
    """Passes of NeuMF after its parts are put together, at most."""

    fine_tune_rate: float = parameter(5e-3, gt=0)
    """The learning rate of these passes; at d = 64, two passes at 1e-3 were better."""

    fine_tune_optimizer: PhaseOptimizer = parameter("adam")
    """``sgd``, without momentum, is the original's."""

    patience: int = parameter(4, ge=1)
    """Epochs without a better validation NDCG@10 before a phase stops."""

    seed: int = parameter(0)
    """The seed of initialisation, shuffling and sampling."""

    device: str = parameter("auto")
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        check_parameters(self)


class PointwiseModel(nn.Module, ABC):
    """Gives the logit of "user u takes item i"."""

    users: nn.Embedding
    items: nn.Embedding

    def __init__(self, n_users: int, n_items: int) -> None:
        super().__init__()
        self.n_users, self.n_items = n_users, n_items

    @abstractmethod
    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """(B,) users and (B, M) items → (B, M) logits."""

    @abstractmethod
    def scorer(self) -> Scorer:
        """A function user → (n_items,) logits, valid until the parameters change.

        The method computes the terms of only one side of a pair once. The function takes one user
        at a time: products of different batch shapes round differently, and a user's logits must
        not depend on other users.
        """

    def l2(self, users: Tensor, items: Tensor) -> Tensor:
        """Mean ‖·‖² of the embeddings of (B,) users plus that of (B, M) items."""
        return _mean_square(self.users, users) + _mean_square(self.items, items)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device


class GMF(PointwiseModel):
    """Generalised matrix factorisation: ŷ_ui = σ(hᵀ(p_u⊙q_i)) (eq. 8–9)."""

    def __init__(self, n_users: int, n_items: int, factors: int) -> None:
        super().__init__(n_users, n_items)
        _check(factors)
        self.users = _embedding(n_users, factors)
        self.items = _embedding(n_items, factors)
        # From h = 1 the model starts as matrix factorisation; smaller weights start it slower.
        self.weight = nn.Parameter(torch.ones(factors))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """(B,) users and (B, M) items → (B, M) logits."""
        of_users = nn.functional.embedding(users, self.users.weight) * self.weight
        of_items = nn.functional.embedding(items, self.items.weight)
        return torch.bmm(of_items, of_users.unsqueeze(2)).squeeze(2) + self.bias

    @torch.no_grad()
    def scorer(self) -> Scorer:
        """See ``PointwiseModel.scorer``."""
        of_users = self.users.weight * self.weight
        of_items, bias = self.items.weight.clone(), self.bias.clone()
        return lambda user: of_items @ of_users[user] + bias


class MLP(PointwiseModel):
    """ŷ_ui = σ(hᵀ a_L(… a_2(W_2ᵀ[p_u; q_i] + b_2) …)), a_l = ReLU (eq. 10).

    The concatenation counts as the first of ``layers``. Each layer is half as wide as the layer
    below, and the last layer is ``factors`` wide. Embeddings have d·2^(N−2) dimensions. At d = 8
    and N = 3 the layers have 32 → 16 → 8 units.
    """

    def __init__(self, n_users: int, n_items: int, factors: int, layers: int = 3) -> None:
        super().__init__(n_users, n_items)
        _check(factors, layers)
        size = factors * 2 ** (layers - 2)
        self.users = _embedding(n_users, size)
        self.items = _embedding(n_items, size)
        widths = [2 * size // 2**depth for depth in range(layers)]
        self.layers = nn.ModuleList(nn.Linear(below, above) for below, above in pairwise(widths))
        for layer in self._linear():
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.weight = nn.Parameter(torch.empty(factors))
        bound = (6.0 / (factors + 1)) ** 0.5  # Xavier for a layer with one output
        nn.init.uniform_(self.weight, -bound, bound)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """(B,) users and (B, M) items → (B, M) logits."""
        # The first layer is linear in its two parts: a user is projected once for its M items, and
        # the whole item table where the batch holds more items than that.
        user_part, item_part, bias = self._first_layer()
        own = nn.functional.linear(nn.functional.embedding(users, self.users.weight), user_part)
        if items.numel() >= self.n_items:
            other = nn.functional.embedding(items, self.items.weight @ item_part.T)
        else:
            other = nn.functional.embedding(items, self.items.weight) @ item_part.T
        return self._above(other + (own + bias).unsqueeze(1))

    @torch.no_grad()
    def scorer(self) -> Scorer:
        """See ``PointwiseModel.scorer``."""
        user_part, item_part, bias = self._first_layer()
        of_users = nn.functional.linear(self.users.weight, user_part, bias)
        of_items = self.items.weight @ item_part.T
        blocks = torch.split(of_items, max(1, BLOCK_CELLS // of_items.shape[1]))

        @torch.no_grad()
        def score(user: int) -> Tensor:
            return torch.cat([self._above(block + of_users[user]) for block in blocks])

        return score

    def _above(self, first: Tensor) -> Tensor:
        """(…, width) sums of the first dense layer → (…) logits."""
        x = torch.relu(first)
        for layer in self._linear()[1:]:
            x = torch.relu(layer(x))
        return x @ self.weight + self.bias

    def _linear(self) -> list[nn.Linear]:
        return [cast(nn.Linear, layer) for layer in self.layers]

    def _first_layer(self) -> tuple[Tensor, Tensor, Tensor]:
        """W_2ᵀ of the user part and of the item part, and b_2."""
        layer = self._linear()[0]
        size = layer.in_features // 2
        return layer.weight[:, :size], layer.weight[:, size:], layer.bias


class NeuMF(PointwiseModel):
    """ŷ_ui = σ(hᵀ[φ^GMF; φ^MLP]) (eq. 12), the two parts with embeddings of their own.

    Each part holds its half of h, so a logit is the sum of the logits of both parts.
    """

    def __init__(self, n_users: int, n_items: int, factors: int, layers: int = 3) -> None:
        super().__init__(n_users, n_items)
        self.gmf = GMF(n_users, n_items, factors)
        self.mlp = MLP(n_users, n_items, factors, layers)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """(B,) users and (B, M) items → (B, M) logits."""
        logits: Tensor = self.gmf(users, items) + self.mlp(users, items)
        return logits

    def scorer(self) -> Scorer:
        """See ``PointwiseModel.scorer``."""
        gmf, mlp = self.gmf.scorer(), self.mlp.scorer()
        return lambda user: gmf(user) + mlp(user)

    def l2(self, users: Tensor, items: Tensor) -> Tensor:
        """See ``PointwiseModel.l2``."""
        return self.gmf.l2(users, items) + self.mlp.l2(users, items)

    @torch.no_grad()
    def start_from(self, gmf: GMF, mlp: MLP, alpha: float = 0.5) -> None:
        """Copies both parts and sets h ← [α h^GMF; (1−α) h^MLP] (eq. 13), the biases likewise.

        Raises ConfigError if α is not between 0 and 1 or a part has other sizes.
        """
        if not 0.0 <= alpha <= 1.0:
            raise ConfigError(f"alpha must be between 0 and 1, not {alpha}")
        for target, source, share in ((self.gmf, gmf, alpha), (self.mlp, mlp, 1.0 - alpha)):
            try:
                target.load_state_dict(source.state_dict())
            except RuntimeError:
                raise ConfigError("NeuMF can start only from parts of its own sizes") from None
            target.weight.mul_(share)
            target.bias.mul_(share)


def _embedding(rows: int, size: int) -> nn.Embedding:
    table = nn.Embedding(rows, size)
    nn.init.normal_(table.weight, std=EMBEDDING_STD)
    return table


def _check(factors: int, layers: int = 3) -> None:
    if not 1 <= factors <= MAX_FACTORS:
        raise ConfigError(f"factors must be 1 to {MAX_FACTORS}, not {factors}")
    if not 2 <= layers <= 6:
        raise ConfigError(f"layers must be 2 to 6, not {layers}")


def _mean_square(table: nn.Embedding, rows: Tensor) -> Tensor:
    """The mean of ‖row‖² over ``rows``, by counts, which is cheaper than a look-up of the rows."""
    counts = torch.bincount(rows.flatten(), minlength=table.num_embeddings)
    return table.weight.square().sum(dim=1) @ counts.to(table.weight.dtype) / rows.numel()


# What an epoch takes beside one of GMF's, as measured at d = 8; only for the time left.
EPOCH_COST = {"gmf": 1.0, "mlp": 1.5, "neumf": 2.0}

M = TypeVar("M", bound=PointwiseModel)
OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Phase:
    """The part of the configuration that differs between the phases of pre-training."""

    name: str
    epochs: int
    rate: float
    optimizer: PhaseOptimizer = "adam"

    later: float = 0.0
    """The work after this phase, in epochs of this phase, to estimate the time left."""


class FittedNeuMF(ScoreModel):
    """A trained NeuMF, or one of its parts, and the history of each phase of its training."""

    def __init__(self, model: PointwiseModel, history: list[History]) -> None:
        self.model = model.eval()
        self.history = history
        self._score = model.scorer()

    def scores(self, users: IntArray) -> npt.NDArray[np.float32]:
        """(B,) users → (B, n_items) logits."""
        rows = torch.stack([self._score(user) for user in users.tolist()])
        logits: npt.NDArray[np.float32] = rows.cpu().numpy()
        return logits


class _Training(Ranks):
    """A model between two epochs; logits of the candidates alone are the cheapest way."""

    def __init__(self, model: PointwiseModel) -> None:
        self.model = model.eval()

    @torch.inference_mode()
    def rank(self, users: IntArray, candidates: IntArray, k: int) -> IntArray:
        rows, items = (torch.from_numpy(x).to(self.model.device) for x in (users, candidates))
        logits = self.model(rows, items.clamp(min=0)).masked_fill(items < 0, -math.inf)
        order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k]
        ranked: IntArray = items.gather(1, order).cpu().numpy()
        return ranked


def fit_neumf(
    split: Split, config: NeuMFConfig, on_progress: OnProgress | None = None
) -> FittedNeuMF:
    """Trains ``config.model`` on ``split.train``; NeuMF with ``config.pretrain`` by eq. 13.

    Each phase keeps the epoch with the best validation NDCG@10, or the last epoch without
    validation items. ``config.seed`` makes the training repeatable on the CPU. Raises ConfigError,
    DataError or TrainingError.
    """
    device = resolve_device(config.device)
    n_users, n_items, d = split.train.n_users, split.train.n_items, config.factors

    def build(make: Callable[[], M]) -> M:
        # Each is seeded by itself, so that a part is what it would be if it were trained alone.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return make().to(device)

    def train(model: PointwiseModel, phase: Phase) -> History:
        return train_phase(model, split, config, phase, on_progress)

    epochs, rate = config.epochs, config.learning_rate
    makers: dict[str, Callable[[], PointwiseModel]] = {
        "gmf": lambda: GMF(n_users, n_items, d),
        "mlp": lambda: MLP(n_users, n_items, d, config.layers),
        "neumf": lambda: NeuMF(n_users, n_items, d, config.layers),
    }
    if config.model != "neumf" or not config.pretrain:
        model = build(makers[config.model])
        return FittedNeuMF(model, [train(model, Phase(f"train {config.model}", epochs, rate))])

    later = config.fine_tune_epochs * EPOCH_COST["neumf"]
    gmf = build(lambda: GMF(n_users, n_items, d))
    after_gmf = (epochs * EPOCH_COST["mlp"] + later) / EPOCH_COST["gmf"]
    gmf_history = train(gmf, Phase("pre-train gmf", epochs, rate, later=after_gmf))
    mlp = build(lambda: MLP(n_users, n_items, d, config.layers))
    after_mlp = later / EPOCH_COST["mlp"]
    mlp_history = train(mlp, Phase("pre-train mlp", epochs, rate, later=after_mlp))
    neumf = build(lambda: NeuMF(n_users, n_items, d, config.layers))
    neumf.start_from(gmf, mlp, config.alpha)
    last = Phase(
        "train neumf", config.fine_tune_epochs, config.fine_tune_rate, config.fine_tune_optimizer
    )
    return FittedNeuMF(neumf, [gmf_history, mlp_history, train(neumf, last)])


def train_phase(
    model: PointwiseModel,
    split: Split,
    config: NeuMFConfig,
    phase: Phase,
    on_progress: OnProgress | None = None,
) -> History:
    """Trains ``model`` in place and leaves it at its best epoch.

    Raises DataError if there are no positives and negatives to learn from. Raises TrainingError if
    the loss or a parameter is not finite; the model is then at its last good epoch.
    """
    batches = _Batches(split.train, config, model.device)
    optimizer: torch.optim.Optimizer
    if phase.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), phase.rate, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), phase.rate)
    steps = phase.epochs * len(batches)
    one_cycle = (
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer, phase.rate, total_steps=steps, cycle_momentum=phase.optimizer == "adam"
        )
        if config.schedule == "one-cycle"
        else None
    )
    validated = bool((split.validation >= 0).any())
    held_out = validation_candidates(split, config.seed) if validated else None
    history = History(phase.name)
    best, best_state = -1.0, copy.deepcopy(model.state_dict())
    last_good = best_state
    for epoch in range(1, phase.epochs + 1):
        started = time.perf_counter()
        loss = _one_epoch(model, batches, config.l2, optimizer, one_cycle)
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
        if not (finite and math.isfinite(loss)):
            model.load_state_dict(last_good)
            became = "a parameter became infinite" if math.isfinite(loss) else f"the loss is {loss}"
            raise TrainingError(
                f"{became} in epoch {epoch} of {phase.name} at learning rate "
                f"{phase.rate:g}: try a smaller rate or smaller l2"
            )
        last_good = copy.deepcopy(model.state_dict())
        ndcg = None
        if held_out is not None:
            metrics = evaluate_sampled(_Training(model), held_out)
            ndcg = metrics.ndcg
            history.ndcg.append(ndcg)
            history.hr.append(metrics.hr)
        history.loss.append(loss)
        history.seconds.append(time.perf_counter() - started)
        if ndcg is None or ndcg > best:
            best, history.best_epoch, best_state = ndcg or 0.0, epoch, last_good
        if on_progress is not None:
            eta = (phase.epochs - epoch + phase.later) * sum(history.seconds) / epoch
            on_progress(Progress(phase.name, epoch, phase.epochs, loss, ndcg, eta))
        if epoch - history.best_epoch >= config.patience:
            break
    model.load_state_dict(best_state)
    model.eval()
    return history


def pointwise_loss(logits: Tensor) -> Tensor:
    """The mean binary cross-entropy (eq. 7) of (B, 1 + n) logits, the positive's first."""
    positive_loss = nn.functional.softplus(-logits[:, 0]).sum()
    return (positive_loss + nn.functional.softplus(logits[:, 1:]).sum()) / logits.numel()


def _one_epoch(
    model: PointwiseModel,
    batches: _Batches,
    l2: float,
    optimizer: torch.optim.Optimizer,
    one_cycle: torch.optim.lr_scheduler.OneCycleLR | None,
) -> float:
    """Trains one pass over the positives; returns the batches' mean loss without the L2 term."""
    model.train()
    total = torch.zeros((), device=model.device)
    for users, items in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = pointwise_loss(model(users, items))
        total += loss.detach()
        if l2:
            loss = loss + l2 * model.l2(users, items)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if one_cycle is not None:
            one_cycle.step()
    return float(total) / len(batches)


class _Batches:
    """Positives in random order, each with fresh negatives: (B,) users, (B, 1 + n) items."""

    def __init__(self, train: Interactions, config: NeuMFConfig, device: torch.device) -> None:
        # A user who has seen every item has no negatives to draw.
        useful = (np.diff(train.indptr) < train.n_items)[train.users]
        if not useful.any():
            raise DataError("training needs a user with an item and without another item")
        learned = train.select(useful)
        self._generator = torch.Generator(device=device).manual_seed(config.seed)
        self._sampler = NegativeSampler(learned, device, self._generator)
        self._users = torch.from_numpy(learned.users).to(device)
        self._items = torch.from_numpy(learned.items).to(device)
        self._size, self._negatives = config.batch_size, config.negatives

    def __len__(self) -> int:
        return -(-len(self._users) // self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator, device = self._generator, self._users.device
        order = torch.randperm(len(self._users), generator=generator, device=device)
        for part in torch.split(order, self._size):
            users, positives = self._users[part], self._items[part].unsqueeze(1)
            negatives = self._sampler.sample(users, self._negatives)
            yield users, torch.cat([positives, negatives], dim=1)
