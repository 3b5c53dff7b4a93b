"""Fold-in of items: vectors fitted to the few users of a new item, and models with such items."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ncr_core.errors import ConfigError, DataError
from ncr_core.fold_in.evidence import FoldInConfig
from ncr_core.fold_in.prior import Floats, Prior, basis_of, known_priors, newton, prior_of
from ncr_core.models import PairwiseRanker, build_model
from ncr_core.models.user_embeddings import PooledUsers


def item_rows(model: PairwiseRanker, items: Tensor) -> Tensor:
    """(m,) rows → (m, F) the parameters of these items: embeddings, and the bias if there is one.

    The item embeddings that users' vectors are pooled from are not included.
    """
    tables = [model.get_parameter(name).detach() for name in model.item_tables]
    return torch.cat([_as_matrix(table)[items] for table in tables], dim=1)


def split_rows(model: PairwiseRanker, rows: Tensor) -> dict[str, Tensor]:
    """(m, F) parameters as of ``item_rows`` → the rows for each of the item tables, by its name.

    Raises ConfigError for another F.
    """
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

    All parameters except item tables share the memory of ``model``. If users' vectors are pooled
    from items, the new items add zeros to the pools. Raises ConfigError for vectors of another
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

    Changes of the copy as a module, as by ``functional_call``, do not affect ``model``.
    """
    with torch.device("meta"):
        copy = build_model(model.config, model.n_users, model.n_items)
    copy.load_state_dict(model.state_dict(), assign=True)
    return copy.requires_grad_(False).eval()


def _as_matrix(table: Tensor) -> Tensor:
    return table if table.ndim == 2 else table.unsqueeze(1)


CROWD = 512  # trained users, drawn once a model
TASTED, ANCHORS = 256, 4  # items that bars are found among, and of them those compared with
BAR = 0.1  # of the tasted items so many are above a user's bar
USERS_AT_ONCE = 64  # whose bars are found: memory does not grow with them
MAX_SHIFT, HALVINGS = 4.0, 10  # of a fitted vector, in standard deviations of the trained items


class ItemFoldIn:
    """Fits item vectors for one model with frozen parameters; made once a model.

    A user's bar is the item at the edge of the best tenth of ``TASTED`` drawn items. The loss is
    that of `FoldIn`, over two kinds of pairs. Each user who took the new item up prefers the item
    to the user's bar. Each user of a crowd of trained users prefers the bar to the item. The prior
    is the distribution of the trained items' vectors.

    Few users tell which users like an item, but not how many. The fold-in therefore shifts the
    vector until the share ``FoldInConfig.shown`` of the crowd has the item above the bar. If a
    larger share of the model's users took the item up, a fitted share between the two shares stays.

    A vector depends on the item's own users alone. The crowd and the drawn items follow from the
    model, so that every server computes the same vector. An item takes at most
    ``FoldInConfig.steps`` + 1 passes over ``CROWD`` + ``FoldInConfig.events`` pairs with autograd,
    and ``HALVINGS`` + 1 passes without. Other threads may use the model meanwhile.

    An item with attributes has a prior of its own: the vector that attributes predict, with the
    covariance ``residual`` (F, F) of trained vectors about such predictions
    (`ContentPlacement.residual`). The share of the crowd at the predicted vector then replaces
    ``FoldInConfig.shown``. Raises DataError for a ``residual`` of another size.
    """

    def __init__(
        self,
        model: PairwiseRanker,
        config: FoldInConfig | None = None,
        residual: Tensor | None = None,
    ) -> None:
        self.config = config or FoldInConfig()
        # A module of its own: while items are fitted, its tables are others.
        self._model = model = shared_copy(model)
        self._prior = prior_of(model.n_items, lambda rows: item_rows(model, rows.to(model.device)))
        self._basis = self._prior.basis if residual is None else basis_of(residual.cpu().numpy())
        if len(self._basis) != len(self._prior.mean):
            raise DataError(
                f"the model's items are {len(self._prior.mean)} numbers each, "
                f"not {len(self._basis)} as the residual says"
            )
        drawn = np.random.default_rng(self.config.seed).permutation(model.n_items)[:TASTED]
        self._tasted = torch.from_numpy(drawn).to(model.device)
        rows = np.random.default_rng(self.config.seed).permutation(model.n_users)[:CROWD]
        self._crowd = model.user_vectors(torch.from_numpy(rows).to(model.device)).detach()
        self._crowd_bars = self._bars(self._crowd)

    @property
    def size(self) -> int:
        """F, the size of an item's vector."""
        return len(self._prior.mean)

    def __call__(
        self,
        users: Sequence[Tensor],
        weights: Sequence[Tensor] | None = None,
        n_users: Sequence[int] | None = None,
        priors: Tensor | None = None,
    ) -> Tensor:
        """Item vectors (m, F), as ``extended`` takes them, in float32 on the CPU.

        Args:
            users: for each of m items, the (k, E) vectors of its users.
            weights: for each item, the (k,) weights of its users, above 0; by default 1 each.
            n_users: for each item, the number of its users, if ``users`` holds only a part of them.
            priors: (m, F) the vectors that attributes predict, as `ContentPlacement.predict` gives
                them; NaN in the whole row for an item without attributes. An item without users
                gets the predicted vector, or else the mean item's vector.

        Raises:
            DataError: weights or priors have a wrong shape or a wrong value.
        """
        vectors = torch.empty((len(users), len(self._prior.mean)))
        known = known_priors(priors, vectors.shape)
        with torch.inference_mode(False):
            for item, adopters in enumerate(users):
                counts = torch.ones(len(adopters)) if weights is None else weights[item]
                n = len(adopters) if n_users is None else n_users[item]
                vectors[item] = torch.from_numpy(self._fit(adopters, counts, n, known[item]))
        return vectors

    def _fit(self, users: Tensor, weights: Tensor, n_users: int, centre: Floats | None) -> Floats:
        if weights.shape != (len(users),):
            raise DataError(f"{len(users)} users, but weights of shape {tuple(weights.shape)}")
        if not bool((weights.isfinite() & (weights > 0)).all()):
            raise DataError("weights must be finite and above 0")
        config = self.config
        prior = self._prior if centre is None else Prior(centre, self._basis)
        users, weights = users[-config.events :], weights[-config.events :]
        if len(users) == 0:
            return prior.mean
        users = users.to(self._crowd)
        margins = _ItemMargins(
            self._model,
            torch.cat([users, self._crowd]),
            torch.cat([self._bars(users), self._crowd_bars]),
            n_wins=len(users),
        )
        each = weights.double().cpu().numpy() * config.strength
        crowd = np.full(len(self._crowd), each.sum() * config.crowd / len(self._crowd))
        counts = np.concatenate([each, crowd])
        vector = newton(margins, counts, prior, config.steps, config.tolerance)
        least = config.shown
        if centre is not None:
            least = float((margins.half(centre)[-len(self._crowd) :] < 0).mean())
        most = max(least, n_users / self._model.n_users)
        return self._shown(vector, margins, prior, least, most)

    def _shown(
        self, vector: Floats, margins: _ItemMargins, prior: Prior, least: float, most: float
    ) -> Floats:
        """The vector, shifted until ``least`` to ``most`` of the crowd have the item above the bar.

        Of all shifts with the same change of the crowd's mean margin, the shift is the most
        probable by the prior.
        """
        half, gradients = (of_pairs[-len(self._crowd) :] for of_pairs in margins(vector))
        share = float((half < 0).mean())
        wanted = min(max(share, least), most)
        slopes = -gradients.mean(0) @ prior.basis
        length = float(np.linalg.norm(slopes))
        if share == wanted or not length > 0:
            return vector
        shift = prior.basis @ (slopes / length)
        low, high = -MAX_SHIFT, MAX_SHIFT
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            half = margins.half(vector + middle * shift)[-len(self._crowd) :]
            low, high = (low, middle) if (half < 0).mean() > wanted else (middle, high)
        shifted: Floats = vector + (low + high) / 2 * shift
        return shifted

    def _bars(self, users: Tensor) -> Tensor:
        """(B, E) user vectors → (B,) items, each user's bar."""
        return torch.cat(
            [_bars(self._model, part, self._tasted) for part in torch.split(users, USERS_AT_ONCE)]
        )


