"""Event weights: NCR_FEEDBACK gives each event a weight by its type and value.

A weight above 0 makes an event positive feedback. A model learns from the event in proportion to
the weight. A weight of 0 marks the item as seen and has no other effect. A weight below 0 makes the
event negative feedback, which keeps the item out of the user's lists.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from app.core.errors import SettingsError
from app.core.requests import text_problem
from app.core.settings import Settings

MAX_TYPE_BYTES = 64
SEEN = "seen"
ANY_OTHER_TYPE = "*"
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3
DAY_MICROSECONDS = 86_400_000_000
MAX_HALF_LIVES = 20.0  # the oldest events keep a millionth of their weight: none decays to 0


class ValueRange(NamedTuple):
    """The weight of values from ``start`` (inclusive) to ``end`` (exclusive)."""

    start: float
    end: float
    weight: float


Rule = float | tuple[ValueRange, ...]
"""One weight for every value, or ranges of values; outside the ranges the weight is 0."""

_DEFAULT: dict[str, Rule] = {"dislike": -1.0, ANY_OTHER_TYPE: 1.0}


@dataclass(frozen=True)
class EventWeights:
    """The weight of an event by its type and value."""

    types: Mapping[str, Rule]
    """Rules by event type."""
    other: Rule
    """The rule of every type that ``types`` does not name."""
    half_life_days: float | None = None
    """The age in days at which a weight has halved; None: weights do not decay."""

    @classmethod
    def from_settings(cls, settings: Settings) -> EventWeights:
        """Return the weights that the settings configure.

        Raises:
            SettingsError: NCR_FEEDBACK is invalid.
        """
        return cls.parse(settings.feedback, settings.feedback_half_life_days)

    @classmethod
    def parse(cls, text: str | None, half_life_days: float | None = None) -> EventWeights:
        """Parse the setting: a JSON object that maps types to weights.

        A weight is a number, ``"seen"`` (0) or a list of ranges such as
        ``{"from": 3, "below": 4, "weight": 1}``. A range without ``below`` ends where the next one
        starts; a range without ``from`` has no lower end. ``"*"`` stands for every other type.
        Defaults: ``{"dislike": -1, "*": 1}``.

        Raises:
            SettingsError: the text is no valid object of weights, or no type has a positive weight.
        """
        rules = dict(_DEFAULT)
        if text is not None and text.strip():
            rules |= {name: _rule(name, value) for name, value in _json_object(text).items()}
        if not any(_is_ever_positive(rule) for rule in rules.values()):
            raise _error("no type has a positive weight, and training needs positive events")
        other = rules.pop(ANY_OTHER_TYPE)
        return cls(rules, other, half_life_days)

    @property
    def key(self) -> str:
        """A cache key: equal weights have equal keys, in every process."""
        return repr((sorted(self.types.items()), self.other, self.half_life_days))

    def weight(self, kind: str, value: float | None) -> float:
        """Return the weight of an event of type ``kind``."""
        rule = self.types.get(kind, self.other)
        if isinstance(rule, float):
            return rule
        if value is None:
            return 0.0
        return next((r.weight for r in rule if r.start <= value < r.end), 0.0)

    @property
    def all_positive(self) -> bool:
        """Whether every possible event is positive."""
        return all(
            isinstance(rule, float) and rule > 0 for rule in (*self.types.values(), self.other)
        )

    def expression(
        self, kind: sa.ColumnElement[str], value: sa.ColumnElement[Any]
    ) -> sa.ColumnElement[float]:
        """Return ``weight`` as an SQL expression of an event's columns."""
        other = _in_sql(self.other, value)
        if not self.types:
            return other
        by_type = {name: _in_sql(rule, value) for name, rule in self.types.items()}
        return sa.case(by_type, value=kind, else_=other)

    def is_positive(
        self, kind: sa.ColumnElement[str], value: sa.ColumnElement[Any]
    ) -> sa.ColumnElement[bool]:
        """Return an SQL expression: whether an event is positive."""
        return sa.true() if self.all_positive else self.expression(kind, value) > 0

    def decay(self, timestamps: NDArray[np.int64], now: int) -> NDArray[np.float32]:
        """Return the factor (n,) by which weights have decayed at ``now``.

        Args:
            timestamps: (n,) times of the events, in microseconds since 1970.
            now: the present, in microseconds since 1970. Events after ``now`` do not decay.
        """
        if self.half_life_days is None:
            return np.ones(len(timestamps), dtype=np.float32)
        half_lives = np.maximum(now - timestamps, 0) / (self.half_life_days * DAY_MICROSECONDS)
        return np.exp2(-np.minimum(half_lives, MAX_HALF_LIVES)).astype(np.float32)


