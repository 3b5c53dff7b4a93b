"""Sets of test items: reading them, and Recall@20 and NDCG@20 by the definitions of LightGCN."""

from __future__ import annotations

import gzip
import math
import string
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from ncr_core.errors import ConfigError, DataError
from ncr_core.evaluation.metrics import hits_of_each, recall_of_each, set_ndcg_of_each
from ncr_core.reproduction.datasets import BenchmarkDataset
from ncr_core.reproduction.item_set_report import item_sets
from ncr_core.reproduction.item_sets import load_item_sets
from ncr_core.reproduction.report import write_page
from ncr_core.reproduction.results_store import ResultsStore, hits_as_text
from ncr_core.reproduction.runner import SET_K, Runner
from ncr_core.reproduction.suites import Selection, make_run, recall, runs_of
from tests.ncr_core.reproduction.conftest import Log, write_item_sets

pytestmark = pytest.mark.usefixtures("quick")


def _folder(path: Path, train: str, test: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "train.txt").write_text(train)
    (path / "test.txt").write_text(test)
    return path


def test_recall_and_ndcg_by_hand() -> None:
    ranked = np.array([[4, 1, 7], [2, 3, -1], [5, 6, 8]])
    items, indptr = np.array([1, 9, 4, 3, 0, 2, 4, 9]), np.array([0, 3, 4, 8])
    hits = hits_of_each(ranked, items, indptr)
    assert hits.tolist() == [[True, True, False], [False, True, False], [False, False, False]]
    sizes = np.diff(indptr)
    assert recall_of_each(hits, sizes).tolist() == pytest.approx([2 / 3, 1.0, 0.0])
    second, third = 1 / math.log2(3), 1 / math.log2(4)
    expected = [(1 + second) / (1 + second + third), second / 1, 0.0]
    assert set_ndcg_of_each(hits, sizes).tolist() == pytest.approx(expected)
    assert hits_as_text(hits) == "ab.b.."


def test_each_user_with_two_items_has_one_for_validation(tmp_path: Path) -> None:
    split = load_item_sets(_folder(tmp_path, "u 1 2 3\nv 2\nw 3 1\n", "u 4 5\nv\nx 1\n"))
    ids = np.array(split.train.item_ids)
    assert split.train.user_ids == ["u", "v", "w", "x"]
    assert np.diff(split.train.indptr).tolist() == [2, 1, 1, 0]
    assert (split.validation >= 0).tolist() == [True, False, True, False]
    assert (split.test >= 0).tolist() == [True, False, False, True]
    assert ids[split.test_items.items_of(0)].tolist() == ["4", "5"]
    # Lists leave out what training has, and no test item.
    assert sorted(ids[split.all_seen.items_of(0)].tolist()) == ["1", "2", "3"]
    refit = split.with_validation_in_train()
    assert refit.train.nnz == 6
    assert refit.test_items is split.test_items


def test_test_items_without_training_are_counted(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "u 1 2 3\nv 2\nw 3 1\n", "u 4 5\nv 1\nx 4\n")
    data = BenchmarkDataset("gowalla-lightgcn", "sets", load_item_sets(folder))
    assert data.description()["untrained_test_items"] == 3
    folder = _folder(tmp_path, "u 1 2 3\nv 2\nw 3 1\n", "v 1\nx 1\n")
    data = BenchmarkDataset("gowalla-lightgcn", "sets", load_item_sets(folder))
    assert "untrained_test_items" not in data.description()


