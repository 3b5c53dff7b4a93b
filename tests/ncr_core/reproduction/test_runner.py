"""Experiments on the paper's data: runs, stored results, and the report of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncr_core.errors import ConfigError, DataError
from ncr_core.evaluation.metrics import hit_ratio, ndcg
from ncr_core.evaluation.protocols import evaluate_full
from ncr_core.reproduction import runner as run_module
from ncr_core.reproduction.baselines.scoring import fit_ease
from ncr_core.reproduction.datasets import ITEM_SETS, SEQUENCES, TEMPORAL, load_dataset
from ncr_core.reproduction.report import write_page
from ncr_core.reproduction.results_store import (
    FORMAT,
    ResultsStore,
    ranks_as_text,
    ranks_from_text,
)
from ncr_core.reproduction.runner import Runner
from ncr_core.reproduction.suites import (
    TARGETS,
    RunSpec,
    Selection,
    best,
    figure5,
    loss,
    make_run,
    paper,
    runs_of,
    table1,
)
from tests.ncr_core.reproduction.conftest import Log, short_name, write_movielens

pytestmark = pytest.mark.usefixtures("quick")

MakeRunner = Callable[[], tuple[Runner, Log]]


@pytest.mark.slow
def test_a_table_is_run_once_and_then_read(make_runner: MakeRunner) -> None:
    runs = table1(Selection(factors=(4,), methods=("ItemPop", "NBPR", "DNCR", "NeuPR")))
    runner, log = make_runner()
    first = runner.run(runs)
    assert log.ran == ["itempop", "nbpr-d4", "dncr-d4", "neupr-d4"]
    again, log = make_runner()
    assert again.run(runs) == first
    assert log.ran == []
    assert log.had == ["itempop", "nbpr-d4", "dncr-d4", "neupr-d4"]


def test_a_result_holds_what_a_reader_needs_to_trust_it(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    runner, _ = make_runner()
    (result,) = runner.run([make_run("NBPR", Selection(), 4)])
    stored = ResultsStore(tmp_path / "results").read("cells/ml-1m/nbpr-d4")
    assert stored is not None
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
    assert 0 < stored["metrics"]["lists"]["coverage"] <= 1


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = table1(Selection(factors=(4,), methods=("ItemPop", "NBPR", "DNCR")))
    real = run_module.fit_method

    def stopped(method: str, request: run_module.FitRequest) -> run_module.FittedMethod:
        if method == "DNCR":
            raise KeyboardInterrupt
        return real(method, request)

    monkeypatch.setattr(run_module, "fit_method", stopped)
    runner, log = make_runner()
    with pytest.raises(KeyboardInterrupt):
        runner.run(runs)
    monkeypatch.setattr(run_module, "fit_method", real)
    runner, log = make_runner()
    runner.run(runs)
    assert log.had == ["itempop", "nbpr-d4"]
    assert log.ran == ["dncr-d4"]


def test_a_result_of_before_lists_were_described_is_measured_again(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    run = make_run("EASE", Selection(), 0)
    (first,) = make_runner()[0].run([run])
    before = deepcopy(first) | {"at": "before"}
    del before["metrics"]["lists"]
    store = ResultsStore(tmp_path / "results")
    store.write(before)
    runner, log = make_runner()
    (again,) = runner.run([run])
    assert log.ran == ["ease"]
    assert again == first | {"at": "before"}

    # With other figures, as on another machine: they stay, beside the new training's lists.
    before["ranks"]["full"], before["metrics"]["full"]["ndcg"] = ranks_as_text(np.ones(3)), 0.5
    store.write(before)
    (again,) = make_runner()[0].run([run])
    assert again["metrics"] == before["metrics"] | {"lists": first["metrics"]["lists"]}
    assert again["ranks"] == before["ranks"]
    assert again["lists_of"]["full"] == first["metrics"]["full"]
    (stored,) = make_runner()[0].run([run])
    assert stored == again


def test_a_validation_says_among_how_many_items(make_runner: MakeRunner) -> None:
    runs = [make_run(name, Selection(), 4) for name in ("NBPR", "NBPR next-item")]
    sampled, full = make_runner()[0].run(runs)
    assert sampled["validation"]["items"] == 101
    assert full["validation"]["items"] == full["data"]["items"]


def test_other_settings_replace_a_result(make_runner: MakeRunner) -> None:
    make_runner()[0].run([make_run("EASE", Selection(), 0)])
    runner, log = make_runner()
    changed = make_run("EASE", Selection(), 0, overrides={"l2": 10.0})
    (result,) = runner.run([changed])
    assert log.ran == ["ease"]
    assert result["configuration"]["settings"] == {"l2": 10.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "name", "value", "ran"),
    [
        ("model", "tower_factors", None, []),  # as if the result was older than the choice
        (
            "training",
            "early_weight",
            None,
            ["next-item-start-d4"],
        ),  # 2 in this recipe, 1 by default
        ("model", "tower_factors", 3, ["next-item-start-d4"]),
        ("model", "no_such_choice", 3, ["next-item-start-d4"]),
    ],
)
def test_a_result_holds_while_choices_newer_than_it_have_their_defaults(
    make_runner: MakeRunner, tmp_path: Path, section: str, name: str, value: Any, ran: list[str]
) -> None:
    run = make_run("next-item start", Selection(), 4)
    before = deepcopy(make_runner()[0].run([run])[0])
    before["resolved"][section] |= {name: value}
    if value is None:
        del before["resolved"][section][name]
    ResultsStore(tmp_path / "results").write(before)
    runner, log = make_runner()
    runner.run([run])
    assert log.ran == ran


def test_results_of_other_data_are_not_mixed(make_runner: MakeRunner, root: Path) -> None:
    runs = [make_run("ItemPop", Selection(), 0)]
    make_runner()[0].run(runs)
    shutil.rmtree(root)
    write_movielens(root, seed=1)
    runner, _ = make_runner()
    with pytest.raises(DataError, match="was made of other data"):
        runner.run(runs)


@pytest.mark.slow
def test_a_model_with_other_settings_is_trained_again(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    """And the figures of its result stay as they were."""
    first = make_runner()[0].run(
        [make_run("NBPR", Selection(), 4), make_run("DNCR", Selection(), 4)]
    )
    manifest = tmp_path / "work" / "cells" / "ml-1m" / "nbpr-d4" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["data"]["fingerprint"] = "0" * 16
    manifest.write_text(json.dumps(content))
    runner, log = make_runner()
    runner.run([make_run("NeuPR", Selection(full=False), 4)])
    assert log.ran == ["neupr-d4", "nbpr-d4"]
    assert runner.run([make_run("NBPR", Selection(), 4)]) == first[:1]


def test_settings_that_do_not_fit_are_refused_before_anything_is_run(
    make_runner: MakeRunner,
) -> None:
    runner, log = make_runner()
    runs = [make_run("EASE", Selection(), 0), make_run("DNCR", Selection(), 100_000)]
    with pytest.raises(ConfigError, match="factors must be"):
        runner.run(runs)
    with pytest.raises(ConfigError, match="alpha must be"):
        runner.run([make_run("NeuPR", Selection(), 4, overrides={"training": {"alpha": 1.5}})])
    assert log.ran == []


@pytest.mark.slow
def test_neupr_starts_from_the_models_of_its_parts(make_runner: MakeRunner) -> None:
    runner, log = make_runner()
    runner.run(figure5(Selection(factors=(4,)))[:2])
    # Its parts come first, once for every α.
    assert log.ran == ["neupr-d4-alpha=0.0", "nbpr-d4", "dncr-d4", "neupr-d4-alpha=0.1"]


def test_a_refit_runs_as_many_rounds_as_validation_chose(make_runner: MakeRunner) -> None:
    runner, log = make_runner()
    (refit,) = runner.run([make_run("NBPR", Selection(), 4, refit=True)])
    assert log.ran == ["nbpr-d4-refit", "nbpr-d4"]
    (chosen,) = runner.run([make_run("NBPR", Selection(), 4)])
    assert refit["rounds"] == chosen["rounds"]
    assert len(refit["history"][0]["loss"]) == chosen["rounds"]
    assert refit["history"][0]["ndcg"] == []  # there is nothing left to validate on
    assert refit["validation"] == chosen["validation"]


@pytest.mark.slow
def test_a_pretrained_neupr_is_refitted_from_refitted_parts(make_runner: MakeRunner) -> None:
    runner, log = make_runner()
    runner.run([make_run("NeuPR", Selection(), 4, refit=True)])
    assert set(log.ran) == {
        "neupr-d4-refit", "neupr-d4", "nbpr-d4", "dncr-d4", "nbpr-d4-refit", "dncr-d4-refit",
    }  # fmt: skip


def test_a_grid_never_looks_at_test_items(make_runner: MakeRunner) -> None:
    runner, _ = make_runner()
    results = runner.run(TARGETS["tuning"](Selection(methods=("EASE",))))
    assert len(results) == 8
    assert all("metrics" not in r and "ranks" not in r for r in results)
    assert all(r["validation"]["ndcg"] > 0 for r in results)


def test_a_grid_measures_validation_items_over_all_items(
    make_runner: MakeRunner, root: Path, tmp_path: Path
) -> None:
    runs = TARGETS["tuning"](Selection(methods=("EASE",)))
    results = make_runner()[0].run(runs)
    split = load_dataset("ml-1m", root).split
    ranker = fit_ease(split.train, l2=250.0)
    expected = evaluate_full(ranker, split, split.validation, 0)
    assert results[0]["validation_full"] == {
        "hr": round(expected.hr, 5),
        "ndcg": round(expected.ndcg, 5),
        "users": int((split.validation >= 0).sum()),
    }

    # A result of before this figure was stored is measured again.
    store = ResultsStore(tmp_path / "results")
    store.write({k: v for k, v in results[0].items() if k != "validation_full"})
    runner, log = make_runner()
    assert runner.run(runs)[0]["validation_full"] == results[0]["validation_full"]
    assert log.ran == ["ease-grid1"]


def test_a_grid_has_its_own_numbers_of_factors() -> None:
    runs = TARGETS["tuning"](Selection(methods=("eALS",)))
    assert {run.factors for run in runs} == {8, 64}
    only = TARGETS["tuning"](Selection(methods=("eALS",), factors=(64,)))
    assert only == [run for run in runs if run.factors == 64]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["eALS", "iALS", "NeuMF", "BPR", "EASE by recency", "NBPR pooled", "NBPR history",
     "NBPR next-item", "NBPR attention", "next-item start", "spectral start", "ALS start",
     "PureSVD", "GF-CF", "Markov",
     "linear next-item", "NeuPR history", "NeuPR next-item", "NeuPR without pre-training",
     "NeuPR shared embeddings", "two towers", "two towers shared"],
)  # fmt: skip
def test_every_method_runs_once(make_runner: MakeRunner, method: str) -> None:
    if method == "iALS":
        pytest.importorskip("implicit", reason="the extra `research` is not installed")
    run = make_run(method, Selection(), 4)
    (result,) = make_runner()[0].run([run])
    assert result["metrics"]["sampled"]["hr"] > 0.1
    assert result["validation"]["ndcg"] > 0
    again, log = make_runner()
    assert again.run([run]) == [result]
    assert (log.ran, log.had) == ([], [short_name(run)])


def test_every_run_of_a_target_has_a_name_of_its_own() -> None:
    of_sequences = {
        "sequential": [*SEQUENCES], "temporal": [*TEMPORAL], "recall": [*ITEM_SETS]
    }  # fmt: skip
    for name in TARGETS:
        runs = [
            run
            for data in of_sequences.get(name, ["ml-1m"])
            for run in runs_of(name, Selection(data))
        ]
        names = [run.name for run in runs]
        assert len(set(names)) == len(names), name


def test_missing_or_too_small_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        load_dataset("ml-1m", tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no folder ml-1m"):
        load_dataset("ml-1m", tmp_path)
    with pytest.raises(ConfigError, match="unknown data set"):
        load_dataset("netflix", tmp_path)
    folder = tmp_path / "ml-1m"
    folder.mkdir()
    (folder / "ratings.csv").write_text("user,item,rating,timestamp\na,b,5,1\n")
    with pytest.raises(DataError, match="no item has 10 interactions"):
        load_dataset("ml-1m", tmp_path)


def test_a_user_with_every_item_seen_is_named(tmp_path: Path) -> None:
    rows = [f"u{u},i{i},5,{100 * u + i}" for u in range(12) for i in range(4 + (u == 3))]
    rows += [f"v{n},i4,5,{n}" for n in range(12)]
    folder = tmp_path / "ml-1m"
    folder.mkdir()
    (folder / "ratings.csv").write_text("user,item,rating,timestamp\n" + "\n".join(rows) + "\n")
    with pytest.raises(DataError, match="'u3', have interacted with all 5 items"):
        load_dataset("ml-1m", tmp_path)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown method 'SVD'"):
        table1(Selection(methods=("SVD",)))


COMMITTED = Path(__file__).parents[3] / "benchmarks" / "results"


def result(name: str, fingerprint: str = "a", data: str = "ml-1m", **more: Any) -> dict[str, Any]:
    configuration = RunSpec(data, name, 0, {}).configuration()
    return {
        "format": FORMAT,
        "cell": f"cells/{data}/{name}",
        "configuration": configuration,
        "data": {"name": data, "fingerprint": fingerprint},
        **more,
    }


def test_results_are_sorted_lines_that_are_replaced_by_name(tmp_path: Path) -> None:
    store = ResultsStore(tmp_path)
    for name in ("nbpr", "ease-by-recency", "ease"):
        store.write(result(name))
    store.write(result("nbpr", seconds=2))
    lines = (tmp_path / "cells" / "ml-1m.jsonl").read_text().splitlines()
    assert [json.loads(line)["cell"] for line in lines] == [
        *("cells/ml-1m/ease", "cells/ml-1m/ease-by-recency", "cells/ml-1m/nbpr"),
    ]
    assert store.read("cells/ml-1m/nbpr") == result("nbpr", seconds=2)
    assert store.read("cells/ml-1m/dncr") is None
    assert store.read("tuning/ml-1m/nbpr") is None
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["ml-1m.jsonl"]


def test_two_stores_add_to_one_file(tmp_path: Path) -> None:
    first, second = ResultsStore(tmp_path), ResultsStore(tmp_path)
    first.write(result("ease"))
    assert second.read("cells/ml-1m/ease") == result("ease")
    second.write(result("nbpr"))
    first.write(result("dncr"))
    assert len(list(second)) == 3


def test_a_result_of_another_configuration_is_none_of_a_run(tmp_path: Path) -> None:
    store = ResultsStore(tmp_path)
    store.write(result("ease"))
    assert store.result(RunSpec("ml-1m", "ease", 0, {})) is not None
    assert store.result(RunSpec("ml-1m", "ease", 0, {"l2": 1.0})) is None


def test_results_of_two_versions_of_a_data_set_are_not_mixed(tmp_path: Path) -> None:
    store = ResultsStore(tmp_path)
    store.write(result("ease", "a"))
    store.write(result("nbpr", "b"))
    assert store.result(RunSpec("ml-1m", "ease", 0, {})) is not None
    with pytest.raises(DataError, match=r"different versions of ml-1m \(a, b\)"):
        store.result(RunSpec("ml-1m", "nbpr", 0, {}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "ml-1m.jsonl line 2 is damaged: remove it"),
        ("[]", "ml-1m.jsonl line 2 is not a result of format ncr-cell/1"),
        ('{"format": "ncr-cell/9"}', "ml-1m.jsonl line 2 is not a result of format ncr-cell/1"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    store = ResultsStore(tmp_path)
    store.write(result("ease"))
    with (tmp_path / "cells" / "ml-1m.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=message):
        store.read("cells/ml-1m/ease")


def test_the_committed_results_are_sorted_complete_and_written_the_same_way() -> None:
    paths = sorted(COMMITTED.glob("*/*.jsonl"))
    assert len(paths) == 11
    for path in paths:
        results = [json.loads(line) for line in path.read_text().splitlines()]
        names = [r["cell"] for r in results]
        assert names == sorted(set(names))
        assert {name.rpartition("/")[0] for name in names} == {f"{path.parent.name}/{path.stem}"}
        assert path.read_text() == "".join(json.dumps(r) + "\n" for r in results)
        for stored in results:
            assert {"commit", "machine", "software", "seconds", "history", "at"} <= set(stored)


def test_ranks_survive_as_text() -> None:
    ranks = np.array([0, 9, -1, 3])
    assert ranks_as_text(ranks) == "09.3"
    assert ranks_from_text("09.3").tolist() == ranks.tolist()


@pytest.fixture(scope="module")
def results(quick: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    runner = Runner(write_movielens(folder / "data"), folder / "results", folder / "work")
    runner.run(table1(Selection(factors=(8,), methods=("ItemPop", "NBPR", "DNCR", "NeuPR"))))
    runner.run(paper(Selection(factors=(8,), methods=("NBPR by the paper",))))
    runner.run(best(Selection(factors=(8,), methods=("EASE",))))
    runner.run(figure5(Selection(factors=(8,), full=False))[:2])
    return folder / "results"


@pytest.fixture
def own_results(results: Path, tmp_path: Path) -> Path:
    """A copy of the results, to be changed."""
    return Path(shutil.copytree(results, tmp_path / "results"))


@pytest.mark.slow
def test_figures_are_those_of_the_results(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "results.md"
    write_page(results, page)
    text = page.read_text()
    stored = ResultsStore(results).read("cells/ml-1m/dncr-d8")
    assert stored is not None
    row = next(line for line in text.splitlines() if line.startswith("| DNCR | 8 |"))
    assert f"{stored['metrics']['sampled']['hr']:.4f}" in row
    assert f"{stored['metrics']['full']['ndcg']:.4f}" in row
    assert "| 0.5664 |" in row  # the paper's
    assert "The trainings took " in text
    by_the_paper = next(x for x in text.splitlines() if x.startswith("| NBPR by the paper | 8 |"))
    assert "| 0.5402 |" in by_the_paper  # the paper's NBPR
    assert "## Figure 3" in text
    assert "## Figure 5" in text
    assert "## Figure 6" not in text  # it was not run
    for plot in ("figure3.svg", "figure5.svg"):
        assert (page.parent / "plots" / plot).read_text().startswith("<?xml")


@pytest.mark.slow
def test_seconds_are_those_of_the_whole_training(own_results: Path, tmp_path: Path) -> None:
    store = ResultsStore(own_results)
    for method, seconds in (("nbpr", 100.0), ("dncr", 20.0), ("neupr", 3.0)):
        stored = deepcopy(store.read(f"cells/ml-1m/{method}-d8"))
        assert stored is not None
        stored["seconds"]["train"] = seconds
        store.write(stored)
    page = tmp_path / "page.md"
    write_page(own_results, page)
    row = next(line for line in page.read_text().splitlines() if line.startswith("| NeuPR | 8 |"))
    assert row.endswith("| 123 |")


@pytest.mark.slow
def test_the_same_results_give_the_same_page(results: Path, tmp_path: Path) -> None:
    pages = [tmp_path / name / "results.md" for name in ("one", "two")]
    for page in pages:
        write_page(results, page)
    first, second = ({f.name: f.read_bytes() for f in p.parent.rglob("*.*")} for p in pages)
    assert first == second


@pytest.mark.slow
def test_ours_are_tested_against_the_strongest_baseline(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    runner, _ = make_runner()
    runner.run([make_run(name, Selection(), 0) for name in ("ItemPop", "EASE")])
    found = runner.run([make_run(name, Selection(), 64) for name in ("NBPR", "spectral start")])
    page = tmp_path / "results.md"
    write_page(tmp_path / "results", page)
    text = page.read_text()
    row = next(x for x in text.splitlines() if x.startswith("| **NBPR, d = 64**"))
    assert " against EASE, p " in row
    # The sentence is there if, and only if, the table says the same.
    start, trained = (
        next(result for result in found if result["configuration"]["method"] == method)
        for method in ("spectral start", "NBPR")
    )
    kinds = ("sampled", "full")
    is_below = any(trained["metrics"][k]["ndcg"] < start["metrics"][k]["ndcg"] for k in kinds)
    assert ("- NBPR is below `spectral start`" in text) == is_below


@pytest.mark.slow
def test_an_untrained_start_is_a_rival_and_named_where_training_is_below_it(
    own_results: Path, tmp_path: Path
) -> None:
    store = ResultsStore(own_results)
    ease = store.read("cells/ml-1m/ease")
    assert ease is not None
    for method, figure in (("spectral start", 0.5), ("NBPR", 0.25)):
        run = make_run(method, Selection(), 64)
        stored = deepcopy(ease) | {"cell": run.name, "configuration": run.configuration()}
        stored["metrics"]["sampled"]["ndcg"] = stored["metrics"]["full"]["ndcg"] = figure
        store.write(stored)
    page = tmp_path / "page.md"
    write_page(own_results, page)
    text = page.read_text()
    assert "\n| spectral start, d = 64 |" in text
    figures = [f"{kind} NDCG@10 0.2500 against 0.5000" for kind in ("sampled", "full")]
    assert f"NBPR is below `spectral start` ({', '.join(figures)})." in text
    row = next(line for line in text.splitlines() if line.startswith("| **NBPR, d = 64** |"))
    assert row.count(" against spectral start, p ") == 2


@pytest.mark.slow
def test_the_page_says_whose_items_lists_show(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    write_page(results, page)
    stored = ResultsStore(results).read("cells/ml-1m/ease")
    assert stored is not None
    statistics = stored["metrics"]["lists"]
    figures = [statistics[name] for name in ("coverage", "gini", "novelty", "popularity_lift")]
    row = " | ".join(f"{figure:.2f}" for figure in figures)
    assert f"| ml-1m | EASE | {row} |" in page.read_text()
    assert "†" not in page.read_text()


@pytest.mark.slow
def test_the_page_says_if_lists_are_of_a_second_training(own_results: Path, tmp_path: Path) -> None:
    store = ResultsStore(own_results)
    stored = store.read("cells/ml-1m/ease")
    assert stored is not None
    again = stored["metrics"]["full"] | {"ndcg": stored["metrics"]["full"]["ndcg"] + 0.0012}
    store.write(stored | {"lists_of": {"full": again, "commit": "1234"}})
    page = tmp_path / "results.md"
    write_page(own_results, page)
    assert "| ml-1m | EASE † |" in page.read_text()
    assert "by at most 0.0012.\n" in page.read_text()


@pytest.mark.slow
def test_the_page_has_figures_by_gap_where_they_were_measured(
    own_results: Path, tmp_path: Path
) -> None:
    figures = {"hr@10": 0.25, "hr_error": 0.015, "ndcg@10": 0.125, "users": 1234}
    rows = [{"method": "EASE", "gap": gap, **figures} for gap in ("<= 1 h", "> 1 h")]
    (own_results / "gaps.json").write_text(json.dumps({"gaps-return-ml-1m": {"rows": rows}}))
    page = tmp_path / "results.md"
    write_page(own_results, page)
    cell = "0.250 ± 0.015 / 0.125"
    assert f"| EASE | {cell} | {cell} |" in page.read_text()
    assert "| <= 1 h, 1,234 users |" in page.read_text()


@pytest.mark.slow
def test_the_training_loss_is_plotted(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner, _ = make_runner()
    (run,) = loss(Selection(factors=(8,), methods=("NBPR",)))
    runner.run([run])
    page = tmp_path / "results.md"
    write_page(tmp_path / "results", page)
    assert "| NBPR | 100 |" in page.read_text()
    assert (tmp_path / "plots" / "loss.svg").exists()


@pytest.mark.slow
def test_a_folder_without_results(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no results"):
        write_page(tmp_path, tmp_path / "page.md")


@pytest.mark.slow
def test_a_result_of_other_settings_is_left_out(own_results: Path, tmp_path: Path) -> None:
    store = ResultsStore(own_results)
    stored = deepcopy(store.read("cells/ml-1m/dncr-d8"))
    assert stored is not None
    stored["configuration"]["settings"]["training"]["epochs"] = 77
    store.write(stored)
    write_page(own_results, tmp_path / "page.md")
    assert "| DNCR | 8 |" not in (tmp_path / "page.md").read_text()
    assert "| NBPR | 8 |" in (tmp_path / "page.md").read_text()
