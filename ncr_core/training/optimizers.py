"""Adam over whole tables or over the rows of each batch, whichever is faster at their sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ncr_core.models.ranker import PairwiseRanker
from ncr_core.models.users import FreeUsers
from ncr_core.training.config import TrainConfig

SPARSE_FROM = 20  # table rows for each row of a batch, as benchmarks/adam.py measures it


class Adam:
    """Dense Adam, and Adam by rows (lazy: rows outside the batch keep their moments).

    ``total_steps`` gives the one-cycle schedule its length; None is a constant rate.
    """

    def __init__(
        self, model: PairwiseRanker, config: TrainConfig, rate: float, total_steps: int | None
    ) -> None:
        self._choose(model, config)
        by_rows = {id(p) for p in _tables(model)}
        dense = [p for p in model.parameters() if p.requires_grad and id(p) not in by_rows]
        sparse = [p for p in model.parameters() if p.requires_grad and id(p) in by_rows]
        self._optimizers: list[torch.optim.Optimizer] = []
        if dense:
            self._optimizers.append(torch.optim.Adam(dense, rate, fused=True))
        if sparse:
            self._optimizers.append(torch.optim.SparseAdam(sparse, rate))
        self._schedules = [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps)
            for optimizer in self._optimizers
            if total_steps is not None
        ]
        self._left = total_steps

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()
        # A schedule refuses more steps than it was told of.
        if self._left is not None and self._left > 1:
            self._left -= 1
            for schedule in self._schedules:
                schedule.step()

    @staticmethod
    def _choose(model: PairwiseRanker, config: TrainConfig) -> None:
        batch = config.batch_size or 4096
        items = batch + (config.shared_negatives or batch * config.negatives)
        least = {"auto": SPARSE_FROM, "dense": float("inf"), "sparse": 1}[config.optimizer]
        model.sparse_users = model.n_users > least * batch
        model.sparse_items = model.n_items > least * items


def _tables(model: PairwiseRanker) -> list[Tensor]:
    """The tables that get gradients by rows."""
    found: list[Tensor] = []
    if model.sparse_users:
        found += [part.weight for part in model.user_parts() if isinstance(part, FreeUsers)]
    if model.sparse_items:
        found += [
            table.weight
            for name, table in model.named_children()
            if name.startswith("items") and isinstance(table, nn.Embedding)
        ]
    return found
