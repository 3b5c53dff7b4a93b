"""Errors that say that there is too little memory."""

from __future__ import annotations

import pytest
import torch

from ncr_core.errors import lacks_device_memory, lacks_memory


@pytest.mark.parametrize(
    ("error", "of_device"),
    [
        (torch.OutOfMemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), False),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            False,
        ),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried"), False),
        (RuntimeError("std::bad_alloc"), False),
        (
            RuntimeError("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8 GiB"),
            False,
        ),
        (RuntimeError("Task was killed due to the node running low on memory."), False),
        (MemoryError(), False),
    ],
)
def test_a_lack_of_memory_is_that_of_a_device_or_of_the_machine(
    error: Exception, of_device: bool
) -> None:
    assert lacks_memory(error)
    assert lacks_device_memory(error) is of_device


def test_other_errors_of_memory_are_no_lack_of_it() -> None:
    for text in ("CUDA error: an illegal memory access was encountered", "shared_memory"):
        assert not lacks_memory(RuntimeError(text))
