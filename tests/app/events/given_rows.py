"""Training snapshots of given rows, without a database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.events.event_weights import EventWeights
from app.events.snapshot_query import EVENT, Named
from app.events.training_snapshot import TrainingSnapshot

Row = tuple[int, int, int, float, int]
"""User, item, timestamp, weight and seq of an event."""


@dataclass(frozen=True)
class GivenRows:
    """A `SnapshotQuery` of these rows."""

    rows: Sequence[Row]
    stated: Sequence[tuple[int, ...]]
    """User, winner, loser, timestamp and seq of preferences, ordered by user, time and seq."""
    user_ids: Mapping[int, str]
    item_ids: Mapping[int, str]

    def sizes(self) -> tuple[int, int, int]:
        return len(self.rows), len(self.user_ids), len(self.item_ids)

    def max_seq(self) -> int:
        return max([row[4] for row in [*self.rows, *self.stated]], default=0)

    def users(self) -> Iterator[Named]:
        return iter(reversed(self.user_ids.items()))

    def items(self) -> Iterator[Named]:
        return iter(reversed(self.item_ids.items()))

    def preferences(self) -> Iterator[tuple[int, ...]]:
        return iter(self.stated)

    def events(self) -> Iterator[NDArray[Any]]:
        for first in range(0, len(self.rows), 7):
            yield np.array(self.rows[first : first + 7], dtype=EVENT)

    def snapshot(
        self, folder: Path, parts: int = 1, half_life_days: float | None = None
    ) -> TrainingSnapshot:
        """The snapshot in so many parts. Raises DataError where there is nothing to learn."""
        made = TrainingSnapshot(folder, parts)
        try:
            made.fill(self, len(self.rows))
            made.resolve(EventWeights({}, 1.0, half_life_days))
        except BaseException:
            made.close()
            raise
        return made
