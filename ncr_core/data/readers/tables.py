"""Interactions in tables: delimited text, JSON Lines and Parquet, and how to find their columns.

pyarrow is loaded only when a Parquet file is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from ncr_core.data.readers.rows import (
    SURELY_SHORT,
    BadRow,
    Columns,
    InteractionRow,
    Memo,
    OnBad,
    OnBytes,
    RowFault,
    as_latest,
    check_id,
    id_of,
    latest_of,
    parse_latest,
    parse_position,
    parse_rating,
    parse_seconds,
    parse_type,
    position_of,
    rating_of,
    shown,
    timestamp_of,
    type_of,
)
from ncr_core.data.readers.text import (
    Block,
    cannot_read,
    read_blocks,
    read_header,
    read_records,
)
from ncr_core.errors import DataError

T = TypeVar("T")
TypedRecord = tuple[int, dict[str, Any]]
"""The number of a line or row, and its cells by column."""
Hint = Callable[[str], str]
"""Gives an error's advice on how to name the column of a part of a row."""

# Names in widely used files, for columns that the caller has left at their default.
_ALIASES = {
    "user": ("userId", "user_id"),
    "item": ("movieId", "itemId", "item_id"),
    "rating": ("value",),
}
_MAX_SAMPLED_OBJECTS = 100
_PARQUET_BATCH_ROWS = 10_000
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _option_hint(part: str) -> str:
    return "the columns option"


@dataclass(frozen=True)
class Names:
    """The names of the columns of one file of interactions."""

    user: str
    item: str
    rating: str | None
    timestamp: str | None
    position: str | None
    latest: str | None
    type: str | None

    def present(self) -> list[str]:
        """The columns to read, each once."""
        names = (getattr(self, part.name) for part in fields(self))
        return list(dict.fromkeys(name for name in names if name is not None))


def interaction_names(
    columns: Columns, header: Sequence[str], where: str, hint: Hint = _option_hint
) -> Names:
    """Find the columns of a table of interactions.

    Args:
        columns: the names that the caller wants.
        header: the names in the table.
        where: the table, for an error.
        hint: gives the advice on how to name the column of a part, for an error.

    Raises:
        DataError: the column of the user or item, or a column that the caller named, is missing.
    """
    finder = _ColumnFinder(columns, header, where, hint)
    user, item = finder.require("user"), finder.require("item")
    others = [part.name for part in fields(Columns) if part.name not in ("user", "item")]
    return Names(user=user, item=item, **{part: finder.find(part) for part in others})


def item_column(columns: Columns, header: Sequence[str], file: str) -> str:
    """The column that holds the item in a file of items. Raises DataError if there is none."""
    return _ColumnFinder(columns, header, file, _option_hint).require("item")


@dataclass(frozen=True)
class _ColumnFinder:
    columns: Columns
    header: Sequence[str]
    where: str
    hint: Hint

    def find(self, part: str) -> str | None:
        wanted: str = getattr(self.columns, part)
        if wanted in self.header:
            return wanted
        if wanted != getattr(Columns, part):  # named by the caller: silence would lose a column
            raise self._missing(part)
        return next((name for name in _ALIASES.get(part, ()) if name in self.header), None)

    def require(self, part: str) -> str:
        name = self.find(part)
        if name is None:
            raise self._missing(part)
        return name

    def _missing(self, part: str) -> DataError:
        listed = ", ".join(ascii(name[:40])[1:-1] for name in self.header[:20]) or "none"
        more = ", …" if len(self.header) > 20 else ""
        return DataError(
            f'{self.where} has no column "{getattr(self.columns, part)}" (found: {listed}{more}); '
            f"name the column that holds the {part} with {self.hint(part)}"
        )


# Delimited text


@dataclass(frozen=True)
class Layout:
    """The delimiter of a file's lines, and the places of its fields."""

    delimiter: str
    width: int
    user: int
    item: int
    rating: int | None = None
    timestamp: int | None = None
    position: int | None = None
    latest: int | None = None
    type: int | None = None
    header: bool = True
    quoted: bool = True


