"""Attributes as columns of numbers: JSON objects in, a sparse matrix out."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy import sparse

from ncr_core.errors import ConfigError, DataError

Objects = Sequence[Mapping[str, Any]]
"""Attributes by their names, one object for each item or user."""

EMBEDDING = "embedding"
"""The attribute that holds a vector of the caller's own, such as that of a text."""
MIN_COUNT = 5  # objects with a value; of fewer it has no column
MAX_ATTRIBUTES = 64  # those that most objects have
MAX_COLUMNS = 1_000  # of values, the most frequent ones
MAX_LEVELS, BINS = 32, 16  # of numbers: a column for each of so many, or for each bin
MAX_DEVIATIONS = 3.0  # from the mean: a number farther away is taken for one at this distance
MAX_EMBEDDING = 1_024
MAX_TEXT = 256  # characters of a value; a longer text is no category

_Value = str | bool


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The mean, the standard deviation and the bins of an attribute's numbers."""

    mean: float
    deviation: float
    edges: tuple[float, ...]
    """The upper ends of all bins but the last."""

    @classmethod
    def of(cls, numbers: Sequence[float]) -> _Numbers | None:
        """From an attribute's numbers; None if their deviation is 0 or not finite."""
        levels, counts = np.unique(np.array(numbers, np.float64), return_counts=True)
        with np.errstate(over="ignore", invalid="ignore"):
            mean, deviation = float(np.mean(numbers)), float(np.std(numbers))
        if len(levels) < 2 or not 0 < deviation < math.inf or not math.isfinite(mean):
            return None
        if len(levels) <= MAX_LEVELS:
            edges = levels[:-1] / 2 + levels[1:] / 2
        else:
            places = np.arange(1, BINS) * (counts.sum() / BINS)
            edges = np.unique(levels[np.searchsorted(counts.cumsum(), places)])
        return cls(mean, deviation, tuple(edges.tolist()))

    def standardised(self, number: float) -> float:
        """The number in standard deviations from the mean, within ± ``MAX_DEVIATIONS``."""
        deviations = number / self.deviation - self.mean / self.deviation
        return max(-MAX_DEVIATIONS, min(MAX_DEVIATIONS, deviations))


@dataclass(frozen=True, slots=True)
class _Attribute:
    """The columns of one attribute, from ``first`` on: its values, then its numbers."""

    name: str
    values: tuple[_Value, ...]
    numbers: _Numbers | None
    first: int

    @property
    def n_columns(self) -> int:
        of_numbers = 0 if self.numbers is None else 2 + len(self.numbers.edges)
        return len(self.values) + of_numbers


