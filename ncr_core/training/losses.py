"""Losses over the logits of both orders of a pair."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import softplus


def bce_loss(z_uij: Tensor, z_uji: Tensor) -> Tensor:
    """Binary cross-entropy over D_S ∪ D̄_S on logits (eq. 15): −log σ(z_uij) − log(1 − σ(z_uji)).

    Any shape; the mean over the pairs of the sum of both orders.
    """
    return (softplus(-z_uij) + softplus(z_uji)).mean()


def bpr_loss(z_uij: Tensor, z_uji: Tensor) -> Tensor:
    """−log σ(z_uij) over D_S alone (eq. 3), the mean over the pairs."""
    return softplus(-z_uij).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"bce": bce_loss, "bpr": bpr_loss}
