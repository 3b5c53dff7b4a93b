"""Interactions from a path, arrays, a data frame, or rows."""

from __future__ import annotations

import os
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ncr_core.data.interactions import IntArray, Interactions, TimeArray, build_interactions
from ncr_core.data.readers import LATEST_OFFSET, BadRow, Columns, DataSource, open_source
from ncr_core.data.readers.rows import (
    RowFault,
    id_of,
    latest_of,
    parse_seconds,
    position_of,
    rating_of,
    shown,
)
from ncr_core.data.readers.tables import Names, interaction_names
from ncr_core.errors import DataError

OrderArray: TypeAlias = npt.NDArray[np.generic]

_ROWS_NEEDED = "rows must be tuples (user, item) or (user, item, timestamp), or mappings"

InteractionSource: TypeAlias = "str | os.PathLike[str] | DataSource | Interactions | Iterable[Any]"
"""The sources that `load_interactions` takes."""


@dataclass(frozen=True)
class Dataset:
    """Interactions, and the titles and categories of items in their source."""

    interactions: Interactions
    titles: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Titles by item id, also of items without interactions."""
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    """Categories by item id, also of items without interactions."""

    @property
    def user_ids(self) -> Sequence[str]:
        """(n_users,) the id of each row of `interactions`."""
        return self.interactions.user_ids

    @property
    def item_ids(self) -> Sequence[str]:
        """(n_items,) the id of each column of `interactions`."""
        return self.interactions.item_ids


def load_interactions(
    source: InteractionSource | Dataset,
    *,
    user: str | None = None,
    item: str | None = None,
    timestamp: str | None = None,
    rating: str | None = None,
) -> Dataset:
    """Read interactions from a path, arrays, a data frame or rows.

    Ids become strings, as in the service: 7 and 7.0 are "7". Each row is a positive interaction
    whatever its rating. Timestamps give the order of a user's items; without timestamps, the order
    of the rows does. Timestamps in arrays, frames and rows may be times, ISO 8601 text or any
    finite numbers. Models that use the time since a user's last interaction take numbers as seconds
    since 1970.

    Args:
        source: one of

            - the path of a file or folder that `ncr import` takes, or an opened `DataSource`;
            - the folder of a snapshot, which `ncr snapshot` has written;
            - a tuple of arrays or lists, `(users, items)` or `(users, items, timestamps)`;
            - an array of shape (n, 2) or (n, 3) with the same columns;
            - a pandas or polars frame, a pyarrow table, or a mapping of names to columns;
            - an iterable of rows: tuples `(user, item)` or `(user, item, timestamp)`, mappings or
              named tuples;
            - an `Interactions` or a `Dataset`, which is returned as it is.
        user: the name of the column that holds the user; default "user", "userId" or "user_id".
        item: the name of the column that holds the item; default "item", "movieId", "itemId" or
            "item_id".
        timestamp: the name of the column that holds the time; default "timestamp", if present.
        rating: the name of the column that holds the rating; default "rating" or "value", if
            present. Ratings are checked, not used.

    Raises:
        DataError: there is no row or only one user, a column is missing, columns differ in length,
            or a value cannot be used. Rows that a file's reader cannot use are left out with a
            `UserWarning` instead.
    """
    names = {"user": user, "item": item, "timestamp": timestamp, "rating": rating}
    columns = Columns(**{part: name for part, name in names.items() if name is not None})
    if isinstance(source, Dataset):
        dataset = source
    elif isinstance(source, Interactions):
        dataset = Dataset(source)
    elif isinstance(source, DataSource):
        dataset = _from_files(source)
    elif isinstance(source, str | os.PathLike) and (snapshot := _snapshot_in(Path(source))):
        dataset = snapshot
    elif isinstance(source, str | os.PathLike):
        dataset = _from_files(open_source(Path(source), columns=columns))
    else:
        dataset = Dataset(_from_memory(source, columns))
    _check_not_empty(dataset.interactions)
    return dataset


def _snapshot_in(folder: Path) -> Dataset | None:
    """The data of a folder that holds a snapshot; None if it holds none."""
    if not (folder / "manifest.json").is_file():
        return None
    from ncr_core.data.snapshot import Snapshot, is_snapshot  # pyarrow is loaded where it is needed

    return Dataset(Snapshot.open(folder).read()) if is_snapshot(folder) else None


def read_source(
    source: DataSource,
    *,
    on_bad: Callable[[BadRow], None],
    on_bytes: Callable[[int], None] | None = None,
) -> Interactions:
    """Read the interactions of an opened file or folder.

    Args:
        source: a source of `open_source`.
        on_bad: called with every row that is left out.
        on_bytes: called with the number of further bytes on disk that have been read.

    Raises:
        DataError: there is no row, or a file can no longer be read.
    """
    is_timed = True

    def rows() -> Iterator[tuple[str, str, float]]:
        nonlocal is_timed
        for chunk in source.interactions(on_bad=on_bad, on_bytes=on_bytes):
            for row in chunk:
                if row.timestamp is None:
                    is_timed = False
                    yield row.user, row.item, float(row.position or 0)
                else:
                    yield row.user, row.item, row.timestamp

    interactions = build_interactions(rows(), timed=True)
    return interactions if is_timed else replace(interactions, times=None)


def _from_files(source: DataSource) -> Dataset:
    bad_rows: list[BadRow] = []
    n_bad = 0

    def on_bad(row: BadRow) -> None:
        nonlocal n_bad
        n_bad += 1
        if not bad_rows:
            bad_rows.append(row)

    try:
        interactions = read_source(source, on_bad=on_bad)
    except DataError as error:
        if not bad_rows:
            raise
        raise DataError(f"{error}; {_first_bad_row(bad_rows[0])}") from None
    items = list(source.items(on_bad=on_bad))
    if n_bad:
        warnings.warn(
            f"{n_bad:,} bad rows of {source.name} left out; {_first_bad_row(bad_rows[0])}",
            UserWarning,
            stacklevel=3,
        )
    return Dataset(
        interactions,
        titles={row.item: row.title for row in items if row.title},
        categories={row.item: row.categories for row in items if row.categories},
    )


def _first_bad_row(row: BadRow) -> str:
    return f"the first bad row is {row.file} line {row.line}: {row.reason}"


def _from_memory(source: Any, columns: Columns) -> Interactions:
    if isinstance(source, np.ndarray) and source.ndim == 2:
        source = tuple(source.T)
    elif isinstance(source, tuple) and source and _is_column(source[0]):
        pass
    elif isinstance(source, Mapping):
        return _from_named_columns(source, list(source), columns)
    elif hasattr(source, "column_names"):  # pyarrow
        return _from_named_columns(source, list(source.column_names), columns)
    elif hasattr(source, "columns"):  # pandas, polars
        return _from_named_columns(source, list(source.columns), columns)
    elif hasattr(source, "__arrow_c_stream__"):
        return _from_memory(_arrow_table(source), columns)
    elif isinstance(source, Iterable) and not isinstance(source, bytes | bytearray):
        rows = list(source)
        if not rows:
            raise DataError("the data has no interactions to learn from")
        named = _columns_of_rows(rows, columns)
        return _from_named_columns(named, list(named), columns, "the rows")
    else:
        raise DataError(
            "interactions come from a path, arrays, a data frame or rows, "
            f"not from {type(source).__name__}"
        )
    if len(source) not in (2, 3):
        raise DataError(
            f"the source has {len(source)} arrays, but needs (users, items) or (users, items, "
            "timestamps)"
        )
    names = (columns.user, columns.item, columns.timestamp)[: len(source)]
    named = dict(zip(names, source, strict=True))
    return _from_named_columns(named, list(named), columns, "the arrays")


def _is_column(value: object) -> bool:
    """Whether a tuple with this first member holds columns; else it holds rows."""
    return isinstance(value, list) or hasattr(value, "__array__")


def _arrow_table(source: Any) -> Any:
    try:
        import pyarrow as pa
    except ImportError:
        raise DataError(f"reading a {type(source).__name__} needs the package pyarrow") from None
    return pa.table(source)


def _from_named_columns(
    frame: Any, found: list[str], columns: Columns, where: str = ""
) -> Interactions:
    names = _names(columns, [str(name) for name in found], where or f"the {type(frame).__name__}")
    parts = {name: frame[name] for name in names.present()}
    _check_lengths(parts)
    if names.rating is not None:
        _parsed_cells(names.rating, parts[names.rating], rating_of)
    order: OrderArray | None = None
    if names.timestamp is not None:
        order = _order(names.timestamp, parts[names.timestamp])
    elif names.position is not None or names.latest is not None:
        order = np.zeros(len(parts[names.user]))
        for name, parse, unit in (
            (names.position, position_of, 1),
            (names.latest, latest_of, LATEST_OFFSET),
        ):
            if name is not None:
                cells = _parsed_cells(name, parts[name], parse)
                order += unit * np.array([cell or 0 for cell in cells], dtype=np.float64)
    timed = names.timestamp is not None
    return _from_columns(parts[names.user], parts[names.item], order, timed=timed)


def _names(columns: Columns, found: Sequence[str], where: str) -> Names:
    return interaction_names(columns, found, where, hint=lambda part: f'{part}="…"')


def _from_columns(users: Any, items: Any, order: OrderArray | None, *, timed: bool) -> Interactions:
    if not len(users):
        raise DataError("the data has no interactions to learn from")
    user_rows, user_ids = _number_ids("user", users)
    item_rows, item_ids = _number_ids("item", items)
    return Interactions.from_arrays(
        user_rows,
        item_rows,
        order,
        user_ids=user_ids,
        item_ids=item_ids,
        times=_seconds(order) if timed and order is not None else None,
    )


def _number_ids(part: str, values: Any) -> tuple[IntArray, list[str]]:
    """(n,) the number of each row's id by first appearance, and the ids in that order."""
    cells = _cells(values)
    if isinstance(cells, np.ndarray):
        distinct, rows, numbers = _distinct(cells)
        return numbers, [_checked_id(part, *cell) for cell in zip(distinct, rows, strict=True)]
    number_of: dict[str, int] = {}
    flat = array("q")
    for row, value in enumerate(cells):
        number = number_of.get(value) if type(value) is str else None
        if number is None:
            number = number_of.setdefault(_checked_id(part, value, row), len(number_of))
        flat.append(number)
    return np.array(flat, dtype=np.int64), list(number_of)


