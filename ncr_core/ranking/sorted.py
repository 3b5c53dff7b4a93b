"""The best of the whole catalogue by a product of vectors: one product in float32 for all items,
and float64 for the few that it leaves in question."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ncr_core.models.tables import LinearTable
from ncr_core.ranking.loader import compiled_sort
from ncr_core.ranking.margins import PAD, TIE, Margins

SPARE = 16  # items beyond k that are looked at again
SCORES_AT_ONCE = 2**24  # of users by items: 64 MiB
UNIT = 2.0**-24  # of rounding in float32
NONE, NO_ORDER = np.zeros(0), np.zeros(0, dtype=np.int64)


@torch.inference_mode()
def top_of_all(
    margins: Margins,
    users: Tensor,
    k: int,
    allowed: Tensor | None,
    order: Tensor | None,
    compiled: bool = True,
) -> Tensor:
    """The best by the product of vectors in s_ui: as ``ExactRanker.top``, for any model that has
    one; in compiled code on a CPU where it may and can be. Raises ValueError for others."""
    single, double = margins.single.linear, margins.double.linear
    if single is None or double is None:
        raise ValueError("this model holds no product of vectors")
    k = min(k, len(double.items))
    if not k or not len(users):
        return torch.full((len(users), k), PAD, device=users.device)
    at_once = max(1, SCORES_AT_ONCE // len(double.items))
    parts = [
        _top(
            single,
            double,
            users[start : start + at_once],
            k,
            None if allowed is None else allowed[start : start + at_once],
            order,
            margins.linear_sizes,
            compiled and users.device.type == "cpu",
        )
        for start in range(0, len(users), at_once)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _top(
    single: LinearTable,
    double: LinearTable,
    users: Tensor,
    k: int,
    allowed: Tensor | None,
    order: Tensor | None,
    sizes: tuple[float, float],
    compiled: bool,
) -> Tensor:
    own = users[:, single.columns].float().contiguous()
    scores = own @ single.items.T if single.bias is None else single.bias + own @ single.items.T
    if allowed is not None:
        scores.masked_fill_(~allowed, -torch.inf)
    # In either of two scores float32 may err by as much as the rounding of d products of two
    # rounded numbers comes to.
    d = single.items.shape[1]
    error_by_length, error = (2 * (d + 4) * UNIT * size for size in sizes)
    if compiled and (kernel := compiled_sort()) is not None:
        best = np.empty((len(users), k), dtype=np.int64)
        kernel.best_by_product(
            scores.numpy(),
            error,
            error_by_length,
            own.numpy() if users.dtype == own.dtype else users[:, double.columns].double().numpy(),
            double.items.numpy(),
            NONE if double.bias is None else double.bias.numpy(),
            NO_ORDER if order is None else order.contiguous().numpy(),
            TIE,
            best,
        )
        return torch.from_numpy(best)
    errors = own.norm(dim=1) * error_by_length + error
    n_items = scores.shape[1]
    found = torch.topk(scores, min(k + SPARE, n_items), dim=1, sorted=True)
    values, rows = found
    ranked = _sorted(double, users, rows, values, k, order)
    if rows.shape[1] == n_items:
        return ranked
    # What was left out is below the last that was looked at.
    unsure = (values[:, -1] >= values[:, k - 1] - errors) & (values[:, -1] > -torch.inf)
    for user in unsure.nonzero().flatten().tolist():  # many that are nearly equal
        near = scores[user] >= values[user, k - 1] - errors[user]
        some = near.nonzero().T
        of_some = scores[user : user + 1, some[0]]
        ranked[user] = _sorted(double, users[user : user + 1], some, of_some, k, order)[0]
    return ranked


def _sorted(
    table: LinearTable, users: Tensor, rows: Tensor, values: Tensor, k: int, order: Tensor | None
) -> Tensor:
    """(B, L) item rows → the best k by their scores in float64; −1 where ``values`` says so."""
    place = (rows if order is None else order[rows]).argsort(dim=1)
    rows, values = rows.gather(1, place), values.gather(1, place)
    own = users[:, table.columns].double()
    # Element by element: not dependent on the rest of the batch.
    scores = (own.unsqueeze(1) * table.items[rows]).sum(dim=2)
    if table.bias is not None:
        scores += table.bias[rows]
    scores = (scores / TIE).round().masked_fill_(values == -torch.inf, -torch.inf)
    best = scores.sort(dim=1, descending=True, stable=True)
    ranked = rows.gather(1, best.indices)
    return ranked.masked_fill_(best.values == -torch.inf, PAD)[:, :k]
