"""The contract of a pairwise ranker: a network that looks at a user and two items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ncr_core.errors import ConfigError
from ncr_core.model_config import ModelConfig
from ncr_core.models.lookups import table_rows
from ncr_core.models.scoring_tables import PairTables
from ncr_core.models.user_embeddings import EMBEDDING_STD, FreeUsers, PooledUsers, UserHistories


@dataclass(frozen=True)
class FactoredScores:
    """Scores (Q, S) of S items for Q users: users (Q, d) · items (S, d) + bias (S,)."""

    users: Tensor
    items: Tensor
    bias: Tensor | None = None

    def matrix(self) -> Tensor:
        """The matrix (Q, S) of all scores."""
        products = self.users @ self.items.T
        return products if self.bias is None else products + self.bias


class PairwiseRanker(nn.Module, ABC):
    """Gives the logit z_uij of "user u prefers item i to item j"; ŷ_uij = σ(z_uij).

    The methods take a user's vector (E,), so that a fold-in can give the vector of a user who was
    not trained on. ``logits`` is the equation as written. ``pair_logits`` gives both orders at once
    for training, and ``tables`` is for ranking.
    """

    users: FreeUsers | PooledUsers  # and ``items``: of a model with one part of each
    items: nn.Embedding
    shares_negatives = False  # whether ``shared_scores`` is there

    def __init__(self, config: ModelConfig, n_users: int, n_items: int) -> None:
        super().__init__()
        self.config = config
        self.n_users = n_users
        self.n_items = n_items
        # Tables of which a batch touches few rows; the training loop chooses.
        self.sparse_users = False
        self.sparse_items = False
        self.sparse_pooled_items = False

    def user_parts(self) -> Sequence[FreeUsers | PooledUsers]:
        """The parts of a user's vector, in order."""
        return [self.users]

    def item_vectors(self, items: Tensor) -> Tensor:
        """(…) rows → (…, F) the embeddings of these items, without biases."""
        return self.item_rows(items, self.items.weight)

    @property
    def item_tables(self) -> list[str]:
        """The names of the parameters, (n_items, …) each, that make up an item, in order."""
        names = ("items.weight", "items_n.weight", "items_d.weight", "bias")
        return [name for name, _ in self.named_parameters() if name in names]

    @abstractmethod
    def logits(self, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """z_uij of (B, E) user vectors and (B,) items i and j → (B,)."""

    @abstractmethod
    def pair_logits(self, users: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """(z_uij, z_uji), each (B, n), of (B, E) user vectors, (B,) items i and (B, n) items j."""

    @abstractmethod
    def tables(self) -> PairTables:
        """Tables for ranking in float64, without gradients, on the model's device."""

    def shared_scores(
        self, users: Tensor, row: Tensor, i: Tensor, j: Tensor
    ) -> tuple[Tensor, FactoredScores]:
        """s_ui (R,) and s_uj (Q, S) with (z_uij − z_uji)/2 = s_ui − s_uj, as products of matrices.

        The order rests on this half margin (§4.4). ``users`` are (Q, E) vectors. ``row`` (R,) is
        the place among ``users`` of the user of each positive ``i`` (R,), and ``j`` (S,) are items.
        Raises ConfigError for a model without ``shares_negatives``.
        """
        raise ConfigError(f"shared negatives are not for {self.config.kind}")

    def user_vectors(self, users: Tensor) -> Tensor:
        """(B,) rows → (B, E) the vectors of these users."""
        parts = [
            table_rows(users, part.weight, sparse=self.sparse_users) for part in self.user_parts()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def training_vectors(self, users: Tensor, histories: UserHistories | None) -> Tensor:
        """(B, E) user vectors for a training batch, pooled without each row's own positive."""
        if histories is None:
            return self.user_vectors(users)
        by_rows = self.sparse_pooled_items
        parts = [part.without_positives(histories, by_rows=by_rows) for part in self._pooled()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def pooled_vectors(
        self, items: Sequence[Tensor], weights: Sequence[Tensor] | None = None
    ) -> Tensor:
        """(B, E) user vectors pooled from each user's items, from old to new, for users="history".

        ``weights`` are the weights of the items, see ``PooledUsers.pool``.
        """
        lengths = torch.tensor([len(history) for history in items], device=self.device)
        every = torch.cat(list(items)).to(self.device)
        counts = None if weights is None else torch.cat(list(weights)).float().to(self.device)
        return torch.cat([part.pool(every, lengths, counts) for part in self._pooled()], dim=-1)

    def pooled_vector(self, items: Tensor, weights: Tensor | None = None) -> Tensor:
        """(E,) the vector of one user, as ``pooled_vectors``; see ``PooledUsers.pool_one``."""
        return torch.cat([part.pool_one(items, weights) for part in self._pooled()])

    def after_gap(self, vectors: Tensor, classes: Tensor) -> Tensor:
        """(B, E) user vectors after gaps of these classes (B,); see ``PooledUsers``.

        Vectors of class 0 stay unchanged. Without ``by_gap`` all vectors stay unchanged.
        """
        if not self.config.by_gap or not bool(classes.any()):
            return vectors
        (part,) = self._pooled()
        return part.after_gap(vectors, classes)

    @property
    def latest_time(self) -> float:
        """The end of the times of the fit of ``by_gap``, in seconds since 1970; 0 without a fit."""
        if not self.config.by_gap:
            return 0.0
        (part,) = self._pooled()
        return float(part.latest_time)

    def gap_scale(self, number: int) -> float:
        """The factor of a user's pooled vector after a gap of this class; 1 for no change."""
        if not self.config.by_gap:
            return 1.0
        (part,) = self._pooled()
        return float(part.gap_scale[number])

    @property
    def fitted_gaps(self) -> frozenset[int]:
        """The gap classes whose vectors differ from the vectors in the middle of a sitting."""
        if not self.config.by_gap:
            return frozenset()
        (part,) = self._pooled()
        differs = (part.gap_scale != 1.0) | (part.gap_offset != 0.0).any(dim=1)
        return frozenset(differs.nonzero().flatten().tolist())

    def remember(self, items: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        """Recomputes the vectors of the trained users from their items.

        ``items`` (T,) are the items of all users, one user after the other, oldest first.
        ``lengths`` (n_users,) are the numbers of items of the users. ``weights`` (T,) are as in
        ``PooledUsers.pool``. Free embeddings stay unchanged.
        """
        if self.config.users == "history":
            items, lengths = items.to(self.device), lengths.to(self.device)
            weights = None if weights is None else weights.to(self.device)
            for part in self._pooled():
                part.remember(items, lengths, weights)

    def item_rows(self, items: Tensor, table: Tensor) -> Tensor:
        """Rows (…) of an item table (n_items, F) → (…, F), or of the biases (n_items,) → (…)."""
        return table_rows(items, table, sparse=self.sparse_items)

    def sparse_tables(self) -> list[Tensor]:
        """The tables whose gradients come by rows."""
        tables: list[Tensor] = []
        if self.sparse_users:
            tables += [part.weight for part in self.user_parts() if isinstance(part, FreeUsers)]
        if self.sparse_items:
            tables += [self.get_parameter(name) for name in self.item_tables]
        if self.sparse_pooled_items:
            tables += [part.items.weight for part in self._pooled()]
        return tables

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def new_users(self, size: int) -> FreeUsers | PooledUsers:
        """A new user part of this size, by the configuration."""
        if self.config.users == "free":
            return FreeUsers(self.n_users, size)
        config = self.config
        return PooledUsers(
            self.n_users,
            self.n_items,
            size,
            config.windows,
            config.embedding_std,
            by_length=config.by_length,
            matrices=config.window_matrices,
            by_gap=config.by_gap,
            attention_layers=config.attention_layers,
            start_factors=config.start_factors,
        )

    def _pooled(self) -> list[PooledUsers]:
        return [part for part in self.user_parts() if isinstance(part, PooledUsers)]


def edge_weight(size: int, config: ModelConfig) -> nn.Parameter:
    """A new weight w (size,) of the prediction layer."""
    weight = nn.Parameter(torch.empty(size))
    if config.init == "paper":
        nn.init.normal_(weight, std=EMBEDDING_STD)
    else:
        bound = (6.0 / (size + 1)) ** 0.5  # Xavier for a layer with one output
        nn.init.uniform_(weight, -bound, bound)
    return weight
