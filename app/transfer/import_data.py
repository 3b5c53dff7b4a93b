"""Imports: the rows of a data set become events, items and preferences of the service."""

from __future__ import annotations

import asyncio
import csv
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from app.all_tables import metadata
from app.catalog.schemas import Item, ItemProblem, parse_item
from app.core.tables import now_us
from app.events.schemas import AppendResult, NewEvent, NewPreference, events_of, parse_preference
from app.events.user_schemas import NewUser, parse_user
from app.transfer.user_order import NUMBER, by_user
from app.wiring import Services
from ncr_core.data.readers import BadRow, DataSource, InteractionRow, ItemRow
from ncr_core.errors import DataError

T = TypeVar("T")

EVENTS_A_COMMIT = 50_000
ITEMS_A_COMMIT = 5_000
MAX_ITEM_IDS = 1_000_000
MIN_ROWS_WITHOUT_INDEX = 1_000_000
"""The index by item of fewer events stays in memory, so that building it later saves no time."""
MIN_VACUUMED_SHARE = 0.1
"""The share of new events, of the events before, from which an import vacuums tables. For fewer
events, PostgreSQL's own upkeep suffices, and reading all of a large table would take longer than
the import."""
EVENT_TYPE = "interaction"
PREFERENCES = "preferences.csv"
USERS = "users.jsonl"


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
    conflicts: int = 0
    """Bad rows whose event id is the id of an event with other content."""

    @property
    def good(self) -> int:
        """The number of rows that are stored now, new or not."""
        return self.accepted + self.duplicates


async def import_source(
    services: Services,
    source: DataSource,
    *,
    on_bad: Callable[[BadRow], None],
    on_bytes: Callable[[int], None],
    on_stored: Callable[[int], None] = lambda n: None,
    on_index: Callable[[], None] = lambda: None,
) -> ImportReport:
    """Adds all rows of a data set; a second import adds nothing.

    The import stores events user by user, each user's events in the order of the data set. If the
    data set has at least ``MIN_ROWS_WITHOUT_INDEX`` rows, and at least as many rows as the service
    had events, the import builds the index of events by item once, at the end. The import vacuums
    PostgreSQL's tables if the new events are more than a tenth of the events before.

    Args:
        services: the service to import into.
        source: the data set.
        on_bad: called for each row that cannot be read or stored, in the thread that reads.
        on_bytes: called with the number of bytes read, in the thread that reads.
        on_stored: called with the number of rows of each commit.
        on_index: called before the index is built at the end, if at all.
    """
    report = ImportReport()

    def bad(row: BadRow) -> None:
        report.bad += 1
        on_bad(row)

    for items in _chunks(_valid_items(source.items(on_bad=bad), bad, source.name), ITEMS_A_COMMIT):
        report.items += await services.catalog.describe_items(
            items, lambda item, problem: bad(_bad_item(source.name, item, problem))
        )
        report.items_known += len(items)
    batches = source.batches(on_bad=bad, on_bytes=on_bytes)
    known = False  # where the chunk before was stored already, this one is likely to be too
    stop = threading.Event()
    item_ids: dict[str, int] = {}
    n_rows: list[int] = []  # of all chunks, once they are sorted
    n_events = await services.events.last_seq()
    is_first = True
    # Two of the three indexes of the events begin with the user. In this order a commit changes a
    # few of their pages; in that of a log it would change one a row, ever more as they grow.
    ordered = map(_events, by_user(batches, EVENTS_A_COMMIT, stop, n_rows.append))
    async with AsyncExitStack() as index, aclosing(_read_ahead(ordered, stop)) as ahead:
        async for events in ahead:
            if known:
                result = await services.events.import_rows(events_of(events))
            else:
                if len(item_ids) > MAX_ITEM_IDS:
                    item_ids.clear()
                result = await services.events.import_new(events, item_ids)
            known = result.duplicates > events.num_rows // 2
            report.accepted += result.accepted
            report.duplicates += result.duplicates
            report.bad += result.conflicts
            report.conflicts += result.conflicts
            on_stored(events.num_rows)
            if is_first and not known and n_rows[0] >= max(MIN_ROWS_WITHOUT_INDEX, n_events):
                await index.enter_async_context(services.events.item_index.put_off(on_index))
            is_first = False
    await services.events.item_index.mend()  # that an import which was killed has left behind
    if report.accepted > n_events * MIN_VACUUMED_SHARE:
        await services.database.vacuum(metadata.sorted_tables)
    return report


