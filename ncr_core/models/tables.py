"""What ranking needs of a model: tables computed once, from which any margin follows.

The margin z_uij − z_uji of every model here is

    s_ui − s_uj  +  w·tower(C_u + A_i + B_j)  −  w·tower(C_u + A_j + B_i)

with a linear part s and, unless the model is additive, a tower whose first layer is linear in the
user, the preferred and the other item, so that its three projections C, A and B are computed once
per user and per item.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearTable:
    """s_ui = user_vector[columns] · items[i] + bias[i]."""

    columns: slice
    items: Tensor  # (n_items, d)
    bias: Tensor | None = None  # (n_items,)

    def to(self, dtype: torch.dtype) -> LinearTable:
        bias = None if self.bias is None else self.bias.to(dtype)
        return LinearTable(self.columns, self.items.to(dtype), bias)


@dataclass(frozen=True)
class TowerTable:
    """The tower with its first layer taken apart."""

    columns: slice
    user_weight: Tensor  # (h, e)
    user_bias: Tensor  # (h,)
    first: Tensor  # (n_items, h) A, the item's projection where it is the preferred one
    second: Tensor  # (n_items, h) B, where it is the other one
    layers: tuple[tuple[Tensor, Tensor], ...]  # weight (out, in), bias (out,) above the first
    weight: Tensor  # (d,) w
    activation: str

    def to(self, dtype: torch.dtype) -> TowerTable:
        return TowerTable(
            self.columns,
            self.user_weight.to(dtype),
            self.user_bias.to(dtype),
            self.first.to(dtype),
            self.second.to(dtype),
            tuple((w.to(dtype), b.to(dtype)) for w, b in self.layers),
            self.weight.to(dtype),
            self.activation,
        )

    def project_user(self, vectors: Tensor) -> Tensor:
        """(B, E) user vectors → (B, h) C_u, bias included."""
        own = vectors[:, self.columns].to(self.user_weight.dtype)
        return torch.addmm(self.user_bias, own, self.user_weight.T)

    def above(self, first_layer: Tensor) -> Tensor:
        """(…, h) inputs of the first activation → (…) w·tower."""
        act = _tanh if self.activation == "tanh" else torch.relu
        x = act(first_layer)
        for weight, bias in self.layers:
            x = act(torch.nn.functional.linear(x, weight, bias))
        return x @ self.weight


def _tanh(x: Tensor) -> Tensor:
    """tanh(x) = 2σ(2x) − 1, which torch computes in less than half the time on a CPU."""
    return x.mul(2).sigmoid_().mul_(2).sub_(1)


@dataclass(frozen=True)
class PairTables:
    """A model as the rankers see it; ``tower`` is None for additive models."""

    linear: LinearTable | None
    tower: TowerTable | None

    @property
    def additive(self) -> bool:
        return self.tower is None

    def to(self, dtype: torch.dtype) -> PairTables:
        return PairTables(
            self.linear.to(dtype) if self.linear else None,
            self.tower.to(dtype) if self.tower else None,
        )
