"""The data sets of the comparison, each with its protocol and its split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncr_core.data import leave_latest_out, min_interactions
from ncr_core.data.dataset import read_source
from ncr_core.data.readers import open_source
from ncr_core.data.splits import Split, check_rankable
from ncr_core.errors import ConfigError, DataError
from ncr_core.evaluation.protocols import CandidateSet, given_candidates, sampled_candidates
from ncr_core.reproduction.published_splits import PublishedSplit, load_deepcf_amusic, load_ncf

MIN_INTERACTIONS = 10  # interactions an item needs, in one pass (§5.1)
DATASETS = ("ml-1m", "ncf-ml-1m", "amusic-deepcf")


@dataclass(frozen=True)
class BenchmarkDataset:
    """A split and the protocol it is measured by."""

    name: str

    protocol: str
    """``p1``, ``p2``, or ``given`` for published negatives."""

    split: Split

    def sampled(self, seed: int) -> CandidateSet:
        """The test items among their candidates; with given ones only the places are random."""
        if isinstance(self.split, PublishedSplit):
            return given_candidates(self.split, seed)
        return sampled_candidates(self.split, self.split.test, seed)

    def description(self) -> dict[str, Any]:
        """Counts, and a fingerprint of everything the results depend on."""
        seen = self.split.all_seen
        return {
            "name": self.name,
            "protocol": self.protocol,
            "users": seen.n_users,
            "items": seen.n_items,
            "interactions": seen.nnz,
            "test_users": int((self.split.test >= 0).sum()),
            "fingerprint": fingerprint(self.split),
        }


def load_dataset(name: str, root: Path) -> BenchmarkDataset:
    """Reads a data set from the folder that holds all of them.

    Raises ConfigError if there is no data set of that name; DataError if it cannot be read, or
    leaves nothing to rank for some users.
    """
    loaders: dict[str, Callable[[Path], BenchmarkDataset]] = {
        "ml-1m": _movielens,
        "ncf-ml-1m": lambda path: BenchmarkDataset("ncf-ml-1m", "p2", load_ncf(path)),
        "amusic-deepcf": lambda path: BenchmarkDataset(
            "amusic-deepcf", "given", load_deepcf_amusic(path)
        ),
    }
    if name not in loaders:
        raise ConfigError(f"unknown data set {name!r}: {', '.join(DATASETS)}")
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; it should hold {', '.join(DATASETS)}")
    data = loaders[name](root)
    check_rankable(data.split)
    return data


def fingerprint(split: Split) -> str:
    """SHA-256 over the training matrix and the held-out items, by row and column numbers."""
    digest = hashlib.sha256()
    train = split.train
    for array in (train.indptr, train.items, split.validation, split.test):
        digest.update(array.astype("<i8").tobytes())
    if isinstance(split, PublishedSplit):
        digest.update(split.negatives.astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def _movielens(root: Path) -> BenchmarkDataset:
    folder = root / "ml-1m"
    if not folder.exists():
        raise DataError(f"{root} has no folder ml-1m; see docs/data.md for where to download it")
    interactions = read_source(open_source(folder), on_bad=lambda _: None)
    split = leave_latest_out(min_interactions(interactions, MIN_INTERACTIONS))
    return BenchmarkDataset("ml-1m", "p1", split)
