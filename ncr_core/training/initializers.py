"""Starts of embeddings, in place of random numbers.

The starts are implicit ALS, leading singular vectors, and the factors of the linear next-item
model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from ncr_core.data.array_storage import table_storage
from ncr_core.data.interactions import Interactions
from ncr_core.errors import ConfigError, DataError
from ncr_core.models import NBPR, NeuPR, PairwiseRanker
from ncr_core.models.user_embeddings import FreeUsers, PooledUsers
from ncr_core.recipes import SMALL_DATA
from ncr_core.train_config import Start
from ncr_core.training.next_item import DECAY, LAGS, next_item_factors

SCORE_SCALE = 10.0  # both starts give scores below about 1, and a logit needs room

ALS_SWEEPS, SPARSE_ALS_SWEEPS = 8, 4
MAX_ALS_UNOBSERVED_WEIGHT = 0.1  # α₀ at most
ALS_UNOBSERVED_SHARE, SMALL_ALS_UNOBSERVED_SHARE = 6.0, 24.0  # α₀ beside the density
ALS_L2 = 0.01  # λ
ALS_PROBE_USERS = 1_000
MAX_CELLS = 2**24  # of the padded rows that are solved at once
MAX_GPU_CELLS = 2**26  # 256 MiB, several times

SCALES: tuple[float, ...] = tuple(SCORE_SCALE * 2**n for n in range(-2, 13))  # to choose from
SCALE_USERS, SCALE_ITEMS = 512, 16_384  # by whose scores a scale is chosen

ITEM_POWER = 0.25  # a
TOWER_STD = 0.3  # of a tower's embeddings: large enough for a tanh to bend, not to saturate
OVERSAMPLED = 32
POWER_ITERATIONS = 6


@torch.no_grad()
def als_start(model: PairwiseRanker, train: Interactions, seed: int) -> None:
    """Sets the embeddings of an NBPR to the factors of implicit ALS, on the model's device.

    The loss is Σ_observed (1 − ŷ)² + α₀·Σ_all ŷ² + λ·(n + α₀·m)·‖·‖² for each vector with n of m
    possible interactions (Rendle et al. 2021). α₀ is `unobserved_weight`. Raises ConfigError if the
    model is not an NBPR with free users.
    """
    if not isinstance(model, NBPR) or not isinstance(model.users, FreeUsers):
        raise ConfigError("an ALS start is for nbpr with free users")
    device, d = model.device, model.config.factors
    rows = torch.from_numpy(train.users).to(device)
    columns = torch.from_numpy(train.items).to(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    items = _new_table(train.n_items, torch.empty(0, d, device=device))
    items.normal_(generator=generator).mul_(0.1).div_(d**0.5)
    weight = unobserved_weight(train)
    by_item = torch.argsort(columns, stable=True)
    for _ in range(_sweeps(train)):
        users = _least_squares(items, rows, columns, train.n_users, weight)
        items = _least_squares(users, columns[by_item], rows[by_item], train.n_items, weight)
    users = _least_squares(items, rows, columns, train.n_users, weight)
    model.users.weight.copy_(users).mul_(SCORE_SCALE**0.5)
    model.items.weight.copy_(items).mul_(SCORE_SCALE**0.5)


def unobserved_weight(train: Interactions) -> float:
    """α₀, with which all pairs together weigh six times the observed pairs; α₀ is at most 0.1.

    With one observed pair in thousands, a constant α₀ would drown the observed pairs. Up to
    ``SMALL_DATA`` interactions all pairs weigh 24 times the observed ones.
    """
    density = train.nnz / max(1, train.n_users * train.n_items)
    share = SMALL_ALS_UNOBSERVED_SHARE if train.nnz <= SMALL_DATA else ALS_UNOBSERVED_SHARE
    return min(MAX_ALS_UNOBSERVED_WEIGHT, share * density)


def _sweeps(train: Interactions) -> int:
    """The number of sweeps; more than four sweeps fit the noise of large sparse data."""
    is_dense = unobserved_weight(train) == MAX_ALS_UNOBSERVED_WEIGHT
    return ALS_SWEEPS if is_dense or train.nnz <= SMALL_DATA else SPARSE_ALS_SWEEPS


@torch.no_grad()
def als_seconds(factors: int, train: Interactions, device: torch.device) -> float:
    """Estimates the seconds of `als_start` on a device by half a sweep over a few users."""
    users = min(train.n_users, ALS_PROBE_USERS)
    probed = np.random.default_rng(0).choice(train.n_users, users, replace=False)
    probed.sort()
    part = train.of_rows(probed)
    if part.nnz == 0:
        return 0.0
    known, columns = np.unique(part.items, return_inverse=True)
    items = torch.ones(len(known), factors, device=device)
    by_row, by_column = (torch.from_numpy(x).to(device) for x in (part.users, columns))
    seconds = math.inf
    for _ in range(3):  # the first is slow, and others may use the processor
        _wait_for(device)
        started = time.perf_counter()
        _least_squares(items, by_row, by_column, users, 0.1)
        _wait_for(device)
        seconds = min(seconds, time.perf_counter() - started)
    share = max((train.n_users + train.n_items) / users, 2 * train.nnz / part.nnz)
    return _sweeps(train) * seconds * share


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _least_squares(
    factors: Tensor, rows: Tensor, columns: Tensor, n: int, unobserved: float
) -> Tensor:
    """The (n, d) best rows for the fixed (m, d) factors of the columns; the entries go by rows."""
    d = factors.shape[1]
    lengths = torch.bincount(rows, minlength=n)
    starts = lengths.cumsum(0) - lengths
    padded = _new_table(len(factors) + 1, factors)
    gram = torch.mul(factors, unobserved, out=padded[:-1]).T @ factors
    padded[:-1] = factors
    eye = torch.eye(d, device=factors.device)
    solved = _new_table(n, factors)
    order = torch.argsort(lengths)  # rows of like lengths together, so that little is padding
    by_length = lengths[order].tolist()
    most = MAX_CELLS if factors.device.type == "cpu" else MAX_GPU_CELLS
    start = 0
    while start < n:
        count = max(1, min(n - start, most // (d * max(by_length[start], d))))
        while count > 1 and count * d * max(by_length[start + count - 1], d) > most:
            count = -(-count // 2)
        block = order[start : start + count]
        block_lengths, longest = lengths[block], by_length[start + count - 1]
        offsets = torch.arange(longest, device=factors.device)
        index = (starts[block].unsqueeze(1) + offsets).clamp(max=len(columns) - 1)
        inside = offsets < block_lengths.unsqueeze(1)
        observed = padded[torch.where(inside, columns[index], len(factors))]
        ridge = ALS_L2 * (block_lengths + unobserved * len(factors))
        left = gram + observed.transpose(1, 2) @ observed + ridge.view(-1, 1, 1) * eye
        solved[block] = torch.linalg.solve(left, observed.sum(dim=1))
        start += count
    return solved


def _new_table(rows: int, like: Tensor) -> Tensor:
    """A table of zeros of so many rows, on a CPU in the storage of tables."""
    if like.device.type != "cpu":
        return like.new_zeros(rows, like.shape[1])
    kind = np.float64 if like.dtype == torch.float64 else np.float32
    return torch.from_numpy(table_storage().zeros((rows, like.shape[1]), kind))


@torch.no_grad()
def spectral_start(model: PairwiseRanker, train: Interactions, seed: int) -> None:
    """Sets the embeddings of a model to leading singular vectors, on the model's device.

    R̃ = D_u^−½ R D_i^−a has the leading right singular vectors W (n_items, d). The scores
    R̃·W·Wᵀ·D_i^a are those of a linear filter (PureSVD, Cremonesi et al. 2010, on a matrix scaled
    by degree). NBPR gives these scores with V_i = d_i^a W_i and U_u = Σ_k d_k^−a W_k / n_u^½ over
    the user's items k, and a history pools the items in the same way. A tower over these embeddings
    learns from its first batch, while a tower over random embeddings stays at popularity for
    epochs. If there are fewer users or items than dimensions, the other dimensions keep their
    initial values.
    """
    embeddings = _embeddings(model)
    widest = max(items.embedding_dim for _, items in embeddings)
    vectors, power = _singular_vectors(train, min(widest, train.n_users, train.n_items), seed)
    vectors, power = vectors.to(model.device), power.to(model.device)
    for part, (users, items) in enumerate(embeddings):
        rank = min(items.embedding_dim, vectors.shape[1])
        history_items, ranked_items = vectors[:, :rank] / power, vectors[:, :rank] * power
        n_users = train.n_users if isinstance(users, FreeUsers) else train.n_remembered
        pooled = _pooled(history_items, train, n_users)
        if _is_element_wise(model, part):
            user_scale = item_scale = math.sqrt(SCORE_SCALE)
        else:
            user_scale = TOWER_STD / float(pooled.std())
            item_scale = TOWER_STD / float(ranked_items.std())
        items.weight[:, :rank] = ranked_items * item_scale
        _set_users(users, history_items * user_scale, pooled * user_scale)


@torch.no_grad()
def next_item_start(model: PairwiseRanker, train: Interactions, seed: int) -> None:
    """Sets the embeddings of a model to the factors of the linear next-item model.

    The items of the histories get A, and the ranked items get B of `next_item_factors`. The
    matrices of the windows are multiples of the unit matrix. Together the pools of the windows come
    as near as possible to the decay of the linear model. Before any training, NBPR then ranks as
    the linear model of low rank does.

    Raises:
        ConfigError: the model's users have no windows: without order there is no next item.
        DataError: no item follows another.
    """
    if not model.config.ordered:
        raise ConfigError('a next-item start is for users="history" with windows')
    embeddings = _embeddings(model)
    widest = max(items.embedding_dim for _, items in embeddings)
    history_factors, ranked_factors = (
        torch.from_numpy(factors).to(model.device)
        for factors in next_item_factors(train, widest, seed)
    )
    if not any(ranked_factors.aminmax()):  # without a copy of the table
        raise DataError("no user has two interactions: the start needs two interactions of a user")
    for part, (users, items) in enumerate(embeddings):
        assert isinstance(users, PooledUsers)  # noqa: S101 - `ordered` says so
        rank = min(items.embedding_dim, history_factors.shape[1])
        history_items, ranked_items = history_factors[:, :rank], ranked_factors[:, :rank]
        for matrix, multiple in zip(users.mix, _decay_by_windows(users.windows), strict=True):
            matrix.copy_(torch.eye(len(matrix)) * multiple)
        users.items.weight.zero_()
        users.items.weight[:, :rank] = history_items
        if _is_element_wise(model, part):
            user_scale = item_scale = math.sqrt(_likeliest_scale(users, ranked_items, train))
        else:
            user_scale = TOWER_STD / float(_pooled(history_items, train, train.n_remembered).std())
            item_scale = TOWER_STD / float(ranked_items.std())
        items.weight[:, :rank].copy_(ranked_items).mul_(item_scale)  # in place: it is large
        users.items.weight.mul_(user_scale)


def _likeliest_scale(users: PooledUsers, ranked_items: Tensor, train: Interactions) -> float:
    """The factor on all scores that makes users' latest items most probable, by a softmax.

    The scores are those of a regression on zeros and ones, and far too small for logits. If there
    are many items, the softmax has the latest items and a random sample of all items.
    """
    rng = np.random.default_rng(0)
    lengths = np.diff(train.indptr)
    rows = rng.permutation(np.flatnonzero(lengths >= 2))[:SCALE_USERS]
    if not len(rows):
        return SCORE_SCALE
    latest_items = train.items[train.indptr[rows + 1] - 1]
    sample = rng.permutation(train.n_items)[:SCALE_ITEMS]
    compared, latest_columns = np.unique(
        np.concatenate([latest_items, sample]), return_inverse=True
    )
    latest = torch.from_numpy(latest_columns[: len(rows)])
    ranked_items = ranked_items[torch.from_numpy(compared).to(ranked_items.device)]
    before = [train.items[train.indptr[row] : train.indptr[row + 1] - 1] for row in rows]
    pools = users.pool(
        torch.from_numpy(np.concatenate(before)).to(ranked_items.device),
        torch.from_numpy(lengths[rows] - 1).to(ranked_items.device),
    )
    scores = pools[:, : ranked_items.shape[1]] @ ranked_items.T
    latest = latest.to(scores.device)
    losses = {
        scale: float(torch.nn.functional.cross_entropy(scores * scale, latest)) for scale in SCALES
    }
    return min(SCALES, key=lambda scale: losses[scale])


def _decay_by_windows(windows: tuple[int, ...]) -> list[float]:
    """The multiple of each window's pool that gives an item n places back a weight near DECAY^n."""
    ages = np.arange(2 * LAGS)
    pools = np.stack([(ages < (w or math.inf)) / math.sqrt(w or len(ages)) for w in windows], 1)
    multiples: list[float] = np.linalg.lstsq(pools, DECAY**ages, rcond=None)[0].tolist()
    return multiples


