"""What a model is made of: its kind and its sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from ncr_core.errors import ConfigError

Kind = Literal["nbpr", "dncr", "neupr", "twotower"]
Activation = Literal["tanh", "relu"]
Init = Literal["xavier", "paper"]
Users = Literal["free", "history"]

MAX_FACTORS = 512
MAX_EMBEDDING = 4096
MAX_WINDOWS = 16


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of a model. Raises ConfigError where they do not fit."""

    kind: Kind = "neupr"
    """nbpr (eq. 17, 19–22), dncr (eq. 23), neupr (eq. 25) or twotower (eq. 7–9)."""

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

    shared_embeddings: bool = False
    """NeuPR with one embedding for both parts (eq. 24) instead of one each (eq. 25)."""

    shared_towers: bool = False
    """twotower with one set of hidden layers for the preferred and the other item."""

    users: Users = "free"
    """``free``: each user has an embedding; ``history``: it is computed from the user's items."""

    windows: tuple[int, ...] = (0,)
    """What ``history`` pools: the latest so many items, 0 for all of them, each with a matrix."""

    item_bias: bool = False
    """Adds b_i − b_j to the element-wise part."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kind", Kind),
            ("activation", Activation),
            ("init", Init),
            ("users", Users),
        ):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(
                    f"{name} must be one of {', '.join(get_args(allowed))}, "
                    f"not {getattr(self, name)!r}"
                )
        if not isinstance(self.factors, int) or not 1 <= self.factors <= MAX_FACTORS:
            raise ConfigError(f"factors must be 1 to {MAX_FACTORS}, not {self.factors}")
        if not 1 <= self.layers <= 6:
            raise ConfigError(f"layers must be 1 to 6, not {self.layers}")
        if not self.learn_weights and self.kind != "nbpr":
            raise ConfigError("fixed weights (learn_weights=False) are for nbpr only")
        if self.shared_embeddings and self.kind != "neupr":
            raise ConfigError("shared embeddings (eq. 24) are for neupr only")
        if self.shared_embeddings and self.layers == 1:
            raise ConfigError("shared embeddings (eq. 24) need at least 2 layers")
        if self.shared_towers and self.kind != "twotower":
            raise ConfigError("shared towers are for twotower only")
        if self.item_bias and (self.kind not in ("nbpr", "neupr") or self.shared_embeddings):
            raise ConfigError("item biases are for nbpr, and neupr with separate embeddings")
        if self.kind != "nbpr" and self.tower_embedding > MAX_EMBEDDING:
            raise ConfigError(
                f"{self.factors} factors with {self.layers} layers need embeddings of "
                f"{self.tower_embedding:,}; at most {MAX_EMBEDDING:,} are allowed"
            )
        if not isinstance(self.windows, list | tuple):
            raise ConfigError(f"windows must be numbers of items, not {self.windows!r}")
        object.__setattr__(self, "windows", tuple(self.windows))  # JSON has lists
        windows = self.windows
        if not all(type(w) is int and 0 <= w <= 2**31 for w in windows):
            raise ConfigError(f"a window is a number of items, or 0 for all of them: {windows}")
        if not 1 <= len(windows) <= MAX_WINDOWS or len(set(windows)) < len(windows):
            raise ConfigError(f"windows must be 1 to {MAX_WINDOWS} different numbers: {windows}")
        if self.windows != (0,) and self.users != "history":
            raise ConfigError('windows are for users="history" only')

    @property
    def tower_embedding(self) -> int:
        """e, the embedding size of the tower: d · 2^(N−2), so that its last layer is d wide.

        With one hidden layer, the concatenation itself, there is no such rule: 32 (Fig. 6).
        """
        return 32 if self.layers == 1 else int(self.factors * 2 ** (self.layers - 2))

    @property
    def tower_width(self) -> int:
        """The width of the last hidden layer: d, or that of the concatenation where it is that."""
        if self.layers > 1:
            return self.factors
        return (2 if self.kind == "twotower" else 3) * self.tower_embedding

    @property
    def ordered(self) -> bool:
        """Whether the order of a user's items plays a part."""
        return self.users == "history" and self.windows != (0,)

    @property
    def embedding_std(self) -> float:
        """Embeddings start from N(0, 0.01²); larger where two item tables multiply each other."""
        return 0.05 if self.users == "history" and self.init == "xavier" else 0.01

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown model settings: {', '.join(unknown)}")
        return cls(**values)
