"""The curvature of a tower's margins in a user's vector."""

from __future__ import annotations

import torch
from torch import Tensor

from ncr_core.models.tables import TowerTable

ROWS_AT_ONCE = 128


@torch.no_grad()
def margin_curvature(
    tower: TowerTable, projected: Tensor, basis: Tensor, i: Tensor, j: Tensor, weights: Tensor
) -> Tensor:
    """Σ_p weights_p·∇²(z_ij − z_ji)/2 over P pairs, in the directions of a basis → (r, r) float64.

    ``projected`` (h,) is the user's C_u and ``basis`` (h, r) how it moves; i and j (P,) are items.
    Only the tower's part: what is linear in the vector has none. With x_l = act(a_l) the layers,
    g_l the derivative of w·x_L by x_l and J_l = ∂a_l/∂v, ∇² = Σ_l J_lᵀ diag(g_l·act″(a_l)) J_l.

    Raises ValueError for a tower whose last layer the user's vector joins (eq. 24).
    """
    if tower.items is not None:
        raise ValueError("towers with shared embeddings are more than their projections")
    total = torch.zeros((basis.shape[1],) * 2, dtype=torch.float64, device=basis.device)
    if tower.activation != "tanh":
        return total  # a relu has none
    for start in range(0, len(i), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        first, other = i[part], j[part]
        inputs = torch.cat(
            [
                projected + tower.first[first] + tower.second[other],
                projected + tower.first[other] + tower.second[first],
            ]
        )
        half = weights[part].to(inputs.dtype) / 2
        total += _of_rows(tower, inputs, basis.to(inputs.dtype), torch.cat([half, -half])).double()
    return total


def _of_rows(tower: TowerTable, inputs: Tensor, basis: Tensor, weights: Tensor) -> Tensor:
    """Of w·tower at (R, h) inputs of the first activation."""
    above = [inputs.tanh()]
    for matrix, bias in tower.layers:
        above.append(torch.addmm(bias, above[-1], matrix.T).tanh())
    slopes = [1.0 - x * x for x in above]
    gradient = tower.weight * weights.unsqueeze(1)
    bends = []
    for layer in range(len(above) - 1, -1, -1):
        inner = gradient * slopes[layer]
        bends.append(-2.0 * above[layer] * inner)  # tanh″ = −2·tanh·tanh′
        if layer:
            gradient = inner @ tower.layers[layer - 1][0]
    bends.reverse()
    total = basis.T @ (basis * bends[0].sum(0).unsqueeze(1))
    moves = basis
    for layer in range(1, len(above)):
        matrix = tower.layers[layer - 1][0] * slopes[layer - 1].unsqueeze(1)
        moves = matrix @ moves  # (R, width, r)
        flat = moves.reshape(-1, moves.shape[2])
        total += flat.T @ (flat * bends[layer].reshape(-1, 1))
    return total
