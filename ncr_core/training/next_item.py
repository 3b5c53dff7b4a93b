"""The linear next-item model in closed form, as two item tables of low rank.

The model is a ridge regression of each user's next item on the items before it. The latest item has
the largest weight. The model is the linear sequential model of Choi et al. (SLIST, WWW 2021)
without its autoencoder half. A randomised SVD (Halko et al. 2011) finds the leading factors of the
matrix of weights by products with the matrix. `next_item_factors` never makes the matrix itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from scipy.linalg import cho_factor, cho_solve, qr

from ncr_core.data.array_storage import table_storage
from ncr_core.data.interactions import FloatArray, IntArray, Interactions
from ncr_core.recipes import MAX_DENSE_ITEMS, SMALL_DATA
from ncr_core.training.decayed_histories import MIN_COLUMNS, DecayedHistories

DECAY = 0.8  # what an item counts beside the one after it
LAGS = 32  # older items count less than .8³² = .0008
RIDGE, SPARSE_RIDGE = 300.0, 100.0  # λ, and that of few, sparse interactions
BACKWARD = 0.25  # β, of few interactions
POPULARITY_POWER, SPARSE_POPULARITY_POWER = 0.25, 0.5  # a
SPARSE_INTERACTIONS = 30.0  # for each item on average; of fewer the data are sparse
MAX_ROWS = 2_000_000  # positives; more are drawn by whole users
OVERSAMPLED = 32
POWER_ITERATIONS, FEW_POWER_ITERATIONS = 3, 1  # few of sparse systems
CG_STEPS = 30
CG_TOLERANCE = 1e-4
ROUGH_TOLERANCE = 0.5  # for the directions alone
CELLS_AT_ONCE = 2**22  # temporary numbers

Matrix = npt.NDArray[np.float32]
_Product = Callable[..., Matrix]

_known: WeakKeyDictionary[Interactions, dict[int, tuple[Matrix, Matrix]]] = WeakKeyDictionary()
"""The factors of a training set by seed, which several recipes start from."""


def next_item_factors(train: Interactions, rank: int, seed: int) -> tuple[Matrix, Matrix]:
    """Factors of W = (XᵀX + λI)⁻¹ (XᵀY + βYᵀX).

    A row of X holds ``DECAY``^lag at the items before an interaction. The row of Y holds a one at
    the item of the interaction. β is ``BACKWARD`` up to ``SMALL_DATA`` interactions, where
    knowledge of the items before an item helps too, and otherwise 0. W ≈ A Bᵀ: A has the vectors of
    the items that a user has had, B those of the next items. A and D⁻ᵃB are the leading factors of
    W D⁻ᵃ, where D holds the items' numbers of interactions. Few factors of W itself would tell
    popular items apart and little else, above all if most items are rare.

    Args:
        train: the interactions, each user's in time order.
        rank: the number of factors; more than the number of items have no effect.
        seed: draws the random directions, and the users if there are more than ``MAX_ROWS``
            interactions.

    Returns:
        A and B, (n_items, r) each, which share out the singular values. After a call with a larger
            rank, a smaller rank gives the first factors of that call.
    """
    rank = min(rank, train.n_items)
    by_seed = _known.setdefault(train, {})
    if seed not in by_seed or by_seed[seed][0].shape[1] < rank:
        by_seed[seed] = _factors(train, rank, seed)
    history, ranked = by_seed[seed]
    return history[:, :rank], ranked[:, :rank]


def next_item_weights(train: Interactions, ridge: float | None = None) -> Matrix:
    """W with β = 0, (n_items, n_items), from the row's item to the next item, for comparisons.

    ``ridge`` is λ; by default the size and the density of the data give λ.
    """
    chosen = _ridge(train) if ridge is None else ridge
    system = _system(train.items, train.indptr, train.n_items, chosen, 0.0)
    return system.solve(system.followers(np.eye(train.n_items, dtype=np.float32)), CG_TOLERANCE)


def _is_sparse(interactions: int, n_items: int) -> bool:
    return interactions < SPARSE_INTERACTIONS * n_items


def _ridge(train: Interactions) -> float:
    """λ by the size and the density of the data."""
    few = train.nnz <= SMALL_DATA
    return SPARSE_RIDGE if few and _is_sparse(train.nnz, train.n_items) else RIDGE


@dataclass(frozen=True)
class _System:
    """The matrices of a regression, as products with blocks (n_items, k)."""

    followers: _Product
    """XᵀY + βYᵀX."""
    transposed: _Product
    """Its transpose."""
    solve: _Product
    """Solves (XᵀX + λI) Z = R for Z, to a relative error where that saves time."""


def _system(items: IntArray, indptr: IntArray, n: int, ridge: float, backward: float) -> _System:
    if n <= MAX_DENSE_ITEMS:
        return _dense_system(items, indptr, n, ridge, backward)
    return _scanned_system(DecayedHistories(items, indptr, n, DECAY), ridge, backward)


def _dense_system(
    items: IntArray, indptr: IntArray, n: int, ridge: float, backward: float
) -> _System:
    """The system by a Cholesky decomposition of XᵀX + λI."""
    following = sparse.csr_matrix(_followers(items, indptr, n))
    counts = np.bincount(items, minlength=n).astype(np.float32)
    solve = _cholesky(following, _latest(items, indptr, n), counts, ridge)
    both = following + np.float32(backward) * following.T if backward else following
    transposed = both.T.tocsr()
    return _System(lambda block: both @ block, lambda block: transposed @ block, solve)


def _scanned_system(histories: DecayedHistories, ridge: float, backward: float) -> _System:
    """The system by conjugate gradients, without a matrix, which would have too many entries."""
    share, shift = np.float32(backward), np.float32(ridge)
    diagonal = histories.gram_diagonal() + shift

    def both(mostly: _Product, partly: _Product) -> _Product:
        if not backward:
            return mostly
        return lambda block: _plus(mostly(block), share, partly(block))

    def gram(block: Matrix) -> Matrix:
        return _plus(histories.gram(block), shift, block)

    def solve(block: Matrix, tolerance: float) -> Matrix:
        """Solves some columns at a time: all at once would need five times the block's memory."""
        result = _zeros(block.shape)
        width = MIN_COLUMNS * max(4, torch.get_num_threads())
        for first in range(0, block.shape[1], width):
            part = slice(first, first + width)
            result[:, part] = _conjugate_gradients(gram, diagonal, block[:, part], tolerance)
        return result

    return _System(
        both(histories.followers, histories.predecessors),
        both(histories.predecessors, histories.followers),
        solve,
    )