def test_a_folder_may_hold_gzipped_files(tmp_path: Path) -> None:
    plain = load_item_sets(_folder(tmp_path, "u 1 2\nv 2 1\n", "u 3\n"))
    for name in ("train.txt", "test.txt"):
        path = tmp_path / name
        path.with_name(f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    zipped = load_item_sets(tmp_path)
    assert zipped.train.items.tolist() == plain.train.items.tolist()


@pytest.mark.parametrize(
    ("train", "test", "reason"),
    [
        ("u 1 2\nu 3\n", "u 4\n", "train.txt: user 'u' has more than one line"),
        ("u 1 1\n", "u 4\n", "train.txt: user 'u' has an item twice"),
        ("u 1 2\n", "u 2\n", "user 'u' has an item in train.txt and in test.txt"),
        ("u\n", "u 2\n", "train.txt has no items"),
        ("u 1\n", "", "test.txt has no items"),
    ],
)
def test_what_cannot_be_measured_is_one_error(
    tmp_path: Path, train: str, test: str, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        load_item_sets(_folder(tmp_path, train, test))


def test_a_file_that_is_not_text_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"u \xff\n")
    with pytest.raises(DataError, match=r"train\.txt is damaged"):
        load_item_sets(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no train.txt \(nor train.txt.gz\)"):
        load_item_sets(tmp_path)


def test_recall_needs_item_sets_and_all_items() -> None:
    with pytest.raises(ConfigError, match="give --set gowalla-lightgcn"):
        recall(Selection("ml-1m"))
    with pytest.raises(ConfigError, match="recall ranks over all items"):
        recall(Selection("gowalla-lightgcn", full=False))
    with pytest.raises(ConfigError, match="its target is recall"):
        runs_of("best", Selection("gowalla-lightgcn"))


def test_the_stored_figures_are_those_of_the_lists(
    tmp_path: Path, make_runner: Callable[[], tuple[Runner, Log]]
) -> None:
    """Popularity by hand: the most frequent items that the user has not had."""
    split = load_item_sets(write_item_sets(tmp_path / "data") / "gowalla-lightgcn")
    (result,) = make_runner()[0].run(recall(Selection("gowalla-lightgcn", methods=("ItemPop",))))
    train = split.with_validation_in_train().train
    counts = train.item_counts()
    shares, gains = [], []
    users = np.flatnonzero(split.test >= 0)
    texts = result["ranks"]["sets"].split(".")[:-1]
    assert len(texts) == len(users) == 60
    for user, text in zip(users, texts, strict=True):
        unseen = np.setdiff1d(np.arange(train.n_items), train.items_of(user))
        bound = np.sort(counts[unseen])[::-1][SET_K - 1]
        wanted = split.test_items.items_of(user)
        sure, possible = (counts[wanted] > bound).sum(), (counts[wanted] >= bound).sum()
        assert sure <= len(text) <= possible  # ties are in random order
        shares.append(len(text) / len(wanted))
        places = [string.ascii_lowercase.index(letter) for letter in text]
        best = sum(1 / np.log2(place + 2) for place in range(min(len(wanted), SET_K)))
        gains.append(sum(1 / np.log2(place + 2) for place in places) / best)
    assert result["metrics"]["sets"]["recall"] == pytest.approx(np.mean(shares), abs=1e-5)
    assert result["metrics"]["sets"]["ndcg"] == pytest.approx(np.mean(gains), abs=1e-5)
    low, high = result["metrics"]["sets"]["recall_interval"]
    assert low <= np.mean(shares) <= high
    write_page(tmp_path / "results", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "## Sets of test items" in page
    validation, found = result["validation"]["ndcg"], result["metrics"]["sets"]["recall"]
    assert f"| ItemPop | {validation:.4f} | {found:.4f} (" in page
    assert "| *LightGCN (He et al. 2020)* |" in page
    assert "Ahead of all our models" not in page  # there is none of ours


def test_methods_ahead_of_ours_are_named(
    tmp_path: Path, make_runner: Callable[[], tuple[Runner, Log]]
) -> None:
    (first,) = make_runner()[0].run([make_run("ItemPop", Selection(), 0)])
    store = ResultsStore(tmp_path / "results")
    for method, ndcg in (("ItemPop", 0.11), ("PureSVD", 0.14), ("NBPR", 0.133)):
        (run,) = recall(Selection("gowalla-lightgcn", methods=(method,)))
        result = deepcopy(first) | {"cell": run.name, "configuration": run.configuration()}
        figures = {"recall": ndcg, "ndcg": ndcg}
        intervals = {f"{name}_interval": [0.0, 1.0] for name in figures}
        result["metrics"] = {"sets": figures | intervals}
        store.write(result)
    page = item_sets(store)
    (sentence,) = [line for line in page.splitlines() if line.startswith("Ahead of all our")]
    assert "PureSVD, d = 64" in sentence
    assert "LightGCN (He et al. 2020)" in sentence
    assert "Mult-VAE" in sentence
    assert "NGCF" not in sentence
    assert "ItemPop" not in sentence
