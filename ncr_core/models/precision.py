"""Checks for training in bfloat16, which has the range of float32 and three digits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


@cache
def has_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16; without them bfloat16 is slower."""
    get_capabilities: Callable[[], dict[str, bool]] = getattr(torch.cpu, "get_capabilities", dict)
    capabilities = get_capabilities()  # of later releases of torch
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def may_use_bfloat16(x: torch.Tensor) -> bool:
    """Whether products of this tensor are several times as fast in bfloat16."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and has_bfloat16()
