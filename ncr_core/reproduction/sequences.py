"""Sequences of items, with the test items, as the authors of SASRec and later papers publish them.

A file has one of two forms, plain or gzipped:

- CSV with the header ``user,item,position,part``, where part is ``train``, ``validation`` or
  ``test`` and positions order a user's items;
- a line for each user, ``user item item …`` with spaces, oldest item first (S3-Rec, Zhou et al.,
  CIKM'20): the last item is for test and the item before it for validation.

By the protocol of these papers the validation item is input at test time, and no model trains on
it. The figures are compared with published ones, so a line that cannot be read is an error.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from ncr_core.data.interactions import IdIndex, IntArray, Interactions
from ncr_core.data.readers.text import cannot_read
from ncr_core.data.splits import MIN_ITEMS, NextItemSplit
from ncr_core.errors import DataError

HEADER = ["user", "item", "position", "part"]
_ORDER = ("train", "validation", "test")


def load_sequences(path: Path) -> NextItemSplit:
    """Reads a file of either form.

    Models train on users with one or two items, and a test leaves these users out. The split leaves
    out a test item that occurs in no training sequence, and counts its users.

    Raises:
        DataError: the file is missing, empty or damaged, a line is malformed, or no user is left to
            test. A user has an item twice, has two lines, or has parts in another order than
            training, validation, test.
    """
    users, items = IdIndex(), IdIndex()
    sequences: list[tuple[int, list[int], bool]] = []
    for user, sequence, held_out in _sequences(path):
        number = users.number(user)
        if number < len(sequences):
            raise DataError(f"{path.name}: user {user!r} has more than one sequence")
        numbers = [items.number(item) for item in sequence]
        if len(set(numbers)) < len(numbers):
            raise DataError(
                f"{path.name}: user {user!r} has an item twice; the protocol ranks the items that "
                "a user has not had"
            )
        sequences.append((number, numbers, held_out))
    if not sequences:
        raise DataError(f"{path.name} has no sequences")
    return _split(sequences, users.ids(), items.ids())


def _split(
    sequences: list[tuple[int, list[int], bool]], user_ids: list[str], item_ids: list[str]
) -> NextItemSplit:
    validation = np.full(len(user_ids), -1, dtype=np.int64)
    test = validation.copy()
    lengths, flat = [], list[int]()
    for user, numbers, held_out in sequences:
        if held_out:
            *numbers, validation[user], test[user] = numbers
        lengths.append(len(numbers))
        flat += numbers
    rows = np.repeat(np.arange(len(user_ids)), lengths)
    train = Interactions.from_arrays(
        rows, np.array(flat, dtype=np.int64), user_ids=user_ids, item_ids=item_ids
    )
    untrained = _untrained(train, test)
    test[untrained] = -1
    if not (test >= 0).any():
        raise DataError(
            f"no user has {MIN_ITEMS} items of which the last is in another user's training: "
            "there is nothing to test on"
        )
    return NextItemSplit(train, validation, test, len(untrained))


def _untrained(train: Interactions, test: IntArray) -> IntArray:
    """The users whose test item has no training interaction."""
    tested = np.flatnonzero(test >= 0)
    untrained: IntArray = tested[train.item_counts()[test[tested]] == 0]
    return untrained


def _sequences(path: Path) -> Iterator[tuple[str, list[str], bool]]:
    """Each user, the items from old to new, and whether the last two items are held out."""
    try:
        with opened(path) as file:
            first = file.readline()
            file.seek(0)
            if "," in first:
                yield from _of_csv(path, file)
            else:
                yield from _of_lines(path, file)
    except OSError as error:
        raise cannot_read(path, error) from None
    except (EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path.name} is damaged: {error}") from None


def opened(path: Path) -> IO[str]:
    """A text file to read, plain or gzipped."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _of_lines(path: Path, file: IO[str]) -> Iterator[tuple[str, list[str], bool]]:
    for number, line in enumerate(file, 1):
        user, *sequence = line.split() or [""]
        if not sequence:
            raise DataError(f"{path.name}, line {number}: not a user and then the user's items")
        yield user, sequence, len(sequence) >= MIN_ITEMS


def _of_csv(path: Path, file: IO[str]) -> Iterator[tuple[str, list[str], bool]]:
    rows = csv.reader(file)
    if next(rows, None) != HEADER:
        raise DataError(f"{path.name}: the first line is not {','.join(HEADER)}")
    by_user: dict[str, list[tuple[int, str, str]]] = {}
    for number, row in enumerate(rows, 2):
        if len(row) != len(HEADER) or row[3] not in _ORDER or not row[2].isdigit():
            raise DataError(f"{path.name}, line {number}: not user, item, position and part")
        user, item, position, part = row
        by_user.setdefault(user, []).append((int(position), item, part))
    for user, of_user in by_user.items():
        of_user.sort(key=lambda row: row[0])
        parts = [part for _, _, part in of_user]
        held_out = parts[-2:] == ["validation", "test"]
        if "train" not in parts or any(p != "train" for p in parts[: -2 if held_out else None]):
            raise DataError(
                f"{path.name}: user {user!r} has not training items, then one for validation and "
                "one for test"
            )
        yield user, [item for _, item, _ in of_user], held_out
