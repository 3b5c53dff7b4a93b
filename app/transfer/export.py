"""Exports: events and preferences as CSV, items and users as JSON Lines, for `ncr import`."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson

from app.catalog.schemas import Item
from app.core.errors import NotFound
from app.events.schemas import StoredEvent
from app.events.user_schemas import User
from app.transfer.archive import Report, new_file, no_report, refuse_existing
from app.transfer.import_data import PREFERENCES, USERS
from app.wiring import Services

EVENTS, ITEMS, SHOWN = "events.csv", "items.jsonl", "shown.csv"
SHOWN_COLUMNS = ("user", "item", "shown_at")
PREFERENCE_COLUMNS = ("user", "winner", "loser", "timestamp")
COLUMNS = ("event_id", "user", "item", "type", "value", "timestamp", "recommendation_id")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

WriteRows = Callable[[Iterable[Sequence[object]]], None]


@dataclass(frozen=True)
class ExportReport:
    """Counts of an export."""

    events: int
    items: int
    preferences: int
    users: int
    """Users with attributes."""
    shown: int
    """Items of the recorded lists that one user was shown."""


async def export(
    services: Services, folder: Path, *, user: str | None = None, report: Report = no_report
) -> ExportReport:
    """Writes items, users, events and preferences to new files; the events' file may have no rows.

    Args:
        services: the service to export.
        folder: the folder of the files, created if necessary.
        user: exports only this user's events, preferences, attributes and shown lists.
        report: called with the progress.

    Raises:
        NotFound: the user is unknown.
        TransferError: one of the files exists already.
    """
    for name in (EVENTS, ITEMS, USERS, PREFERENCES, SHOWN):
        refuse_existing(folder / name)
    items = await _export_items(services, folder, report) if user is None else 0
    try:
        events = await _export_events(services, folder, user, report)
    except NotFound:  # somebody without events may have been shown lists
        if user is None or not (shown := await _export_shown(services, folder, user)):
            raise
        return ExportReport(0, 0, 0, 0, shown)
    preferences = await _export_preferences(services, folder, user, report)
    users = await _export_users(services, folder, user, report)
    shown = 0 if user is None else await _export_shown(services, folder, user)
    return ExportReport(events, items, preferences, users, shown)


async def _export_items(services: Services, folder: Path, report: Report) -> int:
    total = len((await services.catalog.catalogue()).external_ids)
    chunks = services.catalog.iter_items()
    chunk = await anext(chunks, None)
    if chunk is None:
        return 0  # `ncr import` refuses an empty file
    written = 0
    with new_file(folder / ITEMS) as file:
        while chunk is not None:
            file.write(b"".join(_item_line(item) for item in chunk))
            written += len(chunk)
            report("items", written, max(written, total))
            chunk = await anext(chunks, None)
    return written


async def _export_events(services: Services, folder: Path, user: str | None, report: Report) -> int:
    total = await services.events.last_seq()
    written = 0
    with _new_csv(folder / EVENTS, COLUMNS) as write_rows:
        async for chunk in services.events.iter_events(user):
            write_rows(_event_row(*row) for row in chunk)
            written += len(chunk)
            report("events", chunk[-1][0].seq, total)
    return written


async def _export_preferences(
    services: Services, folder: Path, user: str | None, report: Report
) -> int:
    chunks = services.events.iter_preferences(user)
    chunk = await anext(chunks, None)
    if chunk is None:
        return 0
    written = 0
    with _new_csv(folder / PREFERENCES, PREFERENCE_COLUMNS) as write_rows:
        while chunk is not None:
            write_rows((*row[:-1], _iso(row.timestamp)) for row in chunk)
            written += len(chunk)
            report("preferences", written, written)
            chunk = await anext(chunks, None)
    return written


async def _export_users(services: Services, folder: Path, user: str | None, report: Report) -> int:
    if user is None:
        chunks = services.users.iter_described()
        chunk = await anext(chunks, None)
    else:
        described = await services.users.get(user)
        chunk = [described] if described.attributes else None
    if chunk is None:
        return 0  # `ncr import` refuses an empty file
    written = 0
    with new_file(folder / USERS) as file:
        while chunk is not None:
            file.write(b"".join(_user_line(row) for row in chunk))
            written += len(chunk)
            report("users", written, written)
            chunk = None if user is not None else await anext(chunks, None)
    return written


async def _export_shown(services: Services, folder: Path, user: str) -> int:
    """Writes the lists that one user was shown, as data that the service holds on a person.

    Exports of the whole service leave these lists out, because a service works without them.
    """
    lists = sorted(await services.events.shown.of(user))
    if not lists:
        return 0
    names = await services.catalog.external_ids_of({i for each in lists for i in each.items})
    with _new_csv(folder / SHOWN, SHOWN_COLUMNS) as write_rows:
        for each in lists:
            write_rows((user, names[item], _iso(each.shown_at)) for item in each.items)
    return sum(len(each.items) for each in lists)


@contextmanager
def _new_csv(path: Path, columns: Sequence[str]) -> Iterator[WriteRows]:
    with new_file(path) as file:
        # Only line feeds end a line; within an id they are quoted.
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        yield writer.writerows
        text.flush()
        text.detach()


def _item_line(item: Item) -> bytes:
    row = item.as_json()
    for name in ("available_from", "available_until", "embedding"):
        if row[name] is None:
            del row[name]
    return orjson.dumps({"item": row.pop("id"), **row}, option=orjson.OPT_APPEND_NEWLINE)


def _user_line(user: User) -> bytes:
    row = {"user": user.id, "attributes": user.attributes}
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


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
