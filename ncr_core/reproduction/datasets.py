"""The data sets of the comparison, each with its protocol and its split.

A split is made here or read from the files that its authors published. The files hold the test
items and the negatives, plain or gzipped, in one of two forms:

- the form of the authors (https://github.com/hexiangnan/neural_collaborative_filtering and
  https://github.com/familyld/DeepCF, folder ``Data``): ``NAME.train.rating`` and
  ``NAME.test.rating``, tab separated ``user item rating [timestamp]``, and ``NAME.test.negative``.
  A line of the last file has ``(user,item)`` and then the negatives of that user, tab separated;
- CSV with a header: ``test.csv`` and ``negatives.csv`` with a column for the user and one for the
  item, and either ``train.csv`` or a separate source of all ratings, including the test rows.

The figures of a published split are compared with those of other authors. A line that cannot be
read is therefore an error here, while other readers leave the line out.
"""

from __future__ import annotations

import hashlib
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ncr_core.data import leave_latest_out, min_interactions
from ncr_core.data.dataset import read_source
from ncr_core.data.interactions import IdIndex, IntArray, Interactions
from ncr_core.data.readers.rows import (
    BadRow,
    Columns,
    InteractionRow,
    RowFault,
    check_id,
    shown,
)
from ncr_core.data.readers.source import bare_name, open_source
from ncr_core.data.readers.tables import DelimitedFile, Layout, open_csv
from ncr_core.data.readers.text import cannot_read, first_line, read_records
from ncr_core.data.splits import (
    QUANTILE,
    ItemSetSplit,
    NextItemSplit,
    Split,
    TemporalSplit,
    check_rankable,
    temporal_split,
)
from ncr_core.errors import ConfigError, DataError
from ncr_core.evaluation.protocols import CandidateSet, given_candidates, sampled_candidates
from ncr_core.reproduction.item_sets import hold_out_random, hold_out_rows, load_item_sets
from ncr_core.reproduction.sequences import load_sequences

FloatArray = npt.NDArray[np.float64]

MAX_NEGATIVES = 1000
"""The most negatives of one user, ten times the usual number, to bound the memory."""

_TRAIN, _TEST, _NEGATIVE = ".train.rating", ".test.rating", ".test.negative"
_HELD_OUT = re.compile(r"\(([^(),]+),([^(),]+)\)")


@dataclass(frozen=True)
class PublishedSplit(Split):
    """A split with its published test items and negatives.

    Users and items are numbered over training, test and negatives together. An item may therefore
    have no interaction, and a user may have no training item. The evaluation includes users without
    training items. Users of the training part without a test item have −1.

    ``negatives`` is (n, M), the negatives of the n users with a test item (``test_users``) in the
    order of the file, filled from the left and padded with −1. Published negatives stay even if
    they are training items of the user (348 in DeepCF's Amazon Music). The held-out item is removed
    from its own negatives (156 lists of NCF's MovieLens 1M, 18 of DeepCF's Amazon Music). Its list
    is then one negative shorter. The authors' evaluation keeps scores by item and does the same.

    ``in_time_order`` says whether each user's training items are in the order of time.
    """

    negatives: IntArray
    in_time_order: bool

    @property
    def test_users(self) -> IntArray:
        """(n,) the users with a test item, ascending: the rows of ``negatives``."""
        return np.flatnonzero(self.test >= 0)


def load_ncf(root: Path) -> PublishedSplit:
    """The NCF authors' split of MovieLens 1M, protocol P2 (He et al., WWW'17).

    ``root`` holds ``ml-1m.train.rating``, ``ml-1m.test.rating`` and ``ml-1m.test.negative``, or the
    folders ``ncf-ml-1m`` (test and negatives) and ``ml-1m`` (all ratings). Raises DataError as
    ``load_published`` does.
    """
    folder = root / "ncf-ml-1m"
    if folder.is_dir():
        return load_published(folder, ratings=root / "ml-1m")
    return load_published(root, name="ml-1m")


def load_deepcf_amusic(root: Path, *, seed: int = 0) -> PublishedSplit:
    """The DeepCF authors' cut of Amazon Digital Music (Deng et al., AAAI'19).

    ``root`` holds ``AMusic.train.rating`` and the two files that go with it, or the folder
    ``amusic-deepcf``. The data have no times, so ``seed`` draws the validation items at random.
    Raises DataError as ``load_published`` does.
    """
    folder = root / "amusic-deepcf"
    if folder.is_dir():
        return load_published(folder, seed=seed)
    return load_published(root, name="AMusic", seed=seed)


