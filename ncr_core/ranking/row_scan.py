"""The resumable scan for one user at a time, by whole rows: few and large operations.

Where there is no compiled code, what costs on a CPU is the number of operations rather than their
size. So a champion is compared with everyone behind it at once, and those at the end, where
champions change most, all with each other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ncr_core.models.tables import Layers, TowerTable
from ncr_core.ranking.margins import CLOSE, BoundMargins, Margins

Beats = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]
"""(L,) challenger positions and (L,) champion positions → whether each is preferred to it."""

TAIL = 32  # where candidates are in the order of ``cheap_to_rank``, which is from bad to good there


def row_scan(beats: Beats, length: int, k: int) -> tuple[list[int], int]:
    """The positions of the top ``k`` of ``length`` candidates, in order, and the pairs compared.

    Equal to Algorithm 1 on what ``beats`` says; see ``resumable_scan`` for why a pass resumes.
    """
    taken = np.zeros(length, dtype=np.bool_)
    rows: dict[int, NDArray[np.bool_]] = {}
    tail = max(0, length - TAIL)
    compared = 0

    def row(champion: int) -> NDArray[np.bool_]:
        """Who of all positions behind the champion beats it."""
        nonlocal compared
        if champion not in rows:
            if champion < tail:
                behind = np.arange(champion + 1, length)
                rows[champion] = beats(behind, np.full_like(behind, champion))
                compared += len(behind)
            else:
                first, second = np.triu_indices(length - tail, 1)
                found = beats(second + tail, first + tail)
                compared += len(found)
                ends = np.searchsorted(first, np.arange(length - tail + 1))
                for at in range(length - tail):
                    rows[tail + at] = found[ends[at] : ends[at + 1]]
        return rows[champion]

    ranked: list[int] = []
    chain: list[int] = []
    at = 0  # the next position to look at
    while len(ranked) < min(k, length):
        if not chain:  # everything before ``at`` has been taken by then
            at += int(taken[at:].argmin())
            chain.append(at)
            at += 1
        champion = chain[-1]
        ahead = row(champion)[at - champion - 1 :] & ~taken[at:] if at < length else taken[:0]
        step = int(ahead.argmax()) if len(ahead) else 0
        if len(ahead) and ahead[step]:
            chain.append(at + step)
            at += step + 1
        else:
            ranked.append(champion)
            taken[champion] = True
            chain.pop()
            at = champion + 1
    return ranked, compared


class RowScan:
    """Algorithm 1 in torch on a CPU, for a model with a tower. Built once a model.

    tanh(x) = 2σ(2x) − 1, and the 2, 2 and −1 are in the tables: a layer is a product and a σ.
    """

    def __init__(self, margins: Margins) -> None:
        tower = margins.double.tower
        if tower is None:
            raise ValueError("an additive model is sorted")
        self._margins = margins
        self._tower = tower
        self._first, self._second = ((2.0 * x).float() for x in (tower.first, tower.second))
        layers, weight = _folded(tower)
        self._layers = [(w.float(), b.float()) for w, b in layers]
        self._weight = weight.float()
        # A margin's last sum is of at most so much.
        self._size = max(1.0, 2.0 * float(tower.weight.abs().sum()))

    @staticmethod
    def takes(margins: Margins) -> bool:
        """Whether it is made for this model."""
        tower = margins.double.tower
        return (
            tower is not None
            and tower.items is None
            and tower.activation == "tanh"
            and not margins.double.points
            and tower.first.device.type == "cpu"
        )

    @torch.inference_mode()
    def rank(
        self, bound: BoundMargins, users: Tensor, items: Tensor, lengths: Tensor, k: int
    ) -> tuple[Tensor, int]:
        """(B, E) vectors, (B, M) item rows and how many of each count → (B, k) positions of the
        top k, padded with −1, and how many pairs were compared."""
        order = torch.full((len(items), k), -1, dtype=torch.long)
        compared = 0
        projected = self._tower.project_user(users.double())
        caution = self._margins.caution(projected)
        projected = (2.0 * projected).float()
        rows = torch.arange(len(items))
        linear = bound.linear_scores(rows, items, double=True)
        for user in range(len(items)):
            length = int(lengths[user])
            own = items[user, :length]
            beats = self._beats(
                bound, user, own, projected[user], linear[user], float(caution[user])
            )
            best, pairs = row_scan(beats, length, k)
            compared += pairs
            order[user, : len(best)] = torch.tensor(best, dtype=torch.long)
        return order, compared

    def _beats(
        self,
        bound: BoundMargins,
        user: int,
        items: Tensor,
        projected: Tensor,
        linear: Tensor,
        caution: float,
    ) -> Beats:
        first, second = self._first[items].add_(projected), self._second[items]
        least = CLOSE * caution * self._size
        row = torch.tensor([user])

        def beats(
            challengers: NDArray[np.int64], champions: NDArray[np.int64]
        ) -> NDArray[np.bool_]:
            i, j = torch.from_numpy(challengers), torch.from_numpy(champions)
            n = len(i)
            x = torch.empty((2 * n, first.shape[1]))
            torch.add(first[i], second[j], out=x[:n])
            torch.add(first[j], second[i], out=x[n:])
            x.sigmoid_()
            for weight, bias in self._layers:
                x = torch.addmm(bias, x, weight.T).sigmoid_()
            deep = x @ self._weight
            margin = linear[i] - linear[j] + (deep[:n] - deep[n:])
            # What is not a number in float32 may be one in float64.
            sure = margin.abs() >= least
            if not bool(sure.all()):
                close = (~sure).nonzero().flatten()
                again = bound(row, items[i[close]].unsqueeze(0), items[j[close]].unsqueeze(0))
                margin[close] = again[0]
            found: NDArray[np.bool_] = (margin > 0).numpy()
            return found

        return beats


def _folded(tower: TowerTable) -> tuple[Layers, Tensor]:
    """Layers and last weight that take σ(2x) in place of tanh(x), and give 2x to the next σ."""
    layers = tuple(
        (4.0 * weight, 2.0 * (bias - weight.sum(dim=1))) for weight, bias in tower.layers
    )
    # The −1 of the last is the same in both orders, and goes out of the margin.
    return layers, 2.0 * tower.weight
