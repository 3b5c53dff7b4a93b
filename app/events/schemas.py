"""Events and preferences in requests, in the database and in answers.

`parse_event` and `parse_preference` validate rows without pydantic. Pydantic takes several times as
long for a list of 10,000 rows, and does not give one rejection for each row.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, Field

from app.core.requests import (
    MAX_ID_BYTES,
    MAX_TIMESTAMP_US,
    Id,
    parse_timestamp,
    text_problem,
    text_schema,
)
from app.events.event_weights import MAX_TYPE_BYTES

DEFAULT_TYPE = "interaction"

_EVENT_FIELDS = frozenset(
    ("event_id", "user", "item", "type", "value", "timestamp", "recommendation_id")
)

if TYPE_CHECKING:
    import pyarrow as pa
_PREFERENCE_FIELDS = frozenset(("user", "winner", "loser", "timestamp"))


class NewEvent(NamedTuple):
    """A valid event without a seq."""

    event_id: str
    user: str
    item: str
    type: str = DEFAULT_TYPE
    value: float | None = None
    timestamp: int = 0
    """Microseconds since 1970, UTC."""
    recommendation_id: str | None = None
    timestamp_given: bool = True
    """False: the timestamp is the time of arrival, which differs for a retry of the event."""


def events_of(batch: pa.RecordBatch) -> list[NewEvent]:
    """The events of a batch with the fields of `NewEvent`."""
    columns = (batch[name].to_pylist() for name in NewEvent._fields)
    return [NewEvent._make(row) for row in zip(*columns, strict=True)]


class StoredEvent(NamedTuple):
    """An event with its seq.

    User and item are internal ids. The timestamp is in microseconds since 1970, UTC.
    """

    seq: int
    event_id: str
    user_id: int
    item_id: int
    type: str
    value: float | None
    timestamp: int
    recommendation_id: str | None


class NewPreference(NamedTuple):
    """A valid preference without a seq."""

    user: str
    winner: str
    loser: str
    timestamp: int
    """Microseconds since 1970, UTC."""


class StoredPreference(NamedTuple):
    """A stated preference with its seq.

    Ids are internal. The timestamp is in microseconds since 1970, UTC.
    """

    seq: int
    user_id: int
    winner_id: int
    loser_id: int
    timestamp: int


class Adoption(NamedTuple):
    """One positive weight of a user who has adopted an item, see `app.events.adopters`."""

    item: int
    """The internal id."""
    user: str
    """The client's id."""
    last_seq: int
    """The seq of the user's latest event about the item that has a non-zero weight."""
    weight: float
    """The weight of a positive event of the user. Each weight has a row."""
    timestamp: int
    """The time of the latest event of that weight, in microseconds since 1970."""


@dataclass(frozen=True, slots=True, order=True)
class Rejection:
    """Why a row was rejected."""

    index: int
    code: str
    detail: str


