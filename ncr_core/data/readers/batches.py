"""Interactions by columns: Arrow record batches, for files of many million rows.

A batch of a Parquet file in which each row is valid at first sight is taken as it is. Any other
batch goes through the readers of rows, so that both ways have the same verdicts. The module loads
pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from ncr_core.data.readers.rows import (
    END_OF_TIME,
    FIRST_SECOND,
    MAX_ID_BYTES,
    MAX_TYPE_BYTES,
    InteractionRow,
    OnBad,
    OnBytes,
)
from ncr_core.data.readers.tables import (
    InteractionFile,
    Names,
    TypedFile,
    read_parquet,
    records_of,
    seconds_of,
)

TYPES = (pa.string(), pa.string(), pa.float64(), pa.float64(), pa.int64(), pa.string())
SCHEMA = pa.schema(list(zip(InteractionRow._fields, TYPES, strict=True)))


def read_batches(
    file: InteractionFile, on_bad: OnBad, on_bytes: OnBytes | None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in batches with the fields of `InteractionRow`, never empty."""
    if not isinstance(file, TypedFile) or file.kind != "parquet":
        yield from map(_batch_of, filter(None, file.blocks(on_bad, on_bytes)))
        return
    typed = file

    def convert(first: int, cells: pa.RecordBatch) -> pa.RecordBatch:
        found = columns_at_first_sight(cells, typed.names)
        return found or _batch_of(typed.valid_rows(records_of(first, cells), on_bad))

    found = read_parquet(file.path, file.names.present(), convert, on_bad, on_bytes)
    yield from (batch for batch in found if batch.num_rows)


def _batch_of(rows: Sequence[InteractionRow]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
    arrays = [pa.array(cells, kind) for cells, kind in zip(columns, TYPES, strict=True)]
    return pa.record_batch(arrays, schema=SCHEMA)


def columns_at_first_sight(cells: pa.RecordBatch, names: Names) -> pa.RecordBatch | None:
    """Return a batch of the file's cells; None if a cell needs a check of its own."""
    if names.position is not None or names.latest is not None:
        return None

    def cell(name: str | None) -> pa.Array | None:
        # Of several columns with one name none is found.
        index = -1 if name is None else cells.schema.get_field_index(name)
        if index < 0:
            return None
        column = cells.column(index)
        return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column

    user, item = (_ids(cell(name)) for name in (names.user, names.item))
    value = _numbers(cell(names.rating))
    timestamp = _timestamps(cell(names.timestamp))
    kind = _types(cell(names.type))
    if user is None or item is None:
        return None
    found = [(names.rating, value), (names.timestamp, timestamp), (names.type, kind)]
    if any(name is not None and column is None for name, column in found):
        return None
    size = cells.num_rows
    columns = (user, item, value, timestamp, None, kind)
    arrays = [
        pa.nulls(size, type_) if column is None else column
        for column, type_ in zip(columns, TYPES, strict=True)
    ]
    return pa.record_batch(arrays, schema=SCHEMA)


def _ids(cells: pa.Array | None) -> pa.Array | None:
    if cells is None or cells.null_count:
        return None
    if pa.types.is_integer(cells.type):
        return cells.cast(pa.string())
    return _texts(cells, MAX_ID_BYTES)


def _types(cells: pa.Array | None) -> pa.Array | None:
    return None if cells is None else _texts(cells, MAX_TYPE_BYTES)


def _texts(cells: pa.Array, max_bytes: int) -> pa.Array | None:
    """Texts of 1 to ``max_bytes`` bytes without NUL, or nulls; None for other cells."""
    if not (pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)):
        return None
    try:
        cells.validate(full=True)  # UTF-8, above all
        cells = cells.cast(pa.string())
    except pa.ArrowException:
        return None
    sizes = pc.min_max(pc.binary_length(cells)).as_py()
    if sizes["min"] is not None and not 0 < sizes["min"] <= sizes["max"] <= max_bytes:
        return None
    return None if pc.any(pc.match_substring(cells, "\0")).as_py() else cells


def _numbers(cells: pa.Array | None) -> pa.Array | None:
    """Finite numbers or nulls; None for other cells."""
    if cells is None or not (
        pa.types.is_integer(cells.type)
        or pa.types.is_float32(cells.type)
        or pa.types.is_float64(cells.type)
    ):
        return None
    try:
        numbers = cells.cast(pa.float64())  # refuses integers that no float is equal to
    except pa.ArrowException:
        return None
    return None if pc.all(pc.is_finite(numbers)).as_py() is False else numbers


def _timestamps(cells: pa.Array | None) -> pa.Array | None:
    if cells is not None and (pa.types.is_date(cells.type) or pa.types.is_timestamp(cells.type)):
        cells = pa.array(seconds_of(cells), pa.float64())
    seconds = _numbers(cells)
    if seconds is None:
        return None
    ends = pc.min_max(seconds).as_py()
    if ends["min"] is not None and not FIRST_SECOND <= ends["min"] <= ends["max"] <= END_OF_TIME:
        return None
    return seconds
