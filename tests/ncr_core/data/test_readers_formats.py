"""JSON Lines, Parquet, folders, descriptions of items."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncr_core.data.readers import (
    LATEST_OFFSET,
    BadRow,
    ItemRow,
    open_source,
)
from tests.ncr_core.data.conftest import (
    one_line_error,
    put,
    put_parquet,
    read,
    read_items,
    row,
    rows_of,
)


def test_jsonl_values_are_typed_and_bad_lines_numbered(tmp_path: Path) -> None:
    lines = [
        '{"user": "u", "item": 5, "rating": 3, "timestamp": 1.5, "position": 2, "x": [1]}',
        "",
        '{"item": 5.0, "user": 7, "rating": null, "latest": true}\r',
        '{"user": "", "item": "i"}',
        '{"user": true, "item": "i"}',
        '{"user": 1.5, "item": "i"}',
        '{"user": null, "item": "i"}',
        '{"item": "i"}',
        '{"user": "\\ud800", "item": "i"}',
        '{"user": "a\\u0000", "item": "i"}',
        '{"user": "u", "item": "i", "rating": NaN}',
        '{"user": "u", "item": "i", "rating": true}',
        '{"user": "u", "item": "i", "timestamp": [1]}',
        '{"user": "u", "item": "i", "rating": 1' + "0" * 400 + "}",
        '{"user": "u", "item": "i", "rating": 1' + "0" * 5000 + "}",
        "[1, 2]",
        "[" * 100_000,
        "{user: 1}",
        '{"user": "last", "item": "i"}',
    ]
    path = put(tmp_path / "a.jsonl.gz", "\n".join(lines))
    rows, bad = read(open_source(path))
    assert rows == [
        row("u", "5", 3.0, 1.5, 2),
        row("7", "5", position=LATEST_OFFSET),
        row("last", "i"),
    ]
    assert [one.line for one in bad] == list(range(4, 19))
    assert "not JSON" in bad[-1].reason


def test_jsonl_without_its_columns(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", '{"who": 1, "what": 2}\n')
    assert "who, what" in one_line_error(path)
    assert rows_of(path, user="who", item="what") == [row("1", "2")]
    assert "not JSON Lines" in one_line_error(put(tmp_path / "b.jsonl", "hello\n"))


# Parquet


def test_parquet_values_are_typed_and_bad_rows_numbered(tmp_path: Path) -> None:
    import pyarrow as pa

    when = datetime(2020, 1, 1, 0, 0, 0, 500_000)  # noqa: DTZ001 - naive is the case to try
    path = put_parquet(
        tmp_path / "a.parquet",
        {
            "user": pa.array([1, 2, None]),
            "item": pa.array(["x", "y", "z"]).dictionary_encode(),
            "rating": pa.array([1.0, float("nan"), 3.0]),
            "timestamp": pa.array([when, None, when], pa.timestamp("ns")),
            "position": pa.array([3, 4, 5], pa.int8()),
        },
    )
    rows, bad = read(open_source(path))
    seconds = when.replace(tzinfo=UTC).timestamp()
    assert rows == [row("1", "x", 1.0, seconds, 3)]
    assert bad == [
        BadRow("a.parquet", 2, "the rating is not finite: nan"),
        BadRow("a.parquet", 3, "the user is missing"),
    ]


ODD_TEXT = st.none() | st.sampled_from(
    ["", "a", "é😀", "a\0b", "x" * 64, "x" * 65, "é" * 128, "é" * 129, " ", "1e5", "\ufeff", "a\nb"]
)
ODD_FLOAT = st.none() | st.floats() | st.sampled_from([0.5, -0.0, 3.0, 2.0**53, 1.6e9, 4e10])
ODD_INT = st.none() | st.sampled_from([0, 1, -1, 2**53 + 1, 2**63 - 1, -(2**63), 1_600_000_000])
ODD_TICKS = st.none() | st.sampled_from([0, -1, 1_600_000_000_123_456_789, 1_600_000_000_000_001])
ODD_COLUMN = st.one_of(
    st.tuples(st.sampled_from(["string", "large_string", "dictionary"]), st.lists(ODD_TEXT)),
    st.tuples(st.sampled_from(["float64", "float32"]), st.lists(ODD_FLOAT)),
    st.tuples(st.just("int64"), st.lists(ODD_INT)),
    st.tuples(st.just("uint64"), st.lists(st.none() | st.sampled_from([0, 2**64 - 1]))),
    st.tuples(st.sampled_from(["timestamp[ns]", "timestamp[us]"]), st.lists(ODD_TICKS)),
    st.tuples(st.just("duration[s]"), st.lists(st.none() | st.just(5))),
    st.tuples(st.just("date32"), st.lists(st.none() | st.integers(-5, 500_000))),
    st.tuples(st.just("bool_"), st.lists(st.none() | st.booleans())),
    st.tuples(st.just("binary"), st.lists(st.none() | st.sampled_from([b"", b"a", b"\xff"]))),
    st.tuples(st.just("not UTF-8"), st.lists(st.sampled_from([b"a", b"\xff"]))),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_odd_parquet_columns_have_the_same_verdicts_by_rows_and_by_columns(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    import pyarrow as pa

    def column(drawn: tuple[str, list[Any]], usual: list[Any]) -> pa.Array:
        kind, values = drawn
        size = len(usual)
        if not values:
            return pa.array(usual)
        values = (values * size)[:size]
        if kind == "dictionary":
            return pa.array(values, pa.string()).dictionary_encode()
        if kind == "not UTF-8":
            return pa.array(values, pa.binary()).view(pa.string())
        unit = kind.partition("[")[2].rstrip("]")
        kinds = {"timestamp": pa.timestamp, "duration": pa.duration}
        make = kinds.get(kind.partition("[")[0])
        return pa.array(values, make(unit) if make else getattr(pa, kind)())

    names = ("user", "item", "rating", "timestamp", "type")
    usual = (["u", "v", "w"], ["1", "2", "3"], [1.0, None, 2.5], [1, 2, 3], ["a", None, "b"])
    odd = data.draw(st.sets(st.sampled_from(names), max_size=2))
    columns = {
        name: column(data.draw(ODD_COLUMN), cells) if name in odd else pa.array(cells)
        for name, cells in zip(names, usual, strict=True)
    }
    read(open_source(put_parquet(tmp_path_factory.mktemp("odd") / "a.parquet", columns)))


def test_parquet_dates_and_names(tmp_path: Path) -> None:
    days = [datetime(2020, 1, 2, tzinfo=UTC).date()]
    path = put_parquet(tmp_path / "a.parquet", {"who": [b"u"], "what": [4.0], "day": days})
    expected = datetime(2020, 1, 2, tzinfo=UTC).timestamp()
    assert rows_of(path, user="who", item="what", timestamp="day") == [
        row("u", "4", timestamp=expected)
    ]
    assert "who, what, day" in one_line_error(path)


def test_a_parquet_file_of_another_format_or_damaged_is_reported(tmp_path: Path) -> None:
    assert "not a Parquet file" in one_line_error(put(tmp_path / "a.parquet", "user,item\n"))
    path = put_parquet(
        tmp_path / "b.parquet", {"user": [str(n * n) for n in range(5000)], "item": ["i"] * 5000}
    )
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396
    path.write_bytes(data)
    rows, bad = read(open_source(path))
    assert rows == []
    assert len(bad) == 1
    assert "damaged" in bad[0].reason


# Folders, formats, items


def test_a_folder_of_tables(tmp_path: Path) -> None:
    put(tmp_path / "2020.csv", "user,item\na,b\n")
    put(tmp_path / "2021.jsonl", '{"user": "c", "item": "d"}\n')
    put(tmp_path / "people.csv", "user,age\na,3\n")
    put(tmp_path / "test.csv.gz", "user,item\nno,no\n")
    put(tmp_path / "negatives.csv", "user,item\nno,no\n")
    put(tmp_path / "README.md", "user,item\n")
    source = open_source(tmp_path)
    assert read(source)[0] == [row("a", "b"), row("c", "d")]
    assert (source.format, source.name) == ("csv+jsonl", tmp_path.name)
    assert read(open_source(tmp_path, "jsonl"))[0] == [row("c", "d")]


def test_a_split_is_read_by_its_training_part(tmp_path: Path) -> None:
    for name, user in [("train", "a"), ("test", "b"), ("negatives", "c"), ("ratings", "d")]:
        put(tmp_path / f"{name}.csv.gz", f"user,item\n{user},i\n")
    assert rows_of(tmp_path) == [row("a", "i")]
    assert rows_of(tmp_path / "test.csv.gz") == [row("b", "i")]


def test_a_folder_with_nothing_to_read_names_what_was_looked_for(tmp_path: Path) -> None:
    assert "expected" in one_line_error(tmp_path)
    put(tmp_path / "test.csv.gz", "user,item\na,b\n")
    put(tmp_path / "negatives.csv.gz", "user,item\na,b\n")
    assert "expected" in one_line_error(tmp_path)
    put(tmp_path / "log.csv", "who,what\na,b\n")
    assert "who, what" in one_line_error(tmp_path)


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    assert "does not exist" in one_line_error(tmp_path / "none.csv")
    for name in ["a.csv", "a.csv.gz", "a.jsonl", "a.parquet", "ratings.dat", "u.data", "noname"]:
        assert one_line_error(put(tmp_path / name, "")) == f"{name} is empty"


def test_files_without_a_telling_name(tmp_path: Path) -> None:
    assert rows_of(put(tmp_path / "a", "user;item\nu;i\n")) == [row("u", "i")]
    assert rows_of(put(tmp_path / "b", '{"user": "u", "item": "i"}\n')) == [row("u", "i")]
    assert rows_of(put(tmp_path / "c", "1::2::3::4\n")) == [row("1", "2", 3.0, 4.0)]
    assert rows_of(put_parquet(tmp_path / "d", {"user": ["u"], "item": ["i"]})) == [row("u", "i")]
    text = put(tmp_path / "e.txt", "user,item\nu,i\n")
    assert read(open_source(text, "csv"))[0] == [row("u", "i")]


def test_generic_items(tmp_path: Path) -> None:
    put(tmp_path / "events.csv", "user,item\nu,i\n")
    expected = ItemRow("i", "Title, with comma", ("a", "b"), {"year": "1999"})
    path = put(
        tmp_path / "items.csv",
        'item,title,categories,year,blank\ni,"Title, with comma",a|b| a,1999,\n,t,,,\nj,,,,\nk\n',
    )
    source = open_source(tmp_path)
    items, bad = read_items(source)
    assert items == [expected, ItemRow("j")]
    assert [one.line for one in bad] == [3, 5]
    assert read(source)[0] == [row("u", "i")]
    assert read_items(open_source(path))[0] == items  # named itself
    assert read(open_source(path))[0] == []


def test_items_in_json_lines_and_parquet(tmp_path: Path) -> None:
    put(tmp_path / "events.jsonl", '{"user": "u", "item": "i"}\n')
    lines = [
        {"item": 1, "title": "A", "categories": ["x", "y"], "more": {"a": [1, None]}},
        {"item": 2, "title": 3},
        {"item": 3, "categories": 4},
        {"item": 4, "more": "\ud800"},
        {"item": 5, "more": float("nan")},
        {"item": 6, "categories": [7]},
        {"title": "no id"},
    ]
    path = put(tmp_path / "items.jsonl", "\n".join(json.dumps(line) for line in lines))
    items, bad = read_items(open_source(tmp_path))
    assert items == [ItemRow("1", "A", ("x", "y"), {"more": {"a": [1, None]}})]
    assert [one.line for one in bad] == [2, 3, 4, 5, 6, 7]
    path.unlink()
    put_parquet(tmp_path / "items.parquet", {"item": ["1"], "genres": [["x"]], "year": [1999]})
    assert read_items(open_source(tmp_path))[0] == [ItemRow("1", None, ("x",), {"year": 1999})]


IDS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=64
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_any_ids_come_back(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], end: str
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    text = io.StringIO()
    csv.writer(text, lineterminator=end, quoting=csv.QUOTE_ALL).writerows(
        [("user", "item"), *pairs]
    )
    lines = [json.dumps({"user": user, "item": item}, ensure_ascii=False) for user, item in pairs]
    expected = [row(user, item) for user, item in pairs]
    assert rows_of(put(folder / "a.csv", text.getvalue())) == expected
    assert rows_of(put(folder / "a.jsonl", end.join(lines))) == expected


@pytest.mark.slow
def test_pyarrow_is_loaded_only_when_it_is_needed() -> None:
    program = "import sys, app.main, ncr_core.data.readers; sys.exit('pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("gz", ["", ".gz"])
def test_movielens_dat(tmp_path: Path, gz: str) -> None:
    put(tmp_path / f"ratings.dat{gz}", "1::1193::5::978300760\n2::661::3.5::978302109\n")
    put(
        tmp_path / f"movies.dat{gz}",
        "1193::Misérables, Les (1995)::Drama|Musical\n661::A::B (1996)::Comedy\n".encode("latin-1"),
    )
    put(tmp_path / "users.dat", "1::F::1::10::48067\n")
    source = open_source(tmp_path)
    assert source.format == "movielens"
    rows, bad = read(source)
    assert rows == [row("1", "1193", 5.0, 978300760.0), row("2", "661", 3.5, 978302109.0)]
    items, bad_items = read_items(source)
    assert items == [
        ItemRow("1193", "Misérables, Les (1995)", ("Drama", "Musical")),
        ItemRow("661", "A::B (1996)", ("Comedy",)),
    ]
    assert bad == bad_items == []


def test_movielens_dat_named_itself_finds_the_titles_beside_it(tmp_path: Path) -> None:
    put(tmp_path / "movies.dat", "1::Amélie (2001)::(no genres listed)\n")  # UTF-8, as in 10M
    ratings = put(tmp_path / "ratings.dat", "7::1::5::1\r\n8::1::4::2\r\n")
    source = open_source(ratings)
    assert read(source)[0] == [row("7", "1", 5.0, 1.0), row("8", "1", 4.0, 2.0)]
    assert read_items(source)[0] == [ItemRow("1", "Amélie (2001)")]


def u_item(number: int, title: str, *genres: int) -> str:
    flags = "|".join("1" if at in genres else "0" for at in range(19))
    return f"{number}|{title}|01-Jan-1995||http://us.imdb.com/{number}|{flags}\n"


def test_movielens_100k(tmp_path: Path) -> None:
    put(tmp_path / "u.data", "196\t242\t3\t881250949\n186\t302\t3\t891717742\n")
    put(tmp_path / "u.item", u_item(242, "Kolya é (1996)", 5, 18).encode("latin-1"))
    put(tmp_path / "u1.base", "1\t1\t5\t874965758\n")
    source = open_source(tmp_path)
    assert [path.name for path in source.interaction_files] == ["u.data"]
    assert read(source)[0][0] == row("196", "242", 3.0, 881250949.0)
    (item,) = read_items(source)[0]
    assert item.title == "Kolya é (1996)"
    assert item.categories == ("Comedy", "Western")
    assert item.attributes == {
        "release_date": "01-Jan-1995",
        "imdb_url": "http://us.imdb.com/242",
    }
    assert rows_of(tmp_path / "u1.base") == [row("1", "1", 5.0, 874965758.0)]


def test_movielens_100k_takes_the_genres_from_their_file(tmp_path: Path) -> None:
    put(tmp_path / "u.data", "1\t2\t3\t4\n")
    put(tmp_path / "u.item", "2|Two|||x|0|1\n3|Three|||x|0\n")
    put(tmp_path / "u.genre", "unknown|0\nAnime|1\n\n")
    items, bad = read_items(open_source(tmp_path))
    assert [(item.item, item.categories) for item in items] == [("2", ("Anime",))]
    assert bad == [BadRow("u.item", 2, "6 fields instead of 7")]


def test_movielens_csv(tmp_path: Path) -> None:
    put(tmp_path / "ratings.csv", "userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n")
    put(
        tmp_path / "movies.csv",
        'movieId,title,genres\n31,"Dangerous Minds (1995)",Drama\n2,X,(no genres listed)\n',
    )
    put(tmp_path / "tags.csv", "userId,movieId,tag,timestamp\n1,31,nice,1\n")
    source = open_source(tmp_path)
    assert read(source)[0] == [row("1", "31", 2.5, 1260759144.0)]
    assert [item.categories for item in read_items(source)[0]] == [("Drama",), ()]


def test_a_ratings_dat_with_another_layout_is_refused(tmp_path: Path) -> None:
    assert "2 fields" in one_line_error(put(tmp_path / "ratings.dat", "1::2\n"))


# Positions, times, ids


def test_positions_and_the_latest(tmp_path: Path) -> None:
    path = put(
        tmp_path / "ratings.csv.gz",
        "user,item,rating,position,latest\n1,a,4,2,0\n1,b,,1,1\n1,c,5,3.0,\n1,d,5,,true\n",
    )
    assert rows_of(path) == [
        row("1", "a", 4.0, position=2),
        row("1", "b", position=1 + LATEST_OFFSET),
        row("1", "c", 5.0, position=3),
        row("1", "d", 5.0, position=LATEST_OFFSET),
    ]


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("0", 0.0),
        ("32503679999", 32503679999.0),
        ("1.5e9", 1.5e9),
        ("2020-01-02T03:04:05Z", datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()),
        ("2020-01-02 03:04:05", datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()),
        ("2020-01-02T03:04:05+02:00", datetime(2020, 1, 2, 1, 4, 5, tzinfo=UTC).timestamp()),
        ("", None),
    ],
)
def test_timestamps(tmp_path: Path, text: str, seconds: float | None) -> None:
    path = put(tmp_path / "a.csv", f"user,item,timestamp\nu,i,{text}\n")
    assert rows_of(path) == [row("u", "i", timestamp=seconds)]
    path = put(tmp_path / "a.jsonl", json.dumps({"user": "u", "item": "i", "timestamp": text}))
    assert rows_of(path) == [row("u", "i", timestamp=seconds)]
