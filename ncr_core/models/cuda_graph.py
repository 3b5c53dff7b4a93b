"""The capture of CUDA graphs: one at a time in a process, on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TypeVar

import torch

Result = TypeVar("Result")

_CAPTURES = Lock()
"""torch allows one capture at a time, and several models may begin one."""


def captured(
    run: Callable[[], Result], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Captures what a function does on a device → the graph, and the function's result.

    The function must not wait for the device. A replay of the graph writes to the tensors of the
    result again. Other threads may use the device meanwhile. Raises RuntimeError if the function
    cannot be captured; the current stream is then what it was.
    """
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream(device)
    with _CAPTURES, torch.cuda.device(device):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = run()
        finally:  # a capture that fails leaves its own stream behind
            torch.cuda.set_stream(before)
    return graph, result
