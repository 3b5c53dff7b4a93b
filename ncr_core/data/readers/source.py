"""Opening a path: finding the files of interactions and of items, and their formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard

from ncr_core.data.readers.items import MoviesDat, TableKind, open_items, open_u_item
from ncr_core.data.readers.rows import BadRow, Columns, InteractionRow, ItemRow, OnBad
from ncr_core.data.readers.tables import (
    DelimitedFile,
    InteractionFile,
    Layout,
    open_csv,
    open_typed,
)
from ncr_core.data.readers.text import cannot_read, first_line, opened
from ncr_core.errors import DataError

Format = Literal["auto", "movielens", "csv", "jsonl", "parquet"]
Kind = TableKind | Literal["ratings.dat", "u.data", "movies.dat", "u.item"]

RATINGS_STEMS = ("train", "ratings", "interactions", "events")
"""Names of files of interactions. The first found is taken: of a split, the training part."""
ITEMS_STEMS = ("items", "movies")
PROTOCOL_STEMS = ("test", "negative", "valid", "tags", "links")
"""Beginnings of names of files with users and items, but no interactions to learn from."""
_BY_SUFFIX: dict[str, Kind] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_BY_NAME: dict[str, Kind] = {
    "ratings.dat": "ratings.dat",
    "u.data": "u.data",
    "movies.dat": "movies.dat",
    "u.item": "u.item",
}
_U_DATA = re.compile(r"\d+\t\d+\t\d+\t\d+")
RATINGS_DAT = Layout(
    delimiter="::", width=4, user=0, item=1, rating=2, timestamp=3, header=False, quoted=False
)
U_DATA = Layout(
    delimiter="\t", width=4, user=0, item=1, rating=2, timestamp=3, header=False, quoted=False
)
_ORIGINALS: tuple[tuple[Kind, Kind], ...] = (("ratings.dat", "movies.dat"), ("u.data", "u.item"))
_SOUGHT = "ratings.dat, u.data, ratings.csv, or CSV, JSON Lines or Parquet files with columns"


class ItemFile(Protocol):
    """One file of items with known columns."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    def rows(self, on_bad: OnBad) -> Iterator[ItemRow]:
        """Yield the items."""
        ...


@dataclass(frozen=True)
class DataSource:
    """The files of data at a path, of which only the beginnings have been read yet."""

    format: str
    """`movielens`, `csv`, `jsonl`, `parquet`, or several joined by `+`."""
    name: str
    """The name of the file or folder."""
    _interactions: Sequence[InteractionFile]
    _items: Sequence[ItemFile]

    @property
    def interaction_files(self) -> list[Path]:
        """The files of interactions, in the order in which they are read."""
        return [file.path for file in self._interactions]

    @property
    def total_bytes(self) -> int:
        """The size on disk of the files of interactions, in bytes: the sum of all `on_bytes`."""
        return sum(path.stat().st_size for path in self.interaction_files)

    def interactions(
        self,
        *,
        on_bad: Callable[[BadRow], None],
        on_bytes: Callable[[int], None] | None = None,
        chunk_size: int = 10_000,
    ) -> Iterator[list[InteractionRow]]:
        """Yield the interactions in lists of at most `chunk_size`, never empty.

        Args:
            on_bad: called with every row that is left out.
            on_bytes: called with the number of further bytes on disk that have been read.
            chunk_size: the maximum number of rows in a list.

        Raises:
            DataError: a file can no longer be read.
            ValueError: `chunk_size` is below 1.
        """
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, not {chunk_size}")
        waiting: list[InteractionRow] = []
        for file in self._interactions:
            for block in file.blocks(on_bad, on_bytes):
                waiting += block
                whole = len(waiting) - len(waiting) % chunk_size
                for start in range(0, whole, chunk_size):
                    yield waiting[start : start + chunk_size]
                if whole:
                    waiting = waiting[whole:]
        if waiting:
            yield waiting

    def batches(
        self,
        *,
        on_bad: Callable[[BadRow], None],
        on_bytes: Callable[[int], None] | None = None,
    ) -> Iterator[Any]:
        """Yield the same interactions as Arrow record batches with the fields of `InteractionRow`.

        The call loads pyarrow. Arguments and errors are those of `interactions`.
        """
        from ncr_core.data.readers.batches import read_batches

        for file in self._interactions:
            yield from read_batches(file, on_bad, on_bytes)

    def items(self, *, on_bad: Callable[[BadRow], None]) -> Iterator[ItemRow]:
        """Yield the items, if the source has a file of items."""
        for file in self._items:
            yield from file.rows(on_bad)


