"""Attributes of items in memory: a typed column for each name and kind, for filters.

A number is a float, a string is a code in a dictionary, and a boolean is 0 or 1. In a list of
strings, each string has a row. A column of few items holds their ids, and a column of many items
stands by internal id. An item has a name in one kind at most. Any other value (an object, another
list, a string of more than 256 bytes) exists, but equals no value. A null is missing.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from app.catalog.filters import (
    KINDS,
    MAX_TEXT_BYTES,
    AttributeFilter,
    Compared,
    Condition,
    Contains,
    Every,
    Exists,
    Not,
    OneOf,
    Some,
)
from app.core.errors import Unprocessable

DENSE = 4  # a column of at least one in so many items stands by internal id
SPARE_CODES = 1_024  # that no item has any more, beyond as many as are in use
FEW_CODES = 4  # that are compared one by one

Ids = NDArray[np.int32]
Bools = NDArray[np.bool_]
_NO_IDS: Ids = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """The values of one kind: numbers, codes of strings, or booleans."""

    values: NDArray[Any]
    """(size,) by internal id, −1 (NaN for numbers) for a missing value; or (k,) of the ``ids``."""
    ids: Ids | None = None
    """(k,) internal ids, ascending; None: the values stand by internal id."""

    @classmethod
    def of(cls, ids: Ids, values: NDArray[Any]) -> Column | None:
        """The column of ascending ids, in the form that takes less memory; None without ids."""
        if not len(ids):
            return None
        size = int(ids[-1]) + 1
        if len(ids) * DENSE < size:
            return cls(values, ids)
        dense = np.full(size, _missing(values.dtype), values.dtype)
        dense[ids] = values
        return cls(dense)

    def present(self) -> Ids:
        """The ids that have a value, ascending."""
        if self.ids is not None:
            return self.ids
        return np.flatnonzero(~_is_missing(self.values)).astype(np.int32)

    def at(self, ids: Ids) -> NDArray[Any]:
        """The values of ids, −1 (NaN for numbers) for a missing value."""
        found = np.full(len(ids), _missing(self.values.dtype), self.values.dtype)
        if self.ids is None:
            known = ids < len(self.values)
            found[known] = self.values[ids[known]]
        else:
            places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
            known = self.ids[places] == ids
            found[known] = self.values[places[known]]
        return found

    def spread(self, hits: Bools, size: int) -> Bools:
        """(size,) hits by internal id, from the hits by value; False for ids without a value."""
        if self.ids is None and len(hits) == size:
            return hits
        mask = np.zeros(size, np.bool_)
        if self.ids is None:
            mask[: len(hits)] = hits[:size]
        else:
            mask[self.ids[hits]] = True
        return mask

    def replaced(self, ids: Ids, values: NDArray[Any]) -> Column | None:
        """The column with these values of ascending ids, some missing; None if no value is left."""
        if self.ids is None:
            size = max(len(self.values), int(ids[-1]) + 1)
            dense = np.full(size, _missing(values.dtype), values.dtype)
            dense[: len(self.values)] = self.values
            dense[ids] = values
            some_left = not _is_missing(values).all() or not _is_missing(dense).all()
            return Column(dense) if some_left else None
        present = ~_is_missing(values)
        old = ~np.isin(self.ids, ids)
        all_ids = np.concatenate([self.ids[old], ids[present]])
        all_values = np.concatenate([self.values[old], values[present]])
        order = np.argsort(all_ids, kind="stable")
        return Column.of(all_ids[order], all_values[order])


def _is_missing(values: NDArray[Any]) -> Bools:
    return np.isnan(values) if values.dtype == np.float64 else values < 0


def _missing(dtype: np.dtype[Any]) -> Any:
    return np.nan if dtype == np.float64 else -1


class Words:
    """The strings of an attribute, each with a code.

    States of the catalogue share an instance, which only grows. An earlier state has no values with
    later codes.
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        self.codes = {word: code for code, word in enumerate(words)}
        self._ordered: tuple[list[str], NDArray[np.int64], int] | None = None

    def in_order(self) -> tuple[list[str], NDArray[np.int64], int]:
        """The strings in order, the code of each string, and the number of strings.

        The result is cached until a string is added.
        """
        known = self._ordered
        if known is None or known[2] != len(self.codes):
            pairs = sorted(self.codes.items())  # of a copy: another thread may add to it
            codes = np.array([code for _, code in pairs], np.int64)
            self._ordered = known = [word for word, _ in pairs], codes, len(pairs)
        return known

    def add(self, word: str) -> int:
        """The code of a string. A new string gets a new code."""
        return self.codes.setdefault(word, len(self.codes))


