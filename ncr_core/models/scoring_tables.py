"""Tables of a model for ranking, computed once, from which any margin follows.

The margin z_uij − z_uji of every model here is

    s_ui − s_uj  +  w·tower(C_u + A_i + B_j)  −  w·tower(C_u + A_j + B_i)

with an additive part s: a product of vectors, or towers over the user and one item. A model that is
not additive also has a tower. The tower's first layer is linear in the user, the preferred item and
the other item. Its three projections C, A and B are therefore computed once per user and per item.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ncr_core.models.activations import sigmoid_tanh

Layers = tuple[tuple[Tensor, Tensor], ...]
"""Weight (out, in) and bias (out,) of each dense layer above the first."""


@dataclass(frozen=True)
class LinearTable:
    """s_ui = user_vector[columns] · items[i] + bias[i]."""

    columns: slice
    items: Tensor  # (n_items, d)
    bias: Tensor | None = None  # (n_items,)

    def to(self, dtype: torch.dtype) -> LinearTable:
        """The table in another type of floating-point numbers."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return LinearTable(self.columns, self.items.to(dtype), bias)

    def plus_bias(self, bias: Tensor) -> LinearTable:
        """The table with (n_items,) numbers added to the bias."""
        return replace(self, bias=bias if self.bias is None else self.bias + bias)


@dataclass(frozen=True)
class PointTable:
    """s_ui = w·tower(C_u + A_i), a tower over the user and one item.

    With a bias, as for a tower of one layer, s_ui is bias[i] alone: the user's part is the same for
    all items.
    """

    user_weight: Tensor  # (h, e)
    user_bias: Tensor  # (h,)
    items: Tensor  # (n_items, h) A
    layers: Layers
    weight: Tensor  # (d,) w
    activation: str
    bias: Tensor | None = None  # (n_items,)

    def to(self, dtype: torch.dtype) -> PointTable:
        """The table in another type of floating-point numbers."""
        return PointTable(
            self.user_weight.to(dtype),
            self.user_bias.to(dtype),
            self.items.to(dtype),
            _layers_to(self.layers, dtype),
            self.weight.to(dtype),
            self.activation,
            None if self.bias is None else self.bias.to(dtype),
        )

    def scores(self, vectors: Tensor, items: Tensor) -> Tensor:
        """(R, e) user vectors and (R, L) items → (R, L)."""
        if self.bias is not None:
            return self.bias[items]
        projected = torch.addmm(self.user_bias, vectors, self.user_weight.T)
        x = projected.unsqueeze(1) + self.items[items]
        return _upper_layers(x, self.layers, self.activation, None) @ self.weight


@dataclass(frozen=True)
class TowerTable:
    """The tower, with its first layer split into projections of the user and of the items."""

    columns: slice
    user_weight: Tensor  # (h, e)
    user_bias: Tensor  # (h,)
    first: Tensor  # (n_items, h) A, the item's projection where it is the preferred one
    second: Tensor  # (n_items, h) B, where it is the other one
    layers: Layers
    weight: Tensor  # (d,) w
    activation: str
    items: Tensor | None = None  # (n_items, e), where [U⊙V_i; −U⊙V_j] joins the last layer (eq. 24)

    def to(self, dtype: torch.dtype) -> TowerTable:
        """The table in another type of floating-point numbers."""
        return TowerTable(
            self.columns,
            self.user_weight.to(dtype),
            self.user_bias.to(dtype),
            self.first.to(dtype),
            self.second.to(dtype),
            _layers_to(self.layers, dtype),
            self.weight.to(dtype),
            self.activation,
            None if self.items is None else self.items.to(dtype),
        )

    def project_user(self, vectors: Tensor) -> Tensor:
        """(B, E) user vectors → (B, h) C_u, bias included."""
        return torch.addmm(self.user_bias, self.user_columns(vectors), self.user_weight.T)

    def user_columns(self, vectors: Tensor) -> Tensor:
        """(B, E) user vectors → (B, e) the tower's part of the vectors."""
        return vectors[:, self.columns].to(self.user_weight.dtype)

    def margins(
        self, projected: Tensor, vectors: Tensor, i: Tensor, j: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The tower's part of the margin: (R, h) C_u, (R, e) U_u, (R, L) items each → (R, L).

        The second result has the (R, L) sizes of the last sum's terms, with which rounding errors
        grow.
        """
        c = projected.unsqueeze(1)
        both = torch.stack(
            [
                (c + self.first[i]) + self.second[j],
                (c + self.first[j]) + self.second[i],
            ]
        )
        extra = None
        if self.items is not None:
            user = vectors.unsqueeze(1)
            of_i, of_j = user * self.items[i], user * self.items[j]
            extra = torch.stack([torch.cat([of_i, -of_j], -1), torch.cat([of_j, -of_i], -1)])
        last = _upper_layers(both, self.layers, self.activation, extra)
        deep, size = last @ self.weight, last.abs() @ self.weight.abs()
        return deep[0] - deep[1], size[0] + size[1]


@dataclass(frozen=True)
class PairTables:
    """The tables of a model for the rankers; ``tower`` is None for additive models.

    ``points`` are towers over a user and one item, each with the factor of its score. These towers
    take the whole user vector.
    """

    linear: LinearTable | None
    tower: TowerTable | None
    points: tuple[tuple[float, PointTable], ...] = ()

    @property
    def additive(self) -> bool:
        """Whether every margin is a difference of scores s_ui."""
        return self.tower is None

    def to(self, dtype: torch.dtype) -> PairTables:
        """The tables in another type of floating-point numbers."""
        return PairTables(
            self.linear.to(dtype) if self.linear else None,
            self.tower.to(dtype) if self.tower else None,
            tuple((scale, table.to(dtype)) for scale, table in self.points),
        )


def _layers_to(layers: Layers, dtype: torch.dtype) -> Layers:
    return tuple((weight.to(dtype), bias.to(dtype)) for weight, bias in layers)


def _upper_layers(x: Tensor, layers: Layers, activation: str, extra: Tensor | None) -> Tensor:
    """(…, h) inputs of the first activation → (…, d) outputs of the last.

    ``extra`` (…, d) is added to the inputs of the last activation.
    """
    act = sigmoid_tanh if activation == "tanh" else torch.relu
    for weight, bias in layers:
        x = torch.nn.functional.linear(act(x), weight, bias)
    return act(x if extra is None else x + extra)
