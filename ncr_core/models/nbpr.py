"""NBPR, neural Bayesian personalised ranking (eq. 17, 19–22)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ncr_core.models.config import ModelConfig
from ncr_core.models.ranker import PairwiseRanker, edge_weight, embedding
from ncr_core.models.tables import LinearTable, PairTables


class NBPR(PairwiseRanker):
    """z_uij = w₁·(U_u⊙V_i) − w₂·(U_u⊙V_j).

    With ``learn_weights=False`` w is fixed at 1; trained with the loss ``bpr`` that is BPR-MF
    (eq. 4, 16–18).
    """

    def __init__(self, config: ModelConfig, n_users: int, n_items: int) -> None:
        super().__init__(config, n_users, n_items)
        self.users = embedding(n_users, config.factors)
        self.items = embedding(n_items, config.factors)
        self.weight = edge_weight(2 * config.factors, config)
        if not config.learn_weights:
            self.weight = nn.Parameter(torch.ones(2 * config.factors), requires_grad=False)
        elif config.init == "xavier":
            # From w = 1 the model starts as BPR-MF: a w of both signs would have to learn first
            # which dimensions mean liking.
            nn.init.ones_(self.weight)

    def user_vectors(self, users: Tensor) -> Tensor:
        return nn.functional.embedding(users, self.users.weight)

    def item_vectors(self, items: Tensor) -> Tensor:
        return nn.functional.embedding(items, self.items.weight)

    def logits(self, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
        f = torch.cat([users * self.item_vectors(i), -users * self.item_vectors(j)], dim=-1)
        return f @ self.weight

    def pair_logits(self, users: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        return element_wise_logits(users, self.item_vectors(i), self.item_vectors(j), self.weight)

    def tables(self) -> PairTables:
        d = self.config.factors
        weight = self.frozen_double(self.weight)
        items = self.frozen_double(self.items.weight) * (weight[:d] + weight[d:])
        return PairTables(LinearTable(slice(0, d), items), None)


def element_wise_logits(
    users: Tensor, i: Tensor, j: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """(z_uij, z_uji), each (B, n), of the element-wise part.

    users and i are (B, d), j is (B, n, d), weight is (2d,) = [w₁; w₂].
    """
    d = users.shape[1]
    first, second = users * weight[:d], users * weight[d:]
    both = torch.stack([first, second], dim=2)  # (B, d, 2)
    of_j = torch.bmm(j, both)  # (B, n, 2)
    of_i = torch.stack([(first * i).sum(1), (second * i).sum(1)], dim=1).unsqueeze(1)
    return of_i[..., 0] - of_j[..., 1], of_j[..., 0] - of_i[..., 1]
