"""What an event looks like on the way in, and the verdict on each row.

Rows are checked by hand: through a model of pydantic a list of 10,000 takes several times as long,
and its errors would still have to be turned into one verdict a row.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field

from app.core.http import MAX_ID_BYTES, Id, text_problem, text_schema
from app.events.feedback import MAX_TYPE_BYTES

DEFAULT_TYPE = "interaction"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LAST_US = (datetime(2999, 12, 31, 23, 59, 59, tzinfo=UTC) - _EPOCH) // _MICROSECOND
_FIELDS = frozenset(("event_id", "user", "item", "type", "value", "timestamp", "recommendation_id"))


class NewEvent(NamedTuple):
    """A valid event that has no place in the order yet."""

    event_id: str
    user: str
    item: str
    type: str = DEFAULT_TYPE
    value: float | None = None
    timestamp: int = 0
    """Microseconds since 1970, UTC."""
    recommendation_id: str | None = None
    timestamp_given: bool = True
    """False: it is the time of arrival, and a retry of the same event may bring another."""


class StoredEvent(NamedTuple):
    """An event in its place. User and item are internal ids."""

    seq: int
    event_id: str
    user_id: int
    item_id: int
    type: str
    value: float | None
    timestamp: int
    recommendation_id: str | None


class NewPreference(NamedTuple):
    """A valid statement that has no place in the order yet."""

    user: str
    winner: str
    loser: str
    timestamp: int
    """Microseconds since 1970, UTC."""


class StoredPreference(NamedTuple):
    """A stated preference in its place. Ids are internal."""

    seq: int
    user_id: int
    winner_id: int
    loser_id: int
    timestamp: int


@dataclass(frozen=True, slots=True, order=True)
class Rejection:
    """Why a row was not taken."""

    index: int
    code: str
    detail: str


@dataclass(slots=True)
class AppendResult:
    """What became of the rows of one request."""

    accepted: int = 0
    duplicates: int = 0
    rejected: list[Rejection] = field(default_factory=list)
    last_seq: int = 0


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What became of a chunk of an import."""

    accepted: int
    duplicates: int
    """Rows that were there already."""
    conflicts: int
    """Rows whose event id is taken by an event with other content."""


EventType = Annotated[str, Field(json_schema_extra=text_schema(MAX_TYPE_BYTES))]
_Seconds = Annotated[float, Field(ge=0, le=_LAST_US / 1e6)]
_Date = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Moment = Annotated[
    _Seconds | _Date | None,
    Field(description="ISO-8601 or epoch seconds, 1970 to 2999. Default: now."),
]


class EventIn(BaseModel):
    """One event. Documentation only: rows are checked one by one, see `parse_event`."""

    model_config = {"extra": "forbid"}

    event_id: Id | None = Field(default=None, description="Makes a retry harmless.")
    user: Id
    item: Id
    type: EventType | None = DEFAULT_TYPE
    value: float | None = None
    timestamp: Moment = None
    recommendation_id: Id | None = None


class RejectedRow(BaseModel):
    """A row that was not taken, by its place in the request."""

    index: int
    code: str
    detail: str


class EventsAnswer(BaseModel):
    """The verdict on the rows of `POST /events`."""

    accepted: int
    duplicates: int
    rejected: list[RejectedRow]
    last_seq: int


class EventOut(BaseModel):
    """An event in a user's history."""

    seq: int
    event_id: str
    user: str
    item: str
    type: str
    value: float | None
    timestamp: datetime


class EventPage(BaseModel):
    """A page of a user's history."""

    items: list[EventOut]
    next_cursor: str | None


def parse_event(row: Any, index: int, now: int) -> NewEvent | Rejection:
    """Check one row of a request. `now`, in microseconds, is the default of its timestamp."""
    if not isinstance(row, dict):
        return Rejection(index, "invalid_event", "an event must be a JSON object")
    if not row.keys() <= _FIELDS:
        name = str(next(key for key in row if key not in _FIELDS))[:64]
        return Rejection(index, "unknown_field", f"there is no field {name!r}")
    user = row.get("user")
    if (bad := text_rejection(index, "user", user)) is not None:
        return bad
    item = row.get("item")
    if (bad := text_rejection(index, "item", item)) is not None:
        return bad
    event_id = row.get("event_id")
    if event_id is None:
        event_id = uuid.uuid4().hex
    elif (bad := text_rejection(index, "event_id", event_id)) is not None:
        return bad
    kind = row.get("type")
    if kind is None:
        kind = DEFAULT_TYPE
    elif (bad := text_rejection(index, "type", kind, MAX_TYPE_BYTES)) is not None:
        return bad
    recommendation_id = row.get("recommendation_id")
    if recommendation_id is not None and (
        bad := text_rejection(index, "recommendation_id", recommendation_id)
    ):
        return bad
    value = row.get("value")
    if value is not None:
        try:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError
            value = float(value)
            if not math.isfinite(value):
                raise ValueError
        except (ValueError, OverflowError):
            return Rejection(index, "invalid_value", "value must be a finite number")
    given = row.get("timestamp")
    try:
        timestamp = now if given is None else parse_timestamp(given)
    except ValueError as error:
        return Rejection(index, "invalid_timestamp", str(error))
    return NewEvent(
        event_id, str(user), str(item), kind, value, timestamp, recommendation_id, given is not None
    )


def text_rejection(
    index: int, name: str, value: Any, limit: int = MAX_ID_BYTES
) -> Rejection | None:
    """What is wrong with a string of a row; None if nothing is."""
    problem = text_problem(value, limit)
    if problem is None:
        return None
    if value is None:
        return Rejection(index, f"missing_{name}", f"{name} is missing")
    return Rejection(index, f"invalid_{name}", f"{name} {problem}")


def parse_timestamp(value: Any) -> int:
    """Microseconds since 1970 from ISO-8601 (UTC unless it says otherwise) or epoch seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("timestamp must be ISO-8601 or epoch seconds")
    try:
        if isinstance(value, str):
            parsed = datetime.fromisoformat(value[:64])
            if parsed.tzinfo is None:
                parsed = parsed.replace(tzinfo=UTC)
            micros = (parsed - _EPOCH) // _MICROSECOND
        elif isinstance(value, int):
            micros = value * 1_000_000
        else:
            micros = round(value * 1e6)
    except (ValueError, OverflowError):
        raise ValueError("timestamp must be ISO-8601 or epoch seconds") from None
    if not 0 <= micros <= _LAST_US:
        raise ValueError("timestamp must lie in the years 1970 to 2999")
    return micros


def format_timestamp(micros: int) -> str:
    """ISO-8601 with a Z, to the microsecond where there is a fraction."""
    moment = _EPOCH + timedelta(microseconds=micros)
    return moment.isoformat().replace("+00:00", "Z")
