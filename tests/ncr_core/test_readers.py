"""The readers: each format, and what happens to rows and files that are not as they should be."""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncr_core.data import readers
from ncr_core.data.readers import (
    LATEST_OFFSET,
    BadRow,
    Columns,
    InteractionRow,
    ItemRow,
    Source,
    open_source,
)
from ncr_core.errors import DataError


def put(path: Path, content: str | bytes) -> Path:
    """Write a file, compressed if its name says so."""
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def put_parquet(path: Path, columns: dict[str, Any]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def read(source: Source, chunk_size: int = 10_000) -> tuple[list[InteractionRow], list[BadRow]]:
    bad: list[BadRow] = []
    chunks = list(source.interactions(on_bad=bad.append, chunk_size=chunk_size))
    assert all(0 < len(chunk) <= chunk_size for chunk in chunks)
    return [row for chunk in chunks for row in chunk], bad


def read_items(source: Source) -> tuple[list[ItemRow], list[BadRow]]:
    bad: list[BadRow] = []
    return list(source.items(on_bad=bad.append)), bad


def rows_of(path: Path, **columns: str) -> list[InteractionRow]:
    rows, bad = read(open_source(path, columns=Columns(**columns)))
    assert bad == []
    return rows


def one_line_error(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_source(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def row(
    user: str,
    item: str,
    value: float | None = None,
    timestamp: float | None = None,
    position: int | None = None,
) -> InteractionRow:
    return InteractionRow(user, item, value, timestamp, position)


# MovieLens


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


@pytest.mark.parametrize(
    "cells, reason",
    [
        (",i,1,1,1", "the user is empty"),
        ("u,,1,1,1", "the item is empty"),
        (f"{'u' * 257},i,1,1,1", "the user is longer than 256 bytes"),
        (f"u,{'é' * 129},1,1,1", "the item is longer than 256 bytes"),
        ("u\0,i,1,1,1", "the user has a NUL"),
        ("u,i,nan,1,1", "the rating is not finite"),
        ("u,i,inf,1,1", "the rating is not finite"),
        ("u,i,good,1,1", "the rating is not a number: 'good'"),
        ("u,i,1_0,1,1", "the rating is not a number"),
        ("u,i,1,nan,1", "the timestamp is outside"),
        ("u,i,1,1700000000000,1", "the timestamp is outside"),
        ("u,i,1,-1,1", "the timestamp is outside"),
        ("u,i,1,32503680000,1", "the timestamp is outside"),
        ("u,i,1,yesterday,1", "the timestamp is neither"),
        ("u,i,1,1,-1", "the position is not a whole"),
        ("u,i,1,1,1.5", "the position is not a whole"),
        ("u,i,1,1,1000000000", "the position is not a whole"),
        ("u,i,1,1", "4 fields instead of 5"),
        ("u,i,1,1,1,1", "6 fields instead of 5"),
        ("u,i,1\r,1,1", "the line has a carriage return"),
        ('u,"i,1,1,1', "the quotes do not pair up"),
        ('"u"x,i,1,1,1', "the quotes do not pair up"),
    ],
)
def test_bad_rows_are_told_and_the_others_kept(tmp_path: Path, cells: str, reason: str) -> None:
    path = put(
        tmp_path / "a.csv",
        f"user,item,rating,timestamp,position\na,b,1,2,3\n{cells}\n\nc,d,4,5,6\n",
    )
    rows, bad = read(open_source(path))
    assert rows == [row("a", "b", 1.0, 2.0, 3), row("c", "d", 4.0, 5.0, 6)]
    assert [(one.file, one.line) for one in bad] == [("a.csv", 3)]
    assert bad[0].reason.startswith(reason)
    assert "\n" not in bad[0].reason


def test_a_latest_that_says_nothing_known(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", "user,item,latest\nu,i,2\nu,j,1\n")
    rows, bad = read(open_source(path))
    assert rows == [row("u", "j", position=LATEST_OFFSET)]
    assert bad == [BadRow("a.csv", 2, "latest is neither 0 nor 1: '2'")]


def test_ids_are_kept_verbatim(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", f"user,item\n u ,007\n{'é' * 128},İ\n")
    assert rows_of(path) == [row(" u ", "007"), row("é" * 128, "İ")]


# CSV


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_csv_dialects(tmp_path: Path, delimiter: str, end: str, bom: str) -> None:
    lines = [["extra", "user", "item", "rating"], ["x", "u1", "i1", "3"], ["y", "u2", "i2", "4"]]
    path = put(tmp_path / "a.csv", bom + end.join(delimiter.join(line) for line in lines))
    assert rows_of(path) == [row("u1", "i1", 3.0), row("u2", "i2", 4.0)]


def test_other_column_names(tmp_path: Path) -> None:
    text = "who,what,stars,when,extra\nu,i,2,3,x\n"
    path = put(tmp_path / "log.csv", text)
    names = {"user": "who", "item": "what", "rating": "stars", "timestamp": "when"}
    assert rows_of(path, **names) == [row("u", "i", 2.0, 3.0)]
    message = one_line_error(path)
    assert "log.csv" in message
    assert "who, what, stars, when, extra" in message
    assert "columns option" in message
    assert '"points"' in one_line_error(path, columns=Columns("who", "what", "points"))


def test_quotes_over_lines_and_line_numbers(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", 'user,item\n"a\nb","say ""x"""\n,i\nc,d\n')
    rows, bad = read(open_source(path))
    assert rows == [row("a\nb", 'say "x"'), row("c", "d")]
    assert bad == [BadRow("a.csv", 4, "the user is empty")]


def test_a_quote_that_never_closes_costs_one_row(tmp_path: Path) -> None:
    many = "".join(f"u{n},i{n}\n" for n in range(60_000))  # over one block, beyond what is read on
    path = put(tmp_path / "a.csv", f'user,item\n"u,i\n{many}')
    rows, bad = read(open_source(path))
    assert len(rows) == 60_000
    assert rows[-1] == row("u59999", "i59999")
    assert [one.line for one in bad] == [2]


def test_lines_that_are_not_utf8(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", b'user,item\na,b\nc\xe9,d\n"e\n\xff",f\ng,h\n')
    rows, bad = read(open_source(path))
    assert rows == [row("a", "b"), row("g", "h")]
    assert [one.line for one in bad][:2] == [3, 4]
    assert "not UTF-8 (byte 2" in bad[0].reason
    assert "UTF-8" in one_line_error(put(tmp_path / "b.csv", "user,item\n".encode("utf-16")))


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_line_too_long(tmp_path: Path, name: str) -> None:
    huge = b"x" * (3 << 20)
    text = b"user,item\na,b\n" + huge + b",i\nc,d\n" + huge[: 1 << 20] + b"y,i\ne,f\n" + huge
    rows, bad = read(open_source(put(tmp_path / name, text)))
    assert rows == [row("a", "b"), row("c", "d"), row("e", "f")]
    assert [one.line for one in bad] == [3, 5, 7]
    assert all("longer than" in one.reason for one in bad)


def test_a_cut_off_gzip_file(tmp_path: Path) -> None:
    text = "user,item\n" + "".join(f"{n * 7919 % 10007},{n}\n" for n in range(50_000))
    whole = gzip.compress(text.encode())
    path = tmp_path / "a.csv.gz"
    path.write_bytes(whole[: len(whole) // 2])
    rows, bad = read(open_source(path))
    assert 10_000 < len(rows) < 40_000
    assert all(one == row(str(n * 7919 % 10007), str(n)) for n, one in enumerate(rows))
    assert bad[0].line == len(rows) + 2  # the header, and the row that was cut
    assert "cut short or damaged" in bad[0].reason
    path.write_bytes(whole[:-8] + b"\0" * 8)  # the checksum at the end
    rows, bad = read(open_source(path))
    assert len(rows) == 50_000
    assert len(bad) == 1


def test_gzip_without_the_ending_and_the_ending_without_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(gzip.compress(b"user,item\nu,i\n"))
    assert rows_of(path) == [row("u", "i")]
    path = tmp_path / "b.csv.gz"
    path.write_bytes(b"user,item\nu,i\n")
    assert "damaged" in one_line_error(path)


def test_progress_adds_up_to_the_size_on_disk(tmp_path: Path) -> None:
    text = "user,item\n" + "".join(f"{n},{n}\n" for n in range(30_000))
    put(tmp_path / "a.csv", text)
    put(tmp_path / "b.csv.gz", text)
    put_parquet(tmp_path / "c.parquet", {"user": list(range(30_000)), "item": ["i"] * 30_000})
    source = open_source(tmp_path)
    assert source.format == "csv+parquet"
    steps: list[int] = []
    rows = sum(
        len(chunk) for chunk in source.interactions(on_bad=lambda _: None, on_bytes=steps.append)
    )
    assert rows == 90_000
    assert sum(steps) == source.total_bytes
    assert len(steps) > 4
    assert min(steps) > 0


def test_chunks(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", "user,item\n" + "u,i\n" * 25)
    source = open_source(path)
    sizes = [len(chunk) for chunk in source.interactions(on_bad=lambda _: None, chunk_size=10)]
    assert sizes == [10, 10, 5]
    assert len(read(source)[0]) == 25  # a source can be read again


# JSON Lines


def test_jsonl(tmp_path: Path) -> None:
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


def test_parquet(tmp_path: Path) -> None:
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


def test_parquet_dates_and_names(tmp_path: Path) -> None:
    days = [datetime(2020, 1, 2, tzinfo=UTC).date()]
    path = put_parquet(tmp_path / "a.parquet", {"who": [b"u"], "what": [4.0], "day": days})
    expected = datetime(2020, 1, 2, tzinfo=UTC).timestamp()
    assert rows_of(path, user="who", item="what", timestamp="day") == [
        row("u", "4", timestamp=expected)
    ]
    assert "who, what, day" in one_line_error(path)


def test_a_parquet_file_that_is_none_or_damaged(tmp_path: Path) -> None:
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


def test_folders_with_nothing_to_read(tmp_path: Path) -> None:
    assert "looked for" in one_line_error(tmp_path)
    put(tmp_path / "test.csv.gz", "user,item\na,b\n")
    put(tmp_path / "negatives.csv.gz", "user,item\na,b\n")
    assert "looked for" in one_line_error(tmp_path)
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


def test_pyarrow_is_loaded_only_when_it_is_needed() -> None:
    for module in Path(readers.__file__).parent.glob("*.py"):
        for statement in ast.parse(module.read_text()).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                assert "pyarrow" not in ast.unparse(statement), module.name
