"""Items that a caller names, to be ranked or compared for a user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.recommend.candidates import RankRequest


@dataclass(frozen=True, slots=True, eq=False)
class GivenItems:
    """What the ranker is asked of them."""

    whose: RankRequest
    """Whose vector it is to be; what it asks for beside that plays no part."""
    rows: NDArray[np.int64]
    """(M,) item rows, each once, in the order that decides ties."""


class Comparison(NamedTuple):
    """Items compared pair by pair. Positions are those among the given."""

    probability: NDArray[np.float64]
    """(M, M) how probably the user prefers the item of the row to that of the column."""
    order: list[int]
    """The positions, best first, by Algorithm 1."""
