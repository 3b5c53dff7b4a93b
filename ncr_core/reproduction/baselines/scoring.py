"""Baselines that rank by a score of each (user, item), most of them in closed form."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.sparse.linalg import svds

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.errors import ConfigError, DataError, TrainingError
from ncr_core.optional_imports import require
from ncr_core.training.next_item import DECAY, LAGS, next_item_weights

Scores = npt.NDArray[np.float32] | npt.NDArray[np.float64]


class ScoreModel(ABC):
    """A method with a score for each user and item: the higher, the better."""

    @abstractmethod
    def scores(self, users: IntArray) -> Scores:
        """(B,) users → (B, n_items) finite scores.

        A user's row does not depend on the other users of the call.
        """

    def with_input(self, interactions: Interactions) -> ScoreModel:
        """The fitted model with other interactions as the input of the ranking.

        A model whose scores do not depend on the user's items stays as it is.
        """
        return self

    def rank(self, users: IntArray, candidates: IntArray, k: int) -> IntArray:
        """(B,) users and (B, M) candidates, −1 for padding → (B, min(k, M)) items, −1 padded.

        The best item comes first, and ties keep the candidates' order. Raises TrainingError if a
        candidate's score is not a finite number, because other scores have no place in an order.
        """
        padding = candidates < 0
        rows = np.arange(len(users))[:, None]
        scores = np.where(padding, 0.0, self.scores(users)[rows, candidates])
        if not np.isfinite(scores).all():
            raise TrainingError(f"{type(self).__name__} gives scores that are not finite numbers")
        order = np.argsort(np.where(padding, np.inf, -scores), axis=1, kind="stable")[:, :k]
        return np.take_along_axis(candidates, order, axis=1)


class FactorModel(ScoreModel):
    """Scores by the product of a user's vector and an item's vector.

    ``user_factors`` is (n_users, d) and ``item_factors`` (n_items, d). Raises ConfigError if the
    shapes do not fit each other.
    """

    def __init__(self, user_factors: Scores, item_factors: Scores) -> None:
        if user_factors.ndim != 2 or user_factors.shape[1:] != item_factors.shape[1:]:
            raise ConfigError(
                f"user factors of shape {user_factors.shape} do not fit item factors of shape "
                f"{item_factors.shape}"
            )
        self.user_factors = user_factors
        self.item_factors = item_factors

    def scores(self, users: IntArray) -> Scores:
        """(B,) users → (B, n_items)."""
        scores = np.empty((len(users), len(self.item_factors)), dtype=self.item_factors.dtype)
        # One product a user: products of different batch shapes round differently.
        for row, user in enumerate(users):
            scores[row] = self.item_factors @ self.user_factors[user]
        return scores


class Popularity(ScoreModel):
    """Ranks items by the number of their interactions in training, ties in the order given."""

    def __init__(self, train: Interactions) -> None:
        self.counts = train.item_counts()

    def scores(self, users: IntArray) -> Scores:
        """(B,) users → (B, n_items): the counts, in every row."""
        return np.broadcast_to(self.counts.astype(np.float64), (len(users), len(self.counts)))


MAX_ITEMS = 20_000  # at its peak the inverse takes three float64 matrices: 10 GB for so many items
_ROWS = 1024


class EASE(ScoreModel):
    """Scores an item by the sum of its weights from the user's items.

    Steck, "Embarrassingly Shallow Autoencoders for Sparse Data", WWW 2019: a closed form.

    ``weights`` is (n_items, n_items), from the row's item to the column's item, with a zero
    diagonal. With ``half_life`` h, an item n places before the user's latest item has the weight
    2^(−n/h). The half-life is not part of EASE. It is the least knowledge of time that a fair
    comparison with methods that know the order needs.
    """

    def __init__(
        self,
        train: Interactions,
        weights: npt.NDArray[np.float32],
        half_life: float | None = None,
    ) -> None:
        self.train = train
        self.weights = weights
        self.half_life = half_life

    def with_input(self, interactions: Interactions) -> EASE:
        """See `ScoreModel.with_input`."""
        return EASE(interactions, self.weights, self.half_life)

    def scores(self, users: IntArray) -> Scores:
        """(B,) users → (B, n_items); all zero for a user without items."""
        scores = np.empty((len(users), self.train.n_items), dtype=np.float32)
        for row, user in enumerate(users):
            items = self.train.items_of(user)
            if self.half_life is None:
                self.weights[items].sum(axis=0, out=scores[row])
            else:
                age = np.arange(len(items) - 1, -1, -1)
                scores[row] = (
                    np.exp2(-age / self.half_life).astype(np.float32) @ self.weights[items]
                )
        return scores


def fit_ease(train: Interactions, l2: float, half_life: float | None = None) -> EASE:
    """Fits EASE with the weight ``l2`` (λ) of the L2 penalty, and ``half_life`` as in `EASE`.

    Raises ConfigError if ``l2`` or ``half_life`` is not above zero, or if there are more than
    ``MAX_ITEMS`` items. The matrix of all pairs of items has to fit into memory.
    """
    if not l2 > 0:
        raise ConfigError(f"l2 must be above 0, not {l2}")
    if half_life is not None and not half_life > 0:
        raise ConfigError(f"half_life must be above 0, not {half_life}")
    if train.n_items > MAX_ITEMS:
        gigabytes = 3 * 8 * train.n_items**2 / 1e9
        raise ConfigError(
            f"EASE takes at most {MAX_ITEMS:,} items: for {train.n_items:,} its matrices of all "
            f"pairs of items would need about {gigabytes:,.0f} GB"
        )
    gram = _co_occurrences(train)
    gram[np.diag_indices_from(gram)] += l2
    inverse = np.linalg.inv(gram)
    inverse /= -np.diag(inverse).copy()
    np.fill_diagonal(inverse, 0.0)
    return EASE(train, inverse.astype(np.float32), half_life)


class LinearNextItem(ScoreModel):
    """The linear next-item model with its whole matrix of weights, see `next_item_weights`.

    ``weights`` is (n_items, n_items), from the row's item to the next item.
    """

    def __init__(self, train: Interactions, weights: npt.NDArray[np.float32]) -> None:
        self._train, self._weights = train, weights

    def with_input(self, interactions: Interactions) -> LinearNextItem:
        """See `ScoreModel.with_input`."""
        return LinearNextItem(interactions, self._weights)

    def scores(self, users: IntArray) -> Scores:
        """(B,) users → (B, n_items); all zero for a user without items."""
        scores = np.empty((len(users), self._train.n_items), dtype=np.float32)
        for row, user in enumerate(users):
            latest_first = self._train.items_of(user)[::-1][:LAGS]
            decay = np.power(DECAY, np.arange(len(latest_first)), dtype=np.float32)
            scores[row] = decay @ self._weights[latest_first]
        return scores


def fit_linear_next_item(train: Interactions, l2: float | None = None) -> LinearNextItem:
    """Fits the model with λ = ``l2``; by default the size and the density of the data give λ.

    Raises ConfigError if ``l2`` is not above zero, or if there are more than ``MAX_ITEMS`` items.
    """
    if l2 is not None and not l2 > 0:
        raise ConfigError(f"l2 must be above 0, not {l2}")
    if train.n_items > MAX_ITEMS:
        raise ConfigError(f"the linear next-item model takes at most {MAX_ITEMS:,} items")
    return LinearNextItem(train, next_item_weights(train, l2))


class Markov(ScoreModel):
    """Ranks items by how often they directly followed the user's last item, then by popularity."""

    def __init__(self, train: Interactions) -> None:
        follows = np.ones(train.nnz, dtype=np.bool_)
        starts = train.indptr[:-1]
        follows[starts[starts < train.nnz]] = False
        at = np.flatnonzero(follows)
        shape = (train.n_items, train.n_items)
        pairs = (train.items[at - 1], train.items[at])
        self._train = train
        self._followers = sparse.csr_matrix((np.ones(len(at)), pairs), shape=shape)
        counts = train.item_counts().astype(np.float64)
        self._popularity = counts / (counts.max(initial=0.0) + 1.0)  # below one occurrence

    def with_input(self, interactions: Interactions) -> Markov:
        """See `ScoreModel.with_input`."""
        other = copy.copy(self)
        other._train = interactions
        return other

    def scores(self, users: IntArray) -> Scores:
        """(B,) users → (B, n_items)."""
        scores = np.tile(self._popularity, (len(users), 1))
        for row, user in enumerate(users):
            items = self._train.items_of(user)
            if len(items):
                scores[row] += self._followers[[items[-1]]].toarray()[0]
        return scores


