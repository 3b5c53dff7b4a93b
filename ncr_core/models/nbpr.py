"""NBPR, neural Bayesian personalised ranking (eq. 17, 19–22)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ncr_core.model_config import ModelConfig
from ncr_core.models.base import FactoredScores, PairwiseRanker, edge_weight
from ncr_core.models.scoring_tables import LinearTable, PairTables
from ncr_core.models.user_embeddings import embedding


class NBPR(PairwiseRanker):
    """z_uij = w₁·(U_u⊙V_i) − w₂·(U_u⊙V_j), and b_i − b_j with ``item_bias``.

    With ``learn_weights=False`` w is fixed at 1. With the loss ``bpr`` as well, the model is BPR-MF
    (eq. 4, 16–18).
    """

    shares_negatives = True

    def __init__(self, config: ModelConfig, n_users: int, n_items: int) -> None:
        super().__init__(config, n_users, n_items)
        self.users = self.new_users(config.width)
        self.items = embedding(n_items, config.width, config.embedding_std)
        self.weight = edge_weight(2 * config.width, config)
        self.bias = nn.Parameter(torch.zeros(n_items)) if config.item_bias else None
        if not config.learn_weights:
            self.weight = nn.Parameter(torch.ones(2 * config.width), requires_grad=False)
        elif config.init == "xavier":
            # From w = 1 the model starts as BPR-MF: a w of both signs would have to learn first
            # which dimensions mean liking.
            nn.init.ones_(self.weight)

    def logits(self, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """z_uij of (B, E) user vectors and (B,) items i and j → (B,)."""
        f = torch.cat([users * self.item_vectors(i), -users * self.item_vectors(j)], dim=-1)
        z = f @ self.weight
        return z if self.bias is None else z + self.bias[i] - self.bias[j]

    def pair_logits(self, users: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """(z_uij, z_uji), each (B, n), of (B,) items i and (B, n) items j."""
        z_uij, z_uji = element_wise_logits(
            users, self.item_vectors(i), self.item_vectors(j), self.weight
        )
        return with_bias(z_uij, z_uji, self.bias, i, j, self.item_rows)

    def shared_scores(
        self, users: Tensor, row: Tensor, i: Tensor, j: Tensor
    ) -> tuple[Tensor, FactoredScores]:
        """s_ui (R,) and s_uj (Q, S); see ``PairwiseRanker.shared_scores``."""
        d = self.config.width
        own = users * ((self.weight[:d] + self.weight[d:]) / 2)
        # As a look-up of embeddings: a user's many rows make the gradient of an index slow.
        s_i = (nn.functional.embedding(row, own) * self.item_vectors(i)).sum(1)
        of_j = self.item_vectors(j)
        if self.bias is None:
            return s_i, FactoredScores(own, of_j)
        s_i = s_i + self.item_rows(i, self.bias)
        return s_i, FactoredScores(own, of_j, self.item_rows(j, self.bias))

    def tables(self) -> PairTables:
        """Tables for ranking in float64, without gradients."""
        return PairTables(element_wise_table(self.items.weight, self.weight, self.bias), None)


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


def with_bias(
    z_uij: Tensor,
    z_uji: Tensor,
    bias: Tensor | None,
    i: Tensor,
    j: Tensor,
    rows: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Adds b_i − b_j to z_uij and b_j − b_i to z_uji; i is (B,), j is (B, n).

    ``rows`` looks up rows of a table, as `PairwiseRanker.item_rows`.
    """
    if bias is None:
        return z_uij, z_uji
    difference = rows(i, bias).unsqueeze(1) - rows(j, bias)
    return z_uij + difference, z_uji - difference


def element_wise_table(items: Tensor, weight: Tensor, bias: Tensor | None) -> LinearTable:
    """The element-wise part for ranking: items (n_items, d), weight (2d,) = [w₁; w₂].

    A margin holds b_i − b_j twice, once for each order.
    """
    d = items.shape[1]
    both = weight.detach().double()[:d] + weight.detach().double()[d:]
    twice = None if bias is None else 2.0 * bias.detach().double()
    return LinearTable(slice(0, d), items.detach().double() * both, twice)
