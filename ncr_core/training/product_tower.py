"""A tower that starts as the product of trained factors, in place of random layers.

A tower of random layers has to learn first that a user likes what looks like the user. This start
gives the tower that knowledge of an NBPR. With x = α U_k and Δ = β (V_ik − V_jk),

    tanh(c + x + Δ) − tanh(c + x − Δ) − tanh(c − x + Δ) + tanh(c − x − Δ) = 4 tanh″(c) x Δ + …

The terms left out are of the fourth order, because all terms that are even in x or in Δ cancel.
tanh″ is largest, and tanh‴ is 0, where tanh(c) = 1/√3. Four units of the first layer thus make the
product of one factor. The layers above pass the sum of the products on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ncr_core.errors import ConfigError
from ncr_core.model_config import UNITS_PER_FACTOR
from ncr_core.models import DNCR, NBPR
from ncr_core.models.user_embeddings import FreeUsers, PooledUsers

CENTRE = math.atanh(3**-0.5)  # c
CURVATURE = -4 / 3**1.5  # tanh″(c)
SIZE, QUANTILE = 0.1, 0.95  # of x and of an item's part of Δ, for this share of them
LIMIT = 10.0  # of a logit, which the layers above pass through tanh
ROWS = 16_384  # whose sizes give the quantile


@torch.no_grad()
def start_as_product(dncr: DNCR, nbpr: NBPR) -> None:
    """Sets a DNCR to the half margins of a trained NBPR, up to the terms that are left out.

    Large logits shrink to less than ``LIMIT``, which leaves the order of items unchanged.
    Coordinates of users and items beyond the factors of the NBPR keep their initial values, and the
    tower does not use them at first.

    Args:
        dncr: the model to set, as it was initialised; its configuration has ``product_factors``.
        nbpr: an NBPR with so many factors, the same users and items, and no item biases. The
            vectors of its users are up to date.

    Raises:
        ConfigError: the NBPR has another number of factors, or the tower cannot start as a product.
    """
    d = nbpr.config.factors
    if d != dncr.config.product_factors:
        raise ConfigError(
            f"a tower that starts as the product of {dncr.config.product_factors} factors cannot "
            f"start from {d} factors"
        )
    of_users, of_items = nbpr.users.weight, nbpr.items.weight
    user_scale, item_scale = _scale(of_users), _scale(of_items)
    dncr.items.weight[:, :d].copy_(of_items).mul_(item_scale)
    if isinstance(dncr.users, FreeUsers):
        dncr.users.weight[:, :d] = of_users * user_scale
    else:
        assert isinstance(nbpr.users, PooledUsers)  # noqa: S101 - the NBPR has the same users
        _set_pools(dncr.users, nbpr.users, user_scale)
    margin = (nbpr.weight[:d] + nbpr.weight[d:]) / 2
    _set_layers(dncr, margin / (user_scale * item_scale))


def _scale(vectors: Tensor) -> Tensor:
    """(d,) the multiple of each coordinate that brings nearly all vectors (n, d) below ``SIZE``."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(vectors), generator=generator)[:ROWS].to(vectors.device)
    sizes = vectors[rows].abs().quantile(QUANTILE, dim=0)
    return torch.where(sizes > 0, SIZE / sizes.clamp(min=1e-30), 1.0)


def _set_pools(pools: PooledUsers, trained: PooledUsers, scale: Tensor) -> None:
    d = len(scale)
    pools.items.weight[:, :d] = trained.items.weight
    for matrix, trained_matrix in zip(pools.mix, trained.mix, strict=True):
        matrix[:d], matrix[:, :d] = 0.0, 0.0
        matrix[:d, :d] = trained_matrix * scale
    if pools.by_length:
        pools.gate.copy_(trained.gate)
        pools.offset[:, :d] = trained.offset * scale


def _set_layers(dncr: DNCR, gains: Tensor) -> None:
    """Sets the tower and w: the logit is the sum of the (d,) ``gains`` times x Δ."""
    d, e = len(gains), dncr.config.tower_embedding
    first, *above = dncr.tower.linear_layers()
    first.weight.zero_()
    first.bias.fill_(CENTRE)
    output = torch.zeros_like(first.bias)
    factors = torch.arange(d, device=gains.device)
    for number, (of_user, of_items) in enumerate(((1, 1), (1, -1), (-1, 1), (-1, -1))):
        units = factors + number * d
        first.weight[units, factors] = of_user
        first.weight[units, e + factors] = of_items
        first.weight[units, 2 * e + factors] = of_items  # of −V_j
        output[units] = of_user * of_items * gains / (UNITS_PER_FACTOR * CURVATURE)
    if not above:
        dncr.weight.copy_(output)
        return
    for layer in above:
        layer.bias.zero_()
        layer.weight[0] = 0.0
    above[0].weight[0] = output / LIMIT
    for layer in above[1:]:
        layer.weight[0, 0] = 1.0
    dncr.weight.zero_()
    dncr.weight[0] = LIMIT