def load_published(
    folder: Path, *, name: str | None = None, ratings: Path | None = None, seed: int = 0
) -> PublishedSplit:
    """Reads a published split in either of the two forms.

    The training items of a user are in the order of their timestamps or positions, if every row has
    one and they differ. Otherwise the items keep the order of the file. A user with two or more
    training items has one validation item: the latest by time, or a random one by ``seed`` without
    an order of time. ``with_validation_in_train`` puts the validation items back, for the tested
    model.

    Args:
        folder: the folder of the files.
        name: NAME of the authors' form, if the folder has several splits.
        ratings: a file or folder with all ratings, if the folder has no training file. The reader
            removes each user's test item from the ratings.
        seed: draws the validation items.

    Raises:
        DataError: a file is missing, empty or damaged, a line is malformed, or a user is twice in
            the test file. Negatives belong to a user without a test item, or users have different
            numbers of negatives. The message names the file, and the line if one line is at fault.
    """
    files = _find(folder, name, ratings)
    held_out = _read_test(files)
    users, items = IdIndex(), IdIndex()
    rows, when = _read_train(files, users, items)
    tested = {users.number(user): items.number(one.item) for user, one in held_out.items()}
    lists = _read_negatives(files, held_out, items)

    user_ids, item_ids = users.ids(), items.ids()
    test = np.full(len(user_ids), -1, dtype=np.int64)
    test[list(tested)] = list(tested.values())
    if files.whole:
        of_test = rows[:, 1] == test[rows[:, 0]]
        _check_found(files, held_out, {user_ids[user] for user in rows[of_test, 0].tolist()})
        rows, when = rows[~of_test], when[~of_test]
    if len(rows) == 0:
        raise DataError(f"{files.train.name} has no rows to learn from")
    in_time_order = bool(np.isfinite(when).all() and np.ptp(when) > 0)
    everything = Interactions.from_arrays(
        rows[:, 0],
        rows[:, 1],
        when if in_time_order else None,
        user_ids=user_ids,
        item_ids=item_ids,
    )
    train, validation = _hold_out(everything, in_time_order, seed)
    test_users = sorted(tested)
    negatives = _padded([lists[user_ids[user]] for user in test_users], test[test_users])
    return PublishedSplit(train, validation, test, negatives, in_time_order)


class _HeldOut(NamedTuple):
    item: str
    line: int


@dataclass(frozen=True)
class _Files:
    """The files of one split; ``name`` is None for CSV."""

    name: str | None
    train: Path
    whole: bool
    """Whether the training file has the test rows too."""
    test: Path
    negatives: Path

    def table(self, path: Path) -> DelimitedFile:
        """Opens a file with a row for each interaction."""
        return open_csv(path, Columns()) if self.name is None else self.tabbed(path)

    def tabbed(self, path: Path) -> DelimitedFile:
        """Opens a file of the authors' form; its first line gives the number of fields."""
        width = first_line(path).count("\t") + 1
        if width < 2:
            raise DataError(f"{path.name} has no tabs in its first line")
        timestamp = 3 if width > 3 else None
        layout = Layout("\t", width, 0, 1, timestamp=timestamp, header=False, quoted=False)
        return DelimitedFile(path, layout)

    def train_rows(self) -> Iterator[InteractionRow]:
        if self.whole:
            blocks = open_source(self.train).interactions(on_bad=_refuse)
        else:
            blocks = self.table(self.train).blocks(_refuse, None)
        return chain.from_iterable(blocks)


