"""Algorithm 1 in numba, for models with a tower on a CPU.

A model's tables become arrays once a model, and users' projections once a batch. The kernel does
without torch: each of many small operations would release Python's lock, and a busy server returns
the lock late.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ncr_core.data.array_storage import table_storage
from ncr_core.models.scoring_tables import LinearTable, TowerTable
from ncr_core.optional_imports import numba_kernel
from ncr_core.ranking.margins import CLOSE, TIES, USUAL_INPUTS, BoundMargins, Margins

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

NO_BOOST: Floats = np.zeros(0)
UNROLLED = 4  # ``dense_kernel`` wants widths that are multiples of it
MAX_EXPONENT = 28.0  # of 2x, so that a product of three exponentials fits into float32
ROWS_AT_ONCE = 2**14
MAX_COLUMNS = 2**27  # of features by candidates: a GiB in two float32 arrays


def ranking_kernel() -> ModuleType | None:
    """The compiled code of the scan; None without numba, or if compilation fails."""
    return numba_kernel("ncr_core.ranking.backends.numba_kernel")


def numba_ranker(margins: Margins) -> NumbaRanker | None:
    """The ranker of a model; None for an unsupported model, or without numba."""
    tables, kernel = margins.double, None
    if tables.tower is not None and not tables.points and tables.tower.first.device.type == "cpu":
        kernel = ranking_kernel()
    return None if kernel is None else NumbaRanker(margins, kernel)


@dataclass(frozen=True)
class ScanWork:
    """The work of a scan for each of (B,) users: compared pairs, and computed blocks of pairs."""

    pairs: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]


class NumbaRanker:
    """Ranks by compiled code, for a model with a tower on a CPU; see ``Ranker``.

    One ranker serves a model, and threads may share the ranker. A batch is split over as many
    threads as torch has for an operation. Rows that the model does not have raise IndexError.
    """

    def __init__(self, margins: Margins, kernel: ModuleType) -> None:
        tower, single = margins.double.tower, margins.single.tower
        if tower is None or single is None:
            raise ValueError("an additive model is sorted")
        self.kernel = kernel
        self.n_items, self._h = tower.first.shape
        self.double = (
            *(_array(x) for x in (tower.first, tower.second)),
            _items(tower, torch.float64),
            _layers(tower, 1, torch.float64),
        )
        first, second = (_padded(x, UNROLLED) for x in (single.first, single.second))
        self._tanh = tower.activation == "tanh"
        # Without a layer above, eq. 24 adds to the first one before its activation.
        added = tower.items is not None and not tower.layers
        self._fits = self._tanh and not added and all(_is_small(x) for x in (first, second))
        exp = [_exponentials(x if self._fits else x[:0]) for x in (tower.first, tower.second)]
        self.single = (
            *(_array(x) for x in (first, second)),
            *(_array(_padded(x, UNROLLED, 1.0)) for x in exp),
            _items(single, torch.float32),
            _layers(tower, UNROLLED, torch.float32),
        )
        self._width = first.shape[1]
        start = tower.columns.start or 0
        self._user = (start, _array(tower.user_weight), _array(tower.user_bias))
        more = float(margins.more_than_usual)
        self._sizes = (MAX_EXPONENT, float(margins.largest_input), USUAL_INPUTS, CLOSE, more)
        self.linear = _linear_arrays(margins.double.linear, self.n_items)

    def supports(self, n_users: int, n_candidates: int) -> bool:
        """Whether the kernel has the memory for so many candidates a user."""
        return n_candidates * self._h <= MAX_COLUMNS

    def bind(self, users: BoundMargins) -> NumbaBatch:
        """The ranker for a batch of users, whose projections the kernel computes once."""
        vectors = np.ascontiguousarray(users.users.detach().numpy(), dtype=np.float64)
        single, double = self.kernel.bind(
            vectors, self._user, self._width, self._tanh, self._fits, self._sizes
        )
        boost = NO_BOOST if users.boost is None else _array(users.boost)
        return NumbaBatch(self, vectors, single, double, boost)


class NumbaBatch:
    """A ``NumbaRanker`` for a batch of B users, with their (B, E) vectors in float64."""

    def __init__(
        self,
        ranker: NumbaRanker,
        vectors: Floats,
        single: tuple[npt.NDArray[Any], ...],
        double: tuple[npt.NDArray[Any], ...],
        boost: Floats,
    ) -> None:
        self._ranker, self._boost = ranker, boost
        self._vectors, self._single, self._double = vectors, single, double

    def rank(self, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(B, M) item rows → (B, k) rows of the top k, both padded with −1, and (B,) pairs."""
        ranked, work = self.scan(_rows(candidates), k)
        return torch.from_numpy(ranked), torch.from_numpy(work.pairs)

    def scan(self, candidates: Rows, k: int) -> tuple[Rows, ScanWork]:
        """As ``rank``, on arrays, with the work of the scan."""
        ranked = np.full((len(candidates), k), -1, dtype=np.int64)
        counts = np.zeros((len(candidates), 2), dtype=np.int64)
        if candidates.shape[1] and k:
            self._compute(self._ranker.kernel.scan_batch, (candidates, k), ranked, counts)
        return ranked, ScanWork(counts[:, 0], counts[:, 1])

    def all_margins(self, candidates: Tensor) -> Tensor:
        """(B, M) item rows → (B, M, M) float32 margins of each over each; 0 in the padding."""
        items = _rows(candidates)
        b, m = items.shape
        margins = np.zeros((b, m, m), dtype=np.float32)
        self._compute(self._ranker.kernel.all_margins, (items,), margins)
        return torch.from_numpy(margins)

    def list_margins(self, ranked: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """(B, k) lists, padded with −1, and (R,) items → (B, k, R) margins of each listed item.

        The margins are over each of the (R,) items. The second result has (B, k) margins over the
        next item of the list. Both are 0 in the padding.
        """
        b, k = ranked.shape
        n_others = len(others)
        items = np.concatenate(
            [np.broadcast_to(_rows(others), (b, n_others)), _rows(ranked)], axis=1
        )
        over_others = np.zeros((b, k, n_others), dtype=np.float32)
        over_next = np.zeros((b, k), dtype=np.float32)
        kernel = self._ranker.kernel
        self._compute(kernel.list_margins, (items, n_others), over_others, over_next)
        return torch.from_numpy(over_others), torch.from_numpy(over_next)

    def mean_margins(self, anchors: Tensor, items: Tensor) -> Tensor:
        """The mean margin of (T,) items over (A,) anchors → (B, T) float64."""
        mean = np.zeros((len(self._vectors), len(items)))
        rows = np.concatenate([_rows(anchors), _rows(items)])
        n_anchors, n_items = len(anchors), self._ranker.n_items
        if rows.size and (rows.min() < 0 or rows.max() >= n_items):
            # Compiled code reads whatever memory it is told to.
            raise _no_such_row(int(rows.min() if rows.min() < 0 else rows.max()), n_items)
        kernel, linear = self._ranker.kernel, self._ranker.linear

        def run(part: slice) -> tuple[bool, int]:
            vectors, single, _ = self._arrays(part)
            kernel.mean_margins(rows, n_anchors, vectors, linear, single, mean[part])
            return True, 0

        if n_anchors:
            self._in_threads(run, mean)
            if len(self._boost):
                of_anchors, of_items = np.split(self._boost[rows], [n_anchors])
                mean += of_items - of_anchors.mean()
        return torch.from_numpy(mean)

    def _compute(
        self, function: Callable[..., tuple[bool, int]], about: tuple[Any, ...], *out: Any
    ) -> None:
        """Fills ``out``, a row a user, by compiled code that takes items (B, …) and more."""
        items, *more = about
        linear = self._ranker.linear

        def run(part: slice) -> tuple[bool, int]:
            vectors, single, double = self._arrays(part)
            rows = (array[part] for array in out)
            about_users = vectors, linear, single, double, TIES, self._boost
            return function(items[part], *more, *about_users, *rows)

        self._in_threads(run, items)

    def _arrays(self, part: slice) -> tuple[Floats, tuple[Any, ...], tuple[Any, ...]]:
        """(vectors, single, double) of some users, with the model's tables."""
        return (
            self._vectors[part],
            (*(array[part] for array in self._single), *self._ranker.single),
            (*(array[part] for array in self._double), *self._ranker.double),
        )

    def _in_threads(
        self, run: Callable[[slice], tuple[bool, int]], batch: npt.NDArray[Any]
    ) -> None:
        """Runs parts of the users side by side, in as many threads as torch has."""
        n = len(self._vectors)
        if len(batch) != n:
            raise ValueError(f"{n} users, but {len(batch)} lists of candidates")
        threads = max(1, min(torch.get_num_threads(), n))
        ends = [n * part // threads for part in range(threads + 1)]
        parts = [slice(start, stop) for start, stop in pairwise(ends)]
        if threads == 1:
            results = [run(parts[0])]
        else:
            with ThreadPoolExecutor(threads - 1) as pool:
                others = [pool.submit(run, part) for part in parts[1:]]
                results = [run(parts[0]), *(other.result() for other in others)]
        for is_valid, row in results:
            if not is_valid:
                raise _no_such_row(row, self._ranker.n_items)


def _linear_arrays(table: LinearTable | None, n_items: int) -> tuple[int, Floats, Floats]:
    """The start of its part of a user vector, (n_items, d), and biases (n_items,) or none."""
    if table is None:
        return 0, np.zeros((n_items, 0)), np.zeros(0)
    bias = np.zeros(0) if table.bias is None else _array(table.bias)
    return table.columns.start or 0, _array(table.items), bias


def _no_such_row(row: int, n_items: int) -> IndexError:
    return IndexError(f"no item has the row {row}: there are {n_items:,}")


def _rows(items: Tensor) -> Rows:
    return np.ascontiguousarray(items.numpy(), dtype=np.int64)


def _array(x: Tensor) -> npt.NDArray[Any]:
    return np.ascontiguousarray(x.numpy())


def _items(tower: TowerTable, dtype: torch.dtype) -> npt.NDArray[Any]:
    if tower.items is None:
        return np.zeros((0, 0), dtype=np.float32 if dtype == torch.float32 else np.float64)
    return _array(tower.items.to(dtype))


def _layers(tower: TowerTable, multiple: int, dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
    """(widths, weights, biases, w): the layers one after the other, each width padded."""
    width = _up(tower.first.shape[1], multiple)
    widths, weights, biases = [width], [], []
    for weight, bias in tower.layers:
        n_out, n_in = (_up(n, multiple) for n in weight.shape)
        matrix = torch.zeros((n_out, n_in), dtype=dtype)
        matrix[: weight.shape[0], : weight.shape[1]] = weight
        weights.append(matrix.flatten())
        biases.append(_padded(bias.unsqueeze(0), multiple).squeeze(0).to(dtype))
        widths.append(n_out)
    none = [torch.zeros(0, dtype=dtype)]
    last = _padded(tower.weight.unsqueeze(0), multiple).squeeze(0).to(dtype)
    return (
        np.array(widths, dtype=np.int64),
        _array(torch.cat(weights or none)),
        _array(torch.cat(biases or none)),
        _array(last),
    )


def _padded(x: Tensor, multiple: int, value: float = 0.0) -> Tensor:
    """(n, h) filled up to a multiple: a unit without inputs, or with e^0, gives act(0) = 0."""
    missing = _up(x.shape[1], multiple) - x.shape[1]
    return torch.nn.functional.pad(x, (0, missing), value=value) if missing else x


def _is_small(x: Tensor) -> bool:
    low, high = torch.aminmax(x) if x.numel() else (0.0, 0.0)
    return 2 * max(-float(low), float(high)) < MAX_EXPONENT


def _exponentials(x: Tensor) -> Tensor:
    """e^2x of (n, h) float64 in float32, some rows at a time."""
    out = torch.from_numpy(table_storage().zeros(tuple(x.shape), np.float32))
    for start in range(0, len(x), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        out[rows] = torch.exp(2 * x[rows])
    return out


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
