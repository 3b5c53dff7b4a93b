"""DNCR, deep neural collaborative ranking (eq. 23)."""

from __future__ import annotations

from torch import Tensor

from ncr_core.model_config import ModelConfig
from ncr_core.models.base import PairwiseRanker, edge_weight
from ncr_core.models.scoring_tables import LinearTable, PairTables
from ncr_core.models.tower import Tower
from ncr_core.models.user_embeddings import embedding


class DNCR(PairwiseRanker):
    """z_uij = w·tower([U_u; V_i; −V_j])."""

    def __init__(self, config: ModelConfig, n_users: int, n_items: int) -> None:
        super().__init__(config, n_users, n_items)
        e = config.tower_embedding
        self.users = self.new_users(e)
        self.items = embedding(n_items, e, config.embedding_std)
        self.tower = Tower(config)
        self.weight = edge_weight(config.tower_width, config)

    def logits(self, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """z_uij of (B, E) user vectors and (B,) items i and j → (B,)."""
        hidden: Tensor = self.tower(users, self.item_vectors(i), self.item_vectors(j))
        return hidden @ self.weight

    def pair_logits(self, users: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """(z_uij, z_uji), each (B, n), of (B,) items i and (B, n) items j."""
        table, by_rows = self.items.weight, self.sparse_items
        hidden = self.tower.both_orders(users, i, j, table, self.item_rows, by_rows=by_rows)
        z = hidden @ self.weight
        return z[0], z[1]

    def tables(self) -> PairTables:
        """Tables for ranking in float64, without gradients."""
        columns = slice(0, self.config.tower_embedding)
        bias = self.tower.item_bias(self.items.weight, self.weight)
        none = self.items.weight.new_zeros((len(self.items.weight), 0)).double()
        linear = None if bias is None else LinearTable(slice(0, 0), none, bias)
        return PairTables(linear, self.tower.table(columns, self.items.weight, self.weight))
