"""The tables of a tower as the compiled code takes them, made once a model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ncr_core.models.tables import LinearTable, TowerTable
from ncr_core.ranking.loader import compiled_kernel, kernel_or_none
from ncr_core.ranking.margins import CLOSE, TIES, USUAL_INPUTS, Margins

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

LARGEST = 28.0  # of 2x, so that a product of three exponentials fits into float32
ROWS_AT_ONCE = 2**14
MOST_COLUMNS = 2**27  # of features by candidates: a GiB in two float32 arrays


@dataclass(frozen=True)
class Work:
    """What a scan had to do, per user: pairs looked at, and blocks of pairs computed."""

    pairs: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BoundUsers:
    """Users' vectors (B, E), and what compiled code computes of them once."""

    vectors: Floats
    single: tuple[Any, ...]
    double: tuple[Any, ...]

    def part(self, of: slice) -> tuple[Any, ...]:
        """(vectors, single, double) of some users."""
        return (
            self.vectors[of],
            tuple(array[of] for array in self.single),
            tuple(array[of] for array in self.double),
        )


def compiled_scan(margins: Margins) -> CompiledScan | None:
    """The compiled scan of a model; None for what it is not made for, or where numba is not."""
    tables = margins.double
    if tables.tower is None or tables.points or tables.tower.first.device.type != "cpu":
        return None
    return None if kernel_or_none() is None else CompiledScan(margins)


