"""A spectral start: the leading singular vectors of the interactions as the first embeddings.

With R̃ = D_u^−½ R D_i^−a and its leading right singular vectors W (n_items, d), the scores
R̃ W Wᵀ D_i^a are those of a linear filter (PureSVD, Cremonesi et al. 2010, on a matrix scaled by
degree). They are what NBPR gives with V_i = d_i^a W_i and U_u = Σ_k d_k^−a W_k / n_u^½ over the
user's items k, which is how a history pools them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ncr_core.data.interactions import Interactions
from ncr_core.errors import ConfigError
from ncr_core.models import NBPR
from ncr_core.models.users import HistoryUsers

ITEM_POWER = 0.25  # a
SCALE = 10.0  # scores are below 1 then, and a logit needs room
OVERSAMPLED = 32
POWER_STEPS = 6


@torch.no_grad()
def spectral_start(model: NBPR, train: Interactions, seed: int) -> None:
    """Sets the embeddings of an NBPR with w = 1, on the model's device.

    Raises ConfigError where there are more factors than users or items.
    """
    d = model.config.factors
    if d > min(train.n_users, train.n_items):
        raise ConfigError(
            f"a spectral start gives at most {min(train.n_users, train.n_items)} factors here, "
            f"not {d}"
        )
    directions, power = _directions(train, d, seed)
    directions, power = directions.to(model.device) * math.sqrt(SCALE), power.to(model.device)
    own = directions / power
    model.items.weight.copy_(directions * power)
    if isinstance(model.users, HistoryUsers):
        model.users.items.weight.copy_(own)
        # Only the whole history takes part at first; the other windows have to earn it.
        for window, matrix in zip(model.users.windows, model.users.mix, strict=True):
            whole = window == max(model.users.windows, key=lambda w: w or math.inf)
            matrix.copy_(torch.eye(d) if whole else torch.zeros(d, d))
        return
    lengths = torch.from_numpy(train.indptr[1:] - train.indptr[:-1]).to(model.device)
    sums = torch.zeros(train.n_users, d, device=model.device)
    rows = torch.from_numpy(train.users).to(model.device)
    sums.index_add_(0, rows, own[torch.from_numpy(train.items).to(model.device)])
    model.users.weight.copy_(sums / lengths.clamp(min=1).sqrt().unsqueeze(1))


def _directions(train: Interactions, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """(n_items, d) right singular vectors of R̃ and (n_items, 1) d_i^a."""
    lengths = torch.from_numpy(train.indptr[1:] - train.indptr[:-1]).clamp(min=1).float()
    counts = torch.from_numpy(train.item_counts()).clamp(min=1).float()
    power = counts**ITEM_POWER
    users, items = torch.from_numpy(train.users), torch.from_numpy(train.items)
    values = lengths[users].rsqrt() / power[items]
    matrix = torch.sparse_coo_tensor(
        torch.stack([users, items]),
        values,
        (train.n_users, train.n_items),
        check_invariants=False,  # the matrix keeps them
    ).coalesce()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        q = min(d + OVERSAMPLED, train.n_users, train.n_items)
        _, _, right = torch.svd_lowrank(matrix, q=q, niter=POWER_STEPS)
    return right[:, :d].contiguous(), power.unsqueeze(1)
