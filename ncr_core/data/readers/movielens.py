"""The files of MovieLens as GroupLens publishes them, before they were CSV.

Their titles are Latin-1 in the older sets and UTF-8 in the later ones (10M has the older format
with UTF-8), so each line is tried as UTF-8 first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ncr_core.data.readers.delimited import (
    DelimitedFile,
    Layout,
    first_line,
    read_records,
)
from ncr_core.data.readers.items import categories_of
from ncr_core.data.readers.rows import BadRow, ItemRow, OnBad, RowFault, check_id, check_text
from ncr_core.errors import DataError

RATINGS_DAT = Layout(
    delimiter="::", width=4, user=0, item=1, rating=2, timestamp=3, header=False, quoted=False
)
U_DATA = Layout(
    delimiter="\t", width=4, user=0, item=1, rating=2, timestamp=3, header=False, quoted=False
)
GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
    "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi",
    "Thriller", "War", "Western",
)  # fmt: skip
"""The genres that the flags of `u.item` stand for, unless a `u.genre` beside it says otherwise."""
_BEFORE_GENRES = 5


def open_ratings(path: Path, layout: Layout) -> DelimitedFile:
    """Check that an original ratings file is what its name says.

    Raises:
        DataError: it is empty, unreadable or otherwise laid out.
    """
    found = len(first_line(path).split(layout.delimiter))
    if found != layout.width:
        raise DataError(
            f"{path.name} is not a MovieLens ratings file: its first line has {found} fields "
            f"separated by {layout.delimiter!r} instead of {layout.width}"
        )
    return DelimitedFile(path, layout)


@dataclass(frozen=True)
class MoviesDat:
    """`movies.dat`: MovieID::Title::Genre|Genre."""

    path: Path

    def rows(self, on_bad: OnBad) -> Iterator[ItemRow]:
        """Yield the items."""
        for number, fields in _records(self.path, "::", on_bad):
            try:
                if len(fields) < 3:
                    raise RowFault(f"{len(fields)} fields instead of 3")
                # A title may have the separator in it; the first and last field may not.
                title = "::".join(fields[1:-1])
                yield _film(fields[0], title, categories_of(fields[-1]), {})
            except RowFault as fault:
                on_bad(BadRow(self.path.name, number, str(fault)))


@dataclass(frozen=True)
class UItem:
    """`u.item`: id|title|release date|video date|address|a flag a genre."""

    path: Path
    genres: tuple[str, ...]

    def rows(self, on_bad: OnBad) -> Iterator[ItemRow]:
        """Yield the items."""
        width = _BEFORE_GENRES + len(self.genres)
        for number, fields in _records(self.path, "|", on_bad):
            try:
                if len(fields) != width:
                    raise RowFault(f"{len(fields)} fields instead of {width}")
                flags = zip(self.genres, fields[_BEFORE_GENRES:], strict=True)
                genres = tuple(genre for genre, flag in flags if flag == "1" and genre != "unknown")
                further = {"release_date": fields[2], "imdb_url": fields[4]}
                yield _film(fields[0], fields[1], genres, further)
            except RowFault as fault:
                on_bad(BadRow(self.path.name, number, str(fault)))


def open_u_item(path: Path) -> UItem:
    """Read the names of the genres, if they are beside the file.

    Raises:
        DataError: it is empty or unreadable.
    """
    for beside in (path.with_name("u.genre"), path.with_name("u.genre.gz")):
        if beside.is_file():
            numbered: dict[int, str] = {}
            for _, fields in _records(beside, "|", lambda _: None):
                if len(fields) == 2 and fields[1].strip().isdecimal():
                    numbered[int(fields[1])] = fields[0]
            if numbered and sorted(numbered) == list(range(len(numbered))):
                return UItem(path, tuple(numbered[at] for at in range(len(numbered))))
    return UItem(path, GENRES)


def _records(path: Path, delimiter: str, on_bad: OnBad) -> Iterator[tuple[int, list[str]]]:
    for records in read_records(
        path, delimiter, quoted=False, header=False, on_bad=on_bad, latin1=True
    ):
        yield from records


def _film(item: str, title: str, categories: tuple[str, ...], further: dict[str, str]) -> ItemRow:
    return ItemRow(
        item=check_id("item", item),
        title=check_text("title", title) or None,
        categories=categories,
        attributes={name: check_text(name, value) for name, value in further.items() if value},
    )
