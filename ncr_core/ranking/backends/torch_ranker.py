"""Algorithm 1 in torch: the backend on a GPU without Triton and on a CPU without numba.

A pass of Algorithm 1 makes a chain of champions, each beaten by the next. Without the last
champion, the pass stays unchanged up to the position where the last champion took over. The next
pass therefore resumes there, with the champion before. The chain is a stack. No pair is compared
twice, and fewer than half of the literal algorithm's comparisons are left.

On a GPU ``resumable_scan`` scans a whole batch at once. On a CPU the number of operations costs
more than their size, so ``row_scan`` goes user by user and compares whole rows of pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ncr_core.models.scoring_tables import TowerTable
from ncr_core.ranking.margins import CLOSE, PAD, BoundMargins, Margins

PositionMargins = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows (R,), challenger positions (R, L), champion positions (R, L)) → margins (R, L)."""

Beats = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]
"""(L,) challenger positions and (L,) champion positions → whether each challenger is preferred."""

MAX_PAIRS_PER_STEP = 16_384
TAIL = 32  # candidates in the order of ``cheap_to_rank`` go from bad to good there


class TorchRanker:
    """Ranks by torch operations, for any model with a tower; see ``Ranker``. Built once a model."""

    def __init__(self, margins: Margins) -> None:
        tower = margins.double.tower
        if tower is None:
            raise ValueError("an additive model is sorted")
        self.margins = margins
        is_bounded = tower.activation == "tanh" and tower.items is None
        on_cpu = tower.first.device.type == "cpu"
        self.sigmoid_tower = _SigmoidTower(tower) if is_bounded and on_cpu else None

    def supports(self, n_users: int, n_candidates: int) -> bool:
        """Every shape is supported."""
        return True

    def bind(self, users: BoundMargins) -> TorchBatch:
        """The ranker for a batch of users."""
        return TorchBatch(self, users)


