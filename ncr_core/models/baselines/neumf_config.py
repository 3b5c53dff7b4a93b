"""How a NeuMF is made and trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ncr_core.errors import ConfigError
from ncr_core.models.baselines.limits import above_zero, at_least

Kind = Literal["gmf", "mlp", "neumf"]
Rates = Literal["one-cycle", "constant"]
Optimizer = Literal["adam", "sgd"]


@dataclass(frozen=True)
class NeuMFConfig:
    """Choices of a NeuMF. Raises ConfigError where they do not fit."""

    model: Kind = "neumf"
    """neumf, or one of its parts alone: gmf, mlp."""

    factors: int = 8
    """d, the predictive factors: GMF's embedding and the width of the tower's last layer."""

    layers: int = 3
    """Hidden layers of the tower; the concatenation counts as the first."""

    epochs: int = 12
    """Passes over the positives, at most: of each part, or of NeuMF without pre-training."""

    batch_size: int = 2048
    """Positives a step, each with its negatives (the original: 256 of both together)."""

    negatives: int = 4
    """Negatives a positive, drawn anew each epoch."""

    learning_rate: float = 1e-2
    """Adam's, and the peak of the one-cycle schedule (the original: 1e-3, constant)."""

    schedule: Rates = "one-cycle"
    """``one-cycle`` warms up and cools down over the epochs; ``constant`` is the original's."""

    l2: float = 1e-3
    """λ of λ‖Θ‖² on the embeddings of each batch; more factors want more, 1e-2 at d = 64."""

    pretrain: bool = True
    """NeuMF starts from a trained GMF and MLP (eq. 13)."""

    alpha: float = 0.5
    """α of eq. 13, the share of the GMF part."""

    fine_tune_epochs: int = 8
    """Passes of NeuMF after its parts are put together, at most."""

    fine_tune_rate: float = 5e-3
    """The learning rate of these passes; at d = 64, 1e-3 for two of them was better."""

    fine_tune_optimizer: Optimizer = "adam"
    """``sgd``, without momentum, is the original's."""

    patience: int = 4
    """Epochs without a better validation NDCG@10 before a phase stops."""

    seed: int = 0
    """Of initialisation, shuffling and sampling."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        choices = {"model": Kind, "schedule": Rates, "fine_tune_optimizer": Optimizer}
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                known = ", ".join(get_args(allowed))
                raise ConfigError(f"{name} must be one of {known}, not {getattr(self, name)!r}")
        at_least(self, 1, "factors", "epochs", "batch_size", "negatives", "fine_tune_epochs")
        at_least(self, 1, "patience")
        at_least(self, 2, "layers")
        at_least(self, 0, "l2")
        above_zero(self, "learning_rate", "fine_tune_rate")
        if not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"alpha must be between 0 and 1, not {self.alpha}")
