"""Losses over pairs: logits of both orders, or scores where a batch shares its negatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ncr_core.models.base import FactoredScores
from ncr_core.models.precision import may_use_bfloat16

NEVER = -1e9  # a score that stands for "not compared"
BLOCK_CELLS = 2**19  # of scores that are made at once: 2 MiB

PairLoss = Callable[[Tensor, Tensor, int, Tensor | None], Tensor]
"""A function of the logits of both orders → the mean loss.

The arguments are (B, n) logits z_uij and z_uji, the number of items that the n are a sample of, and
(B,) weights of the positives. None stands for equal weights.
"""

SharedLoss = Callable[[Tensor, FactoredScores, Tensor, Tensor, int, Tensor | None], Tensor]
"""A function of scores → the mean loss of pairs with z_uij = −z_uji = s_i − s_j.

The first four arguments are (R,) s_i, (Q, S) s_j of the rows' users, (Q, S) whether a pair counts,
and (R,) the user of each row. The last two are the number of items that the S are a sample of, and
(R,) weights of the positives. None stands for equal weights.
"""


def bce_loss(
    z_uij: Tensor, z_uji: Tensor, catalogue: int = 0, weights: Tensor | None = None
) -> Tensor:
    """Binary cross-entropy over D_S ∪ D̄_S on logits (eq. 15): −log σ(z_uij) − log(1 − σ(z_uji)).

    The logits have any shape. The loss is the mean over the pairs of the sum of both orders.
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

    A term is −log of the probability that i is chosen among i and all j (Luce 1959), for each of
    both orders. With one j the loss is ``bce_loss``. The sum stands for the whole catalogue: each
    of n drawn items has the weight ``catalogue``/n.
    """
    more = math.log(max(1.0, catalogue / z_uij.shape[1]))
    both = softplus((-z_uij).logsumexp(1) + more) + softplus(z_uji.logsumexp(1) + more)
    return _mean(both, weights)


def drawn_listwise_loss(
    z_uij: Tensor, z_uji: Tensor, log_counts: Tensor, weights: Tensor | None = None
) -> Tensor:
    """``listwise_loss`` of items j that were not drawn uniformly.

    Item j stands for exp(``log_counts``) items of the catalogue, (B, n): one divided by n and by
    the probability of drawing it (Bengio & Senécal 2008).
    """
    both = softplus((log_counts - z_uij).logsumexp(1)) + softplus((log_counts + z_uji).logsumexp(1))
    return _mean(both, weights)


def _mean(each: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of (B, …) losses, each row by its weight."""
    if weights is None:
        return each.mean()
    by_row = each if each.dim() == 1 else each.mean(1)
    return (by_row * weights).sum() / weights.sum()


def shared_bce_loss(
    s_i: Tensor,
    s_j: FactoredScores,
    valid: Tensor,
    row: Tensor,
    catalogue: int = 0,
    weights: Tensor | None = None,
) -> Tensor:
    """``bce_loss`` of z_uij = −z_uji = s_i − s_j."""
    return 2.0 * shared_bpr_loss(s_i, s_j, valid, row, catalogue, weights)


def shared_bpr_loss(
    s_i: Tensor,
    s_j: FactoredScores,
    valid: Tensor,
    row: Tensor,
    catalogue: int = 0,
    weights: Tensor | None = None,
) -> Tensor:
    """``bpr_loss`` of z_uij = s_i − s_j, the mean over the pairs that count."""
    each = softplus(s_j.matrix()[row] - s_i.unsqueeze(1))
    counts = valid[row]
    if weights is not None:
        by_weight = counts * weights.unsqueeze(1)
        # Of a weight of a millionth the sum may well be less than 1.
        return (each * by_weight).sum() / by_weight.sum().clamp(min=1e-30)
    return (each * counts).sum() / counts.sum().clamp(min=1)


def shared_listwise_loss(
    s_i: Tensor,
    s_j: FactoredScores,
    valid: Tensor,
    row: Tensor,
    catalogue: int = 0,
    weights: Tensor | None = None,
) -> Tensor:
    """``listwise_loss`` of z_uij = −z_uji = s_i − s_j: 2 log(1 + exp(log Σ_j exp(s_j) − s_i)).

    The function computes the sum over j once for each user, not for each row.
    """
    more = math.log(max(1.0, catalogue / len(s_j.items)))
    bias = s_j.users.new_zeros(len(s_j.items)) if s_j.bias is None else s_j.bias
    rivals: Tensor = _LogSumExp.apply(s_j.users, s_j.items, bias, valid)  # type: ignore[no-untyped-call]
    return 2.0 * _mean(softplus(rivals[row] + more - s_i), weights)


LOSSES: dict[str, PairLoss] = {"bce": bce_loss, "bpr": bpr_loss, "listwise": listwise_loss}
SHARED_LOSSES: dict[str, SharedLoss] = {
    "bce": shared_bce_loss,
    "bpr": shared_bpr_loss,
    "listwise": shared_listwise_loss,
}


class _LogSumExp(torch.autograd.Function):
    """log Σ_j exp(u·v_j + b_j) over the valid j: (Q, d), (S, d), (S,), (Q, S) → (Q,).

    Forward and backward compute the scores block by block. A block stays in the processor's cache,
    while the whole matrix would pass through memory once for each operation.
    """

    @staticmethod
    def forward(ctx: Any, users: Tensor, items: Tensor, bias: Tensor, valid: Tensor) -> Tensor:
        sums = users.new_empty(len(users))
        for rows, scores in _blocks(users, items, bias):
            # Of nothing to compare with the sum is far below any score, and has no gradient.
            sums[rows] = scores.masked_fill_(~valid[rows], NEVER).logsumexp(1)
        ctx.save_for_backward(users, items, bias, valid, sums)
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        users, items, bias, valid, sums = ctx.saved_tensors
        of_users, of_items = torch.empty_like(users), torch.zeros_like(items)
        of_bias = torch.zeros_like(bias)
        fast_users, fast_items = _fast(users), _fast(items)
        for rows, scores in _blocks(users, items, bias):
            scores.sub_(sums[rows].unsqueeze(1)).exp_().mul_(grads[0][rows].unsqueeze(1))
            scores.masked_fill_(~valid[rows], 0.0)
            of_bias += scores.sum(0)
            share = scores.to(fast_users.dtype)
            of_users[rows] = (share @ fast_items).to(users.dtype)
            of_items += (share.T @ fast_users[rows]).to(items.dtype)
        return of_users, of_items, of_bias, None


def _blocks(users: Tensor, items: Tensor, bias: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(Q, d) and (S, d) → rows and their scores (rows, S)."""
    fast_users, fast_items = _fast(users), _fast(items).T
    at_once = max(1, BLOCK_CELLS // max(1, len(items)))
    if users.device.type != "cpu":
        at_once = max(1, len(users))
    for first in range(0, len(users), at_once):
        rows = slice(first, first + at_once)
        yield rows, (fast_users[rows] @ fast_items).to(users.dtype).add_(bias)


def _fast(x: Tensor) -> Tensor:
    """Converts to bfloat16 if the processor is several times as fast with it."""
    return x.to(torch.bfloat16) if may_use_bfloat16(x) else x
