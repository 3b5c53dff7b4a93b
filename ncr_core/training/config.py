"""How a model is trained."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch

from ncr_core.errors import ConfigError

Loss = Literal["bce", "bpr", "listwise"]
Schedule = Literal["one-cycle", "constant"]
Stopping = Literal["validation", "paper"]
Optimizer = Literal["auto", "dense", "sparse"]
Start = Literal["random", "spectral", "als"]

MAX_SHARED = 65_536


@dataclass(frozen=True)
class TrainConfig:
    """Choices of the training loop. Raises ConfigError where they do not fit."""

    epochs: int = 15
    """Passes over the positives, at most."""

    batch_size: int = 0
    """Positives a step (the paper: 256). 0 takes 256 to 4,096 by the number of positives."""

    negatives: int = 4
    """Negatives a positive, drawn anew each epoch (the paper: 1)."""

    shared_negatives: int = 0
    """Above 0, all positives of a batch are compared with the same so many items, drawn anew each
    batch, in place of ``negatives`` of their own: products of matrices instead of look-ups. For
    nbpr, and the nbpr part of a pre-trained neupr. The whole catalogue where it is no larger."""

    start: Start = "random"
    """Where embeddings begin: at random, at the leading singular vectors of the interactions, or,
    nbpr's, at the factors of implicit ALS."""

    learning_rate: float = 1e-2
    """Adam's, and the peak of the one-cycle schedule."""

    schedule: Schedule = "one-cycle"
    """``one-cycle`` warms up and cools down over ``epochs``; ``constant`` is the paper's."""

    loss: Loss = "bce"
    """``bce`` over both orders of each pair (eq. 15); ``bpr`` is −log σ(z_uij) alone (eq. 3);
    ``listwise`` is −log of the probability that the positive beats all its negatives."""

    stated_weight: float = 1.0
    """How much a stated preference, or a positive beside an item that the user dislikes, counts
    next to a positive beside all its negatives. 0 leaves them out."""

    l2: float = 0.0
    """λ of λ‖Θ‖² (eq. 3) on the embeddings of each batch."""

    dropout: float = 0.0
    """The share of each user vector's coordinates left out at random in training."""

    optimizer: Optimizer = "auto"
    """Adam on whole tables (``dense``) or on the rows of each batch (``sparse``), by table."""

    stopping: Stopping = "validation"
    """``validation``: NDCG@10 with ``patience``; ``paper``: the loss falls by less than 0.1 %."""

    patience: int = 4
    """Epochs without a better validation NDCG@10 before training stops."""

    pretrain: bool = True
    """NeuPR starts from a trained NBPR and DNCR (eq. 26)."""

    alpha: float = 0.5
    """α of eq. 26, the share of the NBPR part."""

    fine_tune_epochs: int = 8
    """Passes after the two parts of a pre-trained NeuPR are put together, at most."""

    fine_tune_rate: float = 1e-3
    """The learning rate of these passes: the parts have converged already."""

    seed: int = 0
    """Of initialisation, shuffling and sampling."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("loss", Loss),
            ("schedule", Schedule),
            ("stopping", Stopping),
            ("optimizer", Optimizer),
            ("start", Start),
        ):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(
                    f"{name} must be one of {', '.join(get_args(allowed))}, "
                    f"not {getattr(self, name)!r}"
                )
        for name in ("epochs", "negatives", "patience", "fine_tune_epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.batch_size < 0:
            raise ConfigError(f"batch_size must be at least 1, or 0, not {self.batch_size}")
        if not 0 <= self.shared_negatives <= MAX_SHARED:
            raise ConfigError(
                f"shared_negatives must be 0 to {MAX_SHARED:,}, not {self.shared_negatives}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        if not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"alpha must be between 0 and 1, not {self.alpha}")
        if not 0.0 <= self.stated_weight < math.inf:
            raise ConfigError(f"stated_weight must be 0 or above, not {self.stated_weight}")
        rates = (self.learning_rate, self.fine_tune_rate)
        if not all(0 < rate < math.inf for rate in rates) or not 0 <= self.l2 < math.inf:
            raise ConfigError("learning rates must be above 0, l2 not below 0, and both finite")

    def batch_size_for(self, positives: int) -> int:
        """The batch size for so many positives: about 80 steps an epoch where it is chosen."""
        return self.batch_size or min(4096, max(256, positives // 80))

    def torch_device(self) -> torch.device:
        return resolve_device(self.device)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one. Raises ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}: auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not (
        torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    ):
        raise ConfigError(f"device {name!r} is not there: this machine offers no such GPU to torch")
    return device