def _cells(values: Any) -> list[Any] | npt.NDArray[np.generic]:
    """A column as an array if it holds numbers or times, else as a list."""
    if isinstance(values, list):
        return values
    cells = np.asarray(values)
    if cells.ndim != 1:
        raise DataError(f"a column has one dimension, not {cells.ndim}")
    return cells if cells.dtype.kind in "iufM" else cells.tolist()


def _distinct(cells: npt.NDArray[np.generic]) -> tuple[list[Any], list[int], IntArray]:
    """The distinct cells by first appearance, their rows, and (n,) the number of a row's cell."""
    values, first, inverse = np.unique(cells, return_index=True, return_inverse=True)
    by_appearance = np.argsort(first)
    number = np.empty(len(values), dtype=np.int64)
    number[by_appearance] = np.arange(len(values))
    return list(values[by_appearance]), first[by_appearance].tolist(), number[inverse]


def _checked_id(part: str, value: object, row: int) -> str:
    try:
        return id_of(part, _plain(value))
    except RowFault as fault:
        raise DataError(f"row index {row}: {fault}") from None


def _plain(value: Any) -> Any:
    """A cell as Python's own type; None for NaN, NaT and the NA of pandas."""
    if isinstance(value, np.datetime64):
        return value.astype("datetime64[us]").item()
    if isinstance(value, np.generic):
        value = value.item()
    return None if (value != value) is not False else value


