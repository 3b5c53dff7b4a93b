"""Delimited text: CSV and its relatives, and the separator-only files of the older MovieLens."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, repeat
from pathlib import Path
from typing import TypeVar

from ncr_core.data.readers.columns import Names, interaction_names
from ncr_core.data.readers.lines import MAX_LINE, Block, Line, read_blocks
from ncr_core.data.readers.rows import (
    SURELY_SHORT,
    BadRow,
    Columns,
    InteractionRow,
    Memo,
    OnBad,
    OnBytes,
    RowFault,
    as_latest,
    check_id,
    parse_latest,
    parse_position,
    parse_rating,
    parse_timestamp,
    parse_type,
)
from ncr_core.errors import DataError

DELIMITERS = (",", ";", "\t", "|")

T = TypeVar("T")
Record = tuple[int, list[str]]
"""The line a record starts on, and its fields."""


@dataclass(frozen=True)
class Layout:
    """How a file's lines are cut, and which field is which."""

    delimiter: str
    width: int
    user: int
    item: int
    rating: int | None = None
    timestamp: int | None = None
    position: int | None = None
    latest: int | None = None
    type: int | None = None
    header: bool = True
    quoted: bool = True


@dataclass(frozen=True)
class DelimitedFile:
    """Interactions in delimited text."""

    path: Path
    layout: Layout

    def blocks(self, on_bad: OnBad, on_bytes: OnBytes | None) -> Iterator[list[InteractionRow]]:
        """Yield the rows, some thousand at a time."""
        layout, name = self.layout, self.path.name
        convert = _converter(layout)
        for records in read_records(
            self.path,
            layout.delimiter,
            quoted=layout.quoted,
            header=layout.header,
            on_bad=on_bad,
            on_bytes=on_bytes,
        ):
            rows: list[InteractionRow] = []
            append = rows.append
            for number, fields in records:
                try:
                    append(convert(fields))
                except RowFault as fault:
                    on_bad(BadRow(name, number, str(fault)))
            yield rows


def open_csv(path: Path, columns: Columns) -> DelimitedFile:
    """Find a CSV file's delimiter and columns from its header.

    Raises:
        DataError: it is empty, not text, or lacks a column.
    """

    def names_in(found: list[str]) -> Names:
        return interaction_names(columns, found, path.name)

    delimiter, header, names = read_header(path, names_in)

    def place(name: str | None) -> int | None:
        return None if name is None else header.index(name)

    layout = Layout(
        delimiter=delimiter,
        width=len(header),
        user=header.index(names.user),
        item=header.index(names.item),
        rating=place(names.rating),
        timestamp=place(names.timestamp),
        position=place(names.position),
        latest=place(names.latest),
        type=place(names.type),
    )
    return DelimitedFile(path, layout)


