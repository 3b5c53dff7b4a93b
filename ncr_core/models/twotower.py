"""Two towers: a difference of scores of (user, item) pairs (eq. 7–9, the paper's future work)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ncr_core.model_config import ModelConfig
from ncr_core.models.base import PairwiseRanker, edge_weight
from ncr_core.models.scoring_tables import PairTables, PointTable
from ncr_core.models.tower import DenseTower
from ncr_core.models.user_embeddings import embedding


class PointTower(DenseTower):
    """s(u, i) = w·tower([U_u; V_i]), dense layers 2e → e → e/2 → … → d."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, 2)
        self.weight = edge_weight(config.tower_width, config)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Embeddings (…, e) each, of shapes that broadcast → (…) scores."""
        e = self.embedding_size
        if not self.layers:
            return user @ self.weight[:e] + item @ self.weight[e:]
        first, *above = self.linear_layers()
        # Linear in its two parts: the user is projected once for all its items.
        x = nn.functional.linear(user, first.weight[:, :e], first.bias)
        x = self._act(x + nn.functional.linear(item, first.weight[:, e:]))
        for layer in above:
            x = self._act(layer(x))
        return x @ self.weight

    def table(self, items: Tensor) -> PointTable:
        """The tower's table for ranking, in float64; items (n_items, e)."""
        e = self.embedding_size
        own = items.detach().double()
        if not self.layers:
            # The user's own part is the same for every item.
            none = own.new_zeros((0, e)), own.new_zeros(0), own.new_zeros((len(own), 0))
            return PointTable(
                *none, (), own.new_zeros(0), "", own @ self.weight[e:].detach().double()
            )
        first, *above = self.linear_layers()
        return PointTable(
            first.weight[:, :e].detach().double(),
            first.bias.detach().double(),
            own @ first.weight[:, e:].detach().double().T,
            tuple((m.weight.detach().double(), m.bias.detach().double()) for m in above),
            self.weight.detach().double(),
            self.activation_name,
        )


class TwoTower(PairwiseRanker):
    """z_uij = s₁(u, i) − s₂(u, j); with ``shared_towers`` s₁ and s₂ are one.

    The model is additive: i beats j if s₁ + s₂ is larger for i, so top-K sorts by this sum.
    """

    def __init__(self, config: ModelConfig, n_users: int, n_items: int) -> None:
        super().__init__(config, n_users, n_items)
        e = config.tower_embedding
        self.users = self.new_users(e)
        self.items = embedding(n_items, e, config.embedding_std)
        self.preferred = PointTower(config)
        self.other = None if config.shared_towers else PointTower(config)

    def logits(self, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """z_uij of (B, E) user vectors and (B,) items i and j → (B,)."""
        of_i: Tensor = self.preferred(users, self.item_vectors(i))
        of_j: Tensor = (self.other or self.preferred)(users, self.item_vectors(j))
        return of_i - of_j

    def pair_logits(self, users: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """(z_uij, z_uji), each (B, n), of (B,) items i and (B, n) items j."""
        items = self.item_vectors(torch.cat([i.unsqueeze(1), j], dim=1))
        users = users.unsqueeze(1)
        first: Tensor = self.preferred(users, items)
        second: Tensor = first if self.other is None else self.other(users, items)
        return first[:, :1] - second[:, 1:], first[:, 1:] - second[:, :1]

    def tables(self) -> PairTables:
        """Tables for ranking in float64, without gradients."""
        items = self.items.weight
        if self.other is None:
            return PairTables(None, None, ((2.0, self.preferred.table(items)),))
        towers = (self.preferred, self.other)
        return PairTables(None, None, tuple((1.0, tower.table(items)) for tower in towers))
