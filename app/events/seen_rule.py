"""Seen rules: how long an event keeps its item out of the user's lists, by the event's type.

A rule is an object of ages by type, such as ``{"purchase": "14d", "view": "0s"}``. Types are free:
a type without events matches no event. ``"*"`` stands for all other types, and is ``forever`` by
default. An item is seen as long as one of its events is younger than the age of the event's type.
A disliked item always stays out, unless the rule names the type of the negative event.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from app.core.errors import SettingsError, Unprocessable
from app.core.requests import text_problem
from app.core.settings import Settings
from app.events.event_weights import ANY_OTHER_TYPE, MAX_TYPE_BYTES

FOREVER = "forever"
NEVER_BACK = 2**62
"""The age, in microseconds, of events whose items never come back."""
MAX_AGE_DAYS = 36_500
MAX_HIDDEN_DAYS = 30
"""The number of days for which the service remembers shown lists."""
MAX_TYPES = 32
MAX_QUERY_CHARACTERS = 4_096  # of a rule in a query string
DURATION = r"^(0|[1-9][0-9]{0,9})[smhd]?$"
"""The pattern of a whole number of seconds, minutes, hours or days."""
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_SECOND_US = 1_000_000
_EXAMPLES = '"90s", "30m", "6h" or "14d"'


@dataclass(frozen=True)
class SeenRule:
    """Ages by event type, in microseconds."""

    types: Mapping[str, int]
    """The ages of the types that the rule names."""
    other: int = NEVER_BACK
    """The age of all other types."""

    @cached_property
    def key(self) -> str:
        """A short key for cached lists: equal rules have equal keys, in every process."""
        text = repr((sorted(self.types.items()), self.other))
        encoded = text.encode("utf-8", "backslashreplace")
        return hashlib.blake2b(encoded, digest_size=16).hexdigest()

    @property
    def never_ends(self) -> bool:
        """Whether no item ever comes back, so that the rule changes no list."""
        return self.other == NEVER_BACK and all(age == NEVER_BACK for age in self.types.values())

    def age(self, kind: str) -> int:
        """The age of a type."""
        return self.types.get(kind, self.other)


ALWAYS_SEEN = SeenRule({})
"""The rule by which seen items never come back."""


def parse_rule(value: Any) -> SeenRule:
    """The rule of parsed JSON.

    Raises:
        ValueError: the value is no rule. The message is one line.
    """
    if not isinstance(value, dict):
        raise ValueError('a rule is an object of ages by type, such as {"purchase": "14d"}')
    if len(value) > MAX_TYPES:
        raise ValueError(f"a rule has at most {MAX_TYPES} types")
    ages: dict[str, int] = {}
    for name, value_of_age in value.items():
        problem = text_problem(name, MAX_TYPE_BYTES)
        if problem is not None:
            raise ValueError(f"the name of a type {problem}")
        age = NEVER_BACK if value_of_age == FOREVER else _duration(value_of_age, MAX_AGE_DAYS)
        if age is None:
            raise ValueError(
                f'the age of {name[:40]!r} must be "{FOREVER}" or a time such as {_EXAMPLES}, at '
                f"most {MAX_AGE_DAYS}d"
            )
        ages[name] = age
    other = ages.pop(ANY_OTHER_TYPE, NEVER_BACK)
    return SeenRule(ages, other)


def parse_hidden_time(value: Any) -> int:
    """The time for which a shown item is hidden, in microseconds.

    Raises:
        ValueError: the value is no time, or too long. The message is one line.
    """
    duration = _duration(value, MAX_HIDDEN_DAYS)
    if duration is None:
        raise ValueError(
            f"needs a number of seconds, or a time such as {_EXAMPLES}, at most {MAX_HIDDEN_DAYS}d"
        )
    return duration


def _duration(value: Any, max_days: int) -> int | None:
    """A time in microseconds; None for an invalid time, and for more than ``max_days``."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # in JSON 5.0 is as whole a number as 5
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or re.fullmatch(DURATION[1:-1], value) is None:
        return None
    number, unit = (value, "") if value[-1].isdigit() else (value[:-1], value[-1])
    seconds = int(number) * _SECONDS[unit]
    return seconds * _SECOND_US if seconds <= max_days * _SECONDS["d"] else None


def seen_rule_of(value: Any) -> SeenRule:
    """Parse a rule as `parse_rule` does. Raises Unprocessable ``invalid_seen``."""
    try:
        return parse_rule(value)
    except ValueError as error:
        raise Unprocessable(f"seen: {error}", code="invalid_seen") from None


def read_seen_rule(text: str | None) -> SeenRule | None:
    """The rule in a query string; None without a rule. Raises as `seen_rule_of`."""
    if text is None:
        return None
    if len(text) > MAX_QUERY_CHARACTERS:
        raise Unprocessable(
            f"seen: a rule has at most {MAX_QUERY_CHARACTERS} characters", code="invalid_seen"
        )
    try:
        return parse_rule(_json(text))
    except ValueError as error:
        raise Unprocessable(f"seen: {error}", code="invalid_seen") from None


def hidden_time_of(value: Any) -> int | None:
    """Parse a time as `parse_hidden_time` does; None for None.

    Raises:
        Unprocessable: ``invalid_hide_shown``.
    """
    try:
        return None if value is None else parse_hidden_time(value)
    except ValueError as error:
        raise Unprocessable(f"hide_shown: {error}", code="invalid_hide_shown") from None


def settings_rule(settings: Settings) -> SeenRule:
    """The rule of ``NCR_SEEN``. Raises SettingsError."""
    if settings.seen is None or not settings.seen.strip():
        return ALWAYS_SEEN
    try:
        return parse_rule(_json(settings.seen))
    except ValueError as error:
        raise SettingsError(f"NCR_SEEN: {error}") from None


def settings_hidden_time(settings: Settings) -> int:
    """The time of ``NCR_HIDE_SHOWN``, in microseconds. Raises SettingsError."""
    try:
        return parse_hidden_time(settings.hide_shown)
    except ValueError as error:
        raise SettingsError(f"NCR_HIDE_SHOWN: {error}") from None


def _json(text: str) -> Any:
    """Parse JSON. Raises ValueError for other text, and for repeated names."""

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise _RepeatedNameError("a type occurs twice")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except _RepeatedNameError:
        raise
    except (ValueError, RecursionError):
        raise ValueError("the value is not JSON") from None


class _RepeatedNameError(ValueError):
    """A JSON object has the same name twice."""
