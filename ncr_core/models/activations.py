"""Activations of the hidden layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def sigmoid_tanh(x: Tensor) -> Tensor:
    """tanh(x) = 2σ(2x) − 1 without gradients, on a CPU in less than half the time of torch.tanh."""
    if x.device.type != "cpu":
        return torch.tanh(x)
    return x.mul(2).sigmoid_().mul_(2).sub_(1)


class _FastTanh(torch.autograd.Function):
    """``sigmoid_tanh`` with its gradient 1 − y².

    The absolute error is 1e-7. This error is too large for inputs of 1e-6, which the paper's
    initialisation N(0, 0.01²) gives in deep towers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = sigmoid_tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (y,) = ctx.saved_tensors
        result: Tensor = torch.ops.aten.tanh_backward(grads[0], y)
        return result


def fast_tanh(x: Tensor) -> Tensor:
    """tanh, on a CPU by the logistic function, which is faster there."""
    if x.device.type != "cpu":
        return torch.tanh(x)
    result: Tensor = _FastTanh.apply(x)  # type: ignore[no-untyped-call]
    return result


def activation_of(name: str, init: str) -> Callable[[Tensor], Tensor]:
    """The function of a ModelConfig's ``activation`` and ``init``."""
    if name == "relu":
        return torch.relu
    return torch.tanh if init == "paper" else fast_tanh
