"""Small files for the tests of the readers, and what comes out of them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from ncr_core.data.readers import (
    BadRow,
    Columns,
    DataSource,
    InteractionRow,
    ItemRow,
    open_source,
)
from ncr_core.errors import DataError


def put(path: Path, content: str | bytes) -> Path:
    """Write a file, compressed if its name says so."""
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def put_parquet(path: Path, columns: dict[str, Any]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def read(source: DataSource, chunk_size: int = 10_000) -> tuple[list[InteractionRow], list[BadRow]]:
    """The valid rows and the bad ones, which are the same by rows and by columns."""
    bad: list[BadRow] = []
    chunks = list(source.interactions(on_bad=bad.append, chunk_size=chunk_size))
    assert all(0 < len(chunk) <= chunk_size for chunk in chunks)
    rows = [row for chunk in chunks for row in chunk]
    bad_of_batches: list[BadRow] = []
    batches = list(source.batches(on_bad=bad_of_batches.append))
    assert all(batch.num_rows for batch in batches)
    of_batches = [
        InteractionRow(*row)
        for batch in batches
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    ]
    # As text: equal rows have equal event ids, and 1.0 == 1.
    assert list(map(repr, of_batches)) == list(map(repr, rows))
    assert bad_of_batches == bad
    return rows, bad


def read_items(source: DataSource) -> tuple[list[ItemRow], list[BadRow]]:
    bad: list[BadRow] = []
    return list(source.items(on_bad=bad.append)), bad


def rows_of(path: Path, **columns: str) -> list[InteractionRow]:
    rows, bad = read(open_source(path, columns=Columns(**columns)))
    assert bad == []
    return rows


def one_line_error(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_source(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def row(
    user: str,
    item: str,
    value: float | None = None,
    timestamp: float | None = None,
    position: int | None = None,
) -> InteractionRow:
    return InteractionRow(user, item, value, timestamp, position)


# MovieLens
