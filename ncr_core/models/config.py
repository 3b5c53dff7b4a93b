"""What a model is made of: its kind and its sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from ncr_core.errors import ConfigError

Kind = Literal["nbpr", "dncr", "neupr"]
Activation = Literal["tanh", "relu"]
Init = Literal["xavier", "paper"]

MAX_FACTORS = 512


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of a model. Raises ConfigError where they do not fit."""

    kind: Kind = "neupr"
    """nbpr (eq. 17, 19–22), dncr (eq. 23) or neupr (eq. 25)."""

    factors: int = 8
    """d, the predictive factors: the width of the last hidden layer."""

    layers: int = 4
    """N, the hidden layers of the tower; the concatenation counts as the first."""

    activation: Activation = "tanh"
    """The activation of the hidden layers."""

    init: Init = "xavier"
    """``paper``: N(0, 0.01²) everywhere; ``xavier``: that for embeddings, Xavier for layers."""

    learn_weights: bool = True
    """False fixes NBPR's w at 1, which with the loss ``bpr`` is BPR-MF (eq. 16–18)."""

    def __post_init__(self) -> None:
        for name, allowed in (("kind", Kind), ("activation", Activation), ("init", Init)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(
                    f"{name} must be one of {', '.join(get_args(allowed))}, "
                    f"not {getattr(self, name)!r}"
                )
        if not 1 <= self.factors <= MAX_FACTORS:
            raise ConfigError(f"factors must be 1 to {MAX_FACTORS}, not {self.factors}")
        if not 1 <= self.layers <= 6:
            raise ConfigError(f"layers must be 1 to 6, not {self.layers}")
        if not self.learn_weights and self.kind != "nbpr":
            raise ConfigError("fixed weights (learn_weights=False) are for nbpr only")

    @property
    def tower_embedding(self) -> int:
        """e, the embedding size of the tower: d · 2^(N−2), so that its last layer is d wide.

        With one hidden layer, the concatenation itself, there is no such rule: 32 (Fig. 6).
        """
        return 32 if self.layers == 1 else int(self.factors * 2 ** (self.layers - 2))

    @property
    def tower_width(self) -> int:
        """The width of the last hidden layer: d, or 3e where that is the concatenation."""
        return 3 * self.tower_embedding if self.layers == 1 else self.factors

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown model settings: {', '.join(unknown)}")
        return cls(**values)
