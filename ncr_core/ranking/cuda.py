"""The tables of a tower as the scan on a GPU takes them, made once a model."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ncr_core.models.tables import TowerTable
from ncr_core.ranking.margins import CLOSE, PAD, ROUNDING, TIE, Margins

LEAST_WIDTH = 16
LANES_BY_WIDTH = 4_096  # of a block: what fits into a program's registers
M_BUCKET, B_BUCKET = 64, 16
MOST_BYTES = 2**30  # of a pass's working room


class FusedScan:
    """Algorithm 1 on a GPU for a model with a tower: one launch a pass, no synchronisation in it.

    ``interpreted`` is for tests: the same kernel, on tensors of the CPU, by Triton's interpreter.
    """

    def __init__(self, margins: Margins) -> None:
        from ncr_core.ranking import cuda_kernel  # Triton comes with torch where there are GPUs

        tower, single = margins.double.tower, margins.single.tower
        if tower is None or single is None or tower.items is not None:
            raise ValueError("only towers over C + A + B are for this kernel")
        widths = [tower.first.shape[1], *(len(bias) for _, bias in tower.layers)]
        self._kernel: Any = cuda_kernel.scan
        self._margins = margins
        self._width = max(LEAST_WIDTH, _power_of_two(max(widths)))
        self._look = max(16, min(128, LANES_BY_WIDTH // self._width))
        self._single, self._double = (self._tables(table) for table in (single, tower))

    def takes(self, batch: int, n_candidates: int) -> bool:
        """Whether the room for such a pass is bounded."""
        return batch * n_candidates * 32 <= MOST_BYTES

    def rank(self, users: Tensor, items: Tensor, linear: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(B, E) user vectors, (B, M) item rows filled up with −1, (B, M) s_ui in float64 →
        (B, k) rows of the top k, likewise, and (B,) pairs compared; all on the model's device."""
        tower = self._margins.double.tower
        assert tower is not None  # noqa: S101 - the constructor saw to it
        b, m = items.shape
        # Shapes in steps: the allocator finds room of the same sizes again.
        rows, width = _up(b, B_BUCKET), _up(m, M_BUCKET)
        device = items.device
        own = tower.own(users.double())
        projected = (own.unsqueeze(1) * tower.user_weight).sum(dim=2) + tower.user_bias
        close = CLOSE * self._margins.caution(projected)
        padded = _widened(projected, self._width)
        room = torch.zeros((rows, width), dtype=torch.int32, device=device)
        taken = torch.zeros((rows, width), dtype=torch.int8, device=device)
        candidates = torch.full((b, width), 0, dtype=torch.int32, device=device)
        candidates[:, :m] = items.clamp(min=0)
        scores = torch.zeros((b, width), dtype=torch.float64, device=device)
        scores[:, :m] = linear
        lengths = (items != PAD).sum(dim=1).to(torch.int32)
        ranked = torch.full((b, k), PAD, dtype=torch.int32, device=device)
        pairs = torch.zeros(b, dtype=torch.int32, device=device)
        if b and m and k:
            self._kernel[(b,)](
                candidates, lengths, scores, close, padded.float(), padded,
                *self._single, *self._double, room, taken, ranked, pairs, width, k,
                tie=TIE, rounding=ROUNDING, L=len(tower.layers), H=self._width, LOOK=self._look,
                RELU=tower.activation == "relu", num_warps=4,
            )  # fmt: skip
        return ranked.long(), pairs

    def _tables(self, tower: TowerTable) -> tuple[Tensor, ...]:
        """(first, second, weights, biases, w), padded with zeros to one width."""
        h, dtype, device = self._width, tower.first.dtype, tower.first.device
        weights = torch.zeros((max(1, len(tower.layers)), h, h), dtype=dtype, device=device)
        biases = torch.zeros((len(weights), h), dtype=dtype, device=device)
        for at, (weight, bias) in enumerate(tower.layers):
            weights[at, : weight.shape[0], : weight.shape[1]] = weight
            biases[at, : len(bias)] = bias
        last = _widened(tower.weight.unsqueeze(0), h).squeeze(0)
        return _widened(tower.first, h), _widened(tower.second, h), weights, biases, last


def fused_scan(margins: Margins) -> FusedScan | None:
    """The scan on a GPU, tried out against what it must give; None where it cannot be had."""
    tower = margins.double.tower
    if tower is None or tower.items is not None or tower.first.device.type != "cuda":
        return None
    try:
        made = FusedScan(margins)
        _try_out(made, margins)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        warnings.warn(f"lists are ranked in torch, which is slower: {reason}", stacklevel=2)
        return None
    return made


def _try_out(scan: FusedScan, margins: Margins) -> None:
    """Ranks a few items for a few users of no meaning, beside the scan in torch."""
    from ncr_core.ranking.scan import resumable_scan

    tower = margins.double.tower
    assert tower is not None  # noqa: S101 - the caller saw to it
    generator = torch.Generator().manual_seed(0)
    device, n_items = tower.first.device, len(tower.first)
    size = max(table.columns.stop for table in (tower, margins.double.linear) if table is not None)
    users = torch.randn((4, size), generator=generator).to(device)
    m = min(100, n_items)
    items = torch.stack([torch.randperm(n_items, generator=generator)[:m] for _ in range(4)])
    items = items.to(device)
    bound = margins.bind(users)
    rows = torch.arange(4, device=device)
    linear = bound.linear_scores(rows, items, double=True)
    lengths = torch.full((4,), m, device=device)

    def of_positions(some: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return bound(some, items[some.unsqueeze(1), i], items[some.unsqueeze(1), j])

    expected = items.gather(1, resumable_scan(of_positions, lengths, 10).clamp(min=0))
    ranked, _ = scan.rank(users, items, linear, min(10, m))
    if not ranked.equal(expected[:, : ranked.shape[1]]):
        raise RuntimeError("the kernel for this GPU does not rank as it should")


def _widened(x: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[1])).contiguous()


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
