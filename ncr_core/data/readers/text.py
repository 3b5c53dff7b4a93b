"""Text files, plain or gzip: blocks of lines, and the records of delimited text.

Files are read in bounded memory, and damage is reported by line. Lines are handled a block at a
time because a million calls that each return one line cost more than all the parsing.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, repeat
from pathlib import Path
from typing import NamedTuple, TypeVar

from ncr_core.data.readers.rows import BadRow, OnBad, OnBytes, RowFault
from ncr_core.errors import DataError

DELIMITERS = (",", ";", "\t", "|")
MAX_LINE_BYTES = 1 << 20
"""A file with a longer line is damaged or not text."""
_CHUNK_BYTES = 1 << 18
_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"

T = TypeVar("T")
Record = tuple[int, list[str]]
"""The number of a record's first line, and the record's fields."""


class Line(NamedTuple):
    """A physical line, without its line feed."""

    number: int
    text: str
    fault: str | None
    """The reason why the line cannot be used; None for a usable line."""


class Block(NamedTuple):
    """Some consecutive lines."""

    first: int
    """The number of the first line, from 1."""
    lines: list[str]
    plain: bool
    """Whether each line can be split: no quotes, no stray carriage returns, no faults."""
    crlf: bool
    """Whether the lines of a plain block had carriage returns, which are removed already."""
    faults: dict[int, str]
    """The reasons why lines cannot be used, by line number."""

    def numbered(self) -> Iterator[Line]:
        """The lines as they stand in the file."""
        end = "\r" if self.crlf else ""
        for number, text in enumerate(self.lines, self.first):
            yield Line(number, text + end, self.faults.get(number))


@contextmanager
def opened(path: Path) -> Iterator[tuple[io.BufferedIOBase, io.BufferedReader]]:
    """Open a file: its contents, and the file on disk (the same for a file other than gzip).

    Raises DataError if the file cannot be opened.
    """
    try:
        raw = path.open("rb")
    except OSError as error:
        raise cannot_read(path, error) from None
    with raw:
        if path.suffix.lower() == ".gz" or raw.peek(2)[:2] == _GZIP_MAGIC:
            with gzip.GzipFile(fileobj=raw) as unzipped:
                yield unzipped, raw
        else:
            yield raw, raw


def cannot_read(path: Path, error: OSError) -> DataError:
    """The one-line error for a file or folder that the system refuses to read."""
    return DataError(f"{path} cannot be read: {error.strerror or error}")


def read_blocks(
    path: Path, *, on_bytes: OnBytes | None = None, latin1: bool = False
) -> Iterator[Block]:
    """Yield a file's lines.

    Args:
        path: the file.
        on_bytes: called with the number of further bytes on disk that have been read.
        latin1: read a line that is not UTF-8 as Latin-1, for old files, and not as a fault.

    Raises:
        DataError: the file cannot be read at all.
    """
    with opened(path) as (stream, raw):
        first, tail, skipping, reported = 1, b"", False, 0
        while True:
            damage = None
            try:
                chunk = stream.read1(_CHUNK_BYTES)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                damage = f"the compressed file is cut short or damaged here: {error}"
                chunk = b""
            except OSError as error:
                raise cannot_read(path, error) from None
            if on_bytes is not None and (position := raw.tell()) > reported:
                on_bytes(position - reported)
                reported = position
            if damage is not None:  # half a line may look like a whole one, so the tail goes
                yield _fault(first, damage)
                return
            if not chunk:
                break
            data = tail + chunk if tail else chunk
            end = data.find(b"\n")
            if skipping or end > MAX_LINE_BYTES:
                if end < 0:
                    continue
                yield _fault(first, f"the line is longer than {MAX_LINE_BYTES} bytes")
                first, data, tail, skipping = first + 1, data[end + 1 :], b"", False
            end = data.rfind(b"\n")
            if end >= 0:
                block = _decoded(first, data[:end], latin1)
                yield block
                first += len(block.lines)
            tail = data[end + 1 :]
            if len(tail) > MAX_LINE_BYTES:
                skipping, tail = True, b""
        if skipping:
            yield _fault(first, f"the line is longer than {MAX_LINE_BYTES} bytes")
        elif tail:
            yield _decoded(first, tail, latin1)


def first_line(path: Path) -> str:
    """The first line of a text file that is not blank.

    Raises DataError if all lines are blank, or the file cannot be read.
    """
    for block in read_blocks(path):
        for line in block.numbered():
            if line.fault:
                raise DataError(f"{path.name}, line {line.number}: {line.fault}")
            if line.text.strip():
                return line.text.rstrip("\r")
    raise DataError(f"{path.name} is empty")


def read_header(path: Path, names_in: Callable[[list[str]], T]) -> tuple[str, list[str], T]:
    """Find the delimiter with which a header has the wanted columns.

    Returns:
        the delimiter, the header, and the result of `names_in` for the header.

    Raises:
        DataError: no delimiter gives the columns; the message is that of the likeliest delimiter.
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
    """Cut a file into records, block by block, without blank lines and without the header.

    The iteration over a block cuts the block, so finish a block before the next one.
    """
    blocks = read_blocks(path, on_bytes=on_bytes, latin1=latin1)
    skip = header
    for block in blocks:
        if block.plain and not skip and "" not in block.lines:
            # Lazily: a list of fields that lives on is one more for the garbage collector to visit.
            fields = map(str.split, block.lines, repeat(delimiter))
            yield zip(count(block.first), fields)
            continue
        records = _records_by_line(path.name, block, blocks, delimiter, quoted, on_bad)
        if skip:
            skip = next(records, None) is None
        yield records


