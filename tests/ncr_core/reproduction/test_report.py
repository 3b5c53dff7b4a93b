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


def write(
    store: ResultsStore, run: RunSpec, hits: int, validation: float | None = None, **data: Any
) -> None:
    """Stores a result with so many users whose item is the first, and others without it."""
    first = store.read("cells/ml-1m/itempop")
    assert first is not None
    ranks = np.array([0] * hits + [-1] * (USERS - hits))
    result = deepcopy(first) | {"cell": run.name, "configuration": run.configuration()}
    result["metrics"] = {kind: summary([ranks]) for kind in ("sampled", "full")}
    result["ranks"] = {"sampled": [ranks_as_text(ranks)], "full": ranks_as_text(ranks)}
    result["data"] |= data
    if validation is not None:
        result["validation"] = {"hr": validation, "ndcg": validation, "users": USERS, "items": 101}
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


def test_pairs_that_test_items_order_otherwise_than_validation_items_are_listed(
    store: ResultsStore, tmp_path: Path
) -> None:
    runs = {
        run.method: run
        for run in best(Selection(methods=("EASE", "PureSVD", "NBPR")))
        if not run.refit and not run.variant
    }
    write(store, runs["EASE"], 100, validation=0.4)
    write(store, runs["PureSVD"], 50, validation=0.3)
    write(store, runs["NBPR"], 80, validation=0.41)
    write_page(store.folder, tmp_path / "page.md")
    section = (tmp_path / "page.md").read_text().split("## Validation against test\n")[1]
    rows = [line for line in section.split("\n## ")[0].splitlines() if "NBPR" in line]
    assert rows == ["| ml-1m | NBPR, d = 64 | EASE | sampled | 0.4100 / 0.4000 | 0.4000 / 0.5000 |"]


def test_models_below_their_start_are_named_by_size(store: ResultsStore, tmp_path: Path) -> None:
    for factors, ours, start in ((8, 90, 80), (16, 70, 80)):
        write(store, make_run("DNCR", Selection(), factors), ours)
        write(store, make_run("spectral start", Selection(), factors), start)
    write_page(store.folder, tmp_path / "page.md")
    table = (tmp_path / "page.md").read_text().split("## Table 1: ")[1].split("\n## ")[0]
    assert "- DNCR at d = 16 is below `spectral start` (sampled NDCG@10 0.3500" in table
    assert "DNCR at d = 8 is below" not in table


def test_each_row_of_a_method_is_held_against_its_start(
    store: ResultsStore, tmp_path: Path
) -> None:
    runs = best(Selection(methods=("NBPR", "spectral start")))
    for run in (run for run in runs if not run.refit):
        write(store, run, {"NBPR": 70, "spectral start": 90}[run.method] + 5 * bool(run.variant))
    write_page(store.folder, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    for label, ndcg in (("NBPR", "0.3500"), ("NBPR (full choice)", "0.3750")):
        assert f"- {label} is below `spectral start` (sampled NDCG@10 {ndcg} against" in text
    assert "NBPR, and with it a part of NeuPR, starts at random." in text
    assert "begins at the start itself" not in text


def test_a_model_that_begins_at_its_start_is_not_said_to_start_at_random(
    store: ResultsStore, tmp_path: Path
) -> None:
    figures = {"NBPR pooled": 70, "spectral start": 90, "NBPR from ALS": 70, "ALS start": 90}
    runs = best(Selection(methods=tuple(figures)))
    for run in (run for run in runs if not run.refit):
        write(store, run, figures[run.method])
    write_page(store.folder, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "NBPR from ALS, NBPR pooled: the training begins at the start itself." in text
    assert "at random." not in text.split("These trained models are below")[1].split("\n")[0]


@pytest.mark.slow
def test_the_page_says_where_the_first_seed_is_the_best(
    store: ResultsStore, tmp_path: Path
) -> None:
    write(store, make_run("ItemPop", Selection(), 0), 10)
    for seed, (high, low) in enumerate([(90, 70), (80, 80), (85, 90)]):
        selection = Selection(seed=seed)
        write(store, make_run("NBPR attention", selection, 128), high)
        write(store, make_run("NBPR next-item", selection, 128), low)
    write_page(store.folder, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert (
        "By full NDCG@10 the seed 0 is the best of its row for NBPR attention, d = 128 (P1). It is "
        "the worst for NBPR next-item, d = 128 (P1)."
    ) in text
