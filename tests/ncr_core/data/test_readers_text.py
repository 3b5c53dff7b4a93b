"""Rows that cannot be read, dialects, damaged files, progress."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ncr_core.data.readers import (
    LATEST_OFFSET,
    BadRow,
    Columns,
    open_source,
)
from tests.ncr_core.data.conftest import one_line_error, put, put_parquet, read, row, rows_of


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
def test_bad_rows_are_reported_with_line_and_reason_and_the_others_read(
    tmp_path: Path, cells: str, reason: str
) -> None:
    path = put(
        tmp_path / "a.csv",
        f"user,item,rating,timestamp,position\na,b,1,2,3\n{cells}\n\nc,d,4,5,6\n",
    )
    rows, bad = read(open_source(path))
    assert rows == [row("a", "b", 1.0, 2.0, 3), row("c", "d", 4.0, 5.0, 6)]
    assert [(one.file, one.line) for one in bad] == [("a.csv", 3)]
    assert bad[0].reason.startswith(reason)
    assert "\n" not in bad[0].reason


def test_a_latest_flag_that_is_neither_0_nor_1_is_a_bad_row(tmp_path: Path) -> None:
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


def test_rows_come_in_chunks_of_the_requested_size(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", "user,item\n" + "u,i\n" * 25)
    source = open_source(path)
    sizes = [len(chunk) for chunk in source.interactions(on_bad=lambda _: None, chunk_size=10)]
    assert sizes == [10, 10, 5]
    assert len(read(source)[0]) == 25  # a source can be read again


# JSON Lines


def test_the_types_of_events(tmp_path: Path) -> None:
    """By their own column, in every format; an empty one says nothing."""
    long = "é" * 33
    path = put(
        tmp_path / "a.csv",
        f'user,item,type\na,b,click\na,c,\na,d,"a ""type"", odd"\na,e,{long}\na,f,x\0y\n',
    )
    rows, bad = read(open_source(path))
    assert [(one.item, one.type) for one in rows] == [
        ("b", "click"),
        ("c", None),
        ("d", 'a "type", odd'),
    ]
    assert [one.line for one in bad] == [5, 6]
    assert bad[0].reason.startswith("the type is not 1 to 64 bytes of UTF-8")
    path = put(
        tmp_path / "b.jsonl",
        '{"user": "a", "item": "b", "type": "buy"}\n{"user": "a", "item": "c", "type": null}\n'
        '{"user": "a", "item": "d"}\n{"user": "a", "item": "e", "type": 7}\n'
        '{"user": "a", "item": "f", "type": "\\ud800"}\n',
    )
    rows, bad = read(open_source(path))
    assert [(one.item, one.type) for one in rows] == [("b", "buy"), ("c", None), ("d", None)]
    assert [one.line for one in bad] == [4, 5]
    path = put_parquet(
        tmp_path / "c.parquet", {"user": ["a", "a"], "item": ["b", "c"], "type": ["buy", None]}
    )
    rows, bad = read(open_source(path))
    assert ([(one.item, one.type) for one in rows], bad) == ([("b", "buy"), ("c", None)], [])