@dataclass(frozen=True)
class DelimitedFile:
    """Interactions in delimited text."""

    path: Path
    layout: Layout

    def blocks(self, on_bad: OnBad, on_bytes: OnBytes | None) -> Iterator[list[InteractionRow]]:
        """Yield the rows, some thousand at a time."""
        layout, name = self.layout, self.path.name
        convert = _converter(layout)
        for records in read_records(
            self.path,
            layout.delimiter,
            quoted=layout.quoted,
            header=layout.header,
            on_bad=on_bad,
            on_bytes=on_bytes,
        ):
            rows: list[InteractionRow] = []
            append = rows.append
            for number, cells in records:
                try:
                    append(convert(cells))
                except RowFault as fault:
                    on_bad(BadRow(name, number, str(fault)))
            yield rows


def open_csv(path: Path, columns: Columns) -> DelimitedFile:
    """Find a CSV file's delimiter and columns from its header.

    Raises DataError if the file is empty, not text, or lacks a column.
    """

    def names_in(found: list[str]) -> Names:
        return interaction_names(columns, found, path.name)

    delimiter, header, names = read_header(path, names_in)

    found = {part.name: getattr(names, part.name) for part in fields(Names)}
    places: dict[str, Any] = {
        part: header.index(name) for part, name in found.items() if name is not None
    }
    return DelimitedFile(path, Layout(delimiter=delimiter, width=len(header), **places))


def _converter(layout: Layout) -> Callable[[list[str]], InteractionRow]:
    """A function from fields to a row: a closure, because the function runs once a row."""
    width, user_column, item_column = layout.width, layout.user, layout.item
    rating_column, timestamp_column = layout.rating, layout.timestamp
    position_column, latest_column, type_column = layout.position, layout.latest, layout.type
    ratings, positions, latests = Memo(parse_rating), Memo(parse_position), Memo(parse_latest)
    types = Memo(parse_type)
    new = tuple.__new__  # what the class itself calls, less one call

    def convert(cells: list[str]) -> InteractionRow:
        if len(cells) != width:
            raise RowFault(f"{len(cells)} fields instead of {width}")
        user, item = cells[user_column], cells[item_column]
        # Nearly every id is fine at first sight; the full check costs as much as all the rest.
        if not 0 < len(user) <= SURELY_SHORT or "\0" in user:
            check_id("user", user)
        if not 0 < len(item) <= SURELY_SHORT or "\0" in item:
            check_id("item", item)
        value = None if rating_column is None else ratings[cells[rating_column]]
        timestamp = None if timestamp_column is None else parse_seconds(cells[timestamp_column])
        position = None if position_column is None else positions[cells[position_column]]
        if latest_column is not None and latests[cells[latest_column]]:
            position = as_latest(position)
        kind = None if type_column is None else types[cells[type_column]]
        return new(InteractionRow, (user, item, value, timestamp, position, kind))

    return convert


# JSON Lines and Parquet


@dataclass(frozen=True)
class TypedFile:
    """Interactions in JSON Lines or Parquet."""

    path: Path
    kind: Literal["jsonl", "parquet"]
    names: Names

    def blocks(self, on_bad: OnBad, on_bytes: OnBytes | None) -> Iterator[list[InteractionRow]]:
        """Yield the rows, some thousand at a time."""
        wanted = self.names.present()
        for records in read_typed(self.path, self.kind, wanted, on_bad=on_bad, on_bytes=on_bytes):
            yield self.valid_rows(records, on_bad)

    def valid_rows(self, records: Iterable[TypedRecord], on_bad: OnBad) -> list[InteractionRow]:
        """The rows of those records that have valid cells."""
        rows: list[InteractionRow] = []
        for number, record in records:
            try:
                rows.append(_typed_row(record, self.names))
            except RowFault as fault:
                on_bad(BadRow(self.path.name, number, str(fault)))
        return rows


InteractionFile = DelimitedFile | TypedFile
"""One file of interactions with known columns."""


def open_typed(path: Path, kind: Literal["jsonl", "parquet"], columns: Columns) -> TypedFile:
    """Find the columns of a JSON Lines or Parquet file.

    Raises DataError if the file is empty, of another format, or lacks a column.
    """
    return TypedFile(path, kind, interaction_names(columns, column_names(path, kind), path.name))


def column_names(path: Path, kind: Literal["jsonl", "parquet"]) -> list[str]:
    """The columns of a Parquet file, or the keys of the first objects of a JSON Lines file.

    Raises DataError if the file is empty or of another format.
    """
    if kind == "jsonl":
        return _keys(path)
    with _opened_parquet(path) as file:
        return list(file.schema_arrow.names)