def open_source(path: Path, format: Format = "auto", columns: Columns = Columns()) -> DataSource:  # noqa: A002, B008
    """Find the files of data at a path.

    In a folder, MovieLens's own files come first, then one file named train, ratings, interactions
    or events, then every file that has a user and an item column, by name. Items come from a file
    named items or movies.

    Args:
        path: the file or folder.
        format: the format to read; `auto` decides by names and first bytes.
        columns: the names of the columns, if they are not the usual ones.

    Raises:
        DataError: the path has no file of data, or a file lacks a column or is damaged.
    """
    try:
        if path.is_dir():
            files = sorted(entry for entry in path.iterdir() if entry.is_file())
            return _open_folder(path, files, format, columns)
        if not path.exists():
            raise DataError(f"{path} does not exist")
        if not path.is_file():  # a pipe or a device may never end
            raise DataError(f"{path} is neither a file nor a folder")
    except OSError as error:
        raise cannot_read(path, error) from None
    return _open_file(path, format, columns)


def _open_file(path: Path, wanted: Format, columns: Columns) -> DataSource:
    kind = kind_of(path, wanted)
    if kind in ("movies.dat", "u.item") or (_is_table(kind) and stem(path) in ITEMS_STEMS):
        return _source(path, [], [(path, kind)], columns)
    beside: list[tuple[Path, Kind]] = []
    if kind in ("ratings.dat", "u.data") or stem(path) in RATINGS_STEMS:
        beside = _item_files(_siblings(path), kind, wanted)
    return _source(path, [(path, kind)], beside, columns)


def _open_folder(folder: Path, files: list[Path], wanted: Format, columns: Columns) -> DataSource:
    kinds = {file: kind for file in files if (kind := kind_by_name(file)) and fits(kind, wanted)}
    for ratings, _ in _ORIGINALS:
        named = [(file, kind) for file, kind in kinds.items() if kind == ratings]
        if named:
            return _source(folder, named[:1], _item_files(files, ratings, wanted), columns)
    tables = {file: kind for file, kind in kinds.items() if _is_table(kind)}
    items = _item_files(files, "csv", wanted)
    for wanted_stem in RATINGS_STEMS:
        named = [(file, kind) for file, kind in tables.items() if stem(file) == wanted_stem]
        if named:
            return _source(folder, named[:1], items, columns)
    found: list[tuple[Path, Kind]] = []
    reasons: list[DataError] = []
    for file, kind in tables.items():
        if stem(file) not in ITEMS_STEMS and not stem(file).startswith(PROTOCOL_STEMS):
            try:
                _open_interactions(file, kind, columns)
            except DataError as reason:
                reasons.append(reason)
            else:
                found.append((file, kind))
    if found or items:
        return _source(folder, found, items, columns)
    if len(reasons) == 1:  # one file, and the reason is better than any list of what was sought
        raise reasons[0]
    raise DataError(
        f'{folder} has no readable file: expected {_SOUGHT} "{columns.user}" and "{columns.item}"'
        " (files named test or negatives need an explicit path)"
    )


def _item_files(files: Sequence[Path], ratings: Kind, wanted: Format) -> list[tuple[Path, Kind]]:
    """The one file of items that belongs to a kind of ratings; empty without one."""
    kinds = [(file, kind) for file in files if (kind := kind_by_name(file))]
    original = dict(_ORIGINALS).get(ratings)
    if original is not None:
        return [(file, kind) for file, kind in kinds if kind == original][:1]
    for name in ITEMS_STEMS:
        tables = [one for one in kinds if _is_table(one[1]) and stem(one[0]) == name]
        if fitting := [one for one in tables if fits(one[1], wanted)]:
            return fitting[:1]
    return []


