"""The tables of a tower as the compiled scan takes them, made once a model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ncr_core.models.tables import PairTables, TowerTable
from ncr_core.ranking.margins import CLOSE, TIE

LARGEST = 28.0  # of 2x, so that a product of three exponentials fits into float32


@dataclass(frozen=True)
class Work:
    """What a scan had to do, per user: pairs looked at, and blocks of pairs computed."""

    pairs: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]


def compiled_scan(tables: PairTables) -> CompiledScan | None:
    """The compiled scan for float64 tables; None for what it is not made for, or without numba."""
    tower = tables.tower
    if tower is None or tower.first.device.type != "cpu" or find_spec("numba") is None:
        return None
    return CompiledScan(tower)


class CompiledScan:
    """Algorithm 1 on the CPU for a model with a tower, from its float64 table.

    May be called from several threads; splits a batch over as many as torch has for an operation.
    """

    def __init__(self, tower: TowerTable) -> None:
        from ncr_core.ranking import kernel  # numba takes half a second to import

        self._kernel = kernel
        self._tower = tower
        self._double = (
            *(_array(x) for x in (tower.first, tower.second)),
            _items(tower, torch.float64),
            _layers(tower, 1, torch.float64),
        )
        first, second = (_padded(x, kernel.UNROLLED) for x in (tower.first, tower.second))
        self._tanh = tower.activation == "tanh"
        # Without a layer above, eq. 24 adds to the first one before its activation.
        added = tower.items is not None and not tower.layers
        small = all(bool((2 * x.abs() < LARGEST).all()) for x in (first, second))
        self._fits = self._tanh and small and not added
        exp = (torch.exp(2 * x) if self._fits else x[:0] for x in (first, second))
        self._single = (
            *(_array(x.float()) for x in (first, second, *exp)),
            _items(tower, torch.float32),
            _layers(tower, kernel.UNROLLED, torch.float32),
        )

    def positions(
        self, users: Tensor, items: Tensor, lengths: Tensor, linear: Tensor, k: int
    ) -> tuple[Tensor, Work]:
        """(B, E) user vectors, (B, M) items and (B,) lengths, (B, M) s_ui in float64 → (B, k)
        positions of the top k, padded with −1, and what it took."""
        ranked = np.full((len(users), k), -1, dtype=np.int64)
        counts = np.zeros((len(users), 2), dtype=np.int64)
        rows, ends, scores = _array(items), _array(lengths), _array(linear)
        single, double = self._bound(users)

        def run(part: slice) -> None:
            self._kernel.scan_batch(
                rows[part], ends[part], k, scores[part],
                _part(single, 4, part), _part(double, 2, part), CLOSE, TIE,
                ranked[part], counts[part],
            )  # fmt: skip

        if items.shape[1] and k:
            _in_threads(run, len(users))
        return torch.from_numpy(ranked), Work(counts[:, 0], counts[:, 1])

    def mean_margins(self, users: Tensor, items: Tensor, n_anchors: int, linear: Tensor) -> Tensor:
        """The mean margin of items over anchors: (B, E) user vectors, (A + T,) the anchors, then
        the items, (B, A + T) their s_ui in float64 → (B, T) float64."""
        mean = np.zeros((len(users), len(items) - n_anchors))
        rows, scores = _array(items), _array(linear)
        single, _ = self._bound(users)

        def run(part: slice) -> None:
            self._kernel.mean_margins(
                rows, n_anchors, scores[part], _part(single, 4, part), mean[part]
            )

        if n_anchors:
            _in_threads(run, len(users))
        return torch.from_numpy(mean)

    def _bound(self, users: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """``single`` and ``double`` of the kernel for (B, E) user vectors."""
        tower, kernel = self._tower, self._kernel
        own = tower.own(users.double())
        projected = tower.project_user(users.double())
        padded = _padded(projected, kernel.UNROLLED)
        kinds = torch.full((len(users),), kernel.TANH if self._tanh else kernel.RELU)
        if self._fits:  # each user by itself: a figure must not depend on the rest of the batch
            kinds[(2 * padded.abs() < LARGEST).all(dim=1)] = kernel.TANH_BY_EXPONENTIALS
        of_users = (kinds, padded.float(), torch.exp(2 * padded).float(), own.float())
        single = (*(_array(x) for x in of_users), *self._single)
        return single, (_array(projected), _array(own), *self._double)


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


def _padded(x: Tensor, multiple: int) -> Tensor:
    """(n, h) with zeros up to a multiple: a unit without inputs gives act(0) = 0."""
    return torch.nn.functional.pad(x, (0, _up(x.shape[1], multiple) - x.shape[1]))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