def first_line(path: Path) -> str:
    """The first line of a text file that is not blank.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    for block in read_blocks(path):
        for line in block.numbered():
            if line.fault:
                raise DataError(f"{path.name}, line {line.number}: {line.fault}")
            if line.text.strip():
                return line.text.rstrip("\r")
    raise DataError(f"{path.name} is empty")


def read_header(path: Path, names_in: Callable[[list[str]], T]) -> tuple[str, list[str], T]:
    """Find the delimiter with which a header has the columns wanted.

    Returns:
        the delimiter, the header, and what `names_in` made of it.

    Raises:
        DataError: with none it has; the message is that of the likeliest.
    """
    line = first_line(path)
    headers = [(delimiter, _header_fields(line, delimiter)) for delimiter in DELIMITERS]
    headers.sort(key=lambda one: -len(one[1]))  # stable: a tie goes to the comma
    reasons: list[DataError] = []
    for delimiter, header in headers:
        try:
            return delimiter, header, names_in(header)
        except DataError as error:
            reasons.append(error)
    raise reasons[0]


def read_records(
    path: Path,
    delimiter: str,
    *,
    quoted: bool,
    header: bool,
    on_bad: OnBad,
    on_bytes: OnBytes | None = None,
    latin1: bool = False,
) -> Iterator[Iterator[Record]]:
    """Cut a file into records, block by block; blank lines are none, and the header is left out.

    Each block is cut while it is gone through, so go through it before asking for the next.
    """
    blocks = read_blocks(path, on_bytes=on_bytes, latin1=latin1)
    skip = header
    for block in blocks:
        if block.plain and not skip and "" not in block.lines:
            # Lazily: a list of fields that lives on is one more for the garbage collector to visit.
            fields = map(str.split, block.lines, repeat(delimiter))
            yield zip(count(block.first), fields)
            continue
        records = _careful(path.name, block, blocks, delimiter, quoted, on_bad)
        if skip:
            skip = next(records, None) is None
        yield records


def _header_fields(line: str, delimiter: str) -> list[str]:
    try:
        return [name.strip() for name in next(csv.reader([line], delimiter=delimiter))]
    except csv.Error:
        return []


def _careful(
    file: str, block: Block, blocks: Iterator[Block], delimiter: str, quoted: bool, on_bad: OnBad
) -> Iterator[Record]:
    """The records of a block line by line, taking more blocks where a quoted field goes on."""
    pending = deque(block.numbered())
    while pending:
        line = pending.popleft()
        if line.fault is not None:
            on_bad(BadRow(file, line.number, line.fault))
            continue
        try:
            if quoted and '"' in line.text:
                fields = _quoted(line, pending, blocks, delimiter)
                yield line.number, fields
                continue
            text = line.text.removesuffix("\r")
            if "\r" in text:
                raise RowFault("the line has a carriage return within it")
            if text:
                yield line.number, text.split(delimiter)
        except RowFault as fault:
            on_bad(BadRow(file, line.number, str(fault)))


def _quoted(
    start: Line, pending: deque[Line], blocks: Iterator[Block], delimiter: str
) -> list[str]:
    """The fields of a record with quotes, which may span lines.

    A quote that never closes would swallow the rest of the file: what was read ahead is put back,
    and only the line it stands on is lost.
    """
    ahead: list[Line] = []

    def lines() -> Iterator[str]:
        yield f"{start.text}\n"
        size = len(start.text)
        while size < MAX_LINE:
            if not pending:
                pending.extend(more.numbered() if (more := next(blocks, None)) else ())
                if not pending:
                    return
            ahead.append(pending.popleft())
            if ahead[-1].fault is not None:
                return
            size += len(ahead[-1].text)
            yield f"{ahead[-1].text}\n"

    try:
        return next(csv.reader(lines(), delimiter=delimiter, strict=True))
    except csv.Error as error:
        pending.extendleft(reversed(ahead))
        raise RowFault(f"the quotes do not pair up: {error}") from None


def _converter(layout: Layout) -> Callable[[list[str]], InteractionRow]:
    """A function from fields to a row; a closure, as it runs once a row."""
    width, user_at, item_at = layout.width, layout.user, layout.item
    rating_at, timestamp_at = layout.rating, layout.timestamp
    position_at, latest_at, type_at = layout.position, layout.latest, layout.type
    ratings, positions, latests = Memo(parse_rating), Memo(parse_position), Memo(parse_latest)
    types = Memo(parse_type)
    new = tuple.__new__  # what the class itself calls, less one call

    def convert(fields: list[str]) -> InteractionRow:
        if len(fields) != width:
            raise RowFault(f"{len(fields)} fields instead of {width}")
        user, item = fields[user_at], fields[item_at]
        # Nearly every id is fine at first sight; the full check costs as much as all the rest.
        if not 0 < len(user) <= SURELY_SHORT or "\0" in user:
            check_id("user", user)
        if not 0 < len(item) <= SURELY_SHORT or "\0" in item:
            check_id("item", item)
        value = None if rating_at is None else ratings[fields[rating_at]]
        timestamp = None if timestamp_at is None else parse_timestamp(fields[timestamp_at])
        position = None if position_at is None else positions[fields[position_at]]
        if latest_at is not None and latests[fields[latest_at]]:
            position = as_latest(position)
        kind = None if type_at is None else types[fields[type_at]]
        return new(InteractionRow, (user, item, value, timestamp, position, kind))

    return convert