def read_typed(
    path: Path,
    kind: Literal["jsonl", "parquet"],
    wanted: list[str] | None = None,
    *,
    on_bad: OnBad,
    on_bytes: OnBytes | None = None,
) -> Iterator[Iterable[TypedRecord]]:
    """Yield a file's records block by block.

    Args:
        path: the file.
        kind: its format.
        wanted: the columns to read of a Parquet file, None for all.
        on_bad: called with every row that is left out.
        on_bytes: called with the number of further bytes that have been read.
    """
    if kind == "parquet":
        yield from read_parquet(path, wanted, records_of, on_bad, on_bytes)
    else:
        for block in read_blocks(path, on_bytes=on_bytes):
            yield _objects(path.name, block, on_bad)


def _typed_row(record: dict[str, Any], names: Names) -> InteractionRow:
    """A row from typed cells. Raises `RowFault` for an invalid cell."""
    get = record.get
    position = position_of(get(names.position)) if names.position else None
    if names.latest and latest_of(get(names.latest)):
        position = as_latest(position)
    return InteractionRow(
        id_of("user", get(names.user)),
        id_of("item", get(names.item)),
        rating_of(get(names.rating)) if names.rating else None,
        timestamp_of(get(names.timestamp)) if names.timestamp else None,
        position,
        type_of(get(names.type)) if names.type else None,
    )


def _keys(path: Path) -> list[str]:
    """The keys of the first objects of a file, in the order of their appearance.

    Raises DataError if there is no object among the first lines.
    """
    reasons: list[BadRow] = []
    keys: dict[str, None] = {}
    seen = 0
    for records in read_typed(path, "jsonl", on_bad=reasons.append):
        for _, record in islice(records, _MAX_SAMPLED_OBJECTS):
            keys.update(dict.fromkeys(record))
            seen += 1
        if seen or reasons:
            break
    if seen:
        return list(keys)
    if reasons:
        raise DataError(
            f"{path.name} is not JSON Lines: line {reasons[0].line}: {reasons[0].reason}"
        )
    raise DataError(f"{path.name} is empty")


def _objects(file: str, block: Block, on_bad: OnBad) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in enumerate(block.lines, block.first):
        try:
            if fault := block.faults.get(number):
                raise RowFault(fault)
            if text and not text.isspace():
                yield number, _object(text)
        except RowFault as fault:
            on_bad(BadRow(file, number, str(fault)))


def _object(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise RowFault(f"not JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; deep nesting
        raise RowFault(f"not JSON that can be read: {shown(str(error))}") from None
    if not isinstance(record, dict):
        raise RowFault(f"not a JSON object: {shown(text)}")
    return record


def read_parquet(
    path: Path,
    wanted: list[str] | None,
    convert: Callable[[int, Any], T],
    on_bad: OnBad,
    on_bytes: OnBytes | None,
) -> Iterator[T]:
    """Yield the result of ``convert`` for each batch and the number of its first row, from 1.

    Bytes are reported in proportion to the rows, because the bytes of a row are not known.
    """
    import pyarrow as pa

    size, reported, first = path.stat().st_size, 0, 1
    with _opened_parquet(path) as file:
        total = max(file.metadata.num_rows, 1)
        try:
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=wanted):
                yield convert(first, batch)
                first += batch.num_rows
                position = size * (first - 1) // total
                if on_bytes is not None and position > reported:
                    on_bytes(position - reported)
                    reported = position
        except (pa.ArrowException, OSError, ValueError) as error:
            on_bad(BadRow(path.name, first, f"the file is damaged here: {_one_line(error)}"))


def records_of(first: int, batch: Any) -> list[TypedRecord]:
    """The rows of a batch with their numbers, and with times in seconds since 1970."""
    cells = [_cells(column) for column in batch.columns]
    return [
        (number, dict(zip(batch.schema.names, row, strict=True)))
        for number, row in enumerate(zip(*cells, strict=True), first)
    ]


def _opened_parquet(path: Path) -> Any:
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

    if pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
        return seconds_of(column)
    cells: list[Any] = column.to_pylist()
    return cells


def seconds_of(column: Any) -> list[float | None]:
    """The seconds since 1970 of a column of dates or timestamps."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_date(kind):
        column, kind = column.cast(pa.timestamp("ms")), pa.timestamp("ms")
    per_second = _PER_SECOND[kind.unit]
    ticks = column.cast(pa.int64()).to_pylist()
    return [None if tick is None else tick / per_second for tick in ticks]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
