"""Sets of training and test items of each user, as the authors of LightGCN publish them.

The folder has ``train.txt`` and ``test.txt``, plain or gzipped (He et al., SIGIR'20). A line is
``user item item …`` with spaces, and the items have no order. A user's test items are all ranked
among the items that the user's training does not have. The figures are compared with published
ones, so a line that cannot be read is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ncr_core.data.interactions import IdIndex, IntArray, Interactions
from ncr_core.data.readers.text import cannot_read
from ncr_core.data.splits import ItemSetSplit
from ncr_core.errors import DataError
from ncr_core.reproduction.sequences import opened

TRAIN, TEST = "train.txt", "test.txt"


def load_item_sets(folder: Path, seed: int = 0) -> ItemSetSplit:
    """Reads the two files of a folder.

    A user with two or more training items has a random one for validation, by ``seed``. A line with
    a user alone is a user without items.

    Raises:
        DataError: a file is missing or damaged, or has no items. A user has two lines, an item
            twice, or an item in both files.
    """
    users, items = IdIndex(), IdIndex()
    train = _rows(folder, TRAIN, users, items)
    test = _rows(folder, TEST, users, items)
    user_ids, item_ids = users.ids(), items.ids()

    def matrix(rows: IntArray) -> Interactions:
        return Interactions.from_arrays(
            rows[:, 0], rows[:, 1], user_ids=user_ids, item_ids=item_ids
        )

    everything, test_items = matrix(train), matrix(test)
    if everything.nnz == 0 or test_items.nnz == 0:
        raise DataError(f"{TRAIN if everything.nnz == 0 else TEST} has no items")
    both = everything.contains(test_items.users, test_items.items)
    if both.any():
        user = user_ids[int(test_items.users[both][0])]
        raise DataError(f"user {user!r} has an item in {TRAIN} and in {TEST}")
    first_test = np.full(len(user_ids), -1, dtype=np.int64)
    tested = np.flatnonzero(np.diff(test_items.indptr))
    first_test[tested] = test_items.items[test_items.indptr[tested]]
    kept, validation = hold_out_random(everything, seed)
    return ItemSetSplit(kept, validation, first_test, test_items)


def hold_out_random(train: Interactions, seed: int) -> tuple[Interactions, IntArray]:
    """The training items without the validation items, and the (n_users,) validation items.

    The validation item is a random training item of each user with two or more, and −1 for others.
    """
    lengths = np.diff(train.indptr)
    users = np.flatnonzero(lengths >= 2)
    rows = train.indptr[users] + np.random.default_rng(seed).integers(lengths[users])
    return hold_out_rows(train, users, rows)


def hold_out_rows(
    train: Interactions, users: IntArray, rows: IntArray
) -> tuple[Interactions, IntArray]:
    """The training items without one row of each of these users, and the (n_users,) items of them.

    Other users have −1.
    """
    validation = np.full(train.n_users, -1, dtype=np.int64)
    validation[users] = train.items[rows]
    mask = np.ones(train.nnz, dtype=np.bool_)
    mask[rows] = False
    return train.select(mask), validation


def _rows(folder: Path, name: str, users: IdIndex, items: IdIndex) -> IntArray:
    """(n, 2) users and items of a file."""
    path = folder / name
    if not path.exists():
        path = folder / f"{name}.gz"
    if not path.exists():
        raise DataError(f"{folder} has no {name} (nor {name}.gz)")
    numbers, flat, lengths = [], list[int](), []
    known = set[int]()
    for user, of_user in _lines(path):
        number = users.number(user)
        if number in known:
            raise DataError(f"{path.name}: user {user!r} has more than one line")
        known.add(number)
        if len(set(of_user)) < len(of_user):
            raise DataError(f"{path.name}: user {user!r} has an item twice")
        numbers.append(number)
        flat += [items.number(item) for item in of_user]
        lengths.append(len(of_user))
    rows = np.repeat(np.array(numbers, dtype=np.int64), lengths)
    return np.stack([rows, np.array(flat, dtype=np.int64)], axis=1)


def _lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    try:
        with opened(path) as file:
            for line in file:
                user, *of_user = line.split() or [""]
                if user:
                    yield user, of_user
    except OSError as error:
        raise cannot_read(path, error) from None
    except (EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path.name} is damaged: {error}") from None
