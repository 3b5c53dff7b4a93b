"""The resumable scan: Algorithm 1 for a whole batch with less than half of its comparisons.

A pass of Algorithm 1 makes a chain of champions, each beaten by the next. Removing the last of the
chain leaves the pass before it unchanged up to the place where that last one took over, so the next
pass resumes there with the champion before it. The chain is a stack; nothing is compared twice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# (rows (R,), challenger positions (R, L), champion positions (R, L)) → margins (R, L)
PositionMargins = Callable[[Tensor, Tensor, Tensor], Tensor]

PAIRS_A_STEP = 16_384


def resumable_scan(margins: PositionMargins, lengths: Tensor, k: int) -> Tensor:
    """(B,) numbers of candidates → (B, k) positions of the top k in order, padded with −1.

    ``margins`` says by how much the candidate at one position is preferred to the champion at
    another; only its sign matters, and zero keeps the champion.
    """
    device = lengths.device
    n_rows, width = len(lengths), int(lengths.max()) if len(lengths) else 0
    ranked = torch.full((n_rows, k), -1, dtype=torch.long, device=device)
    if n_rows == 0 or width == 0 or k == 0:
        return ranked
    stack = torch.zeros((n_rows, width), dtype=torch.long, device=device)
    depth = torch.zeros(n_rows, dtype=torch.long, device=device)
    at = torch.zeros(n_rows, dtype=torch.long, device=device)  # the next position to look at
    found = torch.zeros(n_rows, dtype=torch.long, device=device)
    taken = torch.zeros((n_rows, width), dtype=torch.bool, device=device)
    wanted = lengths.clamp(max=k)
    rows = (wanted > 0).nonzero().flatten()
    positions = torch.arange(width, device=device)
    while len(rows):
        # An empty chain begins with the first candidate that is still there. Everything before
        # ``at`` has been taken by then.
        new = rows[depth[rows] == 0]
        if len(new):
            free = ~taken[new] & (positions >= at[new].unsqueeze(1))
            first = free.to(torch.int8).argmax(dim=1)
            stack[new, 0] = first
            depth[new] = 1
            at[new] = first + 1
        look = max(16, min(width, PAIRS_A_STEP // len(rows)))
        block = at[rows].unsqueeze(1) + torch.arange(look, device=device)
        inside = block < lengths[rows].unsqueeze(1)
        block = block.clamp(max=width - 1)
        champion = stack[rows, depth[rows] - 1]
        live = inside & ~taken[rows].gather(1, block)
        margin = margins(rows, block, champion.unsqueeze(1).expand(-1, look))
        beaten = (margin > 0) & live
        any_beaten = beaten.any(dim=1)
        where = beaten.to(torch.int8).argmax(dim=1)

        up = rows[any_beaten]
        if len(up):
            challenger = at[up] + where[any_beaten]
            stack[up, depth[up]] = challenger
            depth[up] += 1
            at[up] = challenger + 1
        stay = rows[~any_beaten]
        at[stay] += look
        done = stay[at[stay] >= lengths[stay]]
        if len(done):
            top = stack[done, depth[done] - 1]
            ranked[done, found[done]] = top
            taken[done, top] = True
            found[done] += 1
            depth[done] -= 1
            at[done] = top + 1
            rows = rows[found[rows] < wanted[rows]]
    return ranked
