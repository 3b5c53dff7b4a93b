"""From the rows of a data set to events and items of the service."""

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
from app.core.metadata import now_us
from app.events.preferences import parse_preference
from app.events.schemas import AppendResult, NewEvent, NewPreference
from app.services import Services
from ncr_core.data.readers import BadRow, InteractionRow, ItemRow, Source
from ncr_core.errors import DataError

T = TypeVar("T")

EVENTS_A_COMMIT = 20_000
ITEMS_A_COMMIT = 5_000
EVENT_TYPE = "interaction"
PREFERENCES = "preferences.csv"


@dataclass
class ImportReport:
    """What an import did."""

    accepted: int = 0
    duplicates: int = 0
    items: int = 0
    """Items that were described."""
    items_known: int = 0
    """Items that the file describes, those that were described before included."""
    bad: int = 0

    @property
    def good(self) -> int:
        return self.accepted + self.duplicates


async def import_source(
    services: Services,
    source: Source,
    *,
    on_bad: Callable[[BadRow], None],
    on_bytes: Callable[[int], None],
) -> ImportReport:
    """Adds everything that ``source`` holds; a second time it adds nothing.

    Rows that cannot be read or stored are told to ``on_bad``; the others are kept. It and
    ``on_bytes`` are called from the thread that reads.
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
    """Adds the stated preferences of a folder that `ncr export` wrote, if it has any; a second time
    none. Their items must be there. Raises DataError for a file that is no CSV.
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
    """The rows, each with its line."""
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
        yield [_event(row, at) for at, row in enumerate(chunk, number)]
        number += len(chunk)


async def _read_ahead(chunks: Iterator[list[NewEvent]]) -> AsyncGenerator[list[NewEvent], None]:
    """Each chunk, while a thread reads the next: the files need the processor, the database not."""

    def read() -> list[NewEvent]:
        return next(chunks, [])

    reading = asyncio.create_task(asyncio.to_thread(read))
    try:
        while events := await reading:
            reading = asyncio.create_task(asyncio.to_thread(read))
            yield events
    finally:
        # No thread can be stopped; nothing of what it reads is told once this is over.
        await asyncio.wait([reading])
        if not reading.cancelled():
            reading.exception()


def _event(row: InteractionRow, number: int) -> NewEvent:
    """The event of a row; readers take no times that events may not have."""
    # Where a set has an order and no times, the order is kept as seconds since 1970.
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
        # Without a time of its own, a row is the same event wherever it stands in its file.
        timestamp_given=row.timestamp is not None or row.position is not None,
    )


def _event_id(row: InteractionRow) -> str:
    """Derived from the row alone, so that the same row is the same event.

    It begins with the user: files mostly come user by user, and an index takes neighbours faster.
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
            # As `ncr export` writes items, and as the API knows them.
            description |= row.attributes
        item = parse_item(description)
        if isinstance(item, ItemProblem):
            on_bad(BadRow(name, 0, f"item {row.item[:40]!r}: {item.detail}"))
        else:
            yield item


def _chunks(items: Iterator[T], size: int) -> Iterator[Sequence[T]]:
    while chunk := list(islice(items, size)):
        yield chunk