def _order(name: str, values: Any) -> OrderArray:
    """(n,) sort keys from times of any kind: numbers as they are, else seconds since 1970."""
    cells = _cells(values)
    order: OrderArray
    if isinstance(cells, list):
        order = np.array(_parsed_cells(name, cells, _sort_key), dtype=np.float64)
    else:
        order = cells
    bad = np.isnat(order) if order.dtype.kind == "M" else ~np.isfinite(order)
    if bad.any():
        raise DataError(f"row index {bad.argmax()}: {name} is missing or not finite")
    return order


def _seconds(order: OrderArray) -> TimeArray:
    """Seconds since 1970 of sort keys that are times; numbers as they are."""
    if order.dtype.kind == "M":
        order = order.astype("datetime64[us]").astype(np.int64) / 1e6
    return order.astype(np.float64)


def _sort_key(value: object) -> float:
    """Seconds since 1970 of a time, a number as it is, NaN for a missing value."""
    if value is None or value == "":
        return float("nan")
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date):
        return datetime.combine(value, time(), UTC).timestamp()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and (seconds := parse_seconds(value)) is not None:
        return seconds
    raise RowFault(f"the timestamp is neither a number nor a time: {shown(value)}")


def _parsed_cells(name: str, values: Any, parse: Callable[[Any], Any]) -> list[Any]:
    """The results of `parse` for all cells; `parse` gets None for a missing cell."""
    cells = _cells(values)
    if isinstance(cells, np.ndarray):
        distinct, rows, numbers = _distinct(cells)
    else:
        distinct, rows, numbers = cells, list(range(len(cells))), None
    parsed = []
    for value, row in zip(distinct, rows, strict=True):
        try:
            parsed.append(parse(_plain(value)))
        except RowFault as fault:
            raise DataError(f"row index {row}: {name}: {fault}") from None
    return parsed if numbers is None else [parsed[number] for number in numbers.tolist()]


