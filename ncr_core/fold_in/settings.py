"""How users' vectors are fitted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ncr_core.errors import ConfigError


@dataclass(frozen=True)
class FoldInConfig:
    """Choices of fold-in, made on MovieLens 1M (`python -m benchmarks.fold_in`).

    Raises ConfigError where they do not fit.
    """

    strength: float = 3.0
    """What an event of weight 1 counts beside the prior, in nats a pair: what tells a newcomer's
    vector from the trained users'."""

    half_life: float = 20.0
    """After how many later events one counts half; 0: all count alike."""

    dislike: float = 2.0
    """What a dislike of weight 1 counts, in events."""

    stated: float = 1.0
    """What a stated preference counts, in events."""

    crowd: float = 1.0
    """How much the losses of a new item to what others like count, beside its wins; 0: not."""

    pairs: int = 768
    """Pairs a user, at most about: each event is compared with so many items that as many come
    together, ``negatives`` at most."""

    negatives: int = 64
    """Items that an event is compared with, at most."""

    events: int = 256
    """Of a user's events so many count, the latest."""

    steps: int = 12
    """Newton steps, at most."""

    tolerance: float = 0.2
    """Stops when a step promises less than so much of the loss, in nats."""

    seed: int = 0
    """Of the items that are compared with."""

    def __post_init__(self) -> None:
        for name in ("strength", "dislike", "stated", "tolerance"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0 and finite, not {getattr(self, name)}")
        for name in ("half_life", "crowd"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be 0 or more and finite, not {getattr(self, name)}")
        for name in ("pairs", "negatives", "events", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