def fit_pure_svd(train: Interactions, factors: int, seed: int) -> FactorModel:
    """Fits PureSVD: the leading ``factors`` singular vectors of the matrix of ones and zeros.

    Cremonesi, Koren, Turrin, "Performance of Recommender Algorithms on Top-N Recommendation Tasks",
    RecSys 2010: a user's scores are the user's row times V·Vᵀ. ``seed`` draws the start vector.
    """
    ones = np.ones(train.nnz)
    shape = (train.n_users, train.n_items)
    matrix = sparse.csr_matrix((ones, train.items, train.indptr), shape=shape)
    v0 = np.random.default_rng(seed).standard_normal(min(shape))
    items = svds(matrix, min(factors, min(shape) - 1), v0=v0)[2].T
    return FactorModel(np.asarray(matrix @ items), np.ascontiguousarray(items))


class GraphFilter(ScoreModel):
    """GF-CF: the user's row times a linear filter and an ideal low-pass filter of the items.

    Shen et al., "How Powerful is Graph Convolution for Recommendation?", CIKM 2021: with
    R̃ = D_u^−½ R D_i^−½ and its leading right singular vectors W (n_items, d), the scores are
    R·R̃ᵀ·R̃ + α·R·D_i^−½·W·Wᵀ·D_i^½.
    """

    def __init__(self, train: Interactions, factors: int, alpha: float, seed: int) -> None:
        shape = (train.n_users, train.n_items)
        ones = np.ones(train.nnz, dtype=np.float32)
        self._rows = sparse.csr_matrix((ones, train.items, train.indptr), shape=shape)
        by_user, by_item = (
            np.maximum(1.0, np.asarray(self._rows.sum(axis=axis)).ravel()) ** -0.5
            for axis in (1, 0)
        )
        scaled = sparse.diags(by_user) @ self._rows @ sparse.diags(by_item)
        self._scaled = sparse.csr_matrix(scaled, dtype=np.float32)
        v0 = np.random.default_rng(seed).standard_normal(min(shape))
        leading = svds(scaled, min(factors, min(shape) - 1), v0=v0)[2].T
        self._projection = alpha * by_item[:, None] * leading
        self._items = np.asarray(leading / by_item[:, None], dtype=np.float32)
        self._users = self._factors_of_users()

    def with_input(self, interactions: Interactions) -> GraphFilter:
        """See `ScoreModel.with_input`."""
        other = copy.copy(self)
        other._rows = sparse.csr_matrix(
            (np.ones(interactions.nnz, dtype=np.float32), interactions.items, interactions.indptr),
            shape=self._rows.shape,
        )
        other._users = other._factors_of_users()
        return other

    def _factors_of_users(self) -> FactorModel:
        return FactorModel(np.asarray(self._rows @ self._projection, dtype=np.float32), self._items)

    def scores(self, users: IntArray) -> Scores:
        """(B,) users → (B, n_items)."""
        linear = (self._rows[users] @ self._scaled.T) @ self._scaled
        total: Scores = self._users.scores(users) + linear.toarray()
        return total


