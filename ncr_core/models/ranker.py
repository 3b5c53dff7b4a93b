"""The contract of a pairwise ranker: a network that looks at a user and two items."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from ncr_core.models.config import ModelConfig
from ncr_core.models.tables import PairTables

EMBEDDING_STD = 0.01  # weights ~ N(0, 0.01²), §5.1


class PairwiseRanker(nn.Module, ABC):
    """Gives the logit z_uij of "user u prefers item i to item j"; ŷ_uij = σ(z_uij).

    A user is its vector (E,), so that a user who was not trained on can be ranked for by a vector
    fitted later. ``logits`` is the equation as written; ``pair_logits`` is the same for training,
    both orders at once, and ``tables`` for ranking.
    """

    def __init__(self, config: ModelConfig, n_users: int, n_items: int) -> None:
        super().__init__()
        self.config = config
        self.n_users = n_users
        self.n_items = n_items

    @abstractmethod
    def user_vectors(self, users: Tensor) -> Tensor:
        """(B,) rows → (B, E) everything the model knows of these users."""

    @abstractmethod
    def item_vectors(self, items: Tensor) -> Tensor:
        """(…) rows → (…, F) everything the model knows of these items."""

    @abstractmethod
    def logits(self, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """z_uij of (B, E) user vectors and (B,) items i and j → (B,)."""

    @abstractmethod
    def pair_logits(self, users: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """(z_uij, z_uji), each (B, n), of (B, E) user vectors, (B,) items i and (B, n) items j."""

    @abstractmethod
    def tables(self) -> PairTables:
        """Tables for ranking in float64, without gradients, on the model's device."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def frozen_double(self, parameter: Tensor) -> Tensor:
        return parameter.detach().double()


def embedding(rows: int, size: int) -> nn.Embedding:
    """An embedding table initialised from N(0, 0.01²)."""
    table = nn.Embedding(rows, size)
    nn.init.normal_(table.weight, std=EMBEDDING_STD)
    return table


def edge_weight(size: int, config: ModelConfig) -> nn.Parameter:
    """w of the prediction layer."""
    weight = nn.Parameter(torch.empty(size))
    if config.init == "paper":
        nn.init.normal_(weight, std=EMBEDDING_STD)
    else:
        bound = (6.0 / (size + 1)) ** 0.5  # Xavier for a layer with one output
        nn.init.uniform_(weight, -bound, bound)
    return weight