async def import_preferences(
    services: Services, folder: Path, *, on_bad: Callable[[BadRow], None]
) -> AppendResult:
    """Adds the preferences in a folder that `ncr export` wrote; a second import adds nothing.

    The items of the preferences must exist.

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


async def import_users(
    services: Services, folder: Path, *, on_bad: Callable[[BadRow], None]
) -> int:
    """Stores the attributes in a folder that `ncr export` wrote, for users without attributes.

    Returns:
        The number of users whose attributes were stored.

    Raises:
        DataError: the file cannot be read.
    """
    path = folder / USERS
    if not path.is_file():
        return 0
    stored = 0
    for chunk in _chunks(_users(path, on_bad), ITEMS_A_COMMIT):
        stored += await services.users.describe_users(chunk)
    return stored


def _users(path: Path, on_bad: Callable[[BadRow], None]) -> Iterator[NewUser]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = orjson.loads(line)
                except orjson.JSONDecodeError:
                    on_bad(BadRow(path.name, number, "not valid JSON"))
                    continue
                if isinstance(row, dict) and "user" in row and "id" not in row:
                    row["id"] = row.pop("user")
                user = parse_user(row)
                if isinstance(user, NewUser):
                    yield user
                else:
                    on_bad(BadRow(path.name, number, user.detail))
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror}") from None


async def _read_ahead(
    chunks: Iterator[pa.RecordBatch], stop: threading.Event
) -> AsyncGenerator[pa.RecordBatch, None]:
    """Yields each chunk while a thread reads the next one, because parsing is CPU-bound."""

    def read() -> pa.RecordBatch | None:
        return next(chunks, None)

    reading = asyncio.create_task(asyncio.to_thread(read))
    try:
        while (events := await reading) is not None:
            reading = asyncio.create_task(asyncio.to_thread(read))
            yield events
    finally:
        stop.set()
        # Its result and its errors are dropped.
        await asyncio.wait([reading])
        if not reading.cancelled():
            reading.exception()


def _events(rows: pa.Table) -> pa.RecordBatch:
    """The events of rows, whose times the reader has already checked."""
    rows = rows.combine_chunks().to_batches()[0]
    given = pc.coalesce(rows["timestamp"], rows["position"].cast(pa.float64()))
    # The order of a data set without times is kept as seconds since 1970.
    seconds = pc.coalesce(given, rows[NUMBER].cast(pa.float64()))
    columns = {
        "event_id": pa.array(_event_ids(rows), pa.string()),
        "user": rows["user"],
        "item": rows["item"],
        "type": rows["type"].fill_null(EVENT_TYPE),
        "value": rows["value"],
        "timestamp": pa.array(np.rint(seconds.to_numpy() * 1e6).astype(np.int64)),
        "recommendation_id": pa.nulls(rows.num_rows, pa.string()),
        # Without a time of its own, a row is the same event at any position of its file.
        "timestamp_given": given.is_valid(),
    }
    return pa.record_batch([columns[name] for name in NewEvent._fields], NewEvent._fields)


def _event_ids(rows: pa.RecordBatch) -> Iterator[str]:
    """Yields ids derived from each row alone, so that the same row is the same event.

    The ids begin with the user, because rows are stored user by user, and an index grows faster in
    order.
    """
    columns = (rows[name].to_pylist() for name in InteractionRow._fields)
    for user, item, value, timestamp, position, kind in zip(*columns, strict=True):
        text = f"{len(user)}:{user}{item}\0{value}\0{timestamp}\0{position}"
        if kind is not None:
            text += f"\0{kind}"
        digest = blake2b(text.encode(), digest_size=16).hexdigest()
        yield f"import:{user[:24]}:{digest}"


_OWN_FIELDS = {"hidden", "attributes", "available_from", "available_until", "embedding"}


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
        is_ours = not row.attributes.keys() - _OWN_FIELDS
        if is_ours and isinstance(hidden, bool) and isinstance(attributes, dict):
            # The format of `ncr export` and of the API.
            description |= row.attributes
        item = parse_item(description)
        if isinstance(item, ItemProblem):
            on_bad(_bad_item(name, row.item, item))
        else:
            yield item


def _bad_item(name: str, item: str, problem: ItemProblem) -> BadRow:
    return BadRow(name, 0, f"item {item[:40]!r}: {problem.detail}")


def _chunks(items: Iterator[T], size: int) -> Iterator[Sequence[T]]:
    while chunk := list(islice(items, size)):
        yield chunk
