"""Negatives that a trained NBPR draws: those that it would put on top of the list.

A tower has time for few negatives of each positive, and few uniform negatives say little about the
top of a list. Drawn by the probabilities of a like model, as many tell nearly as much as all items
(adaptive importance sampling, Bengio & Senécal 2008).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ncr_core.models import NBPR
from ncr_core.training.batches import SharedRows
from ncr_core.training.losses import NEVER

MAX_CELLS = 2**24  # of the probabilities that are drawn from at once: 64 MiB


class Proposal:
    """Draws negatives of each positive from those that a batch shares."""

    def __init__(self, nbpr: NBPR, n: int, seed: int) -> None:
        """``n`` is the number of negatives of each positive, and ``seed`` makes the draws."""
        self._nbpr = nbpr.eval().requires_grad_(False)
        self._n = n
        self._generator = torch.Generator(device=nbpr.device).manual_seed(seed)

    @torch.no_grad()
    def draw(self, rows: SharedRows, n_items: int) -> tuple[Tensor, Tensor]:
        """Items j (R, n), and the logarithms (R, n) of how many items each of them stands for.

        The draws are with replacement, by q_j = softmax_j(s_uj) over the valid items of the user. A
        drawn item stands for 1 / (n q_j) of them, and these stand for all ``n_items``. Of a user
        without any valid item, the items stand for none.
        """
        vectors = self._nbpr.training_vectors(rows.users, rows.histories)
        _, scores = self._nbpr.shared_scores(vectors, rows.row, rows.items, rows.negatives)
        log_q = scores.matrix().masked_fill_(~rows.valid, NEVER).log_softmax(1)
        probabilities = log_q.exp()
        at_once = max(1, MAX_CELLS // len(rows.negatives))
        drawn = torch.cat(
            [
                torch.multinomial(
                    probabilities[rows.row[first : first + at_once]],
                    self._n,
                    replacement=True,
                    generator=self._generator,
                )
                for first in range(0, len(rows.row), at_once)
            ]
        )
        at = rows.row.unsqueeze(1), drawn
        each = math.log(max(1.0, n_items / len(rows.negatives)) / self._n)
        log_counts = (each - log_q[at]).masked_fill_(~rows.valid[at], NEVER)
        return rows.negatives[drawn], log_counts
