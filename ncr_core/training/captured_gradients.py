"""Losses and gradients of batches of one shape, as a CUDA graph.

A step of training consists of some hundred small kernels. A GPU computes each of them in less time
than Python takes to start it, so a graph that starts all of them at once makes steps faster.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ncr_core.models.base import PairwiseRanker
from ncr_core.models.cuda_graph import captured
from ncr_core.training.batches import Rows, SharedRows

EAGER_STEPS = 3  # before the capture: libraries allocate their memory in these

Gradients = Callable[[Rows | SharedRows], Tensor]
"""A function that adds the gradients of a batch to the parameters, and returns the loss."""


class CapturedGradients:
    """Computes gradients by a graph for batches of the first batch's shape, and otherwise directly.

    Without a GPU, or if the capture fails, all computation is direct.

    Only rows without histories, weights and preferences have a graph: others have a shape for each
    batch. The graph draws dropout as the direct computation does. All calls need the gradients of
    the parameters to be None.
    """

    def __init__(self, model: PairwiseRanker) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        # Gradients by rows have a shape for each batch.
        self._may_capture = model.device.type == "cuda" and not model.sparse_tables()
        self._steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Rows | None = None
        self._loss: Tensor | None = None
        self._gradients: list[Tensor | None] = []

    def of(self, gradients: Gradients) -> Gradients:
        """The function by the graph, which is of the first such function.

        All functions must compute the same.
        """

        def compute(rows: Rows | SharedRows) -> Tensor:
            return self._compute(rows, gradients)

        return compute

    def _compute(self, rows: Rows | SharedRows, direct: Gradients) -> Tensor:
        if not (self._may_capture and isinstance(rows, Rows) and _is_plain(rows)):
            return direct(rows)
        if self._inputs is None:
            self._inputs = Rows(rows.users, rows.items, rows.negatives, None)
        if rows.negatives.shape != self._inputs.negatives.shape:
            return direct(rows)
        self._steps += 1
        if self._steps <= EAGER_STEPS:
            return direct(rows)
        if self._graph is None and not self._capture(rows, direct):
            return direct(rows)
        assert self._graph is not None and self._loss is not None  # noqa: S101, PT018
        self._inputs.users.copy_(rows.users)
        self._inputs.items.copy_(rows.items)
        self._inputs.negatives.copy_(rows.negatives)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss

    def _capture(self, rows: Rows, direct: Gradients) -> bool:
        """Captures a graph; False, with a warning, if an operation cannot be captured."""
        inputs = Rows(rows.users.clone(), rows.items.clone(), rows.negatives.clone(), None)
        try:
            graph, loss = captured(lambda: direct(inputs), rows.users.device)
        except RuntimeError as error:
            self._may_capture = False
            reason = str(error).partition("\n")[0]
            warnings.warn(f"the training has no CUDA graph and is slower: {reason}", stacklevel=2)
            for parameter in self._parameters:
                parameter.grad = None
            return False
        self._graph, self._inputs, self._loss = graph, inputs, loss
        self._gradients = [parameter.grad for parameter in self._parameters]
        return True


def _is_plain(rows: Rows) -> bool:
    return rows.histories is None and rows.weights is None and rows.preferences is None
