"""An ALS start: the factors of implicit alternating least squares as the first embeddings.

Hu, Koren and Volinsky 2008 in the form of Rendle et al. 2021:

    Σ_S (1 − U_u·V_i)² + α₀ Σ_all (U_u·V_i)²
    + λ Σ_u (n_u + α₀ n_items) ‖U_u‖² + λ Σ_i (n_i + α₀ n_users) ‖V_i‖²

It fits the whole matrix in closed form, row by row, which suits data too sparse to learn from by
sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ncr_core.data.interactions import Interactions
from ncr_core.errors import ConfigError
from ncr_core.models import PairwiseRanker
from ncr_core.models.nbpr import NBPR
from ncr_core.models.users import FreeUsers

SWEEPS = 12
UNOBSERVED = 0.1  # α₀
L2 = 0.01  # λ
SCALE = 10.0  # scores are about 0 to 1, and a logit needs room
CELLS = 2**24  # of the padded rows that are solved at once


@torch.no_grad()
def als_start(model: PairwiseRanker, train: Interactions, seed: int) -> None:
    """Sets the embeddings of an NBPR with free users, on its device. Raises ConfigError."""
    if not isinstance(model, NBPR) or not isinstance(model.users, FreeUsers):
        raise ConfigError("an ALS start is for nbpr with free users")
    device, d = model.device, model.config.factors
    rows = torch.from_numpy(train.users).to(device)
    columns = torch.from_numpy(train.items).to(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    items = torch.randn(train.n_items, d, generator=generator, device=device) * 0.1 / d**0.5
    by_item = torch.argsort(columns, stable=True)
    for _ in range(SWEEPS):
        users = _solve(items, rows, columns, train.n_users)
        items = _solve(users, columns[by_item], rows[by_item], train.n_items)
    users = _solve(items, rows, columns, train.n_users)
    model.users.weight.copy_(users * SCALE**0.5)
    model.items.weight.copy_(items * SCALE**0.5)


def _solve(other: Tensor, rows: Tensor, columns: Tensor, n: int) -> Tensor:
    """The n best rows for a fixed ``other`` (m, d); the entries (rows, columns) go by rows."""
    d = other.shape[1]
    lengths = torch.bincount(rows, minlength=n)
    starts = lengths.cumsum(0) - lengths
    everywhere = UNOBSERVED * other.T @ other
    eye = torch.eye(d, device=other.device)
    padded = torch.cat([other, other.new_zeros(1, d)])
    solved = other.new_zeros(n, d)
    order = torch.argsort(lengths)  # rows of like lengths together, so that little is padding
    at = 0
    while at < n:
        count = max(1, min(n - at, CELLS // (d * max(int(lengths[order[at]]), d))))
        while count > 1 and count * d * max(int(lengths[order[at + count - 1]]), d) > CELLS:
            count = -(-count // 2)
        some = order[at : at + count]
        own, longest = lengths[some], int(lengths[some].max())
        place = torch.arange(longest, device=other.device)
        index = (starts[some].unsqueeze(1) + place).clamp(max=len(columns) - 1)
        inside = place < own.unsqueeze(1)
        found = padded[torch.where(inside, columns[index], len(other))]
        ridge = L2 * (own + UNOBSERVED * len(other))
        left = everywhere + found.transpose(1, 2) @ found + ridge.view(-1, 1, 1) * eye
        solved[some] = torch.linalg.solve(left, found.sum(dim=1))
        at += count
    return solved
