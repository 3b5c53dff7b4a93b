"""Interactions from paths, arrays, frames and rows; and what is wrong with those that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from ncr_core.data import Interactions
from ncr_core.data.dataset import Dataset, InteractionSource, load_interactions
from ncr_core.data.readers import open_source
from ncr_core.errors import DataError
from tests.ncr_core.data.conftest import put

USERS = ["ann", "ann", "bob", "ann", "bob"]
ITEMS = ["x", "y", "y", "z", "x"]
TIMES = [3.0, 1.0, 5.0, 2.0, 4.0]
EXPECTED = {"ann": ["y", "z", "x"], "bob": ["x", "y"]}


class Click(NamedTuple):
    user: str
    item: str
    timestamp: float


class Frame:
    """Columns by name, as pandas and polars have them."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._data = columns
        self.columns = list(columns)

    def __getitem__(self, name: str) -> Any:
        return np.asarray(self._data[name])


class Stream:
    """Nothing but the Arrow C stream."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._table = pa.table(columns)

    def __arrow_c_stream__(self, schema: object = None) -> object:
        return self._table.__arrow_c_stream__(schema)


def frame(module: str) -> Callable[[dict[str, Any]], Any]:
    def build(columns: dict[str, Any]) -> Any:
        return pytest.importorskip(module).DataFrame(columns)

    return build


FRAMES = pytest.mark.parametrize(
    "make",
    [Frame, Stream, dict, pa.table, frame("pandas"), frame("polars")],
    ids=["columns", "arrow stream", "mapping", "pyarrow", "pandas", "polars"],
)


def histories(dataset: Dataset) -> dict[str, list[str]]:
    interactions = dataset.interactions
    return {
        user: [interactions.item_ids[i] for i in interactions.items_of(row)]
        for row, user in enumerate(dataset.user_ids)
    }


def error(source: InteractionSource, **names: str) -> str:
    with pytest.raises(DataError) as caught:
        load_interactions(source, **names)
    message = str(caught.value)
    assert "\n" not in message
    return message


def columns(**changes: Any) -> dict[str, Any]:
    return {"user": USERS, "item": ITEMS, "timestamp": TIMES} | changes


@pytest.mark.parametrize(
    "source",
    [
        (np.array(USERS), np.array(ITEMS), np.array(TIMES)),
        (np.array(USERS, dtype=object), ITEMS, TIMES),
        list(zip(USERS, ITEMS, TIMES, strict=True)),
        iter(list(zip(USERS, ITEMS, TIMES, strict=True))),
        tuple(zip(USERS, ITEMS, TIMES, strict=True)),
        [list(row) for row in zip(USERS, ITEMS, TIMES, strict=True)],
        [Click(*row) for row in zip(USERS, ITEMS, TIMES, strict=True)],
        [
            {"movieId": item, "userId": user, "timestamp": when}
            for user, item, when in zip(USERS, ITEMS, TIMES, strict=True)
        ],
    ],
    ids=["arrays", "lists", "rows", "generator", "tuple of rows", "lists", "named", "mappings"],
)
def test_arrays_and_rows_are_ordered_by_time(source: Any) -> None:
    dataset = load_interactions(source)
    assert histories(dataset) == EXPECTED
    assert list(dataset.user_ids) == ["ann", "bob"]  # in the order of their first rows
    assert list(dataset.item_ids) == ["x", "y", "z"]
    assert dataset.titles == {}


@FRAMES
def test_frames_are_read_by_their_columns(make: Callable[[dict[str, Any]], Any]) -> None:
    assert histories(load_interactions(make(columns(other=[None] * 5)))) == EXPECTED
    named = make({"who": USERS, "what": ITEMS, "when": TIMES})
    assert histories(load_interactions(named, user="who", item="what", timestamp="when")) == (
        EXPECTED
    )
    message = error(named, item="what")
    assert 'has no column "user" (found: who, what, when)' in message
    assert 'user="…"' in message
    assert "nowhere" in error(make(columns()), timestamp="nowhere")


@FRAMES
@pytest.mark.parametrize(
    "times",
    [
        [datetime(2020, 1, int(when), tzinfo=UTC) for when in TIMES],
        [datetime(2020, 1, int(when)) for when in TIMES],  # noqa: DTZ001 - a case to read
        [date(2020, 1, int(when)) for when in TIMES],
        [f"2020-01-0{int(when)}T00:00:00Z" for when in TIMES],
        [int(when) * 10**18 for when in TIMES],
    ],
    ids=["aware", "naive", "dates", "text", "large integers"],
)
def test_times_of_every_kind(make: Callable[[dict[str, Any]], Any], times: list[Any]) -> None:
    assert histories(load_interactions(make(columns(timestamp=times)))) == EXPECTED


@FRAMES
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"user": ["a", None, "b", "a", "b"]}, "row index 1: the user is missing"),
        ({"item": ["a", "b", "c", "", "e"]}, "row index 3: the item is empty"),
        ({"item": [1.0, 2.0, float("nan"), 3.0, 4.0]}, "row index 2: the item is missing"),
        ({"item": [1.0, 2.5, 2.0, 3.0, 4.0]}, "row index 1: the item is neither"),
        ({"user": [True, False, True, True, True]}, "row index 0: the user is neither"),
        ({"timestamp": [1.0, 2.0, 3.0, 4.0, float("nan")]}, "row index 4: timestamp is missing"),
        ({"timestamp": [1.0, float("inf"), 3.0, 4.0, 5.0]}, "row index 1: timestamp is missing or"),
        ({"timestamp": [date(2020, 1, 1), None, None, None, None]}, "row index 1: timestamp is"),
        ({"timestamp": ["1", "2", "soon", "4", "5"]}, "row index 2: timestamp: the timestamp is n"),
        ({"rating": ["1", "2", "3", "good", "5"]}, "row index 3: rating: the rating is not a num"),
        ({name: [] for name in ("user", "item", "timestamp")}, "the data has no interactions"),
        ({"user": ["ann"] * 5}, "the data has only one user, 'ann'"),
    ],
)  # fmt: skip
def test_bad_values_are_named_by_their_row(
    make: Callable[[dict[str, Any]], Any], changes: dict[str, Any], message: str
) -> None:
    assert error(make(columns(**changes))).startswith(message)


@pytest.mark.parametrize(
    "values",
    [
        [7, 7, 12],
        np.array([7, 7, 12], np.uint8),
        np.array([7.0, 7.0, 12.0]),
        ["7", 7, 12.0],
        np.array([7, "7", b"12"], dtype=object),
    ],
    ids=["ints", "uint8", "floats", "mixed", "objects"],
)
def test_whole_numbers_are_ids_by_their_digits(values: Any) -> None:
    dataset = load_interactions((values, ["b", "a", "a"]))
    assert histories(dataset) == {"7": ["b", "a"], "12": ["a"]}


def test_without_times_the_rows_are_in_order_and_a_position_replaces_a_time() -> None:
    assert histories(load_interactions((USERS, ITEMS))) == {
        "ann": ["x", "y", "z"], "bob": ["y", "x"]
    }  # fmt: skip
    positions = {"user": USERS, "item": ITEMS, "position": [3, 1, 2, 2, 1]}
    assert histories(load_interactions(positions)) == EXPECTED
    positions["latest"] = [0, 1, 0, 0, None]
    assert histories(load_interactions(positions))["ann"] == ["z", "x", "y"]


def test_an_array_of_two_or_three_columns() -> None:
    array = np.array([[1, 5, 9], [2, 5, 1], [1, 6, 3]])
    assert histories(load_interactions(array)) == {"1": ["6", "5"], "2": ["5"]}
    assert histories(load_interactions(array[:, :2])) == {"1": ["5", "6"], "2": ["5"]}
    assert error(array[:, :1]).startswith("the source has 1 arrays, but needs")


@pytest.mark.parametrize(
    "source, message",
    [
        ([], "the data has no interactions"),
        ({}, 'the dict has no column "user" (found: none)'),
        (iter(()), "the data has no interactions"),
        (([], []), "the data has no interactions"),
        ([("ann", "x")], "the data has only one user"),
        (([1, 2], [1, 2, 3]), "the columns differ in length: user 2, item 3"),
        ({"user": [1], "item": [1, 2]}, "the columns differ in length: user 1, item 2"),
        (([1, 2], [1, 2], [1, 2], [1, 2]), "the source has 4 arrays"),
        ([("a", "b"), ("c",)], "row index 1 has 1 values; rows must be"),
        ([("a", "b", 1, 2)], "row index 0 has 4 values; rows must be"),
        ([("a", "b"), {"user": "c"}], "row index 1 is of type dict"),
        ([{"user": "a", "item": "b"}, ("c", "d")], "row index 1 is of type tuple"),
        ([{"user": "a", "item": "b"}, {"item": "b"}], "row index 1: the user is missing"),
        ([("a", "b", 1.0), ("b", "b", None)], "row index 1: timestamp is missing"),
        (["ab", "cd"], "row index 0 is of type str"),
        (("ann", "x"), "row index 0 is of type str"),
        (b"ab", "interactions come from a path, arrays, a data frame or rows, not from bytes"),
        (7, "interactions come from a path, arrays, a data frame or rows, not from int"),
    ],
)
def test_sources_that_cannot_be_read(source: Any, message: str) -> None:
    assert error(source).startswith(message)


# Files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = zip(USERS, ITEMS, TIMES, strict=True)
    lines = [f"{user},{item},{when}\n" for user, item, when in rows]
    put(tmp_path / "ratings.csv", "user,item,timestamp\n" + "".join(lines))
    put(tmp_path / "items.csv", "item,title,genres\nx,First,Drama|Comedy\ny,,\nnew,Third,\n")
    return tmp_path


def test_a_path_is_read_as_ncr_import_reads_it(folder: Path) -> None:
    for source in (folder, str(folder), folder / "ratings.csv", open_source(folder)):
        dataset = load_interactions(source)
        assert histories(dataset) == EXPECTED
        assert dataset.titles == {"x": "First", "new": "Third"}
        assert dataset.categories == {"x": ("Drama", "Comedy")}
    assert "does not exist" in error(folder / "none.csv")
    assert 'has no column "who" (found: user, item, timestamp)' in error(
        folder / "ratings.csv", user="who"
    )


def test_bad_rows_of_a_file_are_left_out_with_a_warning(folder: Path) -> None:
    with (folder / "ratings.csv").open("a") as file:
        file.write(",x,1\n")
    with pytest.warns(UserWarning, match=r"^1 bad rows of .* left out; .*ratings\.csv line 7"):
        assert histories(load_interactions(folder)) == EXPECTED
    path = put(folder / "other.csv", "user,item\n,x\n")
    assert error(path).endswith("the first bad row is other.csv line 2: the user is empty")


def test_a_data_set_is_returned_as_it_is() -> None:
    dataset = load_interactions((USERS, ITEMS))
    assert load_interactions(dataset) is dataset
    assert load_interactions(dataset.interactions).interactions is dataset.interactions
    one = Interactions.from_arrays(
        np.zeros(1, np.int64), np.zeros(1, np.int64), user_ids=["a"], item_ids=["b"]
    )
    assert "only one user" in error(one)


def test_times_are_seconds_where_every_row_has_one(tmp_path: Path) -> None:
    def times_of(source: InteractionSource) -> list[float] | None:
        times = load_interactions(source).interactions.times
        return None if times is None else times.tolist()

    days = np.array(["1970-01-02", "1970-01-01", "1970-01-03"], dtype="datetime64[D]")
    users, items = ["ann", "ann", "bob"], ["x", "y", "x"]
    assert times_of((users, items, days)) == [0.0, 86400.0, 172800.0]
    assert times_of((users, items, [3.0, 1.0, 5.0])) == [1.0, 3.0, 5.0]
    assert times_of((users, items)) is None
    timed = put(tmp_path / "timed.csv", "user,item,timestamp\nann,x,30\nann,y,10\nbob,x,50\n")
    assert times_of(timed) == [10.0, 30.0, 50.0]
    placed = put(tmp_path / "placed.csv", "user,item,position\nann,x,2\nann,y,1\nbob,x,1\n")
    assert times_of(placed) is None
    some = put(tmp_path / "some.csv", "user,item,timestamp\nann,x,30\nann,y,\nbob,x,50\n")
    assert times_of(some) is None
