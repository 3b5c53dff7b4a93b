"""The tables of a tower as the compiled scan takes them, made once a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ncr_core.models.tables import TowerTable
from ncr_core.ranking.margins import CLOSE, TIE, Margins

LARGEST = 28.0  # of 2x, so that a product of three exponentials fits into float32
ROWS_AT_ONCE = 2**14
MOST_COLUMNS = 2**27  # of features by candidates: a GiB in two float32 arrays


@dataclass(frozen=True)
class Work:
    """What a scan had to do, per user: pairs looked at, and blocks of pairs computed."""

    pairs: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]


def compiled_scan(margins: Margins) -> CompiledScan | None:
    """The compiled scan of a model; None for what it is not made for, or where numba is not."""
    tower = margins.double.tower
    if tower is None or tower.first.device.type != "cpu" or _kernel() is None:
        return None
    return CompiledScan(margins)


class CompiledScan:
    """Algorithm 1 on the CPU for a model with a tower.

    May be called from several threads; splits a batch over as many as torch has for an operation.
    """

    def __init__(self, margins: Margins) -> None:
        tower, single = margins.double.tower, margins.single.tower
        if tower is None or single is None:
            raise ValueError("an additive model is sorted")
        kernel = _compiled_kernel()
        self._tower, self._caution = tower, margins.caution
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

    def takes(self, n_candidates: int) -> bool:
        """Whether so many candidates a user are few enough for its memory."""
        return n_candidates * self._tower.first.shape[1] <= MOST_COLUMNS

    def positions(
        self, users: Tensor, items: Tensor, lengths: Tensor, linear: Tensor, k: int
    ) -> tuple[Tensor, Work]:
        """(B, E) user vectors, (B, M) items and (B,) lengths, (B, M) s_ui in float64 → (B, k)
        positions of the top k, padded with −1, and what it took.

        Raises IndexError for items that the model does not have.
        """
        self._check_batch(users, items, lengths, linear)
        ranked = np.full((len(users), k), -1, dtype=np.int64)
        counts = np.zeros((len(users), 2), dtype=np.int64)
        rows, ends, scores = _array(items.long()), _array(lengths.long()), _array(linear)
        single, double = self._bound(users)
        kernel = _compiled_kernel()

        def run(part: slice) -> None:
            kernel.scan_batch(
                rows[part], ends[part], k, scores[part],
                _part(single, 4, part), _part(double, 3, part), TIE, ranked[part], counts[part],
            )  # fmt: skip

        if items.shape[1] and k:
            _in_threads(run, len(users))
        return torch.from_numpy(ranked), Work(counts[:, 0], counts[:, 1])

    def all_margins(self, users: Tensor, items: Tensor, lengths: Tensor, linear: Tensor) -> Tensor:
        """As for ``positions`` → (B, M, M) margins of each candidate over each, float32; 0 beyond
        the lengths."""
        self._check_batch(users, items, lengths, linear)
        b, m = items.shape
        margins = np.zeros((b, m, m), dtype=np.float32)
        rows, ends, scores = _array(items.long()), _array(lengths.long()), _array(linear)
        single, double = self._bound(users)
        kernel = _compiled_kernel()

        def run(part: slice) -> None:
            kernel.all_margins(
                rows[part], ends[part], scores[part], _part(single, 4, part),
                _part(double, 3, part), TIE, margins[part],
            )  # fmt: skip

        _in_threads(run, len(users))
        return torch.from_numpy(margins)

    def mean_margins(self, users: Tensor, items: Tensor, n_anchors: int, linear: Tensor) -> Tensor:
        """The mean margin of items over anchors: (B, E) user vectors, (A + T,) the anchors, then
        the items, (B, A + T) their s_ui in float64 → (B, T) float64.

        Raises IndexError for items that the model does not have.
        """
        self._check(items)
        mean = np.zeros((len(users), len(items) - n_anchors))
        rows, scores = _array(items.long()), _array(linear)
        single, _ = self._bound(users)
        kernel = _compiled_kernel()

        def run(part: slice) -> None:
            kernel.mean_margins(rows, n_anchors, scores[part], _part(single, 4, part), mean[part])

        if n_anchors:
            _in_threads(run, len(users))
        return torch.from_numpy(mean)

    def _check_batch(self, users: Tensor, items: Tensor, *of_users: Tensor) -> None:
        if any(len(other) != len(users) for other in (items, *of_users)):
            raise ValueError(f"{len(users)} users, but {len(items)} lists of candidates")
        self._check(items)

    def _check(self, items: Tensor) -> None:
        """Compiled code reads whatever memory it is told to."""
        if not items.numel():
            return
        low, high = (int(x) for x in torch.aminmax(items))
        if low < 0 or high >= len(self._tower.first):
            wrong = low if low < 0 else high
            raise IndexError(f"no item has the row {wrong}: there are {len(self._tower.first):,}")

    def _bound(self, users: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """``single`` and ``double`` of the kernel for (B, E) user vectors."""
        tower, kernel = self._tower, _compiled_kernel()
        own = tower.own(users.double())
        # One by one: products of other shapes round differently.
        every = [tower.project_user(user) for user in torch.split(users.double(), 1)]
        projected = torch.cat(every) if every else tower.project_user(users.double())
        close = CLOSE * self._caution(projected)
        padded = _padded(projected, kernel.UNROLLED)
        kinds = torch.full((len(users),), kernel.TANH if self._tanh else kernel.RELU)
        if self._fits:  # each user by itself: a figure must not depend on the rest of the batch
            kinds[(2 * padded.abs() < LARGEST).all(dim=1)] = kernel.TANH_BY_EXPONENTIALS
        of_users = (kinds, padded.float(), torch.exp(2 * padded).float(), own.float())
        single = (*(_array(x) for x in of_users), *self._single)
        return single, (*(_array(x) for x in (projected, own, close)), *self._double)


@cache
def _kernel() -> ModuleType | None:
    """The compiled code, tried out once; None, with a warning, where it cannot be had."""
    try:
        import numba

        from ncr_core.ranking import kernel  # numba takes half a second to import
    except ModuleNotFoundError:
        return None
    except Exception as error:
        _warn(error)
        return None
    if getattr(numba.config, "DISABLE_JIT", False):  # Python would take minutes
        return None
    try:
        _try_out(kernel)
    except Exception:
        try:  # a full disk, or a damaged file of compiled code
            kernel.keep_nothing()
            _try_out(kernel)
        except Exception as error:
            _warn(error)
            return None
    return kernel


def _compiled_kernel() -> ModuleType:
    kernel = _kernel()
    if kernel is None:
        raise RuntimeError("there is no compiled code here")
    return kernel


def _warn(error: Exception) -> None:
    reason = str(error).partition("\n")[0]
    warnings.warn(f"lists are ranked in torch, which is slower: {reason}", stacklevel=3)


def _try_out(kernel: ModuleType) -> None:
    """Compiles what a ranker calls, for the types that it calls it with."""
    one, none = np.zeros((1, 4)), np.zeros((0, 0))
    floats = [x.astype(np.float32) for x in (one, none)]
    widths, nothing = np.array([4]), np.zeros(0)
    tower_d = (widths, nothing, nothing, np.zeros(4))
    tower = (widths, *(x.astype(np.float32) for x in tower_d[1:]))
    single = (np.array([kernel.TANH]), *floats[:1] * 7, floats[1], tower)
    rows, scores, out = np.zeros((1, 1), dtype=np.int64), np.zeros((1, 1)), np.zeros((1, 2))
    double = (one, one, np.ones(1), one, one, none, tower_d)
    ranked, counts = np.zeros((1, 1), dtype=np.int64), np.zeros((1, 2), dtype=np.int64)
    kernel.scan_batch(
        rows, np.ones(1, dtype=np.int64), 1, scores, single, double, TIE, ranked, counts
    )
    kernel.mean_margins(np.zeros(2, dtype=np.int64), 1, out, single, scores)
    margins = np.zeros((1, 1, 1), dtype=np.float32)
    kernel.all_margins(rows, np.ones(1, dtype=np.int64), scores, single, double, TIE, margins)


def _part(bound: tuple[Any, ...], of_users: int, part: slice) -> tuple[Any, ...]:
    """Some rows of the users' arrays, which come first, and the tables as they are."""
    return (*(array[part] for array in bound[:of_users]), *bound[of_users:])


def _in_threads(run: Callable[[slice], None], n: int) -> None:
    """Runs parts of ``n`` users side by side, as many as torch has threads."""
    threads = min(torch.get_num_threads(), n)
    if threads <= 1:
        run(slice(0, n))
        return
    ends = [n * part // threads for part in range(threads + 1)]
    parts = [slice(start, stop) for start, stop in pairwise(ends)]
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(run, part) for part in parts[1:]]
        run(parts[0])
        for other in others:
            other.result()


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
