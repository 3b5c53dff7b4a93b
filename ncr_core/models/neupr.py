"""NeuPR, neural personalised ranking (eq. 25), and its start from pre-trained parts (eq. 26)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ncr_core.errors import ConfigError
from ncr_core.models.config import ModelConfig
from ncr_core.models.dncr import DNCR
from ncr_core.models.nbpr import NBPR, element_wise_logits
from ncr_core.models.ranker import PairwiseRanker, edge_weight, embedding
from ncr_core.models.tables import LinearTable, PairTables
from ncr_core.models.tower import Tower


class NeuPR(PairwiseRanker):
    """z_uij = w·[U^N⊙V_i^N; −U^N⊙V_j^N; tower([U^D; V_i^D; −V_j^D])].

    The element-wise part N and the deep part D have embeddings of their own; a user's vector is
    [U^N; U^D].
    """

    def __init__(self, config: ModelConfig, n_users: int, n_items: int) -> None:
        super().__init__(config, n_users, n_items)
        d, e = config.factors, config.tower_embedding
        self.users_n, self.items_n = embedding(n_users, d), embedding(n_items, d)
        self.users_d, self.items_d = embedding(n_users, e), embedding(n_items, e)
        self.tower = Tower(config)
        self.weight = edge_weight(2 * d + config.tower_width, config)
        if config.init == "xavier":
            nn.init.ones_(self.weight.data[: 2 * d])  # as in NBPR

    def user_vectors(self, users: Tensor) -> Tensor:
        return _rows(users, self.users_n, self.users_d)

    def item_vectors(self, items: Tensor) -> Tensor:
        return _rows(items, self.items_n, self.items_d)

    def logits(self, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
        d = self.config.factors
        user_n, user_d = users[..., :d], users[..., d:]
        f_n = torch.cat([user_n * self.items_n(i), -user_n * self.items_n(j)], dim=-1)
        f_d = self.tower(user_d, self.items_d(i), self.items_d(j))
        return torch.cat([f_n, f_d], dim=-1) @ self.weight

    def pair_logits(self, users: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        d = self.config.factors
        n_ij, n_ji = element_wise_logits(
            users[:, :d], self.items_n(i), self.items_n(j), self.weight[: 2 * d]
        )
        deep = self.tower.both_orders(users[:, d:], i, j, self.items_d.weight)
        z = deep @ self.weight[2 * d :]
        return n_ij + z[0], n_ji + z[1]

    def tables(self) -> PairTables:
        d, e = self.config.factors, self.config.tower_embedding
        weight = self.frozen_double(self.weight)
        items = self.frozen_double(self.items_n.weight) * (weight[:d] + weight[d : 2 * d])
        deep = self.weight[2 * d :]
        bias = self.tower.item_bias(self.items_d.weight, deep)
        tower = self.tower.table(slice(d, d + e), self.items_d.weight, deep)
        return PairTables(LinearTable(slice(0, d), items, bias), tower)

    @torch.no_grad()
    def start_from(self, nbpr: NBPR, dncr: DNCR, alpha: float) -> None:
        """Copies both parts and sets w ← [α w^N; (1−α) w^D] (eq. 26)."""
        if not 0.0 <= alpha <= 1.0:
            raise ConfigError(f"alpha must be between 0 and 1, not {alpha}")
        self.users_n.weight.copy_(nbpr.users.weight)
        self.items_n.weight.copy_(nbpr.items.weight)
        self.users_d.weight.copy_(dncr.users.weight)
        self.items_d.weight.copy_(dncr.items.weight)
        self.tower.load_state_dict(dncr.tower.state_dict())
        self.weight.copy_(torch.cat([alpha * nbpr.weight, (1 - alpha) * dncr.weight]))


def _rows(rows: Tensor, first: nn.Embedding, second: nn.Embedding) -> Tensor:
    return torch.cat([first(rows), second(rows)], dim=-1)
