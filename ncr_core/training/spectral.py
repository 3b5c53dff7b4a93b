"""A spectral start: the leading singular vectors of the interactions as the first embeddings.

With R̃ = D_u^−½ R D_i^−a and its leading right singular vectors W (n_items, d), the scores
R̃ W Wᵀ D_i^a are those of a linear filter (PureSVD, Cremonesi et al. 2010, on a matrix scaled by
degree). They are what NBPR gives with V_i = d_i^a W_i and U_u = Σ_k d_k^−a W_k / n_u^½ over the
user's items k, which is how a history pools them. A tower over such embeddings learns from its
first batch, where one over random ones stays at popularity for epochs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ncr_core.data.interactions import Interactions
from ncr_core.models import NBPR, NeuPR, PairwiseRanker
from ncr_core.models.users import FreeUsers, HistoryUsers

ITEM_POWER = 0.25  # a
SCALE = 10.0  # of an element-wise part: its scores are below 1 then, and a logit needs room
TOWER_STD = 0.3  # of a tower's embeddings: large enough for a tanh to bend, not to saturate
OVERSAMPLED = 32
POWER_STEPS = 6


@torch.no_grad()
def spectral_start(model: PairwiseRanker, train: Interactions, seed: int) -> None:
    """Sets the embeddings of a model, on its device.

    Where there are fewer users or items than dimensions, the rest stays as it was initialised.
    """
    tables = [
        table
        for name, table in model.named_children()
        if name.startswith("items") and isinstance(table, nn.Embedding)
    ]
    parts = list(zip(model.user_parts(), tables, strict=True))
    widest = max(table.embedding_dim for table in tables)
    directions, power = _directions(train, min(widest, train.n_users, train.n_items), seed)
    directions, power = directions.to(model.device), power.to(model.device)
    for at, (users, items) in enumerate(parts):
        rank = min(items.embedding_dim, directions.shape[1])
        own, rival = directions[:, :rank] / power, directions[:, :rank] * power
        pooled = _pooled(own, train)
        if isinstance(model, NBPR) or (isinstance(model, NeuPR) and at == 0):
            up = down = math.sqrt(SCALE)
        else:
            up, down = TOWER_STD / float(pooled.std()), TOWER_STD / float(rival.std())
        items.weight[:, :rank] = rival * down
        _set_users(users, own * up, pooled * up)


def _set_users(users: FreeUsers | HistoryUsers, own: Tensor, pooled: Tensor) -> None:
    rank = own.shape[1]
    if isinstance(users, FreeUsers):
        users.weight[:, :rank] = pooled
        return
    users.items.weight[:, :rank] = own
    # Only the longest window takes part at first; the others have to earn it.
    longest = max(users.windows, key=lambda window: window or math.inf)
    for window, matrix in zip(users.windows, users.mix, strict=True):
        matrix.copy_(torch.eye(len(matrix)) if window == longest else torch.zeros_like(matrix))


def _pooled(own: Tensor, train: Interactions) -> Tensor:
    """(n_users, d) Σ_k own_k / n_u^½ over each user's items."""
    lengths = torch.from_numpy(train.indptr[1:] - train.indptr[:-1]).to(own.device)
    sums = own.new_zeros(train.n_users, own.shape[1])
    rows, items = (torch.from_numpy(x).to(own.device) for x in (train.users, train.items))
    sums.index_add_(0, rows, own[items])
    return sums / lengths.clamp(min=1).sqrt().unsqueeze(1)


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