def _check_lengths(columns: Mapping[str, Any]) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise DataError(f"the columns differ in length: {listed}")


def _columns_of_rows(rows: list[Any], columns: Columns) -> dict[str, list[Any]]:
    """The columns of rows that are all mappings, all named tuples, or all tuples."""
    if isinstance(rows[0], Mapping) or hasattr(rows[0], "_asdict"):
        records = [_record(row, number) for number, row in enumerate(rows)]
        names = _names(columns, list(records[0]), "the first row")
        return {name: [record.get(name) for record in records] for name in names.present()}
    width = len(rows[0]) if isinstance(rows[0], Sequence | np.ndarray) else 0
    for number, row in enumerate(rows):
        if not isinstance(row, tuple | list | np.ndarray):
            raise DataError(f"row index {number} is of type {type(row).__name__}; {_ROWS_NEEDED}")
        if len(row) != width or width not in (2, 3):
            raise DataError(f"row index {number} has {len(row)} values; {_ROWS_NEEDED}")
    parts = (columns.user, columns.item, columns.timestamp)[:width]
    return {name: [row[at] for row in rows] for at, name in enumerate(parts)}


def _record(row: Any, number: int) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        return row
    if hasattr(row, "_asdict"):
        record: Mapping[str, Any] = row._asdict()
        return record
    raise DataError(f"row index {number} is of type {type(row).__name__}, other than the first")


def _check_not_empty(interactions: Interactions) -> None:
    if interactions.nnz == 0:
        raise DataError("the data has no interactions to learn from")
    if interactions.n_users == 1:
        raise DataError(
            f"the data has only one user, {shown(interactions.user_ids[0])}: training needs at "
            "least two users"
        )
