"""Sentences of the results page follow from the stored results alone."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncr_core.reproduction.report import write_page
from ncr_core.reproduction.results_store import ResultsStore, ranks_as_text
from ncr_core.reproduction.runner import Runner, summary
from ncr_core.reproduction.suites import RunSpec, Selection, best, make_run
from tests.ncr_core.reproduction.conftest import write_movielens

pytestmark = pytest.mark.usefixtures("quick")
USERS = 200


@pytest.fixture
def store(tmp_path: Path) -> ResultsStore:
    """A store with the popularity list of MovieLens."""
    runner = Runner(write_movielens(tmp_path / "data"), tmp_path / "results", tmp_path / "work")
    runner.run([make_run("ItemPop", Selection(), 0)])
    return ResultsStore(tmp_path / "results")


def write(store: ResultsStore, run: RunSpec, hits: int, **data: Any) -> None:
    """Stores a result with so many users whose item is the first, and others without it."""
    first = store.read("cells/ml-1m/itempop")
    assert first is not None
    ranks = np.array([0] * hits + [-1] * (USERS - hits))
    result = deepcopy(first) | {"cell": run.name, "configuration": run.configuration()}
    result["metrics"] = {kind: summary([ranks]) for kind in ("sampled", "full")}
    result["ranks"] = {"sampled": [ranks_as_text(ranks)], "full": ranks_as_text(ranks)}
    result["data"] |= data
    store.write(result)


def test_neupr_against_neumf_is_summed_up_by_size(store: ResultsStore, tmp_path: Path) -> None:
    write(store, make_run("ItemPop", Selection(), 0), 10)
    for factors, ours in ((8, 150), (16, 50), (24, 101)):
        write(store, make_run("NeuPR", Selection(), factors), ours)
        write(store, make_run("NeuMF", Selection(), factors), 100)
    write_page(store.folder, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    findings = "above NeuMF at d = 8; below NeuMF at d = 16; not significantly different at d = 24."
    for kind in ("sampled", "full"):
        assert f"- by {kind} NDCG@10 {findings}" in text


def test_test_items_that_no_training_has_are_named(store: ResultsStore, tmp_path: Path) -> None:
    (run,) = best(Selection("amusic-deepcf", methods=("ItemPop",)))
    write(store, run, 10, untrained_test_items=7, test_users=USERS)
    write_page(store.folder, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert f"The test items of 7 of the {USERS} test users occur in no training." in text
