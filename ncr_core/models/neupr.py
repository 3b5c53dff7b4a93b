"""NeuPR, neural personalised ranking: eq. 25 started by eq. 26, and eq. 24 with one embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ncr_core.errors import ConfigError
from ncr_core.model_config import ModelConfig
from ncr_core.models.base import PairwiseRanker, edge_weight
from ncr_core.models.dncr import DNCR
from ncr_core.models.nbpr import NBPR, element_wise_logits, element_wise_table, with_bias
from ncr_core.models.scoring_tables import PairTables
from ncr_core.models.tower import Tower
from ncr_core.models.user_embeddings import FreeUsers, PooledUsers, embedding


class NeuPR(PairwiseRanker):
    """z_uij = w·[U^N⊙V_i^N; −U^N⊙V_j^N; tower([U^D; V_i^D; −V_j^D])].

    The element-wise part N and the deep part D have embeddings of their own; a user's vector is
    [U^N; U^D].
    """

    def __init__(self, config: ModelConfig, n_users: int, n_items: int) -> None:
        super().__init__(config, n_users, n_items)
        d, e = config.factors, config.tower_embedding
        std = config.embedding_std
        self.users_n, self.items_n = self.new_users(d), embedding(n_items, d, std)
        self.users_d, self.items_d = self.new_users(e), embedding(n_items, e, std)
        self.tower = Tower(config)
        self.weight = edge_weight(2 * d + config.tower_width, config)
        self.bias = nn.Parameter(torch.zeros(n_items)) if config.item_bias else None
        if config.init == "xavier":
            nn.init.ones_(self.weight.data[: 2 * d])  # as in NBPR

    def user_parts(self) -> Sequence[FreeUsers | PooledUsers]:
        """The parts of a user's vector, in order."""
        return [self.users_n, self.users_d]

    def item_vectors(self, items: Tensor) -> Tensor:
        """(…) rows → (…, F) the embeddings of these items, without biases."""
        of_n = self.item_rows(items, self.items_n.weight)
        return torch.cat([of_n, self.item_rows(items, self.items_d.weight)], dim=-1)

    def logits(self, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """z_uij of (B, E) user vectors and (B,) items i and j → (B,)."""
        d = self.config.factors
        user_n, user_d = users[..., :d], users[..., d:]
        f_n = torch.cat([user_n * self.items_n(i), -user_n * self.items_n(j)], dim=-1)
        f_d = self.tower(user_d, self.items_d(i), self.items_d(j))
        z = torch.cat([f_n, f_d], dim=-1) @ self.weight
        return z if self.bias is None else z + self.bias[i] - self.bias[j]

    def pair_logits(self, users: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """(z_uij, z_uji), each (B, n), of (B,) items i and (B, n) items j."""
        d = self.config.factors
        of_i, of_j = (self.item_rows(rows, self.items_n.weight) for rows in (i, j))
        n_ij, n_ji = element_wise_logits(users[:, :d], of_i, of_j, self.weight[: 2 * d])
        table, by_rows = self.items_d.weight, self.sparse_items
        deep = self.tower.both_orders(users[:, d:], i, j, table, self.item_rows, by_rows=by_rows)
        z = deep @ self.weight[2 * d :]
        return with_bias(n_ij + z[0], n_ji + z[1], self.bias, i, j, self.item_rows)

    def tables(self) -> PairTables:
        """Tables for ranking in float64, without gradients."""
        d, e = self.config.factors, self.config.tower_embedding
        linear = element_wise_table(self.items_n.weight, self.weight[: 2 * d], self.bias)
        deep = self.weight[2 * d :]
        of_tower = self.tower.item_bias(self.items_d.weight, deep)
        if of_tower is not None:
            linear = linear.plus_bias(of_tower)
        return PairTables(linear, self.tower.table(slice(d, d + e), self.items_d.weight, deep))

    @torch.no_grad()
    def start_from(self, nbpr: NBPR, dncr: DNCR, alpha: float) -> None:
        """Copies both parts and sets w ← [α w^N; (1−α) w^D] (eq. 26).

        Raises ConfigError unless 0 ≤ ``alpha`` ≤ 1.
        """
        if not 0.0 <= alpha <= 1.0:
            raise ConfigError(f"alpha must be between 0 and 1, not {alpha}")
        self.users_n.load_state_dict(nbpr.users.state_dict())
        self.items_n.load_state_dict(nbpr.items.state_dict())
        self.users_d.load_state_dict(dncr.users.state_dict())
        self.items_d.load_state_dict(dncr.items.state_dict())
        self.tower.load_state_dict(dncr.tower.state_dict())
        self.weight.copy_(torch.cat([alpha * nbpr.weight, (1 - alpha) * dncr.weight]))
        if self.bias is not None and nbpr.bias is not None:
            self.bias.copy_(alpha * nbpr.bias)


class SharedNeuPR(DNCR):
    """z_uij = w·a([U_u⊙V_i; −U_u⊙V_j] + W_N x_{N−1} + b_N), with x_{N−1} of the tower of eq. 23.

    The sum requires a last layer as wide as the element-wise part, 2e. The equation leaves this
    width open.
    """

    def __init__(self, config: ModelConfig, n_users: int, n_items: int) -> None:
        super().__init__(config, n_users, n_items)
        self.weight = edge_weight(2 * config.tower_embedding, config)
