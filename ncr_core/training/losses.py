"""Losses over pairs: logits of both orders, or scores where a batch shares its negatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

NEVER = -1e9  # a score that stands for "not compared"

PairLoss = Callable[[Tensor, Tensor, int, Tensor | None], Tensor]
"""(B, n) logits z_uij and z_uji, the number of items the n are a sample of, and (B,) how much each
positive counts, None: all the same → the mean loss."""

SharedLoss = Callable[[Tensor, Tensor, Tensor, Tensor, int, Tensor | None], Tensor]
"""The same for pairs with z_uij = −z_uji = s_i − s_j: (R,) s_i, (Q, S) s_j of the rows' users,
(Q, S) which of these pairs count, (R,) the user of each row, the number of items the S are a
sample of, and (R,) how much each positive counts → the mean loss."""


def bce_loss(
    z_uij: Tensor, z_uji: Tensor, catalogue: int = 0, weights: Tensor | None = None
) -> Tensor:
    """Binary cross-entropy over D_S ∪ D̄_S on logits (eq. 15): −log σ(z_uij) − log(1 − σ(z_uji)).

    Any shape; the mean over the pairs of the sum of both orders.
    """
    return _mean(softplus(-z_uij) + softplus(z_uji), weights)


def bpr_loss(
    z_uij: Tensor, z_uji: Tensor, catalogue: int = 0, weights: Tensor | None = None
) -> Tensor:
    """−log σ(z_uij) over D_S alone (eq. 3), the mean over the pairs."""
    return _mean(softplus(-z_uij), weights)


def listwise_loss(
    z_uij: Tensor, z_uji: Tensor, catalogue: int = 0, weights: Tensor | None = None
) -> Tensor:
    """log(1 + Σ_j exp(−z_uij)) + log(1 + Σ_j exp(z_uji)), the mean over the positives.

    −log of the probability that i is chosen among itself and all j (Luce 1959), in both orders;
    with one j it is ``bce_loss``. The sum stands for the whole catalogue: n drawn items weigh
    ``catalogue``/n each.
    """
    more = math.log(max(1.0, catalogue / z_uij.shape[1]))
    both = softplus((-z_uij).logsumexp(1) + more) + softplus(z_uji.logsumexp(1) + more)
    return _mean(both, weights)


def _mean(each: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of (B, …), each row by its weight."""
    if weights is None:
        return each.mean()
    by_row = each if each.dim() == 1 else each.mean(1)
    return (by_row * weights).sum() / weights.sum()


def shared_bce_loss(
    s_i: Tensor,
    s_j: Tensor,
    valid: Tensor,
    row: Tensor,
    catalogue: int = 0,
    weights: Tensor | None = None,
) -> Tensor:
    """``bce_loss`` of z_uij = −z_uji = s_i − s_j."""
    return 2.0 * shared_bpr_loss(s_i, s_j, valid, row, catalogue, weights)


def shared_bpr_loss(
    s_i: Tensor,
    s_j: Tensor,
    valid: Tensor,
    row: Tensor,
    catalogue: int = 0,
    weights: Tensor | None = None,
) -> Tensor:
    """``bpr_loss`` of z_uij = s_i − s_j, the mean over the pairs that count."""
    each = softplus(s_j[row] - s_i.unsqueeze(1))
    counts = valid[row]
    if weights is not None:
        by_weight = counts * weights.unsqueeze(1)
        # Of a weight of a millionth the sum may well be less than 1.
        return (each * by_weight).sum() / by_weight.sum().clamp(min=1e-30)
    return (each * counts).sum() / counts.sum().clamp(min=1)


def shared_listwise_loss(
    s_i: Tensor,
    s_j: Tensor,
    valid: Tensor,
    row: Tensor,
    catalogue: int = 0,
    weights: Tensor | None = None,
) -> Tensor:
    """``listwise_loss`` of z_uij = −z_uji = s_i − s_j: 2 log(1 + exp(log Σ_j exp(s_j) − s_i)).

    The sum over j is taken once a user, whatever number of rows the user has.
    """
    more = math.log(max(1.0, catalogue / s_j.shape[1]))
    rivals: Tensor = _LogSumExp.apply(s_j, valid)  # type: ignore[no-untyped-call]
    return 2.0 * _mean(softplus(rivals[row] + more - s_i), weights)


LOSSES: dict[str, PairLoss] = {"bce": bce_loss, "bpr": bpr_loss, "listwise": listwise_loss}
SHARED_LOSSES: dict[str, SharedLoss] = {
    "bce": shared_bce_loss,
    "bpr": shared_bpr_loss,
    "listwise": shared_listwise_loss,
}


class _LogSumExp(torch.autograd.Function):
    """log Σ_j exp(x_j) over the valid j, (Q, S) → (Q,); keeps the softmax that is its gradient.

    torch's own computes the exponentials once more on the way back, and masks in a pass of its
    own each way.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, valid: Tensor) -> Tensor:
        share = torch.where(valid, x, NEVER)
        top = share.amax(dim=1, keepdim=True)
        share.sub_(top).exp_().mul_(valid)
        total = share.sum(dim=1, keepdim=True)
        ctx.save_for_backward(share.div_(total.clamp(min=1e-30)))
        return (top + total.clamp(min=1e-30).log()).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (share,) = ctx.saved_tensors
        return share * grads[0].unsqueeze(1), None
