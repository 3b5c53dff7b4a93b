"""Filters by attributes: the language, its limits, and the normal form of a filter.

A filter is a JSON object. Its keys are names of attributes, or ``and``, ``or`` and ``not``. The
conditions of all keys must hold. An attribute takes a value, a list of values (any of them), or an
object of operators.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from app.core.errors import Unprocessable
from app.core.requests import loads_lenient, text_problem

MAX_DEPTH = 16  # of objects within each other
MAX_CONDITIONS = 256
MAX_VALUES = 1_000  # in all of a filter
MAX_TEXT_BYTES = 256  # of a string that is compared, and of an attribute's name
MAX_QUERY_CHARACTERS = 8_192  # of a filter in a query string
MAX_BOOSTS = 16
MAX_LOG_ODDS = 100.0  # of one boost

FILTER = (
    "A condition on the attributes of items, as a JSON object: "
    '`{"brand":["x","y"],"price":{"lt":50},"in_stock":true}`. A list of values '
    "matches an item with any of the values. The operators are `eq`, `ne`, `in`, `nin`, `lt`, "
    "`lte`, `gt`, `gte`, `exists` and `contains`. `contains` applies to lists of strings. The "
    "operators `and` and `or` combine a list of filters, and `not` negates a filter. An item "
    "without the attribute matches only `ne`, `nin`, `not` and `exists: false`."
)

# A value that is compared, with its kind: to Python True and 1.0 are equal.
Value = tuple[str, Any]
KINDS = {"number": "numbers", "string": "strings", "boolean": "booleans", "list": "lists"}


@dataclass(frozen=True, slots=True)
class OneOf:
    """Whether an attribute has one of these values."""

    name: str
    values: tuple[Value, ...]
    """Sorted, each once."""
    operator: str = "eq"
    """The operator that the client wrote, for messages. The normal form leaves the operator out."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Whether an attribute is below or above a number or a string."""

    name: str
    operator: str
    """`lt`, `lte`, `gt` or `gte`."""
    value: Value


