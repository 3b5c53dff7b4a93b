"""An external merge sort of the rows of a data set by their users."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ncr_core.errors import DataError

RUN_BYTES = 64 * 2**20
"""The size of a run, which is sorted in memory; sorting takes about three times as much beside."""
NUMBER = "number"


def by_user(
    batches: Iterable[pa.RecordBatch],
    chunk_rows: int,
    stop: threading.Event,
    on_sorted: Callable[[int], None] = lambda n: None,
) -> Iterator[pa.Table]:
    """Yield all rows ordered by user, with each row's position in the data set as a further column.

    The sort writes sorted runs to a temporary file, which disappears with the process, and merges
    the runs from the file. Memory has one run at first, then about two chunks, and as much of the
    file as the system has room for.

    Args:
        batches: the rows, which have a column ``user``.
        chunk_rows: the number of rows of each table but the last.
        stop: ends reading and yielding once set.
        on_sorted: called with the number of all rows before the first table is yielded.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        with tempfile.TemporaryFile(dir=_folder()) as file:
            starts = [_write(file, run) for run in _runs(batches, stop)]
            if starts and not stop.is_set():
                file.flush()
                # It closes with the last table that refers to it.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                data = pa.py_buffer(mapped)
                runs = [pa.ipc.open_stream(data.slice(start)).read_all() for start in starts]
                on_sorted(sum(run.num_rows for run in runs))
                yield from _chunks(_merged(runs, chunk_rows), chunk_rows, stop)
    except OSError as error:  # a full disk, above all
        raise DataError(f"the rows cannot be sorted on disk: {error}") from None


def _folder() -> str | None:
    """The folder for large temporary files, by the rule of SQLite, because /tmp may be memory."""
    folders = (os.environ.get("SQLITE_TMPDIR"), os.environ.get("TMPDIR"), "/var/tmp")  # noqa: S108
    usable = (each for each in folders if each and os.access(each, os.W_OK | os.X_OK))
    return next((folder for folder in usable if Path(folder).is_dir()), None)


def _runs(batches: Iterable[pa.RecordBatch], stop: threading.Event) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    size = number = 0
    for batch in batches:
        if stop.is_set():
            return
        numbers = pa.array(np.arange(number, number + batch.num_rows))
        waiting.append(batch.append_column(NUMBER, numbers))
        size, number = size + batch.nbytes, number + batch.num_rows
        if size >= RUN_BYTES:
            yield _sorted(pa.Table.from_batches(waiting))
            waiting, size = [], 0
    if waiting:
        yield _sorted(pa.Table.from_batches(waiting))


def _sorted(rows: pa.Table) -> pa.Table:
    """The rows in a stable order by user, by UTF-8, which is the order of code points."""
    rows = rows.combine_chunks()
    # Distinct users are few: to sort their ranks takes a tenth of the time that texts take.
    users = rows["user"].combine_chunks().dictionary_encode()
    ranks = pc.rank(users.dictionary, tiebreaker="first").take(users.indices)
    return rows.take(pc.array_sort_indices(ranks))


def _write(file: IO[bytes], run: pa.Table) -> int:
    """Append a run to the file and return its offset, in bytes."""
    start = file.tell()
    with pa.ipc.new_stream(file, run.schema) as writer:
        writer.write_table(run)
    return start


def _merged(runs: list[pa.Table], chunk_rows: int) -> Iterator[pa.Table]:
    """Yield the rows of all runs in order, in tables of any size.

    Each turn takes the users up to a bound. Below the bound, no run has more rows than its share of
    a chunk. The rows of the user at the bound need no sorting, and are taken run by run.
    """
    users = [run["user"].chunk(0) for run in runs]  # of the file's memory; a run is one batch
    places = [0] * len(runs)
    share = max(chunk_rows // len(runs), 1)
    while active := [r for r, run in enumerate(runs) if places[r] < run.num_rows]:

        def name(run: int, row: int) -> str:
            return str(users[run][row].as_py())

        bound = min(name(r, min(places[r] + share, runs[r].num_rows) - 1) for r in active)
        below, equal = [], []
        for r in active:
            start = places[r]

            def key(row: int, r: int = r) -> str:
                return name(r, row)

            rest = range(runs[r].num_rows)
            middle = bisect_left(rest, bound, start, min(start + share, len(rest)), key=key)
            places[r] = bisect_right(rest, bound, middle, key=key)
            below.append(runs[r].slice(start, middle - start))
            equal.append(runs[r].slice(middle, places[r] - middle))
        yield _sorted(pa.concat_tables(below))
        yield from equal


def _chunks(tables: Iterable[pa.Table], rows: int, stop: threading.Event) -> Iterator[pa.Table]:
    """Cut tables into tables of ``rows`` rows, except the last table."""
    waiting: list[pa.Table] = []
    size = 0
    for table in tables:
        while table.num_rows:
            if stop.is_set():
                return
            waiting.append(table.slice(0, rows - size))
            table = table.slice(rows - size)
            size += waiting[-1].num_rows
            if size == rows:
                yield pa.concat_tables(waiting)
                waiting, size = [], 0
    if waiting:
        yield pa.concat_tables(waiting)