def _find(folder: Path, name: str | None, ratings: Path | None) -> _Files:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: a published split is several files in one")
    try:
        # In reverse, so that of NAME and NAME.gz the plain one is taken.
        entries = sorted((one for one in folder.iterdir() if one.is_file()), reverse=True)
    except OSError as error:
        raise cannot_read(folder, error) from None
    by_name = {bare_name(entry): entry for entry in entries}

    def needed(file: str) -> Path:
        if (path := by_name.get(file.lower())) is None:
            raise DataError(f"{folder} has no {file} (nor {file}.gz)")
        return path

    originals = sorted(one.removesuffix(_TRAIN) for one in by_name if one.endswith(_TRAIN))
    if name is None and originals and "test.csv" not in by_name:
        if len(originals) > 1:
            raise DataError(f"{folder} has several splits, name one: {', '.join(originals)}")
        name = originals[0]
    if name is not None:
        train, test, negatives = (needed(name + end) for end in (_TRAIN, _TEST, _NEGATIVE))
        return _Files(name, train, False, test, negatives)
    test, negatives = needed("test.csv"), needed("negatives.csv")
    if ratings is not None and "train.csv" not in by_name:
        return _Files(None, ratings, True, test, negatives)
    return _Files(None, needed("train.csv"), False, test, negatives)


def _refuse(bad: BadRow) -> NoReturn:
    raise DataError(f"{bad.file}, line {bad.line}: {bad.reason}")


def _records(file: DelimitedFile) -> Iterator[tuple[int, list[str]]]:
    """The line numbers and the fields of a file's lines."""
    layout = file.layout
    for block in read_records(
        file.path, layout.delimiter, quoted=layout.quoted, header=layout.header, on_bad=_refuse
    ):
        yield from block


def _pairs(file: DelimitedFile) -> Iterator[tuple[int, str, str]]:
    """(line, user, item) of each row."""
    width, user_column, item_column = file.layout.width, file.layout.user, file.layout.item
    for line, fields in _records(file):
        if len(fields) != width:
            _refuse(BadRow(file.path.name, line, f"{len(fields)} fields instead of {width}"))
        yield line, fields[user_column], fields[item_column]


def _check_ids(path: Path, line: int, user: str, items: Iterable[str]) -> None:
    try:
        check_id("user", user)
        for item in items:
            check_id("item", item)
    except RowFault as fault:
        _refuse(BadRow(path.name, line, str(fault)))


def _read_test(files: _Files) -> dict[str, _HeldOut]:
    held_out: dict[str, _HeldOut] = {}
    for line, user, item in _pairs(files.table(files.test)):
        _check_ids(files.test, line, user, [item])
        if (before := held_out.setdefault(user, _HeldOut(item, line))).line != line:
            again = f"user {shown(user)} has a test item already, in line {before.line}"
            _refuse(BadRow(files.test.name, line, again))
    if not held_out:
        raise DataError(f"{files.test.name} has no rows, and the test needs rows")
    return held_out


def _read_train(files: _Files, users: IdIndex, items: IdIndex) -> tuple[IntArray, FloatArray]:
    """(rows, 2) users and items, and (rows,) times, NaN where unknown."""
    flat, when = array("q"), array("d")
    for user, item, _, timestamp, position, _ in files.train_rows():
        flat.append(users.number(user))
        flat.append(items.number(item))
        time = position if timestamp is None else timestamp
        when.append(math.nan if time is None else time)
    if not when:
        raise DataError(f"{files.train.name} has no rows to learn from")
    pairs = np.frombuffer(flat, dtype=np.int64).reshape(-1, 2)
    return pairs, np.frombuffer(when, dtype=np.float64)


def _check_found(files: _Files, held_out: dict[str, _HeldOut], found: set[str]) -> None:
    """Refuses test items that all ratings lack: the two files are then not of one data set."""
    for user, (item, line) in held_out.items():
        if user not in found:
            reason = f"user {shown(user)} has no item {shown(item)} in {files.train}"
            _refuse(BadRow(files.test.name, line, reason))


def _read_negatives(
    files: _Files, held_out: dict[str, _HeldOut], items: IdIndex
) -> dict[str, array[int]]:
    """The negatives of each user of the test file, the same number for each user."""
    path = files.negatives
    lists: dict[str, array[int]] = {}
    first_lines: dict[str, int] = {}
    for line, user, negatives in _negative_rows(files, held_out):
        if user not in held_out:
            _refuse(BadRow(path.name, line, f"user {shown(user)} is not in {files.test.name}"))
        _check_ids(path, line, user, negatives)
        user_list = lists.setdefault(user, array("q"))
        first_lines.setdefault(user, line)
        user_list.extend([items.number(item) for item in negatives])
        if len(user_list) > MAX_NEGATIVES:
            reason = f"user {shown(user)} has more than {MAX_NEGATIVES} negatives"
            _refuse(BadRow(path.name, line, reason))
    for user, one in held_out.items():
        if user not in lists:
            reason = f"user {shown(user)} has no negatives in {path.name}"
            _refuse(BadRow(files.test.name, one.line, reason))
    first, *others = lists
    for user in others:
        if len(lists[user]) != len(lists[first]):
            reason = (
                f"user {shown(user)} has {len(lists[user])} negatives, "
                f"but user {shown(first)} has {len(lists[first])}"
            )
            _refuse(BadRow(path.name, first_lines[user], reason))
    return lists


