"""NeuPR with one embedding for both of its parts (eq. 24)."""

from __future__ import annotations

from ncr_core.models.config import ModelConfig
from ncr_core.models.dncr import DNCR
from ncr_core.models.ranker import edge_weight


class SharedNeuPR(DNCR):
    """z_uij = w·a([U_u⊙V_i; −U_u⊙V_j] + W_N x_{N−1} + b_N), with x_{N−1} of the tower of eq. 23.

    The sum wants a last layer as wide as the element-wise part, 2e; the equation leaves it open.
    """

    def __init__(self, config: ModelConfig, n_users: int, n_items: int) -> None:
        super().__init__(config, n_users, n_items)
        self.weight = edge_weight(2 * config.tower_embedding, config)