def _fault(number: int, reason: str) -> Block:
    return Block(number, [""], False, False, {number: reason})


def _decoded(first: int, data: bytes, latin1: bool) -> Block:
    if first == 1:
        data = data.removeprefix(_BOM)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return _decoded_by_line(first, data, latin1)
    if '"' in text:
        return Block(first, text.split("\n"), False, False, {})
    returns = text.count("\r")
    if not returns:
        return Block(first, text.split("\n"), True, False, {})
    # The last line feed is not part of data, hence the one added before looking for pairs.
    lines = f"{text}\n".split("\r\n")
    if len(lines) == returns + 1 and not lines.pop() and "\n" not in "".join(lines):
        return Block(first, lines, True, True, {})
    return Block(first, text.split("\n"), False, False, {})


def _decoded_by_line(first: int, data: bytes, latin1: bool) -> Block:
    lines: list[str] = []
    faults: dict[int, str] = {}
    for number, line in enumerate(data.split(b"\n"), first):
        try:
            lines.append(line.decode())
        except UnicodeDecodeError as error:
            if latin1:
                lines.append(line.decode("latin-1"))
                continue
            # Kept in some form, so that quotes around it still pair up.
            lines.append(line.decode(errors="replace"))
            faults[number] = f"the line is not UTF-8 (byte {error.start + 1} of it)"
    return Block(first, lines, False, False, faults)


def _header_fields(line: str, delimiter: str) -> list[str]:
    try:
        return [name.strip() for name in next(csv.reader([line], delimiter=delimiter))]
    except csv.Error:
        return []


def _records_by_line(
    file: str, block: Block, blocks: Iterator[Block], delimiter: str, quoted: bool, on_bad: OnBad
) -> Iterator[Record]:
    """The records of a block, line by line; a quoted field may take lines of further blocks."""
    pending = deque(block.numbered())
    while pending:
        line = pending.popleft()
        if line.fault is not None:
            on_bad(BadRow(file, line.number, line.fault))
            continue
        try:
            if quoted and '"' in line.text:
                fields = _quoted_fields(line, pending, blocks, delimiter)
                yield line.number, fields
                continue
            text = line.text.removesuffix("\r")
            if "\r" in text:
                raise RowFault("the line has a carriage return within it")
            if text:
                yield line.number, text.split(delimiter)
        except RowFault as fault:
            on_bad(BadRow(file, line.number, str(fault)))


def _quoted_fields(
    start: Line, pending: deque[Line], blocks: Iterator[Block], delimiter: str
) -> list[str]:
    """The fields of a record with quotes, which may span lines.

    A quote that never closes would swallow the rest of the file. So the lines that were read ahead
    are put back, and only the line of the quote is lost.
    """
    ahead: list[Line] = []

    def lines() -> Iterator[str]:
        yield f"{start.text}\n"
        size = len(start.text)
        while size < MAX_LINE_BYTES:
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
