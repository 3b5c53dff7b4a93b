"""The sections on next items: what they say follows from the stored results alone."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ncr_core.reproduction import next_item_report
from ncr_core.reproduction.report import write_page
from ncr_core.reproduction.results_store import ResultsStore, RunResult, ranks_as_text
from ncr_core.reproduction.runner import Runner, summary
from ncr_core.reproduction.suites import Selection, best, make_run, sequential, temporal
from ncr_core.reproduction.tables import Comparison
from tests.ncr_core.reproduction.conftest import Log, write_sequences, write_timed

pytestmark = pytest.mark.usefixtures("quick")
MakeRunner = Callable[[], tuple[Runner, Log]]


def test_the_page_has_the_sequential_tables_with_who_was_left_out(
    tmp_path: Path, make_runner: MakeRunner
) -> None:
    write_sequences(tmp_path / "data")
    selection = Selection("beauty-s3rec", methods=("ItemPop", "Markov", "NBPR next-item"))
    found = make_runner()[0].run(
        [replace(run, factors=run.factors and 256) for run in sequential(selection)]
    )
    write_page(tmp_path / "results", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "## Next items: the protocol of SASRec" in page
    assert "test items of 1 users" in page
    rows = {line.split(" | ")[0]: line.split(" | ") for line in page.splitlines()}
    popularity = found[0]["metrics"]["full"]
    n = popularity["users"]
    assert rows["| ItemPop"][4].startswith(f"{popularity['hr'] * n / (n + 1):.4f} / ")
    ours = rows["| **NBPR next-item, d = 256**"]
    assert "against ItemPop, p" in ours[5] or "against Markov, p" in ours[5]
    assert "| *eSASRec (the same)*" in rows
    ahead = max(found, key=lambda result: result["metrics"]["full"]["ndcg"])
    says_so = "- By NDCG@10 no model that we trained with the seed 0 is above" in page
    assert says_so == (ahead["configuration"]["method"] != "NBPR next-item")
    assert "| beauty-s3rec | Markov |" in page  # beyond accuracy


def test_the_page_has_the_figures_by_gap(tmp_path: Path, make_runner: MakeRunner) -> None:
    write_timed(tmp_path / "data")
    runs = temporal(Selection("ml-100k", methods=("ItemPop", "linear next-item")))
    results = make_runner()[0].run(runs)
    gaps = results[0]["metrics"]["gaps"]
    assert gaps["all"]["users"] == results[0]["data"]["test_users"]
    assert sum(g["users"] for name, g in gaps.items() if name != "all") == gaps["all"]["users"]
    assert gaps["all"]["hr"] == pytest.approx(results[0]["metrics"]["full"]["hr"])
    write_page(tmp_path / "results", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert f"| all, {gaps['all']['users']} users |" in page
    assert f"| ItemPop | {gaps['all']['hr']:.3f} / {gaps['all']['ndcg']:.3f} |" in page


def test_seeds_are_summed_up_by_mean_and_standard_deviation(
    tmp_path: Path, make_runner: MakeRunner
) -> None:
    (first,) = make_runner()[0].run([make_run("ItemPop", Selection(), 0)])
    store = ResultsStore(tmp_path / "results")

    for seed, hits in enumerate((2, 4)):
        run = make_run("NBPR next-item", Selection(seed=seed), 128, refit=False)
        ranks = np.array([0] * hits + [-1] * (10 - hits))
        result = deepcopy(first) | {"cell": run.name, "configuration": run.configuration()}
        result["metrics"] = {"sampled": summary([ranks]), "full": summary([ranks])}
        result["ranks"] = {"sampled": [ranks_as_text(ranks)], "full": ranks_as_text(ranks)}
        store.write(result)
        run = make_run("NBPR next-item", Selection("ml-1m-sasrec", seed=seed), 128, refit=False)
        result |= {"cell": run.name, "configuration": run.configuration()}
        result["metrics"] = {"full": summary([ranks])}
        result["ranks"] = {"full": ranks_as_text(ranks)}
        store.write(result)
    p1 = [make_run("NBPR next-item", Selection(seed=n), 128, refit=False).name for n in (0, 1)]
    compared = {p1[0]: [Comparison("EASE", 0.2, 1e-5)], p1[1]: [Comparison("EASE", -0.1, 0.03)]}
    text = next_item_report.seeds(store, compared)
    spread = "0.3000 ± 0.1414 (0.2000–0.4000)"
    assert "| P1 | NBPR next-item, d = 128 | 2 |" + f" {spread} |" * 4 in text
    assert "| -0.1000 against EASE, p = 0.0300 |" in text  # of the worse seed
    of_sequences = "| split of the SASRec papers | NBPR next-item, d = 128 | 2 |"
    assert f"{of_sequences} {spread} | {spread} |  |  |  |" in text
    # Of a figure that only one of the seeds has, there is no spread.
    run = make_run("NBPR next-item", Selection(seed=1), 128, refit=False)
    result |= {"cell": run.name, "configuration": run.configuration()}
    result["metrics"], result["ranks"] = {"sampled": summary([ranks])}, {"sampled": []}
    store.write(result)
    text = next_item_report.seeds(store, {})
    assert f"| P1 | NBPR next-item, d = 128 | 2 |  |  | {spread} | {spread} |" in text


def test_the_worst_seed_is_compared_with_the_best_baseline(
    tmp_path: Path, make_runner: MakeRunner
) -> None:
    (first,) = make_runner()[0].run([make_run("ItemPop", Selection(), 0)])
    store = ResultsStore(tmp_path / "results")

    def write(method: str, hits: int, seed: int = 0, kinds: tuple[str, ...] = ("full",)) -> None:
        (run,) = (
            r
            for r in best(Selection(seed=seed, methods=(method,)))
            if not r.refit and not r.variant
        )
        ranks = np.array([0] * hits + [-1] * (60 - hits))
        result = deepcopy(first) | {"cell": run.name, "configuration": run.configuration()}
        result["metrics"] = {kind: summary([ranks]) for kind in kinds}
        text = ranks_as_text(ranks)
        result["ranks"] = {kind: text if kind == "full" else [text] for kind in kinds}
        store.write(result)

    store.write(deepcopy(first) | {"metrics": {}, "ranks": {}})
    both = ("full", "sampled")
    write("linear next-item", 12, kinds=both)
    write("ALS start", 3, kinds=both)
    write("NeuMF", 9, kinds=both)
    for seed, hits in enumerate((30, 24)):
        write("NBPR next-item", hits, seed, both)
    for seed, hits in enumerate((6, 15)):
        write("NBPR from ALS", hits, seed, both)
    write_page(tmp_path / "results", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    _, _, section = page.partition("## Training seeds")
    rows = {line.split(" | ")[1]: line for line in section.splitlines() if line.startswith("| P1")}
    assert "| +0.2000 against linear next-item, p = " in rows["NBPR next-item, d = 128"]
    from_als = rows["NBPR from ALS, d = 64"]
    assert "+0.0500 against ALS start, p = " in from_als
    assert "-0.0500 against NeuMF, p = " in from_als
    assert "linear next-item" not in from_als
    # The seed of the other tables has one p, whatever the number of sections that have it.
    own = next(x for x in page.splitlines() if x.startswith("| **NBPR next-item, d = 128**"))
    assert "+0.3000 against linear next-item, p < 0.0001" in own


def test_what_is_beaten_in_less_time_is_not_the_best_so_far(tmp_path: Path) -> None:
    def result(
        method: str, value: float, gpu: str | None = None, threads: int = 1, **seconds: float
    ) -> RunResult:
        configuration = {"method": method, "factors": 0, "settings": {}, "refit": False}
        payload = {
            "cell": f"cells/ml-1m/{method}",
            "configuration": configuration,
            "seconds": seconds,
            "metrics": {"full": {"ndcg": value}},
            "machine": {"gpu": gpu, "threads": threads},
        }
        return RunResult(payload)

    part = result("part", 0.1, train=7.0, cpu=6.5)
    results = [
        result("slow", 0.2, threads=2, train=4.5),
        result("quick", 0.3, threads=2, train=5.0, cpu=1.0),
        replace(result("best", 0.4, train=30.0, cpu=13.5), parts=(part,)),
        result("on a GPU", 0.5, "a card", train=2.0, cpu=90.0),
    ]
    text = next_item_report.cost(results, tmp_path / "cost.svg")
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert lines == [
        "| quick | 1.0 | 0.3000 | yes |",
        "| on a GPU | 2.0 (GPU) | 0.5000 |  |",
        "| slow | at most 9.0 | 0.2000 |  |",
        "| best | 20.0 | 0.4000 | yes |",
    ]
    assert "quick" in (tmp_path / "cost.svg").read_text()
    assert next_item_report.cost([], tmp_path / "none.svg") == ""
