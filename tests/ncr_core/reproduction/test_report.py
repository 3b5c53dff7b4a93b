"""The page says what the results say, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest

from ncr_core.errors import DataError
from ncr_core.reproduction.report import write_page
from ncr_core.reproduction.results_store import ResultsStore
from ncr_core.reproduction.runner import Runner
from ncr_core.reproduction.suites import Selection, best, figure5, loss, make_run, table1
from tests.ncr_core.reproduction.conftest import Log, write_movielens

MakeRunner = Callable[[], tuple[Runner, Log]]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]


@pytest.fixture(scope="module")
def results(quick: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    runner = Runner(write_movielens(folder / "data"), folder / "results", folder / "work")
    runner.run(table1(Selection(factors=(8,), methods=("ItemPop", "NBPR", "DNCR", "NeuPR"))))
    runner.run(best(Selection(factors=(8,), methods=("EASE",))))
    runner.run(figure5(Selection(factors=(8,), full=False))[:2])
    return folder / "results"


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
    assert "## Figure 3" in text
    assert "## Figure 5" in text
    assert "## Figure 6" not in text  # it was not run
    for plot in ("figure3.svg", "figure5.svg"):
        assert (page.parent / "plots" / plot).read_text().startswith("<?xml")


def test_the_same_results_give_the_same_page(results: Path, tmp_path: Path) -> None:
    pages = [tmp_path / name / "results.md" for name in ("one", "two")]
    for page in pages:
        write_page(results, page)
    first, second = ({f.name: f.read_bytes() for f in p.parent.rglob("*.*")} for p in pages)
    assert first == second


def test_ours_are_tested_against_the_strongest_baseline(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    runner, _ = make_runner()
    runner.run([make_run(name, Selection(), 0) for name in ("ItemPop", "EASE")])
    runner.run([make_run("NBPR", Selection(), 64)])
    page = tmp_path / "results.md"
    write_page(tmp_path / "results", page)
    row = next(x for x in page.read_text().splitlines() if x.startswith("| **NBPR, d = 64**"))
    assert " to EASE, p " in row


def test_the_training_loss_is_plotted(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner, _ = make_runner()
    (run,) = loss(Selection(factors=(8,), methods=("NBPR",)))
    runner.run([run])
    page = tmp_path / "results.md"
    write_page(tmp_path / "results", page)
    assert "| NBPR | 100 |" in page.read_text()
    assert (tmp_path / "plots" / "loss.svg").exists()


def test_a_folder_without_results(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no results"):
        write_page(tmp_path, tmp_path / "page.md")


def test_a_result_of_other_settings_is_left_out(results: Path, tmp_path: Path) -> None:
    copy = tmp_path / "results"
    shutil.copytree(results, copy)
    store = ResultsStore(copy)
    stored = deepcopy(store.read("cells/ml-1m/dncr-d8"))
    assert stored is not None
    stored["configuration"]["settings"]["training"]["epochs"] = 77
    store.write(stored)
    write_page(copy, tmp_path / "page.md")
    assert "| DNCR | 8 |" not in (tmp_path / "page.md").read_text()
    assert "| NBPR | 8 |" in (tmp_path / "page.md").read_text()