class AttributeEncoder:
    """Turns the attributes of items or users into a sparse matrix.

    - A string, a boolean, or a string of a list is a column of ones if at least ``MIN_COUNT``
      objects have it. The ``MAX_COLUMNS`` most frequent values over all attributes have a column. A
      string of more than ``MAX_TEXT`` characters has no column.
    - A number is a column in standard deviations, and a column of ones for its bin. Up to
      ``MAX_LEVELS`` different numbers of an attribute, such as codes, have a bin each. More numbers
      share ``BINS`` bins with about equal numbers of objects.
    - ``embedding``, a list of numbers of a fixed length, is a column for each number. One scale
      makes the mean square over all numbers 1.

    Unknown content adds no entries: another type, a value without a column, or a number that is not
    finite.
    """

    def __init__(
        self, attributes: Sequence[_Attribute], embedding: int = 0, scale: float = 1.0
    ) -> None:
        self._attributes = tuple(attributes)
        self._embedding, self._scale = embedding, scale
        self._places: dict[str, dict[_Value, int]] = {
            each.name: {value: each.first + i for i, value in enumerate(each.values)}
            for each in self._attributes
        }
        self._n_values = sum(each.n_columns for each in self._attributes)

    @classmethod
    def fit(
        cls,
        objects: Objects,
        names: Sequence[str] | None = None,
        embedding: int | None = None,
        *,
        min_count: int = MIN_COUNT,
    ) -> Self:
        """An encoder for attributes like those of ``objects``.

        Args:
            objects: the attributes of each item or user, as JSON has them.
            names: the attributes to use, ``embedding`` among them; None: ``embedding``, and the
                ``MAX_ATTRIBUTES`` that most objects have. A name that no object has is left out.
            embedding: the length of ``embedding``; None: the most frequent length.
            min_count: the number of objects that must have a value for a column.

        Raises:
            ConfigError: the embedding's length is not 0 to ``MAX_EMBEDDING``, or ``min_count`` is
                less than 1.
        """
        if embedding is not None and not 0 <= embedding <= MAX_EMBEDDING:
            raise ConfigError(f"an embedding has 0 to {MAX_EMBEDDING:,} numbers, not {embedding:,}")
        if min_count < 1:
            raise ConfigError(f"min_count must be at least 1, not {min_count}")
        seen = Counter(name for each in objects for name in each if name != EMBEDDING)
        if names is None:
            counted = [name for name, _ in sorted(seen.items(), key=lambda x: (-x[1], x[0]))]
        else:
            counted = [name for name in dict.fromkeys(names) if name in seen]
        counted = counted[:MAX_ATTRIBUTES]
        values: dict[str, Counter[_Value]] = {name: Counter() for name in counted}
        numbers: dict[str, list[float]] = {name: [] for name in counted}
        for each in objects:
            for name in counted:
                if name in each:
                    of_object, number = _read(each[name])
                    values[name].update(of_object)
                    if number is not None:
                        numbers[name].append(number)
        kept = _most_frequent(values, min_count)
        attributes, first = [], 0
        for name in counted:
            found = _Numbers.of(numbers[name]) if len(numbers[name]) >= min_count else None
            attribute = _Attribute(name, tuple(kept[name]), found, first)
            if attribute.n_columns:
                attributes.append(attribute)
                first += attribute.n_columns
        if names is not None and EMBEDDING not in names:
            embedding = 0
        size, scale = _embedding_of(objects, embedding)
        return cls(attributes, size, scale)

    @property
    def names(self) -> tuple[str, ...]:
        """The attributes in use, ``embedding`` last."""
        names = tuple(each.name for each in self._attributes)
        return (*names, EMBEDDING) if self._embedding else names

    @property
    def n_features(self) -> int:
        """The number of columns."""
        return self._n_values + self._embedding

    @property
    def groups(self) -> npt.NDArray[np.int64]:
        """(n_features,) the index in ``names`` of each column's attribute."""
        widths = [each.n_columns for each in self._attributes]
        return np.repeat(
            np.arange(len(widths) + bool(self._embedding)),
            [*widths, self._embedding] if self._embedding else widths,
        )

    def encode(self, objects: Objects) -> sparse.csr_matrix:
        """(m, n_features) in float32. An unknown attribute has no entries."""
        indptr, columns, entries = [0], [], []
        for each in objects:
            for column, entry in self._row(each):
                columns.append(column)
                entries.append(entry)
            indptr.append(len(columns))
        return sparse.csr_matrix(
            (
                np.array(entries, dtype=np.float32),
                np.array(columns, dtype=np.int64),
                np.array(indptr, dtype=np.int64),
            ),
            shape=(len(objects), self.n_features),
        )

    def _row(self, attributes: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
        for each in self._attributes:
            if each.name not in attributes:
                continue
            values, number = _read(attributes[each.name])
            places = self._places[each.name]
            yield from ((places[value], 1.0) for value in values if value in places)
            if number is not None and each.numbers is not None:
                column = each.first + len(each.values)
                yield column, each.numbers.standardised(number)
                yield column + 1 + bisect_right(each.numbers.edges, number), 1.0
        if self._embedding and EMBEDDING in attributes:
            vector = _vector(attributes[EMBEDDING], self._embedding)
            if vector is not None:
                scaled = np.clip(vector / self._scale, -1e6, 1e6)
                yield from enumerate(scaled.tolist(), self._n_values)

    def to_json(self) -> dict[str, Any]:
        """The JSON from which `from_json` makes the same encoder."""
        return {
            "attributes": [
                {
                    "name": each.name,
                    "values": list(each.values),
                    "numbers": None
                    if each.numbers is None
                    else {
                        "mean": each.numbers.mean,
                        "deviation": each.numbers.deviation,
                        "edges": list(each.numbers.edges),
                    },
                }
                for each in self._attributes
            ],
            "embedding": self._embedding,
            "embedding_scale": self._scale,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """The encoder of `to_json`. Raises DataError for other content."""
        attributes, first = [], 0
        try:
            for each in stored["attributes"]:
                of_numbers = each["numbers"]
                numbers = None
                if of_numbers is not None:
                    edges = tuple(float(edge) for edge in of_numbers["edges"])
                    numbers = _Numbers(
                        float(of_numbers["mean"]), float(of_numbers["deviation"]), edges
                    )
                    if not 0 < numbers.deviation < math.inf:
                        raise ValueError("a deviation is not above 0")
                values = tuple(each["values"])
                if not all(isinstance(value, str | bool) for value in values):
                    raise ValueError("a value is neither a string nor a boolean")
                attribute = _Attribute(str(each["name"]), values, numbers, first)
                attributes.append(attribute)
                first += attribute.n_columns
            embedding, scale = int(stored["embedding"]), float(stored["embedding_scale"])
            if not 0 <= embedding <= MAX_EMBEDDING or not 0 < scale < math.inf:
                raise ValueError("the embedding is malformed")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"the content is not an encoder of attributes: {error!r}") from None
        return cls(attributes, embedding, scale)


def _read(value: Any) -> tuple[list[_Value], float | None]:
    """An attribute's categories, each once, and its number; None without a finite number."""
    match value:
        case bool():
            return [value], None
        case int() | float():
            try:
                number = float(value)
            except OverflowError:
                return [], None
            return [], number if math.isfinite(number) else None
        case str():
            return ([value] if len(value) <= MAX_TEXT else []), None
        case list() | tuple():
            texts = (each for each in value if isinstance(each, str) and len(each) <= MAX_TEXT)
            return list(dict.fromkeys(texts)), None
    return [], None


def _most_frequent(
    counts: Mapping[str, Counter[_Value]], min_count: int
) -> dict[str, list[_Value]]:
    """The values that get a column, by attribute and in a fixed order."""
    frequent = [
        (-count, name, str(value), value)
        for name, of_name in counts.items()
        for value, count in of_name.items()
        if count >= min_count
    ]
    kept: dict[str, list[_Value]] = {name: [] for name in counts}
    for _, name, _, value in sorted(frequent, key=lambda x: x[:3])[:MAX_COLUMNS]:
        kept[name].append(value)
    return kept


def _embedding_of(objects: Objects, size: int | None) -> tuple[int, float]:
    """The length of the embeddings, and the root of their mean square."""
    given = [each[EMBEDDING] for each in objects if EMBEDDING in each]
    if size is None:
        lengths = Counter(len(each) for each in given if isinstance(each, list | tuple))
        size = max(lengths, key=lambda n: (lengths[n], n), default=0)
    if not size or size > MAX_EMBEDDING:
        return 0, 1.0
    vectors = [vector for each in given if (vector := _vector(each, size)) is not None]
    if not vectors:
        return 0, 1.0
    with np.errstate(over="ignore"):
        scale = math.sqrt(float(np.mean([np.mean(vector**2) for vector in vectors])))
    return (size, scale) if 0 < scale < math.inf else (0, 1.0)


def _vector(value: Any, size: int) -> npt.NDArray[np.float64] | None:
    if not isinstance(value, list | tuple) or len(value) != size:
        return None
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in value):
        return None
    try:
        vector = np.array(value, dtype=np.float64)
    except OverflowError:
        return None
    return vector if bool(np.isfinite(vector).all()) else None