def _factors(train: Interactions, rank: int, seed: int) -> tuple[Matrix, Matrix]:
    items, indptr = _sample(train, seed)
    n = train.n_items
    small = train.nnz <= SMALL_DATA
    system = _system(items, indptr, n, _ridge(train), BACKWARD if small else 0.0)
    counts = np.bincount(items, minlength=n).astype(np.float32)
    sparse_items = _is_sparse(len(items), n)
    exponent = SPARSE_POPULARITY_POWER if sparse_items else POPULARITY_POWER
    power = np.maximum(counts, 1.0)[:, None] ** np.float32(exponent)

    def forward(block: Matrix) -> Matrix:
        following = system.followers(np.divide(block, power, out=_zeros(block.shape)))
        return system.solve(following, ROUGH_TOLERANCE)

    def backward(block: Matrix, tolerance: float = ROUGH_TOLERANCE) -> Matrix:
        product: Matrix = system.transposed(system.solve(block, tolerance))
        product /= power
        return product

    few = sparse_items if small else n > MAX_DENSE_ITEMS
    iterations = FEW_POWER_ITERATIONS if few else POWER_ITERATIONS
    left, values, right = _leading_factors(forward, backward, n, rank, iterations, seed)
    root = np.sqrt(values)
    # Not in place: the oversampled columns would be kept beside these.
    history = np.multiply(left, root, out=_zeros(left.shape))
    ranked = np.multiply(right, root, out=_zeros(right.shape))
    ranked *= power
    return history, ranked


def _sample(train: Interactions, seed: int) -> tuple[IntArray, IntArray]:
    """Items and offsets of all users, or of as many random users as have ``MAX_ROWS`` items."""
    if train.nnz <= MAX_ROWS:
        return train.items, train.indptr
    order = np.random.default_rng(seed).permutation(train.n_users)
    lengths = np.diff(train.indptr)[order]
    users = np.zeros(train.n_users, dtype=np.bool_)
    users[order[: max(1, int(np.searchsorted(lengths.cumsum(), MAX_ROWS)))]] = True
    part = train.select(train.entries_of(users))
    return part.items, part.indptr


def _followers(items: IntArray, indptr: IntArray, n: int) -> sparse.coo_matrix:
    """XᵀY (n, n): decayed counts of how often the column's item followed the row's item."""
    position = np.arange(len(items)) - np.repeat(indptr[:-1], np.diff(indptr))
    total = sparse.csr_matrix((n, n), dtype=np.float32)
    for lag in range(1, LAGS + 1):
        at = np.flatnonzero(position >= lag)
        if not len(at):
            break
        weight = np.full(len(at), DECAY ** (lag - 1), dtype=np.float32)
        total = total + sparse.csr_matrix((weight, (items[at - lag], items[at])), shape=(n, n))
    return total.tocoo()


def _latest(items: IntArray, indptr: IntArray, n: int) -> sparse.csr_matrix:
    """(n_users, n) the row that X would hold for an item after each user's last item."""
    lengths = np.diff(indptr)
    age = np.repeat(indptr[1:], lengths) - 1 - np.arange(len(items))
    recent = age < LAGS
    users = np.repeat(np.arange(len(lengths)), lengths)
    values = np.power(DECAY, age[recent], dtype=np.float32)
    return sparse.csr_matrix((values, (users[recent], items[recent])), shape=(len(lengths), n))