def _negative_rows(
    files: _Files, held_out: dict[str, _HeldOut]
) -> Iterator[tuple[int, str, list[str]]]:
    """(line, user, some of the user's negatives) of each line."""
    if files.name is None:
        for line, user, item in _pairs(files.table(files.negatives)):
            yield line, user, [item]
        return
    name, users = files.negatives.name, set[str]()
    for line, (pair, *negatives) in _records(files.tabbed(files.negatives)):
        match = _HELD_OUT.fullmatch(pair)
        if match is None or not negatives:
            _refuse(BadRow(name, line, "the line is not (user,item) and negatives by tabs"))
        user, item = match.groups()
        if user in users:
            _refuse(BadRow(name, line, f"user {shown(user)} has a line already"))
        users.add(user)
        if user in held_out and held_out[user].item != item:
            reason = (
                f"the held-out item of user {shown(user)} is {shown(item)} here, "
                f"but {shown(held_out[user].item)} in {files.test.name}"
            )
            _refuse(BadRow(name, line, reason))
        yield line, user, negatives


def _hold_out(train: Interactions, latest: bool, seed: int) -> tuple[Interactions, IntArray]:
    """The training part without the validation items, and the (n_users,) validation items.

    Users with one item or none have −1, because a validation item would leave no item to learn
    from.
    """
    if not latest:
        return hold_out_random(train, seed)
    users = np.flatnonzero(np.diff(train.indptr) >= 2)
    return hold_out_rows(train, users, train.indptr[users + 1] - 1)


def _padded(lists: list[array[int]], held_out: IntArray) -> IntArray:
    """(n, M) the lists in their order, without the held-out item of each, padded with −1."""
    given = np.array(lists, dtype=np.int64)
    other = given != held_out[:, None]
    # A stable sort by "is the held-out item" moves what is taken out to the right end.
    order = np.argsort(~other, axis=1, kind="stable")
    padded: IntArray = np.take_along_axis(np.where(other, given, -1), order, axis=1)
    return padded


MIN_INTERACTIONS = 10  # interactions an item needs, in one pass (§5.1)
SEQUENCES = {
    "ml-1m-sasrec": "ml-1m-sasrec/sequences.csv",
    "beauty-s3rec": "amazon-s3rec/Beauty.txt",
    "sports-s3rec": "amazon-s3rec/Sports_and_Outdoors.txt",
}
"""The data sets with SASRec's protocol and their files, which may be gzipped."""
TEMPORAL = ("ml-100k",)
"""The data sets that are split at one time for all users."""
ITEM_SETS = ("gowalla-lightgcn",)
"""The data sets with a set of test items for each user."""
DATASETS = ("ml-1m", "ncf-ml-1m", "amusic-deepcf", *SEQUENCES, *TEMPORAL, *ITEM_SETS)