@dataclass(slots=True)
class AppendResult:
    """The outcome of the rows of one request."""

    accepted: int = 0
    duplicates: int = 0
    rejected: list[Rejection] = field(default_factory=list)
    last_seq: int = 0


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The outcome of a chunk of an import."""

    accepted: int
    duplicates: int
    """Rows that were stored before."""
    conflicts: int
    """Rows whose event id belongs to an event with different content."""


EventType = Annotated[str, Field(json_schema_extra=text_schema(MAX_TYPE_BYTES))]
_Seconds = Annotated[float, Field(ge=0, le=MAX_TIMESTAMP_US / 1e6)]
_Date = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Moment = Annotated[
    _Seconds | _Date | None,
    Field(
        description="The time of the event in ISO 8601 or epoch seconds, within the years "
        "1970 to 2999. The default is the time of the request."
    ),
]


class EventIn(BaseModel):
    """An event."""  # For the OpenAPI document only: `parse_event` validates rows.

    model_config = {"extra": "forbid"}

    event_id: Id | None = Field(
        default=None,
        description="An id that makes retries safe. An event with a known id is a duplicate.",
    )
    user: Id
    item: Id
    type: EventType | None = DEFAULT_TYPE
    value: float | None = None
    timestamp: Moment = None
    recommendation_id: Id | None = None


class PreferenceIn(BaseModel):
    """A preference between two items."""  # OpenAPI only: `parse_preference` validates rows.

    model_config = {"extra": "forbid"}

    user: Id
    winner: Id = Field(description="The item that the user prefers.")
    loser: Id
    timestamp: Moment = None


class RejectedRow(BaseModel):
    """A rejected row, by its index in the request."""

    index: int
    code: str
    detail: str


class EventsAnswer(BaseModel):
    """The result of each row of `POST /events`."""

    accepted: int
    duplicates: int
    rejected: list[RejectedRow]
    last_seq: int


class PreferenceAnswer(BaseModel):
    """The seq of a stored preference, in the order of all events and preferences."""

    seq: int


class PreferencesAnswer(BaseModel):
    """The result of each row of a list of preferences."""

    accepted: int
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
    """Validate one event of a request.

    Args:
        row: the parsed JSON.
        index: the row's index in the request.
        now: the default timestamp, in microseconds since 1970.
    """
    if not isinstance(row, dict):
        return Rejection(index, "invalid_event", "an event must be a JSON object")
    if not row.keys() <= _EVENT_FIELDS:
        return _unknown_field(index, row, _EVENT_FIELDS)
    user = row.get("user")
    if (rejection := _text_rejection(index, "user", user)) is not None:
        return rejection
    item = row.get("item")
    if (rejection := _text_rejection(index, "item", item)) is not None:
        return rejection
    event_id = row.get("event_id")
    if event_id is None:
        event_id = uuid.uuid4().hex
    elif (rejection := _text_rejection(index, "event_id", event_id)) is not None:
        return rejection
    event_type = row.get("type")
    if event_type is None:
        event_type = DEFAULT_TYPE
    elif (rejection := _text_rejection(index, "type", event_type, MAX_TYPE_BYTES)) is not None:
        return rejection
    recommendation_id = row.get("recommendation_id")
    if recommendation_id is not None and (
        rejection := _text_rejection(index, "recommendation_id", recommendation_id)
    ):
        return rejection
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
    timestamp = row.get("timestamp")
    timestamp_given = timestamp is not None
    try:
        timestamp = parse_timestamp(timestamp) if timestamp_given else now
    except ValueError as error:
        return Rejection(index, "invalid_timestamp", str(error))
    return NewEvent(
        event_id,
        str(user),
        str(item),
        event_type,
        value,
        timestamp,
        recommendation_id,
        timestamp_given,
    )


def parse_preference(row: Any, index: int, now: int) -> NewPreference | Rejection:
    """Validate one preference of a request, with the arguments of `parse_event`."""
    if not isinstance(row, dict):
        return Rejection(index, "invalid_preference", "a preference must be a JSON object")
    if not row.keys() <= _PREFERENCE_FIELDS:
        return _unknown_field(index, row, _PREFERENCE_FIELDS)
    for name in ("user", "winner", "loser"):
        if (rejection := _text_rejection(index, name, row.get(name))) is not None:
            return rejection
    if row["winner"] == row["loser"]:
        return Rejection(index, "same_item", "winner and loser must be different items")
    timestamp = row.get("timestamp")
    try:
        timestamp = now if timestamp is None else parse_timestamp(timestamp)
    except ValueError as error:
        return Rejection(index, "invalid_timestamp", str(error))
    return NewPreference(row["user"], row["winner"], row["loser"], timestamp)


def _unknown_field(index: int, row: dict[Any, Any], fields: frozenset[str]) -> Rejection:
    name = str(next(key for key in row if key not in fields))[:64]
    return Rejection(index, "unknown_field", f"unknown field {name!r}")


def _text_rejection(
    index: int, name: str, value: Any, max_bytes: int = MAX_ID_BYTES
) -> Rejection | None:
    """Return why a string field is invalid; None if it is valid."""
    problem = text_problem(value, max_bytes)
    if problem is None:
        return None
    if value is None:
        return Rejection(index, f"missing_{name}", f"{name} is missing")
    return Rejection(index, f"invalid_{name}", f"{name} {problem}")