def _bars(model: PairwiseRanker, users: Tensor, items: Tensor) -> Tensor:
    """(B, E) user vectors and (n,) items → (B,) the item at the edge of each user's best tenth."""
    everything = items.expand(len(users), -1)
    scores = torch.zeros(everything.shape, device=items.device)
    with torch.no_grad():
        for anchor in items[:ANCHORS]:
            z_anchor, z_item = model.pair_logits(users, anchor.expand(len(users)), everything)
            scores += z_item - z_anchor
    above = scores.topk(math.ceil(BAR * len(items)), dim=1).indices
    return items[above[:, -1]]


class _ItemMargins:
    """Half margins of one new item by the network itself, and their gradients in the item's vector.

    The new item is the first of each of the ``n_wins`` first pairs, and the second of each other
    pair.
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
        """(F,) a vector → (P,) half margins of its pairs, and (P, F) their gradients."""
        fitted = torch.from_numpy(vector).to(self._others)
        with torch.enable_grad():
            # A copy a pair: one backward pass gives the gradient of every pair.
            item = fitted.expand_as(self._others).clone().requires_grad_(True)
            half = self._halves_of(item)
            (gradients,) = torch.autograd.grad(half.sum(), item)
        return half.detach().double().cpu().numpy(), gradients.double().cpu().numpy()

    def half(self, vector: Floats) -> Floats:
        """(F,) a vector → (P,) half margins of its pairs."""
        fitted = torch.from_numpy(vector).to(self._others)
        with torch.no_grad():
            half: Floats = self._halves_of(fitted.expand_as(self._others)).double().cpu().numpy()
        return half

    def _halves_of(self, item: Tensor) -> Tensor:
        """(P, F) the new item's vector for each pair → (P,) half margins."""
        rows = split_rows(self._model, torch.cat([item, self._others]))
        tables = {f"model.{name}": table for name, table in rows.items()}
        half: Tensor = functional_call(self._halves, tables, (self._users, self._i, self._j))
        return half


class _Halves(nn.Module):
    """A module that computes half margins, so that ``functional_call`` can replace its tables."""

    def __init__(self, model: PairwiseRanker) -> None:
        super().__init__()
        self.model = model

    def forward(self, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (self.model.logits(users, i, j) - self.model.logits(users, j, i)) / 2