def _cholesky(
    following: sparse.csr_matrix, latest: sparse.csr_matrix, counts: FloatArray, ridge: float
) -> _Product:
    """A function that solves (XᵀX + λI) Z = R for Z.

    The item e came after the row x, and x' = DECAY·x + e. The sum over all rows gives (1 − DECAY²)
    XᵀX = DECAY·(XᵀY + YᵀX) + diag(counts) − Σ x·xᵀ, where Σ is over the rows past each user's end.
    No product of the many rows themselves is needed.
    """
    scale = np.float32(1.0 / (1.0 - DECAY**2))  # a quotient would be float64
    symmetric = (following + following.T) * np.float32(DECAY) + sparse.diags(counts)
    gram = (symmetric - latest.T.tocsr() @ latest).toarray() * scale
    gram[np.diag_indices(len(counts))] += np.float32(ridge)
    factor = cho_factor(gram, lower=True, overwrite_a=True, check_finite=False)
    return lambda block, _: cho_solve(factor, block, check_finite=False)


def _conjugate_gradients(
    matrix: _Product, diagonal: FloatArray, target: Matrix, tolerance: float
) -> Matrix:
    """Solves ``matrix`` Z = target, all columns at once, preconditioned by the diagonal."""
    inverse_diagonal = (1.0 / diagonal)[:, None].astype(np.float32)
    solution, scratch = _zeros(target.shape), _zeros(target.shape)
    residual, direction = table_storage().copy(target), _zeros(target.shape)

    def products(first: Matrix, second: Matrix) -> Matrix:
        """(k,) the product of each column of the first with that of the second."""
        column_sums: Matrix = np.multiply(first, second, out=scratch).sum(0)
        return column_sums

    np.multiply(inverse_diagonal, residual, out=direction)
    product = products(residual, direction)
    goal = products(residual, residual) * tolerance**2
    for _ in range(CG_STEPS):
        if (products(residual, residual) <= goal).all():
            break
        moved = matrix(direction)
        curvature = products(direction, moved)
        step = np.divide(product, curvature, out=np.zeros_like(product), where=curvature > 0)
        solution += np.multiply(step, direction, out=scratch)
        residual -= np.multiply(step, moved, out=scratch)
        scaled = np.multiply(inverse_diagonal, residual, out=moved)
        before, product = product, products(residual, scaled)
        direction *= np.divide(product, before, out=np.zeros_like(product), where=before > 0)
        direction += scaled
    return solution


def _zeros(shape: tuple[int, ...]) -> Matrix:
    """A new matrix of the size of tables, in their storage."""
    return table_storage().zeros(shape, np.float32)


def _plus(block: Matrix, factor: np.float32, other: Matrix) -> Matrix:
    """Adds a multiple of another block to a block, some rows at a time; returns the block."""
    for rows in _some_rows(block):
        block[rows] += factor * other[rows]
    return block


def _some_rows(block: Matrix) -> Iterator[slice]:
    """All rows of a block, as many at a time as have ``CELLS_AT_ONCE`` numbers."""
    step = max(1, CELLS_AT_ONCE // max(1, block.shape[1]))
    return (slice(first, first + step) for first in range(0, len(block), step))


def _leading_factors(
    forward: _Product, backward: _Product, n: int, rank: int, iterations: int, seed: int
) -> tuple[Matrix, Matrix, Matrix]:
    """The leading singular vectors (n, r) and values (r,) of an (n, n) matrix, by its products."""
    columns = min(rank + OVERSAMPLED, n)
    block, rng = _zeros((n, columns)), np.random.default_rng(seed)
    for rows in _some_rows(block):
        block[rows] = rng.standard_normal(block[rows].shape)
    basis = _orthonormal(forward(block))
    for _ in range(iterations):
        basis = _orthonormal(forward(_orthonormal(backward(basis))))
    left, values, right = _svd_of_transpose(backward(basis, CG_TOLERANCE))
    return _product(basis, left)[:, :rank], values[:rank], right[:, :rank]


def _svd_of_transpose(block: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """U (r, r), the values (r,) and V (n, r) of blockᵀ = U diag(values) Vᵀ."""
    if len(block) <= MAX_DENSE_ITEMS:
        left, values, right = np.linalg.svd(block.T, full_matrices=False)
        return left, values, right.T
    q, triangle = _qr(block)
    left, values, right = np.linalg.svd(triangle.T)
    return left, values, _product(q, right.T)


def _product(block: Matrix, matrix: Matrix) -> Matrix:
    """The product of a large block (n, k) with a small matrix (k, r)."""
    return np.matmul(block, matrix, out=_zeros((len(block), matrix.shape[1])))


def _orthonormal(block: Matrix) -> Matrix:
    q: Matrix = np.linalg.qr(block)[0] if len(block) <= MAX_DENSE_ITEMS else _qr(block)[0]
    return q


def _qr(block: Matrix) -> tuple[Matrix, Matrix]:
    """The QR of a large block in float32; numpy would make it in float64 and copy it twice."""
    by_columns = _zeros(block.shape[::-1]).T  # LAPACK leaves Q in its place
    by_columns[...] = block
    q, triangle = qr(by_columns, mode="economic", overwrite_a=True, check_finite=False)
    return table_storage().copy(q), triangle