class CompiledScan:
    """Algorithm 1 on the CPU for a model with a tower, from arrays to arrays.

    It does without torch: many small operations would each give Python's lock away, and a server
    that is busy gives it back late. May be called from several threads; splits a batch over as many
    as torch has for an operation. Rows that the model does not have raise IndexError.
    """

    def __init__(self, margins: Margins) -> None:
        tower, single = margins.double.tower, margins.single.tower
        if tower is None or single is None:
            raise ValueError("an additive model is sorted")
        kernel = compiled_kernel()
        self._n_items, self._h = tower.first.shape
        self._double = (
            *(_array(x) for x in (tower.first, tower.second)),
            _items(tower, torch.float64),
            _layers(tower, 1, torch.float64),
        )
        first, second = (_padded(x, kernel.UNROLLED) for x in (single.first, single.second))
        self._tanh = tower.activation == "tanh"
        # Without a layer above, eq. 24 adds to the first one before its activation.
        added = tower.items is not None and not tower.layers
        self._fits = self._tanh and not added and all(_is_small(x) for x in (first, second))
        exp = [_exponentials(x) if self._fits else x[:0] for x in (tower.first, tower.second)]
        self._single = (
            *(_array(x) for x in (first, second)),
            *(_array(_padded(x, kernel.UNROLLED, 1.0)) for x in exp),
            _items(single, torch.float32),
            _layers(tower, kernel.UNROLLED, torch.float32),
        )
        self._width = first.shape[1]
        start = tower.columns.start or 0
        self._user = (start, _array(tower.user_weight), _array(tower.user_bias))
        more = float(margins.more_than_usual)
        self._sizes = (LARGEST, float(margins.largest_input), USUAL_INPUTS, CLOSE, more)
        self._linear = linear_arrays(margins.double.linear, self._n_items)

    def takes(self, n_candidates: int) -> bool:
        """Whether so many candidates a user are few enough for its memory."""
        return n_candidates * self._h <= MOST_COLUMNS

    def bind(self, users: Floats) -> BoundUsers:
        """For (B, E) user vectors."""
        users = np.ascontiguousarray(users, dtype=np.float64)
        bound = compiled_kernel().bind(
            users, self._user, self._width, self._tanh, self._fits, self._sizes
        )
        return BoundUsers(users, *bound)

    def rank(self, users: BoundUsers, items: Rows, k: int) -> tuple[Rows, Work]:
        """(B, M) item rows, filled up with −1 → (B, k) rows of the top k, likewise, and what it
        took."""
        ranked = np.full((len(items), k), -1, dtype=np.int64)
        counts = np.zeros((len(items), 2), dtype=np.int64)
        scan = compiled_kernel().scan_batch

        def run(part: slice) -> tuple[bool, int]:
            vectors, single, double = self._with_tables(users, part)
            found: tuple[bool, int] = scan(
                items[part], k, vectors, self._linear, single, double, TIES,
                ranked[part], counts[part],
            )  # fmt: skip
            return found

        if items.shape[1] and k:
            self._in_threads(run, users, items)
        return ranked, Work(counts[:, 0], counts[:, 1])

    def all_margins(self, users: BoundUsers, items: Rows) -> npt.NDArray[np.float32]:
        """As for ``rank`` → (B, M, M) margins of each candidate over each; 0 beyond the lengths."""
        b, m = items.shape
        margins = np.zeros((b, m, m), dtype=np.float32)
        compute = compiled_kernel().all_margins

        def run(part: slice) -> tuple[bool, int]:
            vectors, single, double = self._with_tables(users, part)
            found: tuple[bool, int] = compute(
                items[part], vectors, self._linear, single, double, TIES, margins[part]
            )
            return found

        self._in_threads(run, users, items)
        return margins

    def against(
        self, users: BoundUsers, ranked: Rows, others: Rows
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """(B, k) lists, filled up with −1, and (R,) others → (B, k, R) margins of each item over
        each of the others, and (B, k) over the item after it; 0 beyond the lengths."""
        b, k = ranked.shape
        items = np.concatenate([np.broadcast_to(others, (b, len(others))), ranked], axis=1)
        over_others = np.zeros((b, k, len(others)), dtype=np.float32)
        over_next = np.zeros((b, k), dtype=np.float32)
        compute = compiled_kernel().against

        def run(part: slice) -> tuple[bool, int]:
            vectors, single, double = self._with_tables(users, part)
            found: tuple[bool, int] = compute(
                items[part], len(others), vectors, self._linear, single, double, TIES,
                over_others[part], over_next[part],
            )  # fmt: skip
            return found

        self._in_threads(run, users, items)
        return over_others, over_next

    def mean_margins(self, users: BoundUsers, anchors: Rows, items: Rows) -> Floats:
        """The mean margin of (T,) items over (A,) anchors → (B, T) float64."""
        mean = np.zeros((len(users.vectors), len(items)))
        rows = np.concatenate([anchors, items])
        check_rows(rows, self._n_items)
        compute = compiled_kernel().mean_margins

        def run(part: slice) -> tuple[bool, int]:
            vectors, single, _ = self._with_tables(users, part)
            compute(rows, len(anchors), vectors, self._linear, single, mean[part])
            return True, 0

        if len(anchors):
            self._in_threads(run, users, mean)
        return mean

    def _with_tables(self, users: BoundUsers, part: slice) -> tuple[Any, Any, Any]:
        vectors, single, double = users.part(part)
        return vectors, (*single, *self._single), (*double, *self._double)

    def _in_threads(
        self, run: Callable[[slice], tuple[bool, int]], users: BoundUsers, batch: npt.NDArray[Any]
    ) -> None:
        """Runs parts of the users side by side, as many as torch has threads."""
        n = len(users.vectors)
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
        for good, wrong in results:
            if not good:
                raise _no_such_row(wrong, self._n_items)


def linear_arrays(table: LinearTable | None, n_items: int) -> tuple[int, Floats, Floats]:
    """Where its part of a user vector begins, (n_items, d), and biases (n_items,) or none."""
    if table is None:
        return 0, np.zeros((n_items, 0)), np.zeros(0)
    bias = np.zeros(0) if table.bias is None else _array(table.bias)
    return table.columns.start or 0, _array(table.items), bias


def check_rows(items: Rows, n_items: int) -> None:
    """Raises IndexError: compiled code reads whatever memory it is told to."""
    if items.size and (items.min() < 0 or items.max() >= n_items):
        raise _no_such_row(int(items.min() if items.min() < 0 else items.max()), n_items)


def _no_such_row(row: int, n_items: int) -> IndexError:
    return IndexError(f"no item has the row {row}: there are {n_items:,}")


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
    return 2 * max(-float(low), float(high)) < LARGEST


def _exponentials(x: Tensor) -> Tensor:
    """e^2x of (n, h) float64 in float32, some rows at a time."""
    out = torch.empty(x.shape, dtype=torch.float32)
    for start in range(0, len(x), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        out[rows] = torch.exp(2 * x[rows])
    return out


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
