"""Fold-in of items: a new item's vector, fitted to the few users who took it up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ncr_core.errors import DataError
from ncr_core.fold_in.extended import item_rows, shared_copy, split_rows
from ncr_core.fold_in.newton import Floats, newton
from ncr_core.fold_in.pairs import SHARED
from ncr_core.fold_in.prior import prior_of
from ncr_core.fold_in.settings import FoldInConfig
from ncr_core.models.ranker import PairwiseRanker

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
            for at, own in enumerate(users):
                given = torch.ones(len(own)) if weights is None else weights[at]
                vectors[at] = torch.from_numpy(self._of(own, given))
        return vectors

    def _of(self, users: Tensor, weights: Tensor) -> Floats:
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
    """Half margins of one new item by the network itself, and their gradients in its vector: over
    the others in the first ``n_wins`` pairs, of the others over it in the rest."""

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
        own = torch.from_numpy(vector).to(self._others)
        with torch.enable_grad():
            # A copy a pair: one backward pass gives the gradient of every pair.
            item = own.expand_as(self._others).clone().requires_grad_(True)
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
