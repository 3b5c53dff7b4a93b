"""MovieLens files, and what rows can hold."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ncr_core.data.readers import (
    LATEST_OFFSET,
    BadRow,
    ItemRow,
    open_source,
)
from tests.ncr_core.reading import one_line_error, put, read, read_items, row, rows_of


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


def test_a_dat_file_that_is_none(tmp_path: Path) -> None:
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
