"""The page of the data: accepted and rejected rows, and the upload of a file."""

from __future__ import annotations

import codecs
import csv
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.core.access import Role, access
from app.core.errors import BadRequest, Unprocessable
from app.core.ids import HOUR_MS, hour_now
from app.core.middleware import header
from app.core.tables import now_us
from app.dashboard.rendering import (
    ROOT,
    PageRoute,
    caller_id,
    lists_of,
    render,
    services_of,
)
from app.events.counts import EventCount
from app.events.event_weights import EventWeights, Rule
from app.events.schemas import Rejection

router = APIRouter(route_class=PageRoute, include_in_schema=False)

HOURS = 48
DAYS = 90
SHOWN_TYPES = 5
BARE_ITEMS = 20
COLUMNS = ("user", "item", "type", "value", "timestamp", "event_id", "recommendation_id")
GROUP_ROWS = 500
MAX_LINE_CHARACTERS = 64 * 1024
MAX_REJECTED = 1_000
SHOWN_REJECTED = 20
SHOWN_IMPORTS = 20
MAX_NAME_CHARACTERS = 200


@router.get(f"{ROOT}/data")
@access(Role.METRICS, page=True)
async def data_page(request: Request) -> Response:
    """Events by hour and type, rejected rows by reason, and users and items that lack data."""
    services, feature = services_of(request), lists_of(request)
    now = hour_now()
    sums = await services.events.counts.sums_since(now - DAYS * 24)
    last = await services.events.counts.since(now - HOURS + 1)
    types = sums.get("accepted", Counter())
    catalogue = await services.catalog.catalogue()
    popularity = feature.popularity.counts
    taken = int((popularity[: catalogue.size] > 0).sum())
    model = feature.models.current
    users = await services.events.count_users()
    bare = await services.catalog.bare_items(BARE_ITEMS + 1)
    return render(
        request,
        "data.html",
        days=DAYS,
        chart=_chart(last, now) if last else None,
        types=[
            (name, rows, _weight(services.events.event_weights, name))
            for name, rows in types.most_common(20)
        ],
        total=sum(types.values()),
        rejected=sums.get("rejected", Counter()).most_common(20),
        duplicates=sums.get("duplicate", Counter()).total(),
        items=len(catalogue.internal_ids) - len(catalogue.deleted),
        untaken=max(0, len(catalogue.internal_ids) - taken),
        users=users,
        strangers=None if model is None else max(0, users - model.row.users),
        bare=bare[:BARE_ITEMS],
        more_bare=len(bare) > BARE_ITEMS,
        imports=await services.events.imports.last(SHOWN_IMPORTS),
        columns=COLUMNS,
    )


@router.post(f"{ROOT}/data")
@access(Role.EVENTS, page=True, streamed=True)
async def upload(request: Request) -> Response:
    """Stores the events of a streamed CSV file, and answers with the outcome of its rows."""
    events = services_of(request).events
    shown: list[Rejection] = []
    next_index = 0
    async with events.imports.record("page", _file_name(request), caller_id(request)) as counts:
        try:
            async for rows in _rows(request):
                result = await events.add_rows(rows, now_us(), wait=True)
                counts.accepted += result.accepted
                counts.duplicates += result.duplicates
                for each in result.rejected:
                    counts.reject(each.code)
                shown += (
                    Rejection(next_index + each.index, each.code, each.detail)
                    for each in result.rejected[: SHOWN_REJECTED - len(shown)]
                )
                next_index += len(rows)
                if counts.rejected.total() >= MAX_REJECTED:
                    counts.problem = f"Reading stopped after {MAX_REJECTED:,} rejected rows."
                    break
        except (csv.Error, UnicodeDecodeError) as error:
            counts.problem = f"Reading stopped at row {next_index + 1:,}: it is not CSV in UTF-8."
            if not next_index:
                raise BadRequest(
                    f"the file is not CSV in UTF-8: {str(error)[:200]}", code="malformed_csv"
                ) from None
    return render(
        request, "_upload.html", counts=counts, codes=counts.rejected.most_common(),
        rejected=shown, rows=next_index,
    )  # fmt: skip


def _file_name(request: Request) -> str:
    """The name of the file, from a percent-encoded header; empty without the header."""
    name = unquote((header(request.scope, b"x-file-name") or b"").decode("latin-1"))
    return "".join(c for c in name if c.isprintable())[:MAX_NAME_CHARACTERS]