STARTS: dict[Start, Callable[[PairwiseRanker, Interactions, int], None]] = {
    "spectral": spectral_start,
    "als": als_start,
    "next-item": next_item_start,
}
"""By the name of a start, the function of a model, the training interactions and a seed."""


def _embeddings(model: PairwiseRanker) -> list[tuple[FreeUsers | PooledUsers, nn.Embedding]]:
    """The users and the ranked items of each part."""
    tables = [
        table
        for name, table in model.named_children()
        if name.startswith("items") and isinstance(table, nn.Embedding)
    ]
    return list(zip(model.user_parts(), tables, strict=True))


def _is_element_wise(model: PairwiseRanker, part: int) -> bool:
    """Whether the scores of this part are products of its vectors, without a tower."""
    return isinstance(model, NBPR) or (isinstance(model, NeuPR) and part == 0)


def _set_users(users: FreeUsers | PooledUsers, items: Tensor, pooled: Tensor) -> None:
    """Sets the users' vectors (n_users, d), or the items' vectors (n_items, d) of a pool."""
    rank = items.shape[1]
    if isinstance(users, FreeUsers):
        users.weight[:, :rank] = pooled
        return
    users.items.weight[:, :rank] = items
    # Only the longest window takes part at first; the others have to earn it.
    longest = max(users.windows, key=lambda window: window or math.inf)
    for window, matrix in zip(users.windows, users.mix, strict=True):
        matrix.copy_(torch.eye(len(matrix)) if window == longest else torch.zeros_like(matrix))


def _pooled(items: Tensor, train: Interactions, n_users: int) -> Tensor:
    """(n_items, d) → (n_users, d) Σ_k items_k / n_u^½ over the items k of the first users."""
    lengths = torch.from_numpy(np.diff(train.indptr[: n_users + 1])).to(items.device)
    sums = items.new_zeros(n_users, items.shape[1])
    entries = slice(0, train.indptr[n_users])
    rows, columns = (
        torch.from_numpy(x[entries]).to(items.device) for x in (train.users, train.items)
    )
    sums.index_add_(0, rows, items[columns])
    return sums / lengths.clamp(min=1).sqrt().unsqueeze(1)


def _singular_vectors(train: Interactions, d: int, seed: int) -> tuple[Tensor, Tensor]:
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
        _, _, right = torch.svd_lowrank(matrix, q=q, niter=POWER_ITERATIONS)
    return right[:, :d].contiguous(), power.unsqueeze(1)
