"""The rows that readers yield, and the conversion of a cell's text to a value.

Readers keep ids verbatim. Ids are the caller's own names of users and items, and a reader that
trims or folds ids could merge different users or items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar

LATEST_OFFSET = 10**9
"""Added to the position of a row with `latest` = 1, which then sorts after all others of its user.

Some published data sets mark a user's last interaction, although their order is another (equal
times). Positions in a file must be below this number for the rule to hold.
"""

MAX_ID_BYTES = 256
MAX_TYPE_BYTES = 64
SURELY_SHORT = MAX_ID_BYTES // 4
"""The number of characters that always fit into an id, at up to 4 bytes of UTF-8 each."""
FIRST_SECOND = 0.0
END_OF_TIME = datetime(2999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()
_EXACT_FLOATS = 2.0**53

S = TypeVar("S")
T = TypeVar("T")


class InteractionRow(NamedTuple):
    """One interaction: a user, an item, and if known the rating, time, position and type."""

    user: str
    item: str
    value: float | None
    """The rating, if the file has one."""
    timestamp: float | None
    """Seconds since 1970."""
    position: int | None
    """The place in the user's own order, oldest first, if a file gives an order but no times."""
    type: str | None = None
    """The type of the event, if the file has one."""


@dataclass(frozen=True, slots=True)
class ItemRow:
    """One item of a file."""

    item: str
    title: str | None = None
    categories: tuple[str, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    """All other columns by name, as values that JSON can hold."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that was left out, with the reason."""

    file: str
    """The file's name, without its folder."""
    line: int
    """The first physical line of the row, the header being line 1; in Parquet the row, from 1."""
    reason: str


@dataclass(frozen=True)
class Columns:
    """The names of the columns to read. Only the user and the item are required."""

    user: str = "user"
    item: str = "item"
    rating: str = "rating"
    timestamp: str = "timestamp"
    position: str = "position"
    latest: str = "latest"
    type: str = "type"


OnBad = Callable[[BadRow], None]
OnBytes = Callable[[int], None]


class RowFault(ValueError):  # noqa: N818 - a verdict on a row, which nobody outside sees raised
    """The reason why one row cannot be used; callers of the readers get a `BadRow`."""


class Memo(dict[str, T], Generic[T]):
    """Keeps parsed values by text, because ratings and positions repeat in nearly every row."""

    MAX_SIZE = 50_000  # a column of all-different values must not grow it without end

    def __init__(self, parse: Callable[[str], T]) -> None:
        super().__init__()
        self._parse = parse

    def __missing__(self, text: str) -> T:
        value = self._parse(text)
        if len(self) >= self.MAX_SIZE:
            self.clear()
        self[text] = value
        return value


def converted(
    file: str, records: Iterable[tuple[int, S]], convert: Callable[[S], T], on_bad: OnBad
) -> Iterator[T]:
    """Yield the result of ``convert`` for each record; ``on_bad`` gets the refused records."""
    for number, record in records:
        try:
            yield convert(record)
        except RowFault as fault:
            on_bad(BadRow(file, number, str(fault)))


def shown(value: object) -> str:
    """A value as a message quotes it: on one line and short."""
    text = ascii(value[:60]) if isinstance(value, str) else ascii(value)
    return text if len(text) <= 64 else f"{text[:60]}…"


def check_id(what: str, text: str) -> str:
    """Return an id as it is, or raise `RowFault`."""
    if not text:
        raise RowFault(f"the {what} is empty")
    check_text(what, text)
    if len(text.encode()) > MAX_ID_BYTES:
        raise RowFault(f"the {what} is longer than {MAX_ID_BYTES} bytes: {shown(text)}")
    return text


def check_text(what: str, text: str) -> str:
    """Return text that any database takes, or raise `RowFault`."""
    if "\0" in text:
        raise RowFault(f"the {what} has a NUL character: {shown(text)}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RowFault(f"the {what} is not valid Unicode: {shown(text)}") from None
    return text


def id_of(what: str, value: object) -> str:
    """The id in a typed cell: text, or a whole number as its digits."""
    if isinstance(value, str):
        if 0 < len(value) <= SURELY_SHORT and value.isascii() and "\0" not in value:
            return value  # nearly every id
        return check_id(what, value)
    if isinstance(value, int) and not isinstance(value, bool):
        return check_id(what, str(value))
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_FLOATS:
        return str(int(value))
    if isinstance(value, bytes):
        try:
            return check_id(what, value.decode())
        except UnicodeDecodeError:
            raise RowFault(f"the {what} is not UTF-8: {shown(value[:20])}") from None
    if value is None:
        raise RowFault(f"the {what} is missing")
    raise RowFault(f"the {what} is neither text nor a whole number: {shown(value)}")


def parse_rating(text: str) -> float | None:
    """A rating, None for an empty cell."""
    return _finite("rating", _number("rating", text)) if text else None


def rating_of(value: object) -> float | None:
    """The rating in a typed cell."""
    if isinstance(value, str):
        return parse_rating(value)
    return None if value is None else _finite("rating", _typed_number("rating", value))


def parse_seconds(text: str) -> float | None:
    """Seconds since 1970 from a number or from ISO 8601 (without an offset: UTC)."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text.strip())
        except ValueError:
            raise RowFault(
                f"the timestamp is neither a number nor ISO 8601: {shown(text)}"
            ) from None
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return _plausible(seconds, text)


def timestamp_of(value: object) -> float | None:
    """The timestamp in a typed cell."""
    if isinstance(value, str):
        return parse_seconds(value)
    return None if value is None else _plausible(_typed_number("timestamp", value), value)


def parse_position(text: str) -> int | None:
    """A position, None for an empty cell. `3.0` is 3, for tools without missing integers."""
    return _whole(_number("position", text), text) if text else None


def position_of(value: object) -> int | None:
    """The position in a typed cell."""
    if isinstance(value, str):
        return parse_position(value)
    return None if value is None else _whole(_typed_number("position", value), value)


def parse_latest(text: str) -> bool:
    """Whether a row is marked as its user's last."""
    return latest_of(text.strip().lower())


def latest_of(value: object) -> bool:
    """Whether a typed cell marks a row as its user's last."""
    if value is None or value in (0, "", "0", "0.0", "false"):
        return False
    if value in (1, "1", "1.0", "true"):
        return True
    raise RowFault(f"latest is neither 0 nor 1: {shown(value)}")


def parse_type(text: str) -> str | None:
    """The type of an event, None for an empty cell."""
    if not text:
        return None
    try:
        fits = len(text.encode()) <= MAX_TYPE_BYTES and "\0" not in text
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise RowFault(f"the type is not 1 to {MAX_TYPE_BYTES} bytes of UTF-8: {shown(text)}")
    return text


def type_of(value: object) -> str | None:
    """The type of an event in a typed cell, None for an empty cell."""
    if value is None or isinstance(value, str):
        return parse_type(value or "")
    raise RowFault(f"the type is not text: {shown(value)}")


def as_latest(position: int | None) -> int:
    """The position of a row that is marked as its user's last."""
    return (position or 0) + LATEST_OFFSET


def _number(what: str, text: str) -> float:
    try:
        if "_" not in text:  # Python's own digit grouping is no notation of data files
            return float(text)
    except ValueError:
        pass
    raise RowFault(f"the {what} is not a number: {shown(text)}")


def _typed_number(what: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise RowFault(f"the {what} is out of range") from None
    raise RowFault(f"the {what} is not a number: {shown(value)}")


def _finite(what: str, number: float) -> float:
    if math.isfinite(number):
        return number
    raise RowFault(f"the {what} is not finite: {number}")


def _plausible(seconds: float, given: object) -> float:
    if FIRST_SECOND <= seconds <= END_OF_TIME:  # false for NaN too
        return seconds
    raise RowFault(f"the timestamp is outside the years 1970 to 2999 (in seconds): {shown(given)}")


def _whole(number: float, given: object) -> int:
    if number.is_integer() and 0 <= number < LATEST_OFFSET:
        return int(number)
    raise RowFault(f"the position is not a whole number from 0 to 999999999: {shown(given)}")
