"""Parquet, through pyarrow, which is loaded only when such a file is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncr_core.data.readers.columns import Names, interaction_names
from ncr_core.data.readers.jsonlines import typed_row
from ncr_core.data.readers.lines import cannot_read
from ncr_core.data.readers.rows import (
    BadRow,
    Columns,
    InteractionRow,
    OnBad,
    OnBytes,
    RowFault,
)
from ncr_core.errors import DataError

_BATCH = 10_000
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclass(frozen=True)
class ParquetFile:
    """Interactions in Parquet."""

    path: Path
    names: Names

    def blocks(self, on_bad: OnBad, on_bytes: OnBytes | None) -> Iterator[list[InteractionRow]]:
        """Yield the rows, some thousand at a time."""
        wanted = self.names.present()
        for records in read_rows(self.path, wanted, on_bad=on_bad, on_bytes=on_bytes):
            rows: list[InteractionRow] = []
            for number, record in records:
                try:
                    rows.append(typed_row(record, self.names))
                except RowFault as fault:
                    on_bad(BadRow(self.path.name, number, str(fault)))
            yield rows


def open_parquet(path: Path, columns: Columns) -> ParquetFile:
    """Find the columns in a file's schema.

    Raises:
        DataError: it is empty, not Parquet, or lacks a column.
    """
    return ParquetFile(path, interaction_names(columns, columns_of(path), path.name))


def columns_of(path: Path) -> list[str]:
    """The names of a file's columns.

    Raises:
        DataError: it is empty or not Parquet.
    """
    with _opened(path) as file:
        return list(file.schema_arrow.names)


def read_rows(
    path: Path, wanted: list[str] | None, *, on_bad: OnBad, on_bytes: OnBytes | None = None
) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """Yield a file's rows with their numbers, from 1; times as epoch seconds.

    Bytes are told in proportion to the rows: which bytes a row takes is not known.
    """
    import pyarrow as pa

    size, told, first = path.stat().st_size, 0, 1
    with _opened(path) as file:
        total = max(file.metadata.num_rows, 1)
        try:
            for batch in file.iter_batches(batch_size=_BATCH, columns=wanted):
                names = batch.schema.names
                cells = [_cells(column) for column in batch.columns]
                yield [
                    (number, dict(zip(names, row, strict=True)))
                    for number, row in enumerate(zip(*cells, strict=True), first)
                ]
                first += batch.num_rows
                now = size * (first - 1) // total
                if on_bytes is not None and now > told:
                    on_bytes(now - told)
                    told = now
        except (pa.ArrowException, OSError, ValueError) as error:
            on_bad(BadRow(path.name, first, f"the file is damaged here: {_one_line(error)}"))


def _opened(path: Path) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(f"reading {path.name} needs the package pyarrow") from None
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path.name} is empty")
        with path.open("rb"):  # so that a system's refusal is told from damage, also an OSError
            pass
    except OSError as error:
        raise cannot_read(path, error) from None
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path.name} is not a Parquet file: {_one_line(error)}") from None


def _cells(column: Any) -> list[Any]:
    import pyarrow as pa

    kind = column.type
    if pa.types.is_date(kind):
        column, kind = column.cast(pa.timestamp("ms")), pa.timestamp("ms")
    if pa.types.is_timestamp(kind):
        per_second = _PER_SECOND[kind.unit]
        ticks = column.cast(pa.int64()).to_pylist()
        return [None if tick is None else tick / per_second for tick in ticks]
    cells: list[Any] = column.to_pylist()
    return cells


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
