"""What an event says of a user's taste: types and values of events become weights.

Above 0 an event is positive: it is learned from, and the more the higher the weight. 0: the item
counts as seen, and takes no part otherwise. Below 0: the user does not want the item.
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
from app.core.http import text_problem
from app.core.settings import Settings

MAX_TYPE_BYTES = 64
SEEN = "seen"
EVERY_OTHER = "*"
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3
DAY_US = 86_400_000_000
MOST_HALF_LIVES = 20.0  # an event of long ago still counts a millionth, and no weight becomes 0


class Step(NamedTuple):
    """The values from ``start`` to below ``end`` have this weight."""

    start: float
    end: float
    weight: float


Rule = float | tuple[Step, ...]
"""A weight whatever the value, or one by value; in no step, or without a value, it is 0."""

_DEFAULT: dict[str, Rule] = {"dislike": -1.0, EVERY_OTHER: 1.0}


@dataclass(frozen=True)
class Feedback:
    """The weight of every event by its type and value."""

    types: Mapping[str, Rule]
    """By the names of types."""
    other: Rule
    """Of every type that has no rule."""
    half_life_days: float | None = None
    """After how long a weight counts half; None: for ever as much."""

    @classmethod
    def of(cls, settings: Settings) -> Feedback:
        """As the settings say. Raises SettingsError."""
        return cls.parse(settings.feedback, settings.feedback_half_life_days)

    @classmethod
    def parse(cls, text: str | None, half_life_days: float | None = None) -> Feedback:
        """Reads the setting: a JSON object from types to weights, ``"seen"``, or lists of ranges.

        A range is ``{"from": 3, "below": 4, "weight": 1}``. Without ``below`` it ends where the
        next one begins; without ``from`` it has no lower end. ``"*"`` is for every type that is not
        named; left out it is 1, and ``dislike`` −1. Raises SettingsError.
        """
        rules = dict(_DEFAULT)
        if text is not None and text.strip():
            rules |= {name: _rule(name, given) for name, given in _object(text).items()}
        if not any(_is_ever_positive(rule) for rule in rules.values()):
            raise _wrong("no type has a positive weight: there would be nothing to learn from")
        other = rules.pop(EVERY_OTHER)
        return cls(rules, other, half_life_days)

    @property
    def key(self) -> str:
        """The same for the same weights, in every process."""
        return repr((sorted(self.types.items()), self.other, self.half_life_days))

    def weight(self, kind: str, value: float | None) -> float:
        """The weight of an event."""
        rule = self.types.get(kind, self.other)
        if isinstance(rule, float):
            return rule
        if value is None:
            return 0.0
        return next((s.weight for s in rule if s.start <= value < s.end), 0.0)

    @property
    def all_positive(self) -> bool:
        """Whether there is no event that is not positive."""
        return all(
            isinstance(rule, float) and rule > 0 for rule in (*self.types.values(), self.other)
        )

    def expression(
        self, kind: sa.ColumnElement[str], value: sa.ColumnElement[Any]
    ) -> sa.ColumnElement[float]:
        """``weight`` in SQL, of the columns of an event."""
        other = _in_sql(self.other, value)
        if not self.types:
            return other
        by_type = {name: _in_sql(rule, value) for name, rule in self.types.items()}
        return sa.case(by_type, value=kind, else_=other)

    def is_positive(
        self, kind: sa.ColumnElement[str], value: sa.ColumnElement[Any]
    ) -> sa.ColumnElement[bool]:
        """Whether an event is positive, in SQL."""
        return sa.true() if self.all_positive else self.expression(kind, value) > 0

    def decay(self, timestamps: NDArray[np.int64], now: int) -> NDArray[np.float32]:
        """What is left at a time of the weight of events of these times, all in microseconds."""
        if self.half_life_days is None:
            return np.ones(len(timestamps), dtype=np.float32)
        half_lives = np.maximum(now - timestamps, 0) / (self.half_life_days * DAY_US)
        return np.exp2(-np.minimum(half_lives, MOST_HALF_LIVES)).astype(np.float32)


def _object(text: str) -> dict[str, Any]:
    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise _wrong("a name is there twice")
        return found

    try:
        given = json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError):
        raise _wrong("is not JSON") from None
    if not isinstance(given, dict):
        raise _wrong('must be a JSON object, as {"purchase": 3, "click": 1, "view": "seen"}')
    return given


def _rule(name: str, given: Any) -> Rule:
    problem = text_problem(name, MAX_TYPE_BYTES)
    if problem is not None:
        raise _wrong(f"the name of a type {problem}")
    if not isinstance(given, list):
        return _weight(name, given)
    if not given:
        raise _wrong(f"{_shown(name)} has an empty list of ranges")
    ranges = sorted((_range(name, each) for each in given), key=lambda each: each[0])
    ends = [start for start, _, _ in ranges[1:]] + [math.inf]
    steps = []
    for (start, below, weight), following in zip(ranges, ends, strict=True):
        end = following if below is None else below
        if start == following or end > following:
            raise _wrong(f"{_shown(name)} has ranges that overlap")
        if end <= start:
            raise _wrong(f"{_shown(name)} has a range that ends before it begins")
        steps.append(Step(start, end, weight))
    return tuple(steps)


def _range(name: str, given: Any) -> tuple[float, float | None, float]:
    if not isinstance(given, dict) or not given.keys() <= {"from", "below", "weight"}:
        raise _wrong(f'a range of {_shown(name)} must be as {{"from": 3, "below": 4, "weight": 1}}')
    if "weight" not in given:
        raise _wrong(f"a range of {_shown(name)} has no weight")
    start = -math.inf if given.get("from") is None else _number(name, given["from"])
    below = None if given.get("below") is None else _number(name, given["below"])
    return start, below, _weight(name, given["weight"])


def _weight(name: str, given: Any) -> float:
    if given == SEEN:
        return 0.0
    weight = _number(name, given)
    if weight and not LEAST_WEIGHT <= abs(weight) <= MOST_WEIGHT:
        raise _wrong(
            f"a weight is 0, or between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g} above or below it"
        )
    return weight


def _number(name: str, given: Any) -> float:
    try:
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise ValueError
        number = float(given)
        if not math.isfinite(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise _wrong(
            f'{_shown(name)} needs a finite number, "{SEEN}" or a list of ranges'
        ) from None
    return number


def _is_ever_positive(rule: Rule) -> bool:
    return rule > 0 if isinstance(rule, float) else any(step.weight > 0 for step in rule)


def _in_sql(rule: Rule, value: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    if isinstance(rule, float):
        return _double(rule)
    # From the highest: the first whose start is reached is the one, if its end is not.
    whens = []
    for step in reversed(rule):
        inside = [value >= _double(step.start)] if step.start > -math.inf else []
        inside += [value < _double(step.end)] if step.end < math.inf else []
        whens.append((sa.and_(*inside) if inside else value.is_not(None), _double(step.weight)))
    return sa.case(*whens, else_=_double(0.0))


def _double(number: float) -> sa.ColumnElement[float]:
    return sa.literal(number, sa.Double())


def _shown(name: str) -> str:
    return repr(name[:40])


def _wrong(problem: str) -> SettingsError:
    return SettingsError(f"NCR_FEEDBACK: {problem}")