@dataclass(frozen=True, slots=True, eq=False)
class Attribute:
    """An attribute in one state of the catalogue."""

    seq: int
    """The number of the latest change of the attribute."""
    words: Words = field(default_factory=Words)
    number: Column | None = None
    string: Column | None = None
    boolean: Column | None = None
    list_ids: Ids = field(default_factory=lambda: _NO_IDS)
    """Ids of the items that have a list of strings, ascending."""
    entries: Ids = field(default_factory=lambda: _NO_IDS)
    """(m,) the id of the item of each string in these lists, in any order."""
    entry_codes: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """(m,) the code of each string in these lists, in the order of ``entries``."""
    other: Ids = field(default_factory=lambda: _NO_IDS)
    """Ids of the items that have a value of no kind, ascending."""

    @property
    def kinds(self) -> list[str]:
        """The kinds of the values that items have."""
        scalar = [k for k in ("number", "string", "boolean") if getattr(self, k) is not None]
        return [*scalar, "list"] if len(self.list_ids) else scalar

    @property
    def is_empty(self) -> bool:
        """Whether no item has the attribute."""
        return not self.kinds and not len(self.other)

    def exists(self, size: int) -> Bools:
        """(size,) whether an item has the attribute, by internal id."""
        mask = np.zeros(size, np.bool_)
        for column in (self.number, self.string, self.boolean):
            if column is not None:
                mask[column.present()] = True
        mask[self.list_ids] = True
        mask[self.other] = True
        return mask

    def updated(self, seq: int, ids: Ids, given: dict[int, Any]) -> Attribute:
        """The attribute after a change of items; the same object if no value changed.

        Args:
            seq: the number of the change.
            ids: the items that changed, ascending.
            given: the values of the items that have one, by internal id.
        """
        by_kind = _by_kind(given)
        words = self.words
        columns: dict[str, Column | None] = {}
        is_changed = False
        for kind, dtype in (("number", np.float64), ("string", np.int32), ("boolean", np.int8)):
            column: Column | None = getattr(self, kind)
            some_ids, some = by_kind[kind]
            if column is None and not some_ids:
                columns[kind] = None
                continue
            coded = [words.add(value) for value in some] if kind == "string" else some
            new_ids, new = np.array(some_ids, np.int32), np.array(coded, dtype)
            if column is None:
                columns[kind], is_changed = Column.of(new_ids, new), True
                continue
            values = np.full(len(ids), _missing(np.dtype(dtype)), dtype)
            values[np.searchsorted(ids, new_ids)] = new
            if np.array_equal(column.at(ids), values, equal_nan=kind == "number"):
                columns[kind] = column
            else:
                columns[kind], is_changed = column.replaced(ids, values), True
        lists = self._lists(ids, *by_kind["list"], words)
        other = _with_ids(self.other, ids, np.array(by_kind["other"][0], np.int32))
        if not is_changed and lists is None and other is self.other:
            return self
        return _compact(
            Attribute(
                seq,
                words,
                columns["number"],
                columns["string"],
                columns["boolean"],
                *(lists or (self.list_ids, self.entries, self.entry_codes)),
                other,
            )
        )

    def _lists(
        self, ids: Ids, new_ids: list[int], lists: list[list[str]], words: Words
    ) -> tuple[Ids, Ids, NDArray[np.int32]] | None:
        """The arrays of lists after a change; None if they stay the same."""
        had = _members(self.list_ids, ids)
        if not len(had) and not new_ids:
            return None
        entries = np.repeat(np.array(new_ids, np.int32), [len(one) for one in lists])
        codes = np.array([words.add(word) for one in lists for word in one], np.int32)
        kept = ~np.isin(self.entries, ids)
        if (
            had.tolist() == new_ids
            and len(self.entries) - int(kept.sum()) == len(entries)
            and _pairs(self.entries[~kept], self.entry_codes[~kept]) == _pairs(entries, codes)
        ):
            return None
        return (
            _with_ids(self.list_ids, ids, np.array(new_ids, np.int32)),
            np.concatenate([self.entries[kept], entries]),
            np.concatenate([self.entry_codes[kept], codes]),
        )


