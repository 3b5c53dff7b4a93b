"""Telling what a file is: by its name where that says it, else by its first bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from ncr_core.data.readers.delimited import first_line
from ncr_core.data.readers.lines import cannot_read, opened
from ncr_core.errors import DataError

Format = Literal["auto", "movielens", "csv", "jsonl", "parquet"]
Kind = Literal["ratings.dat", "u.data", "movies.dat", "u.item", "csv", "jsonl", "parquet"]

RATINGS_STEMS = ("train", "ratings", "interactions", "events")
"""Files of interactions, the first found being taken: where there is a split, its training part."""
ITEMS_STEMS = ("items", "movies")
PROTOCOL_STEMS = ("test", "negative", "valid", "tags", "links")
"""Beginnings of names that have users and items in them but no interactions to learn from."""

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


def bare_name(path: Path) -> str:
    """A file's name in lower case and without `.gz`."""
    return path.name.lower().removesuffix(".gz")


def stem(path: Path) -> str:
    """The name without what says its format."""
    name = bare_name(path)
    suffix = Path(name).suffix
    return name.removesuffix(suffix) if suffix in _BY_SUFFIX else name


def kind_by_name(path: Path) -> Kind | None:
    """What a file's name says it is."""
    name = bare_name(path)
    return _BY_NAME.get(name) or _BY_SUFFIX.get(Path(name).suffix)


def fits(kind: Kind, wanted: Format) -> bool:
    """Whether a file may be read when the caller asked for a format."""
    if wanted == "auto":
        return True
    if wanted == "movielens":
        return kind not in ("jsonl", "parquet")
    return kind == wanted


def kind_of(path: Path, wanted: Format) -> Kind:
    """What a file that the caller named is.

    Raises:
        DataError: it is empty or cannot be read.
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