class TorchBatch:
    """A ``TorchRanker`` for a batch of B users."""

    def __init__(self, ranker: TorchRanker, users: BoundMargins) -> None:
        self._ranker = ranker
        self._users = users

    @torch.inference_mode()
    def rank(self, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(B, M) item rows → (B, k) rows of the top k, both padded with −1, and (B,) pairs."""
        lengths, items = (candidates != PAD).sum(dim=1), candidates.clamp(min=0)
        scan = self._row_by_row if items.device.type == "cpu" else self._whole_batch
        positions, pairs = scan(items, lengths, k)
        ranked = items.gather(1, positions.clamp(min=0))
        return ranked.masked_fill_(positions == PAD, PAD), pairs

    def _whole_batch(self, items: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        pairs = torch.zeros(len(items), dtype=torch.long, device=items.device)

        def margins(rows: Tensor, i: Tensor, j: Tensor) -> Tensor:
            pairs[rows] += i.shape[1]
            rows_of_pairs = rows.unsqueeze(1)
            return self._users(rows, items[rows_of_pairs, i], items[rows_of_pairs, j])

        return resumable_scan(margins, lengths, k), pairs

    def _row_by_row(self, items: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        positions = torch.full((len(items), k), PAD, dtype=torch.long)
        pairs = torch.zeros(len(items), dtype=torch.long)
        linear = self._users.linear_scores(torch.arange(len(items)), items, double=True)
        for row, length in enumerate(lengths.tolist()):
            beats = self._beats(row, items[row, :length], linear[row])
            best, pairs[row] = row_scan(beats, length, k)
            positions[row, : len(best)] = torch.tensor(best, dtype=torch.long)
        return positions, pairs

    def _beats(self, row: int, items: Tensor, linear: Tensor) -> Beats:
        """Whether positions of one user's (M,) items beat others; ``linear`` (M,) is s_ui.

        Margins of a bounded tower are computed in float32, from inputs that are gathered once a
        user. Margins close to zero are computed in float64, as in ``BoundMargins``.
        """
        batch_row = torch.tensor([row])
        users, tower = self._users, self._ranker.sigmoid_tower

        def exact(i: Tensor, j: Tensor) -> Tensor:
            return users(batch_row, items[i].unsqueeze(0), items[j].unsqueeze(0))[0]

        if tower is None or users.projected is None:
            return lambda i, j: (exact(torch.from_numpy(i), torch.from_numpy(j)) > 0).numpy()
        inputs = tower.inputs(users.projected[row], items)
        uncertain = CLOSE * float(users.caution[row]) * tower.max_sum

        def beats(
            challengers: NDArray[np.int64], champions: NDArray[np.int64]
        ) -> NDArray[np.bool_]:
            i, j = torch.from_numpy(challengers), torch.from_numpy(champions)
            margin = linear[i] - linear[j] + tower.margins(*inputs, i, j)
            # What is not a number in float32 may be one in float64.
            close = ~(margin.abs() >= uncertain)
            if bool(close.any()):
                rows = close.nonzero().flatten()
                margin[rows] = exact(i[rows], j[rows])
            result: NDArray[np.bool_] = (margin > 0).numpy()
            return result

        return beats


class _SigmoidTower:
    """A tanh tower in float32 with tanh(x) = 2σ(2x) − 1 folded into its tables.

    The weights contain the 2, 2 and −1: a layer is a product and a σ. The −1 of the last layer is
    the same in both orders and drops out of the margin.
    """

    def __init__(self, tower: TowerTable) -> None:
        self._first, self._second = ((2.0 * x).float() for x in (tower.first, tower.second))
        self._layers = [
            ((4.0 * weight).float(), (2.0 * (bias - weight.sum(dim=1))).float())
            for weight, bias in tower.layers
        ]
        self._weight = (2.0 * tower.weight).float()
        self.max_sum = max(1.0, 2.0 * float(tower.weight.abs().sum()))
        """The largest size of a margin's terms, at least 1."""

    def inputs(self, projected: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        """(h,) C_u and (M,) items → (M, h) inputs of the items as preferred and as the other."""
        return self._first[items].add_((2.0 * projected).float()), self._second[items]

    def margins(self, first: Tensor, second: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """(L,) the tower's part of the margins of positions i over j."""
        n = len(i)
        x = torch.empty((2 * n, first.shape[1]))
        torch.add(first[i], second[j], out=x[:n])
        torch.add(first[j], second[i], out=x[n:])
        x.sigmoid_()
        for weight, bias in self._layers:
            x = torch.addmm(bias, x, weight.T).sigmoid_()
        logits = x @ self._weight
        return logits[:n] - logits[n:]


def row_scan(beats: Beats, length: int, k: int) -> tuple[list[int], int]:
    """The positions of the top ``k`` of ``length`` candidates, best first, and the pairs compared.

    The positions are those of Algorithm 1 with ``beats``. A champion is compared with all positions
    behind at once. The last ``TAIL`` positions, where champions change most, are all compared with
    each other.
    """
    is_ranked = np.zeros(length, dtype=np.bool_)
    rows: dict[int, NDArray[np.bool_]] = {}  # who of all positions behind the champion beats it
    tail = max(0, length - TAIL)
    compared = 0

    def compare(champion: int) -> None:
        nonlocal compared
        if champion < tail:
            behind = np.arange(champion + 1, length)
            rows[champion] = beats(behind, np.full_like(behind, champion))
            compared += len(behind)
            return
        first, second = np.triu_indices(length - tail, 1)
        beaten = beats(second + tail, first + tail)
        compared += len(beaten)
        ends = np.searchsorted(first, np.arange(length - tail + 1))
        for offset in range(length - tail):
            rows[tail + offset] = beaten[ends[offset] : ends[offset + 1]]

    ranked: list[int] = []
    chain: list[int] = []
    position = 0  # the next challenger
    while len(ranked) < min(k, length):
        if not chain:  # everything before ``position`` has been ranked by then
            position += int(is_ranked[position:].argmin())
            chain.append(position)
            position += 1
        champion = chain[-1]
        step, is_beaten = 0, False
        if position < length:
            if champion not in rows:
                compare(champion)
            winners = rows[champion][position - champion - 1 :] & ~is_ranked[position:]
            step = int(winners.argmax())
            is_beaten = bool(winners[step])
        if is_beaten:
            chain.append(position + step)
            position += step + 1
        else:
            ranked.append(champion)
            is_ranked[champion] = True
            chain.pop()
            position = champion + 1
    return ranked, compared


def resumable_scan(margins: PositionMargins, lengths: Tensor, k: int) -> Tensor:
    """(B,) numbers of candidates → (B, k) positions of the top k in order, padded with −1.

    ``margins`` gives the margins of challengers over champions. Only the sign of a margin matters,
    and zero keeps the champion.
    """
    device = lengths.device
    n_rows, width = len(lengths), int(lengths.max()) if len(lengths) else 0
    ranked = torch.full((n_rows, k), PAD, dtype=torch.long, device=device)
    if n_rows == 0 or width == 0 or k == 0:
        return ranked
    stack = torch.zeros((n_rows, width), dtype=torch.long, device=device)
    depth = torch.zeros(n_rows, dtype=torch.long, device=device)
    position = torch.zeros(n_rows, dtype=torch.long, device=device)  # the next challenger
    n_ranked = torch.zeros(n_rows, dtype=torch.long, device=device)
    is_ranked = torch.zeros((n_rows, width), dtype=torch.bool, device=device)
    wanted = lengths.clamp(max=k)
    rows = (wanted > 0).nonzero().flatten()
    positions = torch.arange(width, device=device)
    while len(rows):
        # An empty chain begins with the first candidate that is still there. Everything before
        # ``position`` has been ranked by then.
        new = rows[depth[rows] == 0]
        if len(new):
            free = ~is_ranked[new] & (positions >= position[new].unsqueeze(1))
            first = free.to(torch.int8).argmax(dim=1)
            stack[new, 0] = first
            depth[new] = 1
            position[new] = first + 1
        look = max(16, min(width, MAX_PAIRS_PER_STEP // len(rows)))
        block = position[rows].unsqueeze(1) + torch.arange(look, device=device)
        inside = block < lengths[rows].unsqueeze(1)
        block = block.clamp(max=width - 1)
        champion = stack[rows, depth[rows] - 1]
        live = inside & ~is_ranked[rows].gather(1, block)
        margin = margins(rows, block, champion.unsqueeze(1).expand(-1, look))
        beaten = (margin > 0) & live
        any_beaten = beaten.any(dim=1)
        where = beaten.to(torch.int8).argmax(dim=1)

        up = rows[any_beaten]
        if len(up):
            challenger = position[up] + where[any_beaten]
            stack[up, depth[up]] = challenger
            depth[up] += 1
            position[up] = challenger + 1
        stay = rows[~any_beaten]
        position[stay] += look
        done = stay[position[stay] >= lengths[stay]]
        if len(done):
            top = stack[done, depth[done] - 1]
            ranked[done, n_ranked[done]] = top
            is_ranked[done, top] = True
            n_ranked[done] += 1
            depth[done] -= 1
            position[done] = top + 1
            rows = rows[n_ranked[rows] < wanted[rows]]
    return ranked