async def _rows(request: Request) -> AsyncIterator[list[dict[str, Any]]]:
    """The rows of the file in groups, of which only one is in memory.

    Raises:
        Unprocessable: the file is empty, or the first line does not name its columns.
        csv.Error, UnicodeDecodeError: the file is not CSV in UTF-8.
    """
    names: list[str] | None = None
    group: list[dict[str, Any]] = []
    async for cells in _cells(request):
        if names is None:
            names = [cell.strip().lower() for cell in cells]
            unknown = [name for name in names if name not in COLUMNS]
            if unknown or not {"user", "item"} <= set(names):
                raise Unprocessable(
                    "the first line must name the columns: user and item, and optionally "
                    f"{', '.join(COLUMNS[2:])}"
                    + (f"; there is no column {unknown[0][:64]!r}" if unknown else ""),
                    code="unknown_column",
                )
            continue
        if len(cells) > len(names):
            raise csv.Error("a line has more cells than columns")
        row: dict[str, Any] = {
            name: cell for name, cell in zip(names, cells, strict=False) if cell != ""
        }
        for name in ("value", "timestamp"):
            row |= _as_number(row, name)
        group.append(row)
        if len(group) == GROUP_ROWS:
            yield group
            group = []
    if names is None:
        raise Unprocessable("the file is empty", code="empty_file")
    if group:
        yield group


def _as_number(row: dict[str, Any], name: str) -> dict[str, Any]:
    """The named cell as a number; an empty dict without a number, as for a date."""
    try:
        return {name: float(row[name])} if name in row else {}
    except ValueError:
        return {}


async def _cells(request: Request) -> AsyncIterator[list[str]]:
    """The cells of each line. A cell in quotes may hold the end of a line."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    tail = ""
    async for chunk in request.stream():
        *lines, tail = (tail + decoder.decode(chunk)).split("\n")
        lines, held = _whole(lines)
        tail = "\n".join((*held, tail))
        if len(tail) > MAX_LINE_CHARACTERS:
            raise csv.Error(f"a line is longer than {MAX_LINE_CHARACTERS:,} characters")
        for cells in csv.reader(lines, strict=True):
            if cells:
                yield cells
    tail += decoder.decode(b"", final=True)
    for cells in csv.reader(tail.split("\n"), strict=True):
        if cells:
            yield cells


def _whole(lines: list[str]) -> tuple[list[str], list[str]]:
    """The lines of complete rows, each with a line end, and the lines of an incomplete row."""
    rows: list[str] = []
    held: list[str] = []
    quotes = 0
    for line in lines:
        held.append(line)
        # Within a cell that does not begin with one, a quotation mark is text.
        if quotes or line.startswith('"') or ',"' in line:
            quotes += line.count('"')
        if quotes % 2 == 0:
            rows += (f"{part}\n" for part in held)
            held, quotes = [], 0
    return rows, held


def _sums(counts: list[EventCount], verdict: str) -> Counter[str]:
    sums: Counter[str] = Counter()
    for each in counts:
        if each.verdict == verdict:
            sums[each.name] += each.rows
    return sums


def _weight(weights: EventWeights, name: str) -> str:
    """The weight of events of a type, in words."""
    rule: Rule = weights.types.get(name, weights.other)
    if not isinstance(rule, float):
        return "by its value"
    if rule == 0:
        return "seen only"
    return f"liked, ×{rule:g}" if rule > 0 else f"disliked, ×{-rule:g}"


def _chart(counts: list[EventCount], now: int) -> dict[str, Any]:
    """The chart of events by hour and type. Rare types share one series."""
    hours = range(now - HOURS + 1, now + 1)
    names = [name for name, _ in _sums(counts, "accepted").most_common(SHOWN_TYPES)]
    by_name: dict[str, Counter[int]] = {name: Counter() for name in names}
    for each in counts:
        if each.verdict == "accepted":
            by_name.setdefault(each.name if each.name in names else "others", Counter())[
                each.hour
            ] += each.rows
        elif each.verdict == "rejected":
            by_name.setdefault("rejected", Counter())[each.hour] += each.rows
    return {
        "x": [hour * HOUR_MS // 1000 for hour in hours],
        "time": True,
        "series": [
            {"label": name, "values": [sums[hour] for hour in hours], "bars": len(by_name) == 1}
            for name, sums in by_name.items()
        ],
    }
