"""Synthetic data of any size: events of a long tail, as a service logs them.

The popularity of items and the activity of users follow a power law. The events are in the order
of their times, so that users alternate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BLOCK_ROWS = 1_000_000
FIRST_SECOND = 1_600_000_000
ITEM_TAIL, USER_TAIL = 3.0, 1.7  # larger: fewer items, or users, have most of the events


@dataclass(frozen=True)
class World:
    """How many there are of each."""

    events: int
    users: int
    items: int

    def blocks(self, seed: int = 0) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yields users and items of the events, some at a time."""
        rng = np.random.default_rng(seed)
        users, items = rng.permutation(self.users), rng.permutation(self.items)
        for start in range(0, self.events, BLOCK_ROWS):
            n = min(BLOCK_ROWS, self.events - start)
            user = users[(self.users * rng.random(n) ** USER_TAIL).astype(np.int64)]
            yield user, items[(self.items * rng.random(n) ** ITEM_TAIL).astype(np.int64)]

    def write_items(self, path: Path, categories: int) -> None:
        """Writes titles and one of so many categories of each item, as CSV."""
        with path.open("w") as file:
            file.write("item,title,genres\n")
            file.writelines(f"item-{i},Item {i},c{i % categories}\n" for i in range(self.items))

    def write(self, path: Path) -> None:
        """Writes the events as a Parquet file that `ncr import` reads."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        names = [("user", pa.string()), ("item", pa.string()), ("timestamp", pa.int64())]
        with pq.ParquetWriter(path, pa.schema(names)) as writer:
            second = FIRST_SECOND
            for user, item in self.blocks():
                columns = {
                    "user": [f"user-{u}" for u in user.tolist()],
                    "item": [f"item-{i}" for i in item.tolist()],
                    "timestamp": np.arange(second, second + len(user)),
                }
                writer.write_table(pa.table(columns, schema=writer.schema))
                second += len(user)