@dataclass(frozen=True)
class BenchmarkDataset:
    """A split and the protocol it is measured by."""

    name: str

    protocol: str
    """``p1``, ``p2``, ``given`` for published negatives, ``sasrec``, ``temporal`` or ``sets``.

    The last three protocols rank the test items among all items that the user has not had, and
    never among sampled items; see `NextItemSplit` and `ItemSetSplit`.
    """

    split: Split

    def sampled(self, seed: int) -> CandidateSet:
        """The test items among sampled or published candidates; ``seed`` draws items and places."""
        if isinstance(self.split, PublishedSplit):
            return given_candidates(self.split, seed)
        return sampled_candidates(self.split, self.split.test, seed)

    def description(self) -> dict[str, Any]:
        """Counts, and a fingerprint of everything the results depend on."""
        seen = self.split.all_seen
        description = {
            "name": self.name,
            "protocol": self.protocol,
            "users": seen.n_users,
            "items": seen.n_items,
            "interactions": seen.nnz,
            "test_users": int((self.split.test >= 0).sum()),
            "fingerprint": fingerprint(self.split),
        }
        if not isinstance(self.split, NextItemSplit | ItemSetSplit):
            learned = self.split.train
            if isinstance(self.split, PublishedSplit):  # which is refitted
                learned = self.split.with_validation_in_train().train
            held_out = self.split.test[self.split.test >= 0]
            untrained = learned.item_counts()[held_out] == 0
            description["untrained_test_items"] = int(untrained.sum())
        if isinstance(self.split, NextItemSplit):
            left_out = self.split.untrained_test_items
            if self.protocol == "sasrec":
                description["interactions"] = seen.nnz + left_out
            description["untrained_test_items"] = left_out
        if isinstance(self.split, ItemSetSplit):
            description["interactions"] = seen.nnz + self.split.test_items.nnz
            description["test_items"] = self.split.test_items.nnz
            untrained = seen.item_counts()[self.split.test_items.items] == 0
            if untrained.any():
                description["untrained_test_items"] = int(untrained.sum())
        if isinstance(self.split, TemporalSplit):
            description |= {"cut": self.split.cut, "newcomers": self.split.newcomers}
        return description


def load_dataset(name: str, root: Path) -> BenchmarkDataset:
    """Reads a data set from the folder that holds all data sets.

    Raises ConfigError if no data set has the name. Raises DataError if the data set cannot be read,
    or if some users have no item left to rank.
    """
    loaders: dict[str, Callable[[Path], BenchmarkDataset]] = {
        "ml-1m": _movielens,
        "ncf-ml-1m": lambda path: BenchmarkDataset("ncf-ml-1m", "p2", load_ncf(path)),
        "amusic-deepcf": lambda path: BenchmarkDataset(
            "amusic-deepcf", "given", load_deepcf_amusic(path)
        ),
        **{key: partial(_sequences, key) for key in SEQUENCES},
        **{key: partial(_temporal, key) for key in TEMPORAL},
        **{key: partial(_item_sets, key) for key in ITEM_SETS},
    }
    if name not in loaders:
        raise ConfigError(f"unknown data set {name!r}: {', '.join(DATASETS)}")
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; it should hold {', '.join(DATASETS)}")
    data = loaders[name](root)
    check_rankable(data.split)
    return data


def _sequences(name: str, root: Path) -> BenchmarkDataset:
    path = root / SEQUENCES[name]
    if not path.exists():
        path = path.with_name(f"{path.name}.gz")
    if not path.exists():
        raise DataError(f"{root} has no {SEQUENCES[name]} (nor {SEQUENCES[name]}.gz)")
    return BenchmarkDataset(name, "sasrec", load_sequences(path))


def _temporal(name: str, root: Path) -> BenchmarkDataset:
    folder = root / name
    if not folder.exists():
        raise DataError(f"{root} has no folder {name}; see docs/how-to/data.md for the download")
    interactions = read_source(open_source(folder), on_bad=lambda _: None)
    return BenchmarkDataset(name, "temporal", temporal_split(interactions, QUANTILE))


def _item_sets(name: str, root: Path) -> BenchmarkDataset:
    folder = root / name
    if not folder.exists():
        raise DataError(f"{root} has no folder {name}; see docs/how-to/data.md for the download")
    return BenchmarkDataset(name, "sets", load_item_sets(folder))


def fingerprint(split: Split) -> str:
    """The first 16 digits of SHA-256 over training matrix, held-out items and published negatives.

    Users and items enter by row and column numbers.
    """
    digest = hashlib.sha256()
    train = split.train
    for numbers in (train.indptr, train.items, split.validation, split.test):
        digest.update(numbers.astype("<i8").tobytes())
    if isinstance(split, PublishedSplit):
        digest.update(split.negatives.astype("<i8").tobytes())
    if isinstance(split, ItemSetSplit):
        for numbers in (split.test_items.indptr, split.test_items.items):
            digest.update(numbers.astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def _movielens(root: Path) -> BenchmarkDataset:
    folder = root / "ml-1m"
    if not folder.exists():
        raise DataError(f"{root} has no folder ml-1m; see docs/how-to/data.md for the download")
    interactions = read_source(open_source(folder), on_bad=lambda _: None)
    split = leave_latest_out(min_interactions(interactions, MIN_INTERACTIONS))
    return BenchmarkDataset("ml-1m", "p1", split)