def _source(
    path: Path,
    interactions: list[tuple[Path, Kind]],
    items: list[tuple[Path, Kind]],
    columns: Columns,
) -> DataSource:
    kinds = {_format(kind): None for _, kind in interactions or items}
    return DataSource(
        format="+".join(kinds),
        name=path.resolve().name,
        _interactions=[_open_interactions(file, kind, columns) for file, kind in interactions],
        _items=[_open_items(file, kind, columns) for file, kind in items],
    )


def _open_interactions(path: Path, kind: Kind, columns: Columns) -> InteractionFile:
    if kind == "ratings.dat" or kind == "u.data":
        return _open_ratings(path, RATINGS_DAT if kind == "ratings.dat" else U_DATA)
    if kind == "jsonl" or kind == "parquet":
        return open_typed(path, kind, columns)
    return open_csv(path, columns)


def _open_items(path: Path, kind: Kind, columns: Columns) -> ItemFile:
    if kind == "movies.dat":
        return MoviesDat(path)
    return open_items(path, kind, columns) if _is_table(kind) else open_u_item(path)


def _is_table(kind: Kind) -> TypeGuard[TableKind]:
    return kind in ("csv", "jsonl", "parquet")


def _format(kind: Kind) -> str:
    return kind if _is_table(kind) else "movielens"


def _siblings(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.parent.iterdir() if entry.is_file())
    except OSError:  # the file itself may be readable where its folder cannot be listed
        return []


def bare_name(path: Path) -> str:
    """A file's name in lower case and without `.gz`."""
    return path.name.lower().removesuffix(".gz")


def stem(path: Path) -> str:
    """The bare name without the suffix of its format."""
    name = bare_name(path)
    suffix = Path(name).suffix
    return name.removesuffix(suffix) if suffix in _BY_SUFFIX else name


def kind_by_name(path: Path) -> Kind | None:
    """The kind of a file by its name; None for other names."""
    name = bare_name(path)
    return _BY_NAME.get(name) or _BY_SUFFIX.get(Path(name).suffix)


def fits(kind: Kind, wanted: Format) -> bool:
    """Whether a file of a kind may be read as the wanted format."""
    if wanted == "auto":
        return True
    if wanted == "movielens":
        return kind not in ("jsonl", "parquet")
    return kind == wanted


def kind_of(path: Path, wanted: Format) -> Kind:
    """The kind of a file that the caller named.

    Raises DataError if the content has to decide, and the file is empty or cannot be read.
    """
    if wanted in ("csv", "jsonl", "parquet"):
        return wanted
    kind = kind_by_name(path)
    if kind is not None and fits(kind, wanted):
        return kind
    if _begins_as_parquet(path):
        return "parquet"
    line = first_line(path)
    if "::" in line:
        return "movies.dat" if line.count("::") == 2 else "ratings.dat"
    if _U_DATA.fullmatch(line):
        return "u.data"
    return "jsonl" if line.lstrip().startswith("{") else "csv"


def _begins_as_parquet(path: Path) -> bool:
    with opened(path) as (stream, _):
        try:
            return stream.read(4) == b"PAR1"
        except EOFError as error:
            raise DataError(f"{path.name} is damaged: {error}") from None
        except OSError as error:
            raise cannot_read(path, error) from None


def _open_ratings(path: Path, layout: Layout) -> DelimitedFile:
    """Check that an original ratings file is what its name says.

    Raises DataError if the file is empty, unreadable or of another layout.
    """
    found = len(first_line(path).split(layout.delimiter))
    if found != layout.width:
        raise DataError(
            f"{path.name} is not a MovieLens ratings file: its first line has {found} fields "
            f"separated by {layout.delimiter!r} instead of {layout.width}"
        )
    return DelimitedFile(path, layout)