@dataclass(frozen=True, slots=True)
class Contains:
    """Whether an attribute is a list of strings with a certain string."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Exists:
    """Whether an item has an attribute, of any kind."""

    name: str


@dataclass(frozen=True, slots=True)
class Every:
    """Whether all of the conditions hold: `and`."""

    of: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Some:
    """Whether one of the conditions holds: `or`."""

    of: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """Whether a condition does not hold."""

    of: Condition


Condition = OneOf | Compared | Contains | Exists | Every | Some | Not


@dataclass(frozen=True, slots=True)
class AttributeFilter:
    """A valid filter in its normal form, which is the same for every order of the conditions."""

    condition: Condition
    names: tuple[str, ...]
    """The names of the attributes that the filter depends on, sorted."""
    key: str
    """A digest of the condition: part of cache keys."""

    @classmethod
    def of(cls, condition: Condition) -> AttributeFilter:
        """The filter of a condition in its normal form."""
        names = tuple(sorted({*_names(condition)}))
        digest = hashlib.blake2b(_form(condition).encode("utf-8", "backslashreplace"))
        return cls(condition, names, digest.hexdigest()[:32])


@dataclass(frozen=True, slots=True)
class Boost:
    """Log-odds that the service adds to the preference for the items that a filter selects."""

    filter: AttributeFilter
    by: float


def parse_filter(value: Any, where: str = "filter") -> AttributeFilter | None:
    """The filter of parsed JSON; None for a filter that every item fits.

    Raises:
        Unprocessable: the value is no filter, or exceeds a limit.
    """
    condition = _Parser(where).filter(value)
    return None if condition == Every(()) else AttributeFilter.of(condition)


def read_filter(text: str | None) -> AttributeFilter | None:
    """The filter in a query string; None without a filter. Raises as `parse_filter`."""
    return None if text is None else parse_filter(_read_json(text, "filter"))


BOOST = (
    'Boosts as JSON: `[{"filter":{"brand":"x"},"by":0.5}]`. The server adds `by` '
    "to the log-odds that the user prefers a matching item to other items. A boost of ±0.7 "
    "doubles or halves the odds. Boosts also change `score` and `preferred_over_next`. The "
    "boosts of an item add up. For popular items, the log-odds are the logarithm of the "
    f"number of users. A request has at most {MAX_BOOSTS} boosts of at most ±{MAX_LOG_ODDS:g}."
)


def parse_boosts(value: Any) -> tuple[Boost, ...]:
    """The boosts of parsed JSON in a normal form, without boosts that have no effect.

    Raises:
        Unprocessable: the value is no list of boosts, or exceeds a limit.
    """
    if not isinstance(value, list):
        raise _bad_boost("boost: a boost list has objects with `filter` and `by`")
    if len(value) > MAX_BOOSTS:
        raise _bad_boost(f"boost: a request has at most {MAX_BOOSTS} boosts")
    by_filter: dict[str, Boost] = {}
    parser = _Parser("boost")  # its limits are on all of them together
    for index, one in enumerate(value):
        where = f"boost[{index}]"
        if not isinstance(one, dict) or one.keys() != {"filter", "by"}:
            raise _bad_boost(f"{where}: a boost is an object with `filter` and `by`")
        by = one["by"]
        if isinstance(by, bool) or not isinstance(by, int | float) or not abs(by) <= MAX_LOG_ODDS:
            # What is not a number is not at most anything.
            raise _bad_boost(f"{where}.by: log-odds are a number from −100 to 100")
        parser.start(f"{where}.filter")
        condition = parser.filter(one["filter"])
        wanted = None if condition == Every(()) else AttributeFilter.of(condition)
        if wanted is not None:  # what is added to every item changes no preference
            known = by_filter.get(wanted.key)
            by_filter[wanted.key] = Boost(wanted, float(by) + (known.by if known else 0.0))
    return tuple(by_filter[key] for key in sorted(by_filter) if by_filter[key].by)


def read_boosts(text: str | None) -> tuple[Boost, ...]:
    """The boosts in a query string. Raises as `parse_boosts`."""
    return () if text is None else parse_boosts(_read_json(text, "boost"))


def _bad_boost(problem: str) -> Unprocessable:
    return Unprocessable(problem, code="invalid_boost")


def _read_json(text: str, name: str) -> Any:
    if len(text) > MAX_QUERY_CHARACTERS:
        raise Unprocessable(
            f"{name}: a query has at most {MAX_QUERY_CHARACTERS:,} characters here, and this "
            f"value has {len(text):,}; send the value in a body",
            code=f"invalid_{name}",
        )
    try:
        return loads_lenient(text.encode("utf-8", "surrogatepass"))
    except ValueError:
        raise Unprocessable(f"{name}: the value is not JSON", code=f"invalid_{name}") from None


_COMPARED = ("lt", "lte", "gt", "gte")
_OPERATORS = ("eq", "ne", "in", "nin", *_COMPARED, "exists", "contains")


class _Parser:
    """Reads filters, and counts conditions and values for the limits."""

    def __init__(self, where: str) -> None:
        self._root = where
        self._conditions = self._values = 0

    def start(self, where: str) -> None:
        """Begin another filter, which messages call ``where``. The counts go on."""
        self._root = where

    def filter(self, value: Any, where: str = "", depth: int = 1) -> Condition:
        """The normal form of a filter. Raises Unprocessable."""
        if not isinstance(value, dict):
            self._refuse(where, "a filter is a JSON object")
        if depth > MAX_DEPTH:
            self._refuse("", f"the filter is more than {MAX_DEPTH} objects deep")
        conditions: list[Condition] = []
        for name, content in value.items():
            inner = f"{where}.{name[:64]}"
            if name in ("and", "or"):
                if not isinstance(content, list):
                    self._refuse(inner, f"`{name}` takes a list of filters")
                parts = [
                    self.filter(part, f"{inner}[{index}]", depth + 1)
                    for index, part in enumerate(self._counted(content, "conditions"))
                ]
                conditions.append(_every(parts) if name == "and" else _some(parts))
            elif name == "not":
                conditions.append(_not(self.filter(content, inner, depth + 1)))
            else:
                conditions += self._attribute(name, content, inner)
        return _every(conditions)

    def _attribute(self, name: str, content: Any, where: str) -> list[Condition]:
        problem = text_problem(name, MAX_TEXT_BYTES)
        if problem is not None:
            self._refuse(where, f"the attribute's name {problem}")
        if not isinstance(content, dict):
            operator = "in" if isinstance(content, list) else "eq"
            return [self._condition(name, operator, content, where)]
        if not content:
            self._refuse(where, "an operator is missing")
        return [
            self._condition(name, operator, operand, f"{where}.{operator[:64]}")
            for operator, operand in content.items()
        ]

    def _condition(self, name: str, operator: str, operand: Any, where: str) -> Condition:
        if operator not in _OPERATORS:
            self._refuse(where, f"unknown operator; the operators are {', '.join(_OPERATORS)}")
        self._counted((None,), "conditions")
        if operator == "exists":
            if not isinstance(operand, bool):
                self._refuse(where, "`exists` takes true or false")
            return Exists(name) if operand else Not(Exists(name))
        if operator in ("in", "nin"):
            if not isinstance(operand, list):
                self._refuse(where, f"`{operator}` takes a list of values")
            values = {self._value(one, where) for one in self._counted(operand, "values")}
        else:
            values = {self._value(one, where) for one in self._counted((operand,), "values")}
        if operator in ("eq", "in"):
            return OneOf(name, tuple(sorted(values)), operator)
        if operator in ("ne", "nin"):
            return Not(OneOf(name, tuple(sorted(values)), operator))
        (value,) = values
        if operator == "contains":
            if value[0] != "string":
                self._refuse(where, f"`contains` takes a string, not a {value[0]}")
            return Contains(name, value[1])
        if value[0] == "boolean":
            self._refuse(where, f"`{operator}` takes a number or a string, not a boolean")
        return Compared(name, operator, value)

    def _value(self, value: Any, where: str) -> Value:
        if isinstance(value, bool):
            return "boolean", value
        if isinstance(value, int | float):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if not math.isfinite(number):
                self._refuse(where, "a number must be finite")
            return "number", number + 0.0  # −0 is 0
        if isinstance(value, str):
            if value and (problem := text_problem(value, MAX_TEXT_BYTES)) is not None:
                self._refuse(where, f"a string {problem}")
            return "string", value
        problem = "a value is a string, a number or a boolean"
        if value is None:
            problem = 'null is not a value; use {"exists": false} for a missing attribute'
        return self._refuse(where, problem)

    def _counted(self, values: Sequence[Any], what: str) -> Sequence[Any]:
        if what == "values":
            self._values += len(values)
        else:
            self._conditions += len(values)
        limit, number = (
            (MAX_VALUES, self._values) if what == "values" else (MAX_CONDITIONS, self._conditions)
        )
        if number > limit:
            self._refuse("", f"the filter has more than {limit:,} {what}")
        return values

    def _refuse(self, where: str, problem: str) -> NoReturn:
        raise Unprocessable(f"{self._root}{where[:200]}: {problem}", code="invalid_filter")


def _every(parts: Iterable[Condition]) -> Condition:
    flat: dict[str, Condition] = {}
    for part in parts:
        for one in part.of if isinstance(part, Every) else (part,):
            flat[_form(one)] = one
    return next(iter(flat.values())) if len(flat) == 1 else Every(_in_order(flat))


def _some(parts: Iterable[Condition]) -> Condition:
    flat: dict[str, Condition] = {}
    for part in parts:
        for one in part.of if isinstance(part, Some) else (part,):
            flat[_form(one)] = one
    return next(iter(flat.values())) if len(flat) == 1 else Some(_in_order(flat))


def _not(part: Condition) -> Condition:
    return part.of if isinstance(part, Not) else Not(part)


def _in_order(by_form: dict[str, Condition]) -> tuple[Condition, ...]:
    return tuple(by_form[form] for form in sorted(by_form))


def _form(condition: Condition) -> str:
    """The normal form of a condition as text, without the operator that the client wrote."""
    match condition:
        case OneOf(name, values, _):
            return f"in{(name, values)!r}"
        case Compared(name, operator, value):
            return f"{operator}{(name, value)!r}"
        case Contains(name, text):
            return f"contains{(name, text)!r}"
        case Exists(name):
            return f"exists{(name,)!r}"
        case Every(parts):
            return f"and[{','.join(map(_form, parts))}]"
        case Some(parts):
            return f"or[{','.join(map(_form, parts))}]"
        case Not(part):
            return f"not[{_form(part)}]"


def _names(condition: Condition) -> Iterable[str]:
    match condition:
        case Every(parts) | Some(parts):
            for part in parts:
                yield from _names(part)
        case Not(part):
            yield from _names(part)
        case _:
            yield condition.name
