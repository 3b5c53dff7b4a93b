"""The ids of lists that were given out: what they carry, and which of them an index finds."""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa

from app.core.randomness import random_hex

_RANDOM_BYTES = 6
_TIME_DIGITS = 11  # of milliseconds since 1970, in hexadecimal: from 2004 up to 2527
HOUR_MS = 3_600_000


def recommendation_id(source: str) -> str:
    """A new id: what the list is from (a version, or a trial), the time and a random part."""
    return f"{source}.{time.time_ns() // 1_000_000:x}.{random_hex(_RANDOM_BYTES)}"


def hour_now() -> int:
    """Hours since 1970, UTC."""
    return time.time_ns() // (HOUR_MS * 1_000_000)


def from_source(column: sa.ColumnElement[Any], source: str) -> sa.ColumnElement[bool]:
    """Whether an id is of a list from this source, so that an index on it serves."""
    return (column > first_of(source)) & (column < last_of(source)) & is_of(column, source)


def first_of(source: str) -> str:
    """Before the id of every list from a source, in any collation; as `last_of` is after it.

    What is between the two need not be such an id: clients may send anything, and collations differ
    in what they make of points and dashes.
    """
    return f"{source}.0"


def last_of(source: str) -> str:
    return f"{source}.g"


def is_of(column: sa.ColumnElement[Any], source: str) -> sa.ColumnElement[bool]:
    """Whether it is, exactly, and without help of an index."""
    return (sa.func.length(column) == _length(source)) & (
        sa.func.substr(column, 1, len(source) + 1) == f"{source}."
    )


def is_from(name: str, source: str) -> bool:
    """The same of an id that has been read."""
    return len(name) == _length(source) and name.startswith(f"{source}.")


def _length(source: str) -> int:
    return len(source) + _TIME_DIGITS + 2 * _RANDOM_BYTES + 2


def bounds(source: str, hour: int) -> tuple[str, str]:
    """The first id that lists of this hour could have, and the first that later ones could."""
    first, after = (f"{at * HOUR_MS:0{_TIME_DIGITS}x}" for at in (hour, hour + 1))
    return f"{source}.{first}", f"{source}.{after}"
