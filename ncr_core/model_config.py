"""The configuration of a model: its kind and its sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ncr_core.errors import ConfigError
from ncr_core.parameters import check_parameters, parameter

ServiceKind = Literal["nbpr", "dncr", "neupr"]
"""The kinds that the service trains and serves."""
Kind = Literal[ServiceKind, "twotower"]
Activation = Literal["tanh", "relu"]
Init = Literal["xavier", "paper"]
Users = Literal["free", "history"]

HEADS = 2
"""The number of heads of each layer of self-attention."""
UNITS_PER_FACTOR = 4
"""The number of units of a tower that make the product of one factor, see `product_tower`."""
MAX_FACTORS = 1024
MAX_REQUEST_FACTORS = 512  # more are for models in closed form
MAX_EMBEDDING = 4096
MAX_WINDOWS = 16


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of a model.

    Raises ConfigError if the values do not fit each other, or one is out of bounds.
    """

    kind: Kind = parameter(
        "neupr",
        "The kind of model.",
        name="model",
        request={},
        request_type=ServiceKind,
        by_setting=True,
    )
    """nbpr (eq. 17, 19–22), dncr (eq. 23), neupr (eq. 25) or twotower (eq. 7–9)."""

    factors: int = parameter(
        8,
        "The number of predictive factors d.",
        ge=1,
        le=MAX_FACTORS,
        request={"le": MAX_REQUEST_FACTORS},
        by_setting=True,
    )
    """The width of the last hidden layer."""

    tower_factors: int = parameter(
        0, "The number of factors of the tower of neupr, 0 for as many as factors.",
        ge=0, le=MAX_REQUEST_FACTORS,
    )  # fmt: skip
    """A small tower beside a large element-wise part costs little for each compared pair."""

    layers: int = parameter(
        4, "The number of hidden layers N of the tower.", ge=1, le=6, request={}
    )
    """The concatenation counts as the first layer."""

    activation: Activation = parameter("tanh", "The activation function of the layers.")

    init: Init = parameter("xavier", "The initialisation. paper: N(0, 0.01²) everywhere.")
    """``xavier``: N(0, 0.01²) for embeddings, Xavier for layers."""

    learn_weights: bool = parameter(
        True,
        "Learn the weights, or fix them at 1. Fixed weights with the loss bpr give BPR-MF.",
        negation="--fixed-weights",
    )
    """False fixes NBPR's w at 1, which with the loss ``bpr`` is BPR-MF (eq. 16–18)."""

    shared_embeddings: bool = parameter(False, "Use the neupr of eq. 24, with shared embeddings.")
    """NeuPR with one embedding for both parts (eq. 24) instead of one each (eq. 25)."""

    shared_towers: bool = parameter(False, "Use a twotower with one set of hidden layers.")
    """The preferred and the other item share one set."""

    users: Users = parameter(
        "free",
        "The kind of user vector: free (learned) or history (pooled from the items of the user).",
        request={},
        by_setting=True,
    )

    windows: tuple[int, ...] = parameter(
        (0,),
        "The number of latest items that history pools, 0 for all. The option may repeat.",
        name="window",
    )
    """Each window has a matrix of its own, or a number."""

    window_matrices: bool = parameter(True, option=False)
    """Whether each window has a matrix (d, d), in place of a number; see ``PooledUsers``."""

    by_length: bool = parameter(False, option=False)
    """Whether a pooled vector depends on the number of pooled items; see ``PooledUsers``."""

    by_gap: bool = parameter(False, option=False)
    """Whether a vector depends on the time since the last interaction; see ``PooledUsers``."""

    attention_layers: int = parameter(
        0, "The number of causal self-attention layers over the latest items (windowed history).",
        ge=0, le=4,
    )  # fmt: skip
    """Above 0, the output of the layers is added to the pools of the windows; see
    ``CausalEncoder``."""

    start_factors: int = parameter(0, ge=0, le=MAX_FACTORS, option=False)
    """Of NBPR, the number of further factors that stay as the next-item start made them.

    They are behind the trained factors, and the scores of both add up; see ``kept_start``. In a
    recipe the number is the most, and the size of the data may leave fewer or none.
    """

    item_bias: bool = parameter(False, "Add item biases.")
    """Adds b_i − b_j to the element-wise part."""

    def __post_init__(self) -> None:
        """Checks the values, and makes ``windows`` a tuple."""
        check_parameters(self)
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
        if self.tower_factors and (self.kind != "neupr" or self.shared_embeddings):
            raise ConfigError("tower_factors are for neupr with separate embeddings")
        if self.kind != "nbpr" and self.tower_embedding > MAX_EMBEDDING:
            raise ConfigError(
                f"{self.deep_factors} factors with {self.layers} layers need embeddings of "
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
        if not self.window_matrices and self.users != "history":
            raise ConfigError('window_matrices=False is for users="history" only')
        if self.by_length and not self.ordered:
            raise ConfigError("by_length is for windows of so many items")
        if self.by_gap and not (self.kind == "nbpr" and self.ordered):
            raise ConfigError("by_gap is for nbpr with windows of so many items")
        if self.start_factors and not (self.kind == "nbpr" and self.ordered):
            raise ConfigError("start_factors are for nbpr with windows of so many items")
        if self.attention_layers:
            if not self.ordered:
                raise ConfigError("attention_layers are for windows of so many items")
            sizes = [self.factors] if self.kind in ("nbpr", "neupr") else []
            sizes += [self.tower_embedding] if self.kind != "nbpr" else []
            if any(size % HEADS for size in sizes):
                raise ConfigError(f"attention_layers need a number of factors divisible by {HEADS}")

    @property
    def width(self) -> int:
        """The number of all factors of NBPR, trained and of the start."""
        return self.factors + self.start_factors

    @property
    def deep_factors(self) -> int:
        """The number of factors of the tower: ``tower_factors``, or ``factors``."""
        return self.tower_factors or self.factors

    @property
    def tower_embedding(self) -> int:
        """e, the embedding size of the tower: d · 2^(N−2), so that its last layer is d wide.

        With one hidden layer, the concatenation itself, e is 32 (Fig. 6).
        """
        return 32 if self.layers == 1 else int(self.deep_factors * 2 ** (self.layers - 2))

    @property
    def tower_width(self) -> int:
        """The width of the last hidden layer: d, or with one layer that of the concatenation."""
        if self.layers > 1:
            return self.deep_factors
        return (2 if self.kind == "twotower" else 3) * self.tower_embedding

    @property
    def product_factors(self) -> int:
        """The number of factors whose product the tower of a dncr can start as; 0 for none.

        The start needs the curve of tanh, and users' vectors whose coordinates can be scaled.
        """
        curved = self.layers > 1 and self.activation == "tanh" and self.init == "xavier"
        scaled = self.users == "free" or (self.window_matrices and not self.attention_layers)
        if self.kind != "dncr" or not curved or not scaled:
            return 0
        return self.tower_embedding // UNITS_PER_FACTOR

    @property
    def ordered(self) -> bool:
        """Whether a user's vector depends on the order of the user's items."""
        return self.users == "history" and self.windows != (0,)

    @property
    def embedding_std(self) -> float:
        """The initial embeddings' standard deviation: 0.01, or 0.05 if two item tables multiply."""
        return 0.05 if self.users == "history" and self.init == "xavier" else 0.01

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as a checkpoint keeps them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The inverse of ``as_dict``. Raises ConfigError for an unknown field."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown model settings: {', '.join(unknown)}")
        return cls(**values)
