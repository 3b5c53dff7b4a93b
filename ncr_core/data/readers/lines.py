"""Text files as blocks of lines: plain or gzip, in bounded memory, damage reported by line.

Lines are handled a block at a time because a million calls that each return one line cost more
than all the parsing.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ncr_core.data.readers.rows import OnBytes
from ncr_core.errors import DataError

MAX_LINE = 1 << 20
"""The longest line, in bytes: beyond it a file is damaged or not text."""
_CHUNK = 1 << 18
_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A physical line, without its line feed."""

    number: int
    text: str
    fault: str | None
    """Why it cannot be used, if it cannot."""


class Block(NamedTuple):
    """Some consecutive lines."""

    first: int
    """The number of the first line, from 1."""
    lines: list[str]
    plain: bool
    """No quotes, no stray carriage returns, no faults: each line can simply be split."""
    crlf: bool
    """The lines of a plain block had carriage returns, which are already gone."""
    faults: dict[int, str]
    """By line number."""

    def numbered(self) -> Iterator[Line]:
        """The lines as they stand in the file."""
        end = "\r" if self.crlf else ""
        for number, text in enumerate(self.lines, self.first):
            yield Line(number, text + end, self.faults.get(number))


@contextmanager
def opened(path: Path) -> Iterator[tuple[io.BufferedIOBase, io.BufferedReader]]:
    """Open a file for its contents, with the file on disk beside it (the same if not gzip).

    Raises:
        DataError: it cannot be opened.
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
    """The one-line message for a file or folder that the system will not let us read."""
    return DataError(f"{path} cannot be read: {error.strerror or error}")


def read_blocks(
    path: Path, *, on_bytes: OnBytes | None = None, latin1: bool = False
) -> Iterator[Block]:
    """Yield a file's lines.

    Args:
        path: the file.
        on_bytes: told how many more bytes of the file on disk have been read.
        latin1: take a line that is not UTF-8 as Latin-1, as old files want, not as a fault.

    Raises:
        DataError: it cannot be read at all.
    """
    with opened(path) as (stream, raw):
        first, tail, skipping, told = 1, b"", False, 0
        while True:
            damage = None
            try:
                chunk = stream.read1(_CHUNK)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                damage = f"the compressed file is cut short or damaged here: {error}"
                chunk = b""
            except OSError as error:
                raise cannot_read(path, error) from None
            if on_bytes is not None and (now := raw.tell()) > told:
                on_bytes(now - told)
                told = now
            if damage is not None:  # half a line may look like a whole one, so the tail goes
                yield _fault(first, damage)
                return
            if not chunk:
                break
            data = tail + chunk if tail else chunk
            end = data.find(b"\n")
            if skipping or end > MAX_LINE:
                if end < 0:
                    continue
                yield _fault(first, f"the line is longer than {MAX_LINE} bytes")
                first, data, tail, skipping = first + 1, data[end + 1 :], b"", False
            end = data.rfind(b"\n")
            if end >= 0:
                block = _decoded(first, data[:end], latin1)
                yield block
                first += len(block.lines)
            tail = data[end + 1 :]
            if len(tail) > MAX_LINE:
                skipping, tail = True, b""
        if skipping:
            yield _fault(first, f"the line is longer than {MAX_LINE} bytes")
        elif tail:
            yield _decoded(first, tail, latin1)


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