def _json_object(text: str) -> dict[str, Any]:
    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) < len(pairs):
            raise _error("a name occurs twice")
        return names

    try:
        value = json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError):
        raise _error("is not JSON") from None
    if not isinstance(value, dict):
        raise _error('must be a JSON object, such as {"purchase": 3, "click": 1, "view": "seen"}')
    return value


def _rule(name: str, value: Any) -> Rule:
    problem = text_problem(name, MAX_TYPE_BYTES)
    if problem is not None:
        raise _error(f"the name of a type {problem}")
    if not isinstance(value, list):
        return _weight(name, value)
    if not value:
        raise _error(f"{_quoted(name)} has an empty list of ranges")
    ranges = sorted((_range(name, each) for each in value), key=lambda each: each[0])
    next_starts = [start for start, _, _ in ranges[1:]] + [math.inf]
    rule = []
    for (start, below, weight), next_start in zip(ranges, next_starts, strict=True):
        end = next_start if below is None else below
        if start == next_start or end > next_start:
            raise _error(f"{_quoted(name)} has ranges that overlap")
        if end <= start:
            raise _error(f"{_quoted(name)} has a range that ends before it begins")
        rule.append(ValueRange(start, end, weight))
    return tuple(rule)


def _range(name: str, value: Any) -> tuple[float, float | None, float]:
    if not isinstance(value, dict) or not value.keys() <= {"from", "below", "weight"}:
        raise _error(
            f'a range of {_quoted(name)} must look like {{"from": 3, "below": 4, "weight": 1}}'
        )
    if "weight" not in value:
        raise _error(f"a range of {_quoted(name)} has no weight")
    start = -math.inf if value.get("from") is None else _number(name, value["from"])
    below = None if value.get("below") is None else _number(name, value["below"])
    return start, below, _weight(name, value["weight"])


def _weight(name: str, value: Any) -> float:
    if value == SEEN:
        return 0.0
    weight = _number(name, value)
    if weight and not MIN_WEIGHT <= abs(weight) <= MAX_WEIGHT:
        raise _error(
            f"a weight must be 0, or its absolute value between {MIN_WEIGHT:g} and {MAX_WEIGHT:g}"
        )
    return weight


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        number = float(value)
        if not math.isfinite(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise _error(
            f'{_quoted(name)} needs a finite number, "{SEEN}" or a list of ranges'
        ) from None
    return number


def _is_ever_positive(rule: Rule) -> bool:
    return rule > 0 if isinstance(rule, float) else any(each.weight > 0 for each in rule)


def _in_sql(rule: Rule, value: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    if isinstance(rule, float):
        return _double(rule)
    # From the highest range down: the first whose start the value reaches is the one.
    cases = []
    for start, end, weight in reversed(rule):
        conditions = [value >= _double(start)] if start > -math.inf else []
        conditions += [value < _double(end)] if end < math.inf else []
        inside = sa.and_(*conditions) if conditions else value.is_not(None)
        cases.append((inside, _double(weight)))
    return sa.case(*cases, else_=_double(0.0))


def _double(number: float) -> sa.ColumnElement[float]:
    return sa.literal(number, sa.Double())


def _quoted(name: str) -> str:
    return repr(name[:40])


def _error(problem: str) -> SettingsError:
    return SettingsError(f"NCR_FEEDBACK: {problem}")
