"""Imports: the rows of a data set become events, items and preferences of the service."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from app.catalog.schemas import Item, ItemProblem, parse_item
from app.core.tables import now_us
from app.events.schemas import AppendResult, NewEvent, NewPreference, parse_preference
from app.wiring import Services
from ncr_core.data.readers import BadRow, DataSource, InteractionRow, ItemRow
from ncr_core.errors import DataError

T = TypeVar("T")

EVENTS_A_COMMIT = 50_000
ITEMS_A_COMMIT = 5_000
EVENT_TYPE = "interaction"
PREFERENCES = "preferences.csv"
SORT_CACHE_KIB = 65_536
STOP_STEPS = 100_000  # of SQLite between two looks whether to stop: milliseconds


@dataclass
class ImportReport:
    """Counts of an import."""

    accepted: int = 0
    duplicates: int = 0
    items: int = 0
    """Items whose description is new or has changed."""
    items_known: int = 0
    """Items that the data set describes."""
    bad: int = 0

    @property
    def good(self) -> int:
        """Rows that are stored now, whether or not they are new."""
        return self.accepted + self.duplicates


async def import_source(
    services: Services,
    source: DataSource,
    *,
    on_bad: Callable[[BadRow], None],
    on_bytes: Callable[[int], None],
    on_stored: Callable[[int], None] = lambda n: None,
) -> ImportReport:
    """Adds all rows of a data set; a second import adds nothing.

    The events are stored user by user, each user's in the order of the data set.

    Args:
        services: the service to import into.
        source: the data set.
        on_bad: called for each row that cannot be read or stored, in the thread that reads.
        on_bytes: called with the number of bytes read, in the thread that reads.
        on_stored: called with the number of rows of each commit.
    """
    report = ImportReport()

    def bad(row: BadRow) -> None:
        report.bad += 1
        on_bad(row)

    for items in _chunks(_valid_items(source.items(on_bad=bad), bad, source.name), ITEMS_A_COMMIT):
        report.items += await services.catalog.describe_items(items)
        report.items_known += len(items)
    rows = source.interactions(on_bad=bad, on_bytes=on_bytes, chunk_size=EVENTS_A_COMMIT)
    known = False  # where the chunk before was stored already, this one is likely to be too
    stop = threading.Event()
    async with aclosing(_read_ahead(_events(_by_user(rows, stop)), stop)) as ahead:
        async for events in ahead:
            result = await services.events.import_rows(events, likely_new=not known)
            known = result.duplicates > len(events) // 2
            report.accepted += result.accepted
            report.duplicates += result.duplicates
            report.bad += result.conflicts
            on_stored(len(events))
    return report


async def import_preferences(
    services: Services, folder: Path, *, on_bad: Callable[[BadRow], None]
) -> AppendResult:
    """Adds the preferences in a folder that `ncr export` wrote; a second import adds nothing.

    Their items must exist.

    Raises:
        DataError: the file is not CSV.
    """
    total = AppendResult()
    path = folder / PREFERENCES
    if not path.is_file():
        return total
    for chunk in _chunks(_preferences(path, on_bad), ITEMS_A_COMMIT):
        result = await services.events.import_preferences([row for row, _ in chunk])
        total.accepted += result.accepted
        total.duplicates += result.duplicates
        for bad in result.rejected:
            on_bad(BadRow(path.name, chunk[bad.index][1], bad.detail))
    return total


def _preferences(
    path: Path, on_bad: Callable[[BadRow], None]
) -> Iterator[tuple[NewPreference, int]]:
    """The valid rows, each with its line number."""
    now = now_us()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for cells in reader:
                filled = {name: cell for name, cell in cells.items() if cell}
                row = parse_preference(filled, 0, now)
                if isinstance(row, NewPreference):
                    yield row, reader.line_num
                else:
                    on_bad(BadRow(path.name, reader.line_num, row.detail))
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path.name} cannot be read: {reason}") from None


def _by_user(
    chunks: Iterable[Sequence[InteractionRow]], stop: threading.Event
) -> Iterator[list[tuple[int, InteractionRow]]]:
    """Yields all rows ordered by user, each with its number in the data set.

    Two of the three indexes of the events begin with the user. In this order a commit changes a few
    of their pages; in the order of a log it would change one a row, ever more of them as they grow.
    A temporary database sorts the rows on disk, which disappears with the process.
    """
    try:
        with closing(sqlite3.connect("", isolation_level=None, check_same_thread=False)) as rows:
            rows.set_progress_handler(stop.is_set, STOP_STEPS)
            rows.execute(f"PRAGMA cache_size=-{SORT_CACHE_KIB}")
            rows.execute("PRAGMA journal_mode=OFF")
            # Columns without a type: values come back as they were.
            columns = ", ".join(InteractionRow._fields)
            rows.execute(f"CREATE TABLE rows (number INTEGER PRIMARY KEY, {columns})")
            marks = ", ".join("?" * len(InteractionRow._fields))
            number = 0
            for chunk in chunks:
                rows.execute("BEGIN")
                numbered = ((n, *row) for n, row in enumerate(chunk, number))
                rows.executemany(f"INSERT INTO rows VALUES (?, {marks})", numbered)  # noqa: S608
                rows.execute("COMMIT")
                number += len(chunk)
            query = f"SELECT number, {columns} FROM rows ORDER BY user, number"  # noqa: S608
            found = rows.execute(query)
            while chunk := found.fetchmany(EVENTS_A_COMMIT):
                yield [(row[0], InteractionRow._make(row[1:])) for row in chunk]
    except sqlite3.Error as error:  # a full disk, above all
        raise DataError(f"the rows cannot be sorted on disk: {error}") from None


def _events(
    chunks: Iterable[Sequence[tuple[int, InteractionRow]]],
) -> Iterator[list[NewEvent]]:
    for chunk in chunks:
        yield [_event(row, number) for number, row in chunk]


async def _read_ahead(
    chunks: Iterator[list[NewEvent]], stop: threading.Event
) -> AsyncGenerator[list[NewEvent], None]:
    """Yields each chunk while a thread reads the next one, because parsing is CPU-bound."""

    def read() -> list[NewEvent]:
        return next(chunks, [])

    reading = asyncio.create_task(asyncio.to_thread(read))
    try:
        while events := await reading:
            reading = asyncio.create_task(asyncio.to_thread(read))
            yield events
    finally:
        stop.set()
        # Its result and its errors are dropped.
        await asyncio.wait([reading])
        if not reading.cancelled():
            reading.exception()


def _event(row: InteractionRow, number: int) -> NewEvent:
    """The event of a row, whose time the reader has already checked."""
    # The order of a data set without times is kept as seconds since 1970.
    seconds = row.timestamp
    if seconds is None:
        seconds = float(number if row.position is None else row.position)
    return NewEvent(
        event_id=_event_id(row),
        user=row.user,
        item=row.item,
        type=row.type or EVENT_TYPE,
        value=row.value,
        timestamp=round(seconds * 1e6),
        # Without a time of its own, a row is the same event at any position of its file.
        timestamp_given=row.timestamp is not None or row.position is not None,
    )


def _event_id(row: InteractionRow) -> str:
    """An id derived from the row alone, so that the same row is the same event.

    It begins with the user: rows are stored user by user, and an index grows faster in order.
    """
    text = f"{len(row.user)}:{row.user}{row.item}\0{row.value}\0{row.timestamp}\0{row.position}"
    if row.type is not None:
        text += f"\0{row.type}"
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return f"import:{row.user[:24]}:{digest}"


def _valid_items(
    rows: Iterable[ItemRow], on_bad: Callable[[BadRow], None], name: str
) -> Iterator[Item]:
    for row in rows:
        description = {
            "id": row.item,
            "title": row.title,
            "categories": list(row.categories),
            "attributes": row.attributes,
        }
        hidden, attributes = row.attributes.get("hidden"), row.attributes.get("attributes")
        if len(row.attributes) == 2 and isinstance(hidden, bool) and isinstance(attributes, dict):
            # The format of `ncr export` and of the API.
            description |= row.attributes
        item = parse_item(description)
        if isinstance(item, ItemProblem):
            on_bad(BadRow(name, 0, f"item {row.item[:40]!r}: {item.detail}"))
        else:
            yield item


def _chunks(items: Iterator[T], size: int) -> Iterator[Sequence[T]]:
    while chunk := list(islice(items, size)):
        yield chunk
