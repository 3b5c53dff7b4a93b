"""Exports: events and stated preferences as CSV and items as JSON Lines, in a folder that
`ncr import` reads."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson

from app.catalog.schemas import Item
from app.events.schemas import StoredEvent
from app.imports import PREFERENCES
from app.services import Services
from app.transfer.archive import Report, quietly
from app.transfer.files import new_file, refuse_existing

EVENTS, ITEMS = "events.csv", "items.jsonl"
PREFERENCE_COLUMNS = ("user", "winner", "loser", "timestamp")
COLUMNS = ("event_id", "user", "item", "type", "value", "timestamp", "recommendation_id")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class ExportReport:
    """What was written."""

    events: int
    items: int
    preferences: int


async def export(
    services: Services, folder: Path, *, user: str | None = None, report: Report = quietly
) -> ExportReport:
    """Writes all items, events and preferences to new files, or what one user did and said alone.

    There is a file of preferences only if there are any.
    Raises NotFound for an unknown user, and TransferError where one of the files is there already.
    """
    for name in (EVENTS, ITEMS, PREFERENCES):
        refuse_existing(folder / name)
    items = 0
    if user is None:
        items = await _export_items(services, folder, report)
    events = await _export_events(services, folder, user, report)
    return ExportReport(events, items, await _export_preferences(services, folder, user, report))


async def _export_items(services: Services, folder: Path, report: Report) -> int:
    total = len((await services.catalog.catalogue()).external_ids)
    written = 0
    chunks = services.catalog.every()
    first = await anext(chunks, None)
    if first is None:
        return 0  # an empty file would be none that can be imported
    with new_file(folder / ITEMS) as file:
        chunk: list[Item] | None = first
        while chunk is not None:
            file.write(b"".join(_item_line(item) for item in chunk))
            written += len(chunk)
            report("items", written, max(written, total))
            chunk = await anext(chunks, None)
    return written


async def _export_events(services: Services, folder: Path, user: str | None, report: Report) -> int:
    total = await services.events.last_seq()
    written = 0
    with new_file(folder / EVENTS) as file:
        # A line feed within an id is quoted; at the end of lines there is nothing else.
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        async for chunk in services.events.every(user):
            writer.writerows(_event_row(*row) for row in chunk)
            written += len(chunk)
            report("events", chunk[-1][0].seq, total)
        text.flush()
        text.detach()
    return written


def _item_line(item: Item) -> bytes:
    row = item.as_json()
    return orjson.dumps({"item": row.pop("id"), **row}, option=orjson.OPT_APPEND_NEWLINE)


async def _export_preferences(
    services: Services, folder: Path, user: str | None, report: Report
) -> int:
    chunks = services.events.every_preference(user)
    chunk = await anext(chunks, None)
    if chunk is None:
        return 0
    written = 0
    with new_file(folder / PREFERENCES) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(PREFERENCE_COLUMNS)
        while chunk is not None:
            writer.writerows((*row[:-1], _iso(row.timestamp)) for row in chunk)
            written += len(chunk)
            report("preferences", written, written)
            chunk = await anext(chunks, None)
        text.flush()
        text.detach()
    return written


def _iso(micros: int) -> str:
    moment = _EPOCH + timedelta(microseconds=micros)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _event_row(event: StoredEvent, user: str, item: str) -> tuple[object, ...]:
    return (
        event.event_id,
        user,
        item,
        event.type,
        event.value,
        _iso(event.timestamp),
        event.recommendation_id,
    )
