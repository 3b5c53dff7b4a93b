"""The tower of hidden layers over [U_u; V_i; −V_j] (eq. 23)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from ncr_core.model_config import ModelConfig
from ncr_core.models.activations import activation_of
from ncr_core.models.lookups import is_sharded
from ncr_core.models.scoring_tables import TowerTable
from ncr_core.models.user_embeddings import EMBEDDING_STD

Rows = Callable[[Tensor, Tensor], Tensor]
"""(rows, table) → the rows of a table."""


def dense_layers(widths: list[int], init: str) -> nn.ModuleList:
    """Linear layers from each width to the next."""
    layers = [nn.Linear(below, above) for below, above in pairwise(widths)]
    for layer in layers:
        if init == "paper":
            nn.init.normal_(layer.weight, std=EMBEDDING_STD)
            nn.init.normal_(layer.bias, std=EMBEDDING_STD)
        else:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return nn.ModuleList(layers)


class DenseTower(nn.Module):
    """Dense layers n·e → e → e/2 → … → d over n embeddings; none with one hidden layer.

    With shared embeddings (eq. 24) the last layer is 2e wide.
    """

    def __init__(self, config: ModelConfig, n_inputs: int) -> None:
        super().__init__()
        e = config.tower_embedding
        self.embedding_size = e
        self.activation_name = config.activation
        self._act = activation_of(config.activation, config.init)
        widths = [n_inputs * e] + [e // 2**depth for depth in range(config.layers - 1)]
        if config.shared_embeddings:
            widths[-1] = 2 * e
        self.layers = dense_layers(widths, config.init)

    def linear_layers(self) -> list[nn.Linear]:
        """The dense layers, from the first to the last."""
        return [cast(nn.Linear, layer) for layer in self.layers]


class Tower(DenseTower):
    """Dense layers 3e → e → e/2 → … → d, each followed by the activation.

    With one hidden layer there are no dense layers: the tower is the concatenation, and so is
    additive. With shared embeddings (eq. 24) the last layer is 2e wide, and [U_u⊙V_i; −U_u⊙V_j] is
    added before its activation (``element_wise``).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, 3)
        self.element_wise = config.shared_embeddings

    def forward(self, user: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Embeddings (…, e) each → (…, d), by eq. 23, or by eq. 24 with shared embeddings."""
        x = torch.cat([user, i, -j], dim=-1)
        if not self.layers:
            return x
        *below, last = self.linear_layers()
        for layer in below:
            x = self._act(layer(x))
        x = last(x)
        if self.element_wise:
            x = x + torch.cat([user * i, -user * j], dim=-1)
        return self._act(x)

    def both_orders(
        self,
        user: Tensor,
        i: Tensor,
        j: Tensor,
        all_items: Tensor,
        rows_of: Rows,
        *,
        by_rows: bool = False,
    ) -> Tensor:
        """(B, e) users, (B,) items i, (B, n) items j → (2, B, n, d): towers of (i, j) and (j, i).

        The first layer is linear in its three parts, so each user and item is projected once for
        all its pairs. If the batch holds as many items as the table or more, the whole table is
        projected at once. The exceptions are a sharded table, and ``by_rows``, with which the
        table's gradient has to come by rows.
        """
        if not self.layers:
            own, other = rows_of(i, all_items), rows_of(j, all_items)
            user, own = (x.unsqueeze(1).expand_as(other) for x in (user, own))
            return torch.stack([self(user, own, other), self(user, other, own)])
        c = nn.functional.linear(user, *self._user_part())
        preferred, other = self._item_parts()
        by_rows = by_rows or is_sharded(all_items)
        if not by_rows and len(i) + j.numel() >= len(all_items):
            first, second = all_items @ preferred, all_items @ other
            first_i, first_j = nn.functional.embedding(i, first), nn.functional.embedding(j, first)
            second_i = nn.functional.embedding(i, second)
            second_j = nn.functional.embedding(j, second)
        else:
            own, rival = rows_of(i, all_items), rows_of(j, all_items)
            first_i, first_j = own @ preferred, rival @ preferred
            second_i, second_j = own @ other, rival @ other
        ij = (c + first_i).unsqueeze(1) + second_j
        ji = first_j + (c + second_i).unsqueeze(1)
        x = torch.stack([ij, ji])
        for layer in self.linear_layers()[1:]:
            x = layer(self._act(x))
        if self.element_wise:
            x = x + self._both_element_wise(user, rows_of(i, all_items), rows_of(j, all_items))
        return self._act(x)

    def item_bias(self, items: Tensor, weight: Tensor) -> Tensor | None:
        """(n_items,) s_ui of a tower without dense layers, (w_i + w_j)·V_i; else None."""
        if self.layers:
            return None
        _, first, second = torch.split(weight.detach().double(), self.embedding_size)
        bias: Tensor = items.detach().double() @ (first + second)
        return bias

    def table(self, columns: slice, items: Tensor, weight: Tensor) -> TowerTable | None:
        """The tower for ranking, in float64: items (n_items, e), w (d,); None if it is additive."""
        if not self.layers:
            return None

        def double(x: Tensor) -> Tensor:
            return x.detach().double()

        user_weight, user_bias = self._user_part()
        first, second = (double(items) @ double(part) for part in self._item_parts())
        return TowerTable(
            columns,
            double(user_weight),
            double(user_bias),
            first,
            second,
            tuple((double(m.weight), double(m.bias)) for m in self.linear_layers()[1:]),
            double(weight),
            self.activation_name,
            double(items) if self.element_wise else None,
        )

    @staticmethod
    def _both_element_wise(user: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """(B, e) users and items i, (B, n, e) items j → (2, B, n, 2e) [U⊙V_i; −U⊙V_j]."""
        of_j = user.unsqueeze(1) * j
        of_i = (user * i).unsqueeze(1).expand_as(of_j)
        return torch.stack([torch.cat([of_i, -of_j], dim=-1), torch.cat([of_j, -of_i], dim=-1)])

    def _user_part(self) -> tuple[Tensor, Tensor]:
        layer = self.linear_layers()[0]
        return layer.weight[:, : self.embedding_size], layer.bias

    def _item_parts(self) -> tuple[Tensor, Tensor]:
        """(e, h) each: projections of an item as the preferred one and, negated, as the other."""
        layer = self.linear_layers()[0]
        e = self.embedding_size
        return layer.weight[:, e : 2 * e].T, -layer.weight[:, 2 * e :].T
