"""Imports: the rows of a data set become events, items and preferences of the service."""

from __future__ import annotations

import asyncio
import csv
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
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

EVENTS_A_COMMIT = 20_000
ITEMS_A_COMMIT = 5_000
EVENT_TYPE = "interaction"
PREFERENCES = "preferences.csv"


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
) -> ImportReport:
    """Adds all rows of a data set; a second import adds nothing.

    Args:
        services: the service to import into.
        source: the data set.
        on_bad: called for each row that cannot be read or stored, in the thread that reads.
        on_bytes: called with the number of bytes read, in the thread that reads.
    """
    report = ImportReport()

    def bad(row: BadRow) -> None:
        report.bad += 1
        on_bad(row)

    for items in _chunks(_valid_items(source.items(on_bad=bad), bad, source.name), ITEMS_A_COMMIT):
        report.items += await services.catalog.describe_items(items)
        report.items_known += len(items)
    conflicts = 0
    chunks = source.interactions(on_bad=bad, on_bytes=on_bytes, chunk_size=EVENTS_A_COMMIT)
    async with aclosing(_read_ahead(_events(chunks))) as ahead:
        async for events in ahead:
            result = await services.events.import_rows(events)
            report.accepted += result.accepted
            report.duplicates += result.duplicates
            conflicts += result.conflicts
    report.bad += conflicts
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


def _events(chunks: Iterable[Sequence[InteractionRow]]) -> Iterator[list[NewEvent]]:
    number = 0
    for chunk in chunks:
        yield [_event(row, row_number) for row_number, row in enumerate(chunk, number)]
        number += len(chunk)


async def _read_ahead(chunks: Iterator[list[NewEvent]]) -> AsyncGenerator[list[NewEvent], None]:
    """Yields each chunk while a thread reads the next one, because parsing is CPU-bound."""

    def read() -> list[NewEvent]:
        return next(chunks, [])

    reading = asyncio.create_task(asyncio.to_thread(read))
    try:
        while events := await reading:
            reading = asyncio.create_task(asyncio.to_thread(read))
            yield events
    finally:
        # A thread cannot be stopped: its result and its errors are dropped.
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

    It begins with the user: most files are sorted by user, and an index grows faster in order.
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
