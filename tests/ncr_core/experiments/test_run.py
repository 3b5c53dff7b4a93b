"""Cells are run once, start from each other's models, and never mix data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ncr_core.errors import ConfigError, DataError
from ncr_core.evaluation.metrics import hit_ratio, ndcg
from ncr_core.experiments import run as run_module
from ncr_core.experiments.cell import ranks_as_text, ranks_from_text
from ncr_core.experiments.datasets import load_data_set
from ncr_core.experiments.run import Runner
from ncr_core.experiments.targets import TARGETS, Choice, cell_of, figure5, table1
from tests.ncr_core.experiments.conftest import Log, write_movielens

MakeRunner = Callable[[], tuple[Runner, Log]]
pytestmark = pytest.mark.usefixtures("quick")


def test_a_table_is_run_once_and_then_read(make_runner: MakeRunner) -> None:
    cells = table1(Choice(factors=(4,), methods=("ItemPop", "NBPR", "DNCR", "NeuPR")))
    runner, log = make_runner()
    first = runner.run(cells)
    assert log.ran == ["itempop", "nbpr-d4", "dncr-d4", "neupr-d4"]
    again, log = make_runner()
    assert again.run(cells) == first
    assert log.ran == []
    assert log.had == ["itempop", "nbpr-d4", "dncr-d4", "neupr-d4"]


def test_a_result_holds_what_a_reader_needs_to_trust_it(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    runner, _ = make_runner()
    (result,) = runner.run([cell_of("NBPR", Choice(), 4)])
    stored = json.loads((tmp_path / "results" / "cells" / "ml-1m" / "nbpr-d4.json").read_text())
    assert stored == result
    assert stored["format"] == "ncr-cell/1"
    assert {"commit", "machine", "software", "seconds", "history", "at"} <= set(stored)
    assert stored["configuration"]["seed"] == 0
    ranks = [ranks_from_text(text) for text in stored["ranks"]["sampled"]]
    assert len(ranks) == 3
    sampled = stored["metrics"]["sampled"]
    assert sampled["hr"] == pytest.approx(np.mean([hit_ratio(r, 10) for r in ranks]), abs=1e-5)
    assert sampled["ndcg"] == pytest.approx(np.mean([ndcg(r, 10) for r in ranks]), abs=1e-5)
    low, high = sampled["hr_interval"]
    assert low < sampled["hr"] < high
    full = ranks_from_text(stored["ranks"]["full"])
    assert stored["metrics"]["full"]["hr"] == pytest.approx(hit_ratio(full, 10), abs=1e-5)


def test_a_stopped_run_goes_on_where_it_was(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = table1(Choice(factors=(4,), methods=("ItemPop", "NBPR", "DNCR")))
    real = run_module.fit

    def stopped(method: str, request: run_module.Request) -> run_module.Fitted:
        if method == "DNCR":
            raise KeyboardInterrupt
        return real(method, request)

    monkeypatch.setattr(run_module, "fit", stopped)
    runner, log = make_runner()
    with pytest.raises(KeyboardInterrupt):
        runner.run(cells)
    monkeypatch.setattr(run_module, "fit", real)
    runner, log = make_runner()
    runner.run(cells)
    assert log.had == ["itempop", "nbpr-d4"]
    assert log.ran == ["dncr-d4"]


def test_other_settings_replace_a_result(make_runner: MakeRunner) -> None:
    make_runner()[0].run([cell_of("EASE", Choice(), 0)])
    runner, log = make_runner()
    changed = cell_of("EASE", Choice(), 0, over={"l2": 10.0})
    (result,) = runner.run([changed])
    assert log.ran == ["ease"]
    assert result["configuration"]["settings"] == {"l2": 10.0}


def test_results_of_other_data_are_not_mixed(make_runner: MakeRunner, root: Path) -> None:
    cells = [cell_of("ItemPop", Choice(), 0)]
    make_runner()[0].run(cells)
    shutil.rmtree(root)
    write_movielens(root, seed=1)
    runner, _ = make_runner()
    with pytest.raises(DataError, match="was made of other data"):
        runner.run(cells)


def test_a_model_with_other_settings_is_trained_again(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    """And the figures of its result stay as they were."""
    first = make_runner()[0].run([cell_of("NBPR", Choice(), 4), cell_of("DNCR", Choice(), 4)])
    manifest = tmp_path / "work" / "cells" / "ml-1m" / "nbpr-d4" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["data"]["fingerprint"] = "0" * 16
    manifest.write_text(json.dumps(content))
    runner, log = make_runner()
    runner.run([cell_of("NeuPR", Choice(full=False), 4)])
    assert log.ran == ["neupr-d4", "nbpr-d4"]
    assert runner.run([cell_of("NBPR", Choice(), 4)]) == first[:1]


def test_what_cannot_work_is_said_before_anything_is_run(make_runner: MakeRunner) -> None:
    runner, log = make_runner()
    cells = [cell_of("EASE", Choice(), 0), cell_of("DNCR", Choice(), 100_000)]
    with pytest.raises(ConfigError, match="factors must be"):
        runner.run(cells)
    with pytest.raises(ConfigError, match="alpha must be"):
        runner.run([cell_of("NeuPR", Choice(), 4, over={"training": {"alpha": 1.5}})])
    assert log.ran == []


def test_neupr_starts_from_the_cells_of_its_parts(make_runner: MakeRunner) -> None:
    runner, log = make_runner()
    runner.run(figure5(Choice(factors=(4,)))[:2])
    # Its parts come first, once for every α.
    assert log.ran == ["neupr-d4-alpha=0.0", "nbpr-d4", "dncr-d4", "neupr-d4-alpha=0.1"]


def test_a_refit_runs_as_many_rounds_as_validation_chose(make_runner: MakeRunner) -> None:
    runner, log = make_runner()
    (refit,) = runner.run([cell_of("NBPR", Choice(), 4, refit=True)])
    assert log.ran == ["nbpr-d4-refit", "nbpr-d4"]
    (chosen,) = runner.run([cell_of("NBPR", Choice(), 4)])
    assert refit["rounds"] == chosen["rounds"]
    assert len(refit["history"][0]["loss"]) == chosen["rounds"]
    assert refit["history"][0]["ndcg"] == []  # there is nothing left to validate on
    assert refit["validation"] == chosen["validation"]


def test_a_pretrained_neupr_is_refitted_from_refitted_parts(make_runner: MakeRunner) -> None:
    runner, log = make_runner()
    runner.run([cell_of("NeuPR", Choice(), 4, refit=True)])
    assert set(log.ran) == {
        "neupr-d4-refit", "neupr-d4", "nbpr-d4", "dncr-d4", "nbpr-d4-refit", "dncr-d4-refit",
    }  # fmt: skip


def test_a_grid_never_looks_at_test_items(make_runner: MakeRunner) -> None:
    runner, _ = make_runner()
    results = runner.run(TARGETS["tuning"](Choice(methods=("EASE",))))
    assert len(results) == 6
    assert all("metrics" not in r and "ranks" not in r for r in results)
    assert all(r["validation"]["ndcg"] > 0 for r in results)


@pytest.mark.parametrize(
    "method",
    ["eALS", "iALS", "NeuMF", "BPR", "EASE by recency", "NBPR pooled", "NBPR history",
     "NeuPR history", "NeuPR without pre-training", "NeuPR shared embeddings", "two towers",
     "two towers shared"],
)  # fmt: skip
def test_every_method_runs(make_runner: MakeRunner, method: str) -> None:
    if method == "iALS":
        pytest.importorskip("implicit", reason="the extra `research` is not installed")
    (result,) = make_runner()[0].run([cell_of(method, Choice(), 4)])
    assert result["metrics"]["sampled"]["hr"] > 0.1
    assert result["validation"]["ndcg"] > 0


def test_every_target_names_cells_of_their_own() -> None:
    for name, target in TARGETS.items():
        cells = target(Choice())
        names = [cell.name for cell in cells]
        assert len(set(names)) == len(names), name


def test_data_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        load_data_set("ml-1m", tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no folder ml-1m"):
        load_data_set("ml-1m", tmp_path)
    with pytest.raises(ConfigError, match="unknown data set"):
        load_data_set("netflix", tmp_path)
    folder = tmp_path / "ml-1m"
    folder.mkdir()
    (folder / "ratings.csv").write_text("user,item,rating,timestamp\na,b,5,1\n")
    with pytest.raises(DataError, match="no item has 10 interactions"):
        load_data_set("ml-1m", tmp_path)


def test_a_user_with_every_item_seen_is_named(tmp_path: Path) -> None:
    rows = [f"u{u},i{i},5,{100 * u + i}" for u in range(12) for i in range(4 + (u == 3))]
    rows += [f"v{n},i4,5,{n}" for n in range(12)]
    folder = tmp_path / "ml-1m"
    folder.mkdir()
    (folder / "ratings.csv").write_text("user,item,rating,timestamp\n" + "\n".join(rows) + "\n")
    with pytest.raises(DataError, match="'u3', have interacted with all 5 items"):
        load_data_set("ml-1m", tmp_path)


def test_a_method_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="unknown method 'SVD'"):
        table1(Choice(methods=("SVD",)))


def test_ranks_survive_as_text() -> None:
    ranks = np.array([0, 9, -1, 3])
    assert ranks_as_text(ranks) == "09.3"
    assert ranks_from_text("09.3").tolist() == ranks.tolist()
