"""Products with the matrices of the linear next-item model, by scans of users' histories.

A row x_t of X stands for an interaction t of a user and holds DECAY^(s−1) at the item s places
before it. The row y_t of Y holds a one at the item of t. With x_(t+1) = DECAY·x_t + e(item of t), a
product with X takes one step for each interaction, independent of the number of items before it.
XᵀX and XᵀY themselves have up to as many entries as there are pairs of items within a user's
history.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ncr_core.data.array_storage import table_storage
from ncr_core.data.interactions import FloatArray, IntArray
from ncr_core.ranking.backends.dense_kernel import compiled

Matrix = npt.NDArray[np.float32]


class DecayedHistories:
    """X and Y of all interactions, as products with blocks (n_items, k) of vectors."""

    def __init__(self, items: IntArray, indptr: IntArray, n_items: int, decay: float) -> None:
        """Takes interactions by user, each user's in time order: ``items[indptr[u]:indptr[u+1]]``.

        Args:
            items: (n,) numbers of items.
            indptr: (n_users + 1,) the place where each user's interactions begin.
            n_items: The number of items.
            decay: The weight of an item relative to the item after it.
        """
        self._items = np.ascontiguousarray(items)
        self._indptr = np.ascontiguousarray(indptr)
        self._n_items = n_items
        self._decay = np.float32(decay)
        self._longest = int(np.diff(indptr).max(initial=0))

    def gram(self, block: Matrix) -> Matrix:
        """XᵀX block."""
        return self._scan(_gram, block)

    def followers(self, block: Matrix) -> Matrix:
        """XᵀY block: for each item, the decayed sum of the block's rows of the items after it."""
        return self._scan(_followers, block)

    def predecessors(self, block: Matrix) -> Matrix:
        """YᵀX block: for each item, the decayed sum of the block's rows of the items before it."""
        return self._scan(_predecessors, block)

    def gram_diagonal(self) -> FloatArray:
        """(n_items,) the diagonal of XᵀX, or a part of it if a history has an item twice."""
        later = np.repeat(self._indptr[1:], np.diff(self._indptr)) - 1 - np.arange(len(self._items))
        square = float(self._decay) ** 2
        weights = (1.0 - square**later) / (1.0 - square)
        sums = np.bincount(self._items, weights=weights, minlength=self._n_items)
        return sums.astype(np.float32)

    def _scan(self, kernel: Any, block: Matrix) -> Matrix:
        """Runs the kernel in torch's number of threads at most, each on columns of its own."""
        block = np.ascontiguousarray(block, dtype=np.float32)
        result = table_storage().zeros(block.shape, np.float32)
        columns = block.shape[1]
        threads = max(1, min(torch.get_num_threads(), columns // MIN_COLUMNS))
        bounds = [columns * part // threads for part in range(threads + 1)]

        def scan(part: int) -> None:
            begin, end = bounds[part], bounds[part + 1]
            states = np.zeros((self._longest + 1, end - begin), dtype=np.float32)
            kernel(self._items, self._indptr, self._decay, block, begin, states, result)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(scan, range(threads)))
        return result


MIN_COLUMNS = 16  # of a thread: a cache line


@compiled
def _gram(
    items: Any, indptr: Any, decay: Any, block: Any, begin: int, states: Any, result: Any
) -> None:
    """Adds XᵀX block to result, in as many columns from ``begin`` on as ``states`` has."""
    width = states.shape[1]
    for user in range(len(indptr) - 1):
        first, length = indptr[user], indptr[user + 1] - indptr[user]
        for column in range(width):
            states[0, column] = 0
        for place in range(length - 1):  # forward: X block
            item = items[first + place]
            for column in range(width):
                states[place + 1, column] = (
                    decay * states[place, column] + block[item, begin + column]
                )
        for place in range(length - 2, -1, -1):  # backward: Xᵀ of that
            item = items[first + place]
            if place < length - 2:
                for column in range(width):
                    states[place + 1, column] += decay * states[place + 2, column]
            for column in range(width):
                result[item, begin + column] += states[place + 1, column]


@compiled
def _followers(
    items: Any, indptr: Any, decay: Any, block: Any, begin: int, states: Any, result: Any
) -> None:
    """Adds XᵀY block to result, as `_gram` does."""
    width = states.shape[1]
    for user in range(len(indptr) - 1):
        for column in range(width):
            states[0, column] = 0
        for at in range(indptr[user + 1] - 2, indptr[user] - 1, -1):
            item, following = items[at], items[at + 1]
            for column in range(width):
                states[0, column] = decay * states[0, column] + block[following, begin + column]
                result[item, begin + column] += states[0, column]


@compiled
def _predecessors(
    items: Any, indptr: Any, decay: Any, block: Any, begin: int, states: Any, result: Any
) -> None:
    """Adds YᵀX block to result, as `_gram` does."""
    width = states.shape[1]
    for user in range(len(indptr) - 1):
        for column in range(width):
            states[0, column] = 0
        for at in range(indptr[user] + 1, indptr[user + 1]):
            item, before = items[at], items[at - 1]
            for column in range(width):
                states[0, column] = decay * states[0, column] + block[before, begin + column]
                result[item, begin + column] += states[0, column]
