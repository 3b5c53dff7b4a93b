"""The settings of the methods follow from the stored grids, and the page says how."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncr_core.recipes import merge_sections
from ncr_core.reproduction.hyperparameters import (
    CHOSEN_IN_FULL,
    GRIDS,
    settings_of,
    size_of,
)
from ncr_core.reproduction.methods import with_defaults
from ncr_core.reproduction.report import write_page
from ncr_core.reproduction.results_store import ResultsStore
from ncr_core.reproduction.suites import Selection, best, tuning
from ncr_core.reproduction.tables import results_of

STORED = ResultsStore(Path(__file__).parents[3] / "benchmarks" / "results")
CHOSEN = [
    (data, method, size)
    for data, grids in GRIDS.items()
    for method, of_method in grids.items()
    for size in of_method
    if size in (0, size_of(method, data))
]
MORE = 1.01  # full NDCG@10 of the settings that it chose, beside that of the others


@pytest.mark.parametrize(("data", "method", "size"), CHOSEN)
def test_a_method_also_has_the_best_settings_of_its_grid_in_full(
    data: str, method: str, size: int
) -> None:
    grid = results_of(STORED, tuning(Selection(data, (size,), (method,))))
    assert len(grid) == len(GRIDS[data][method][size])
    by_full = [(r.full_validation, r.payload["resolved"]) for r in grid if r.full_validation]
    assert len(by_full) == len(grid)
    highest = max(full for full, _ in by_full)
    used = settings_of(method, size, data)
    chosen = merge_sections(used, CHOSEN_IN_FULL.get((method, data), {}))
    resolved = [with_defaults(each, method, size) for each in (used, chosen)]
    of_used, of_chosen = (
        next(full for full, settings in by_full if settings == each) for each in resolved
    )
    if used == chosen:
        assert highest <= MORE * of_used
    else:
        assert of_chosen == highest > MORE * of_used


@pytest.mark.slow
def test_a_grid_names_the_used_and_the_best_settings(tmp_path: Path) -> None:
    results = results_of(STORED, tuning(Selection(methods=("EASE",))))
    assert [result.settings["l2"] for result in results][:2] == [250.0, 500.0]
    write_page(STORED.folder, tmp_path / "page.md")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (tmp_path / "page.md").read_text().split("### EASE, ml-1m")[1].splitlines()
        if line.startswith("| l2")
    ][: len(results)]
    marks = {row[1]: row[0] for row in rows if row[1]}
    in_full = CHOSEN_IN_FULL["EASE", "ml-1m"]["l2"]
    assert marks == {"used": f"l2 {settings_of('EASE', 0)['l2']}", "full choice": f"l2 {in_full}"}
    for column, figures in (
        (2, [result.validation for result in results]),
        (3, [result.full_validation for result in results]),
    ):
        bold = [row[column] for row in rows if row[column].startswith("**")]
        assert bold == [f"**{max(x for x in figures if x is not None):.4f}**"]


def test_a_baseline_chosen_in_full_has_rows_of_its_own() -> None:
    results = results_of(STORED, best(Selection(methods=("EASE",))))
    assert [result.label for result in results] == ["EASE", "EASE", *["EASE (full choice)"] * 2]
    assert [result.refit for result in results] == [False, True, False, True]
    of_full = results[2].settings["l2"]
    assert of_full == CHOSEN_IN_FULL["EASE", "ml-1m"]["l2"] != settings_of("EASE", 0)["l2"]
