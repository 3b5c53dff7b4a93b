"""Data sets with their protocols: what is learned from, and which candidates are ranked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncr_core.data import build_interactions, leave_latest_out, min_interactions
from ncr_core.data.interactions import Interactions
from ncr_core.data.published import PublishedSplit, load_deepcf_amusic, load_ncf
from ncr_core.data.readers import open_source
from ncr_core.data.splits import Split
from ncr_core.errors import ConfigError, DataError
from ncr_core.evaluation.protocols import CandidateSet, given_candidates, sampled_candidates

LEAST = 10  # interactions an item needs, in one pass (§5.1)
DATA_SETS = ("ml-1m", "ncf-ml-1m", "amusic-deepcf")


@dataclass(frozen=True)
class DataSet:
    """A split and its protocol: ``p1``, or ``given`` with published negatives.

    ``refit`` says whether the protocol's figures are those of a model that was fitted once more
    with the validation items, as is the rule where the test split was published without any.
    """

    name: str
    protocol: str
    split: Split
    refit: bool

    def sampled(self, seed: int) -> CandidateSet:
        """The test items among their candidates; with given ones only the places are random."""
        if isinstance(self.split, PublishedSplit):
            return given_candidates(self.split, seed)
        return sampled_candidates(self.split, self.split.test, seed)

    def described(self) -> dict[str, Any]:
        """Counts, and a fingerprint of everything the results depend on."""
        every = self.split.all_seen
        return {
            "name": self.name,
            "protocol": self.protocol,
            "users": every.n_users,
            "items": every.n_items,
            "interactions": every.nnz,
            "test_users": int((self.split.test >= 0).sum()),
            "fingerprint": fingerprint(self.split),
        }


def load_data_set(name: str, root: Path) -> DataSet:
    """Reads a data set from the folder that holds all of them. Raises DataError, ConfigError."""
    loaders: dict[str, Callable[[Path], DataSet]] = {
        "ml-1m": _movielens,
        "ncf-ml-1m": lambda path: DataSet("ncf-ml-1m", "p2", load_ncf(path), True),
        "amusic-deepcf": lambda path: DataSet(
            "amusic-deepcf", "given", load_deepcf_amusic(path), True
        ),
    }
    if name not in loaders:
        raise ConfigError(f"unknown data set {name!r}: {', '.join(DATA_SETS)}")
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; it should hold {', '.join(DATA_SETS)}")
    data = loaders[name](root)
    check_rankable(data.split)
    return data


def check_rankable(split: Split) -> None:
    """Raises DataError where a user has nothing left to be compared with."""
    seen = split.all_seen
    lengths = seen.indptr[1:] - seen.indptr[:-1]
    full = (lengths >= seen.n_items).nonzero()[0]
    if len(full):
        raise DataError(
            f"{len(full):,} users, among them {seen.user_ids[full[0]]!r}, have interacted with "
            f"all {seen.n_items:,} items: there is nothing to rank for them, leave them out"
        )


def fingerprint(split: Split) -> str:
    """SHA-256 over the training matrix and the held-out items, by row and column numbers."""
    digest = hashlib.sha256()
    train = split.train
    for array in (train.indptr, train.items, split.validation, split.test):
        digest.update(array.astype("<i8").tobytes())
    if isinstance(split, PublishedSplit):
        digest.update(split.negatives.astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def _movielens(root: Path) -> DataSet:
    folder = root / "ml-1m"
    if not folder.exists():
        raise DataError(f"{root} has no folder ml-1m; see docs/data.md for where to download it")
    return DataSet("ml-1m", "p1", leave_latest_out(min_interactions(_read(folder), LEAST)), False)


def _read(folder: Path) -> Interactions:
    rows = open_source(folder).interactions(on_bad=lambda bad: None)
    return build_interactions(
        (r.user, r.item, r.timestamp if r.timestamp is not None else float(r.position or 0))
        for chunk in rows
        for r in chunk
    )