def _members(ascending: Ids, ids: Ids) -> Ids:
    """The ids that are among the ascending ids."""
    if not len(ascending):
        return _NO_IDS
    places = np.minimum(np.searchsorted(ascending, ids), len(ascending) - 1)
    found: Ids = ids[ascending[places] == ids]
    return found


def _with_ids(ascending: Ids, ids: Ids, new: Ids) -> Ids:
    """The ascending ids with ``new`` in place of ``ids``; the same array if all ids stay."""
    if np.array_equal(_members(ascending, ids), new):
        return ascending
    left = np.delete(ascending, np.searchsorted(ascending, _members(ascending, ids)))
    joined: Ids = np.insert(left, np.searchsorted(left, new), new)
    return joined


def _by_kind(given: dict[int, Any]) -> dict[str, tuple[list[int], list[Any]]]:
    """The ascending ids and the values, by kind."""
    by_kind: dict[str, tuple[list[int], list[Any]]] = {kind: ([], []) for kind in (*KINDS, "other")}
    for item in sorted(given):
        value = given[item]
        if isinstance(value, bool):
            kind = "boolean"
        elif isinstance(value, int | float):
            kind, value = "number", float(value)
        elif isinstance(value, str):
            kind = "string" if _is_short(value) else "other"
        elif isinstance(value, list):
            strings = all(isinstance(one, str) and _is_short(one) for one in value)
            kind = "list" if strings else "other"
        else:
            kind = "other"
        by_kind[kind][0].append(item)
        by_kind[kind][1].append(value)
    return by_kind


def _is_short(text: str) -> bool:
    return 4 * len(text) <= MAX_TEXT_BYTES or len(text.encode()) <= MAX_TEXT_BYTES


def _pairs(ids: Ids, codes: NDArray[np.int32]) -> list[tuple[int, int]]:
    return sorted(zip(ids.tolist(), codes.tolist(), strict=True))


