"""Fold-in of items: vectors fitted to the few users who took an item up, and models with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ncr_core.errors import ConfigError, DataError
from ncr_core.fold_in.evidence import SHARED, FoldInConfig
from ncr_core.fold_in.prior import Floats, newton, prior_of
from ncr_core.models import PairwiseRanker, build_model
from ncr_core.models.user_embeddings import PooledUsers


def item_rows(model: PairwiseRanker, items: Tensor) -> Tensor:
    """(m,) rows → (m, F) all that makes up these items: embeddings, and the bias if there is one.

    Not what users' vectors are pooled from.
    """
    tables = [model.get_parameter(name).detach() for name in model.item_tables]
    return torch.cat([_as_matrix(table)[items] for table in tables], dim=1)


def split_rows(model: PairwiseRanker, rows: Tensor) -> dict[str, Tensor]:
    """(m, F) as ``item_rows`` gives it → what goes into each of the item tables, by its name."""
    tables = {name: model.get_parameter(name) for name in model.item_tables}
    widths = [_as_matrix(table).shape[1] for table in tables.values()]
    if rows.ndim != 2 or rows.shape[1] != sum(widths):
        raise ConfigError(
            f"the model's items are {sum(widths)} numbers each, not {tuple(rows.shape)}"
        )
    return {
        name: part.reshape(len(rows), *table.shape[1:])
        for (name, table), part in zip(
            tables.items(), torch.split(rows, widths, dim=1), strict=True
        )
    }


def extended(model: PairwiseRanker, vectors: Tensor) -> PairwiseRanker:
    """A frozen model with (m, F) fitted item vectors as its items from n_items on.

    Users and all that is no item table share the memory of ``model``. Where users' vectors are
    pooled from items, the new ones add nothing to them. Raises ConfigError for vectors of another
    size.
    """
    added = {
        name: rows.to(model.device, torch.float32)
        for name, rows in split_rows(model, vectors).items()
    }
    for name, part in model.named_modules():
        if isinstance(part, PooledUsers):
            table = part.items.weight
            added[f"{name}.items.weight"] = table.new_zeros((len(vectors), table.shape[1]))
    with torch.device("meta"):
        larger = build_model(model.config, model.n_users, model.n_items + len(vectors))
    state = {
        name: torch.cat([value, added[name].to(value.dtype)]) if name in added else value
        for name, value in model.state_dict().items()
    }
    larger.load_state_dict(state, assign=True)
    return larger.requires_grad_(False).eval()


def shared_copy(model: PairwiseRanker) -> PairwiseRanker:
    """Another module with the same parameters, in the same memory.

    What is done to it as a module, as ``functional_call`` does, is not seen by others who use
    ``model``.
    """
    with torch.device("meta"):
        copy = build_model(model.config, model.n_users, model.n_items)
    copy.load_state_dict(model.state_dict(), assign=True)
    return copy.requires_grad_(False).eval()


def _as_matrix(table: Tensor) -> Tensor:
    return table if table.ndim == 2 else table.unsqueeze(1)


CROWD = 64  # trained users who did not take a new item up
TASTED, ANCHORS, FAVOURITES = 256, 4, 16  # of so many items, by so many of them, the best


class ItemFoldIn:
    """Gives item vectors for one model, whose parameters must be frozen. Made once a model.

    The loss is that of `FoldIn`. Each user who took the item up prefers it to other items; each of
    a crowd of trained users, drawn once, prefers one of the items that are most to their taste to
    it: as in training, where an item that few took up loses to what others took up. Its vector is
    held to where the trained items' lie. It depends on nothing but the item's own users. It takes
    tens of milliseconds an item, by autograd. Other threads may use the model meanwhile.
    """

    def __init__(self, model: PairwiseRanker, config: FoldInConfig | None = None) -> None:
        self.config = config or FoldInConfig()
        # A module of its own: while items are fitted, its tables are others.
        self._model = model = shared_copy(model)
        self._prior = prior_of(model.n_items, lambda rows: item_rows(model, rows.to(model.device)))
        drawn = np.random.default_rng(self.config.seed).permutation(model.n_items)[:SHARED]
        self._shared = torch.from_numpy(drawn).to(model.device)
        rows = np.random.default_rng(self.config.seed).permutation(model.n_users)[:CROWD]
        self._crowd = model.user_vectors(torch.from_numpy(rows).to(model.device)).detach()
        self._favourites = _favourites(model, self._crowd, self._shared[:TASTED])

    def __call__(self, users: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> Tensor:
        """Item vectors (m, F), as ``extended`` takes them, in float32 on the CPU.

        ``users`` are, for each of m items, the (k, E) vectors of its users, and ``weights`` (k,)
        how much each counts, above 0. An item without users gets the mean item's vector. Raises
        DataError for weights that do not fit.
        """
        vectors = torch.empty((len(users), len(self._prior.mean)))
        with torch.inference_mode(False):
            for item, adopters in enumerate(users):
                counts = torch.ones(len(adopters)) if weights is None else weights[item]
                vectors[item] = torch.from_numpy(self._fit(adopters, counts))
        return vectors

    def _fit(self, users: Tensor, weights: Tensor) -> Floats:
        if weights.shape != (len(users),):
            raise DataError(f"{len(users)} users, but weights of shape {tuple(weights.shape)}")
        if not bool((weights.isfinite() & (weights > 0)).all()):
            raise DataError("weights must be finite and above 0")
        config = self.config
        users, weights = users[-config.events :], weights[-config.events :]
        if len(users) == 0:
            return self._prior.mean
        shared = len(self._shared)
        n = min(config.negatives, shared, max(1, config.pairs // len(users)))
        # Each user has items of their own, at equal steps: together they cover what is shared.
        place = torch.arange(len(users)).unsqueeze(1) + torch.arange(n) * max(1, shared // n)
        losers = self._shared[(place % shared).flatten().to(self._shared.device)]
        each = weights.double().cpu() * config.strength
        margins = _ItemMargins(
            self._model,
            torch.cat([users.to(self._crowd).repeat_interleave(n, dim=0), self._crowd]),
            torch.cat([losers, self._favourites]),
            n_wins=len(losers),
        )
        crowd = torch.full((len(self._crowd),), float(each.sum()) * config.crowd / len(self._crowd))
        counts = torch.cat([(each / n).repeat_interleave(n), crowd.double()])
        return newton(margins, counts.numpy(), self._prior, config.steps, config.tolerance)


def _favourites(model: PairwiseRanker, users: Tensor, items: Tensor) -> Tensor:
    """(B,) for each user one of the ``FAVOURITES`` of the items that are most to their taste."""
    anchors = items[:ANCHORS]
    place = torch.cartesian_prod(
        *(torch.arange(n, device=items.device) for n in (len(users), len(items), len(anchors)))
    )
    with torch.no_grad():
        user, i, j = users[place[:, 0]], items[place[:, 1]], anchors[place[:, 2]]
        margins = model.logits(user, i, j) - model.logits(user, j, i)
    scores = margins.view(len(users), len(items), len(anchors)).mean(2)
    best = scores.topk(min(FAVOURITES, len(items)), dim=1).indices
    turn = torch.arange(len(users), device=items.device) % best.shape[1]
    return items[best.gather(1, turn.unsqueeze(1)).squeeze(1)]


class _ItemMargins:
    """Half margins of one new item by the network itself, and their gradients in its vector.

    They are over the others in the first ``n_wins`` pairs, and of the others over it in the rest.
    """

    def __init__(self, model: PairwiseRanker, users: Tensor, others: Tensor, n_wins: int) -> None:
        self._model = model = shared_copy(model)
        self._halves = _Halves(model)
        self._users = users
        self._others = item_rows(model, others)
        place = torch.arange(len(users), device=model.device)
        wins = place < n_wins
        self._i = torch.where(wins, place, place + len(users))
        self._j = torch.where(wins, place + len(users), place)

    def __call__(self, vector: Floats) -> tuple[Floats, Floats]:
        fitted = torch.from_numpy(vector).to(self._others)
        with torch.enable_grad():
            # A copy a pair: one backward pass gives the gradient of every pair.
            item = fitted.expand_as(self._others).clone().requires_grad_(True)
            rows = split_rows(self._model, torch.cat([item, self._others]))
            tables = {f"model.{name}": table for name, table in rows.items()}
            half: Tensor = functional_call(self._halves, tables, (self._users, self._i, self._j))
            (gradients,) = torch.autograd.grad(half.sum(), item)
        return half.detach().double().cpu().numpy(), gradients.double().cpu().numpy()


class _Halves(nn.Module):
    """Half margins as a module's call, so that its tables can be others."""

    def __init__(self, model: PairwiseRanker) -> None:
        super().__init__()
        self.model = model

    def forward(self, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (self.model.logits(users, i, j) - self.model.logits(users, j, i)) / 2
