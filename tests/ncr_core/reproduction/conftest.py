"""A matrix for literal loops, a small MovieLens-shaped folder, and a runner on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ncr_core.data import Interactions
from ncr_core.data.synthetic import synthetic_catalogue
from ncr_core.recipes import merge_sections
from ncr_core.reproduction import hyperparameters
from ncr_core.reproduction.runner import Runner, RunnerCallbacks
from ncr_core.reproduction.suites import RunSpec


def small_matrix(n_users: int = 25, n_items: int = 14, seed: int = 3) -> Interactions:
    """Some popular items and some rare; the last user and the last item have no interactions."""
    rng = np.random.default_rng(seed)
    chance = np.linspace(0.7, 0.1, n_items)
    chosen = rng.random((n_users, n_items)) < chance
    chosen[-1], chosen[:, -1] = False, False
    users, items = np.nonzero(chosen)
    order = rng.permutation(len(users))
    return Interactions.from_arrays(
        users,
        items,
        order,
        user_ids=[f"u{n}" for n in range(n_users)],
        item_ids=[f"i{n}" for n in range(n_items)],
    )


def dense(train: Interactions) -> npt.NDArray[np.float64]:
    """(n_users, n_items) of zeros and ones."""
    matrix = np.zeros((train.n_users, train.n_items))
    matrix[train.users, train.items] = 1.0
    return matrix


def write_movielens(root: Path, users: int = 150, seed: int = 0) -> Path:
    """Ratings in the form of ``ml-1m`` under ``root``."""
    folder = root / "ml-1m"
    folder.mkdir(parents=True)
    catalogue = synthetic_catalogue(users, 80, 20, seed=seed)
    lines = [f"{user},{item},5,{int(when)}" for user, item, when in catalogue.interactions]
    (folder / "ratings.csv").write_text("user,item,rating,timestamp\n" + "\n".join(lines) + "\n")
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_movielens(tmp_path / "data")


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """The chosen settings with fewer passes, for data this small."""
    real = hyperparameters.settings_of

    def settings_of(method: str, factors: int, data: str = "ml-1m") -> hyperparameters.Settings:
        settings = real(method, factors, data)
        if "model" in settings:
            few = {"epochs": 2, "fine_tune_epochs": 1, "negatives": 2, "batch_size": 512}
            if settings["training"].get("epochs") == 0:  # a start alone
                few["epochs"] = 0
            return merge_sections(settings, {"training": few})
        if method == "NeuMF":
            return {**settings, "epochs": 1, "fine_tune_epochs": 1}
        return settings

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ncr_core.reproduction.suites.settings_of", settings_of)
        yield


class Log(RunnerCallbacks):
    """Notes which methods were run and which were there already."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.had: list[str] = []
        super().__init__(
            started=lambda run, number, count: self.ran.append(short_name(run)),
            skipped=lambda run: self.had.append(short_name(run)),
        )


def short_name(run: RunSpec) -> str:
    return run.name.rpartition("/")[2]


@pytest.fixture
def make_runner(root: Path, tmp_path: Path) -> Callable[[], tuple[Runner, Log]]:
    """Runners that share their results, as commands given one after the other do."""

    def make() -> tuple[Runner, Log]:
        log = Log()
        return Runner(root, tmp_path / "results", tmp_path / "work", log), log

    return make


def write_sequences(root: Path, users: int = 120) -> Path:
    """Sequences in the form of ``amazon-s3rec``; one test item that no training has."""
    folder = root / "amazon-s3rec"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(1)
    lines = []
    for user in range(users):
        first = int(rng.integers(40))
        steps = rng.integers(1, 3, size=int(rng.integers(3, 9))).cumsum()
        lines.append(" ".join(map(str, [user, *dict.fromkeys((first + steps) % 40)])))
    lines.append("odd 1 2 never")
    (folder / "Beauty.txt").write_text("\n".join(lines) + "\n")
    return root


def write_timed(root: Path, users: int = 60) -> Path:
    """Ratings with times in the form of ``ml-100k``: everybody has items over a hundred days."""
    folder = root / "ml-100k"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(2)
    lines = ["user,item,rating,timestamp"]
    for user in range(users):
        items = rng.permutation(30)[:10]
        days = np.sort(rng.random(10)) * 100
        lines += [f"{user},{i},5,{int(d * 86_400)}" for i, d in zip(items, days, strict=True)]
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    return root


def write_item_sets(root: Path, users: int = 60) -> Path:
    """Training and test items in the form of ``gowalla-lightgcn``; the last user has no test."""
    folder = root / "gowalla-lightgcn"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(3)
    train, test = [], []
    for user in range(users):
        items = [str(item) for item in rng.permutation(40)[:12]]
        train.append(" ".join([str(user), *items[:8]]))
        test.append(" ".join([str(user), *items[8 : int(rng.integers(9, 13))]]))
    train.append("last 1 2 3")
    test.append("last")
    (folder / "train.txt").write_text("\n".join(train) + "\n")
    (folder / "test.txt").write_text("\n".join(test) + "\n")
    return root