def _compact(attribute: Attribute) -> Attribute:
    """The attribute without unused words, if most words are unused."""
    if len(attribute.words.codes) <= SPARE_CODES:
        return attribute
    string = attribute.string
    n_used = len(attribute.entry_codes) + (0 if string is None else len(string.present()))
    if len(attribute.words.codes) <= 2 * n_used + SPARE_CODES:
        return attribute
    own = np.zeros(0, np.int32) if string is None else string.at(string.present())
    used = np.union1d(own, attribute.entry_codes).astype(np.int64)
    old = list(attribute.words.codes)
    new_code = np.full(len(old) + 1, -1, np.int32)
    new_code[used] = np.arange(len(used), dtype=np.int32)
    return Attribute(
        attribute.seq,
        Words(old[code] for code in used),
        attribute.number,
        None if string is None else Column(new_code[string.values], string.ids),
        attribute.boolean,
        attribute.list_ids,
        attribute.entries,
        new_code[attribute.entry_codes],
        attribute.other,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Attributes:
    """Attributes of all items in a state of the catalogue. A change makes another instance.

    Attributes that no filter has named yet are missing, see `CatalogService.with_attributes`.
    """

    by_name: dict[str, Attribute] = field(default_factory=dict)
    seq: int = 0
    """The number of the latest change of an attribute."""
    size: int = 0
    """One more than the highest internal id that has had attributes."""
    loaded: frozenset[str] | None = None
    """The names of the loaded attributes; None: all."""
    known: frozenset[str] | None = None
    """The names of all attributes, loaded or not; None: not read yet."""

    def missing(self, names: Iterable[str]) -> set[str]:
        """The names that some item may have and that are not loaded."""
        if self.loaded is None:
            return set()
        missing = set(names) - self.loaded
        return missing if self.known is None else missing & self.known

    @classmethod
    def nothing(cls, names: Iterable[str] = ()) -> Attributes:
        """A state without items, with these names loaded."""
        return cls(loaded=frozenset(names))

    def joined(self, other: Attributes) -> Attributes:
        """The attributes of both instances, which are of the same state of the catalogue."""
        return replace(
            self,
            by_name=self.by_name | other.by_name,
            seq=max(self.seq, other.seq),
            size=max(self.size, other.size),
            loaded=(self.loaded or frozenset()) | (other.loaded or frozenset()),
            known=(self.known or frozenset()) | (other.known or frozenset()),
        )

    def updated(self, rows: Sequence[tuple[int, int, str]]) -> Attributes:
        """The state after changes of items: rows of internal id, number of the change, and JSON."""
        given: dict[str, dict[int, Any]] = defaultdict(dict)
        names: set[str] = set()
        for item, _, text in rows:
            if text != "{}":
                attributes = attributes_of(text)
                if self.loaded is not None:
                    names.update(attributes)
                    attributes = {n: attributes[n] for n in self.loaded if n in attributes}
                for name, value in attributes.items():
                    if value is not None:
                        given[name][item] = value
        if names and not names <= (self.known or frozenset()):
            known = names.union(self.known or ())
            return replace(self, known=frozenset(known))._with(rows, given)
        return self._with(rows, given)

    def _with(
        self, rows: Sequence[tuple[int, int, str]], given: dict[str, dict[int, Any]]
    ) -> Attributes:
        if not given and all(item >= self.size for item, _, _ in rows):
            return self
        ids = np.array(sorted({item for item, _, _ in rows}), np.int32)
        seq = max(seq for _, seq, _ in rows)
        changed = {}
        for name in dict.fromkeys([*self.by_name, *given]):
            before = self.by_name.get(name)
            attribute = (before or Attribute(0)).updated(seq, ids, given.get(name, {}))
            if attribute is not before:
                changed[name] = attribute
        if not changed:
            return self
        # An attribute that no item has any more stays, for the number of the change that ended it.
        size = max(self.size, int(ids[-1]) + 1)
        return replace(self, by_name=self.by_name | changed, seq=seq, size=size)

    def state(self, names: Iterable[str]) -> tuple[int, ...]:
        """The number of the latest change of each of these attributes, for cache keys."""
        return tuple(
            0 if (attribute := self.by_name.get(name)) is None else attribute.seq for name in names
        )

    def mask(self, wanted: AttributeFilter, size: int) -> Bools:
        """(size,) whether an item fits a filter; ``size`` is above every internal id.

        Raises:
            Unprocessable: the filter compares values of a kind that no item has.
        """
        return self._mask(wanted.condition, size)

    def fits_without(self, condition: Condition) -> bool:
        """Whether an item without any attribute fits."""
        match condition:
            case Every(parts):
                return all(map(self.fits_without, parts))
            case Some(parts):
                return any(map(self.fits_without, parts))
            case Not(part):
                return not self.fits_without(part)
        return False

    def _mask(self, condition: Condition, size: int) -> Bools:
        match condition:
            case Every(parts):
                mask = np.ones(size, np.bool_) if not parts else self._mask(parts[0], size).copy()
                for part in parts[1:]:
                    mask &= self._mask(part, size)
                return mask
            case Some(parts):
                mask = np.zeros(size, np.bool_)
                for part in parts:
                    mask |= self._mask(part, size)
                return mask
            case Not(part):
                return ~self._mask(part, size)
        attribute = self.by_name.get(condition.name)
        if attribute is None or attribute.is_empty:
            return np.zeros(size, np.bool_)
        match condition:
            case Exists():
                return attribute.exists(size)
            case Contains(name, text):
                _check(attribute, name, "contains", "list", "looks in a list")
                mask = np.zeros(size, np.bool_)
                code = attribute.words.codes.get(text, -2)
                mask[attribute.entries[attribute.entry_codes == code]] = True
                return mask
            case Compared(name, operator, (kind, bound)):
                _check(attribute, name, operator, kind)
                return _compared(attribute, kind, operator, bound, size)
            case OneOf(name, values, operator):
                mask = np.zeros(size, np.bool_)
                for kind in dict.fromkeys(kind for kind, _ in values):
                    _check(attribute, name, operator, kind)
                    mask |= _one_of(attribute, kind, [v for k, v in values if k == kind], size)
                return mask


def attributes_of(text: str) -> dict[str, Any]:
    """The attributes in JSON from a database."""
    try:
        loaded: dict[str, Any] = orjson.loads(text)
    except orjson.JSONDecodeError:  # numbers that PostgreSQL writes with all their digits
        loaded = json.loads(text, parse_int=float)
    return loaded


def _check(
    attribute: Attribute, name: str, operator: str, kind: str, does: str | None = None
) -> None:
    kinds = attribute.kinds
    if kind in kinds or not kinds:
        return
    does = does or f"compares with a {kind}"
    have = " or ".join(KINDS[one] for one in kinds)
    hint = "; `contains` looks in lists" if kinds == ["list"] else ""
    raise Unprocessable(
        f"filter.{name[:64]}: `{operator}` {does}, but the items' values are {have}{hint}",
        code="filter_type_mismatch",
    )


def _one_of(attribute: Attribute, kind: str, wanted: list[Any], size: int) -> Bools:
    column: Column | None = getattr(attribute, kind)
    if column is None:
        return np.zeros(size, np.bool_)
    if kind == "string":
        codes = attribute.words.codes
        wanted = [code for word in wanted if (code := codes.get(word)) is not None]
        if len(wanted) > FEW_CODES:
            return column.spread(_with_codes(column.values, wanted, len(codes)), size)
    elif len(wanted) > FEW_CODES:
        return column.spread(np.isin(column.values, np.array(wanted, column.values.dtype)), size)
    hits = np.zeros(len(column.values), np.bool_)
    for value in wanted:
        hits |= column.values == value
    return column.spread(hits, size)


def _with_codes(
    values: NDArray[np.int32], wanted: Sequence[int] | NDArray[np.int64], n_codes: int
) -> Bools:
    """Whether each code is wanted; −1, for a missing value, is the last entry of the table."""
    table = np.zeros(n_codes + 1, np.bool_)
    table[np.asarray(wanted, np.int64)] = True
    hits: Bools = table[values]
    return hits


def _compared(attribute: Attribute, kind: str, operator: str, bound: Any, size: int) -> Bools:
    column: Column | None = getattr(attribute, kind)
    if column is None:
        return np.zeros(size, np.bool_)
    if kind == "number":
        return column.spread(_NUMBERS[operator](column.values, bound), size)
    words, codes, n_codes = attribute.words.in_order()
    place = (bisect_left if operator in ("lt", "gte") else bisect_right)(words, bound)
    wanted = codes[:place] if operator in ("lt", "lte") else codes[place:]
    return column.spread(_with_codes(column.values, wanted, n_codes), size)


_NUMBERS = {"lt": np.less, "lte": np.less_equal, "gt": np.greater, "gte": np.greater_equal}