def _co_occurrences(train: Interactions) -> npt.NDArray[np.float64]:
    """(n_items, n_items) numbers of users who have both items, counted by blocks of users."""
    gram = np.zeros((train.n_items, train.n_items))
    for start in range(0, train.n_users, _ROWS):
        stop = min(start + _ROWS, train.n_users)
        entries = slice(train.indptr[start], train.indptr[stop])
        # Sums of at most so many ones are exact in float32.
        rows = np.zeros((stop - start, train.n_items), dtype=np.float32)
        rows[train.users[entries] - start, train.items[entries]] = 1.0
        gram += rows.T @ rows
    return gram


class CornacBPR(FactorModel):
    """BPR-MF with item biases as one more factor; ``seconds`` is the time of training alone.

    Rendle, Freudenthaler, Gantner, Schmidt-Thieme, "BPR: Bayesian Personalized Ranking from
    Implicit Feedback", UAI 2009.
    """

    def __init__(self, user_factors: Scores, item_factors: Scores, seconds: float) -> None:
        super().__init__(user_factors, item_factors)
        self.seconds = seconds


def fit_cornac_bpr(
    train: Interactions,
    factors: int,
    *,
    learning_rate: float = 0.05,
    regularisation: float = 0.005,
    iterations: int = 100,
    threads: int = 0,
    seed: int | None = None,
) -> CornacBPR:
    """Fits BPR by ``iterations`` passes, each over as many drawn pairs as interactions.

    ``threads`` 0 is one thread for each core. With a ``seed`` the library ignores ``threads``,
    takes one thread, and gives the same model each time. Raises ConfigError if ``cornac`` is not
    installed, and DataError if there are no interactions.
    """
    bpr = require("cornac.models", "cornac").BPR(
        k=factors,
        max_iter=iterations,
        learning_rate=learning_rate,
        lambda_reg=regularisation,
        num_threads=threads,
        seed=seed,
    )
    data = _dataset(train)
    started = time.perf_counter()
    bpr.fit(data)
    seconds = time.perf_counter() - started
    ones = np.ones((train.n_users, 1), dtype=np.float32)
    return CornacBPR(
        np.hstack([bpr.u_factors, ones]),
        np.hstack([bpr.i_factors, bpr.i_biases[:, None]]),
        seconds,
    )


def _dataset(train: Interactions) -> Any:
    """The interactions as a data set of the library, with the same user and item numbers."""
    if train.nnz == 0:
        raise DataError("the data has no interactions to learn from")
    # Its Dataset.build would number users and items anew, and leave out those without any.
    return require("cornac.data", "cornac").Dataset(
        num_users=train.n_users,
        num_items=train.n_items,
        uid_map={user: user for user in range(train.n_users)},
        iid_map={item: item for item in range(train.n_items)},
        uir_tuple=(train.users, train.items, np.ones(train.nnz)),
    )
