"""The sections of docs/results.md on what validation items chose, and how test items differ."""

from __future__ import annotations

from collections.abc import Sequence

from ncr_core.evaluation.protocols import NEGATIVES
from ncr_core.recipes import merge_sections
from ncr_core.reproduction import suites
from ncr_core.reproduction.datasets import DATASETS
from ncr_core.reproduction.hyperparameters import CHOSEN_IN_FULL, GRIDS, settings_of, size_of
from ncr_core.reproduction.methods import with_defaults
from ncr_core.reproduction.results_store import ResultsStore, RunResult
from ncr_core.reproduction.suites import Selection
from ncr_core.reproduction.tables import (
    bold_figure,
    figure_text,
    label_of,
    make_section,
    make_table,
    results_of,
)


def reversals(by_section: Sequence[tuple[str, Sequence[RunResult]]]) -> str:
    """The section on pairs that validation and test items order differently; empty without any."""
    lines = []
    for name, results in by_section:
        if name.endswith(", refit"):  # the same validation as before the refit
            continue
        measured = [result for result in results if result.validation is not None]
        others = [result for result in measured if not result.is_ours]
        for ours in (result for result in measured if result.is_ours):
            for other in others:
                kind, ndcg = _validated(ours), ours.metric(_validated(ours), "ndcg")
                rival = other.metric(kind, "ndcg")
                if _validated(other) != kind or ndcg is None or rival is None:
                    continue
                ahead = (ours.validation or 0.0) - (other.validation or 0.0)
                if ahead * (ndcg - rival) < 0:
                    figures = [(ours.validation, other.validation), (ndcg, rival)]
                    texts = (" / ".join(map(figure_text, pair)) for pair in figures)
                    lines.append([name, label_of(ours), label_of(other), kind, *texts])
    note = (
        "In these pairs one of our models is ahead of a baseline on the validation items and "
        "behind it on the test items, or the reverse. NeuPR next-item is measured on fewer "
        "validation users than the baselines on Beauty and Sports, see "
        "[the protocol](#next-items-the-protocol-of-sasrec).\n"
    )
    head = ["data set", "ours", "baseline", "NDCG@10", "validation: ours / baseline"]
    return make_section(
        "Validation against test", [*head, "test: ours / baseline"], lines, note if lines else ""
    )


def _validated(result: RunResult) -> str:
    """The kind of ranking of a result's validation: sampled or full."""
    is_sampled = result.payload["validation"]["items"] <= NEGATIVES + 1
    return "sampled" if is_sampled else "full"


def grids(store: ResultsStore) -> str:
    """The section on the configurations that were tried; empty without results."""
    sections = []
    for data, method in ((d, m) for d in DATASETS for m in GRIDS.get(d, {})):
        results = results_of(store, suites.tuning(Selection(data, methods=(method,))))
        for factors in dict.fromkeys(result.factors for result in results):
            size = f", d = {factors}" if factors else ""
            grid = [result for result in results if result.factors == factors]
            sections.append(f"### {method}{size}, {data}\n\n{_grid(grid)}")
    if not sections:
        return ""
    note = (
        "The figures are NDCG@10 on the validation items, with one seed: sampled, and among all "
        "items that the user did not interact with. The best of each column is bold. A method has "
        "at most eight configurations with the same number of factors. The column *rounds* has the "
        "epoch or iteration that the same items chose, by sampled NDCG@10. The tables of this page "
        "have the settings that are marked as *used*, and rows of their own those marked as *full "
        "choice*. Without a mark, they have settings from other trials. Empty cells were not "
        "measured.\n\n"
    )
    return "## The grids\n\n" + note + "\n".join(sections)


def _grid(results: Sequence[RunResult]) -> str:
    """The table of the runs of one grid."""
    best = max((r.validation or 0.0) for r in results)
    best_full = max((r.full_validation or 0.0) for r in results)
    rows = [
        [
            _changes(r),
            _use(r),
            bold_figure(r.validation, r.validation == best),
            bold_figure(r.full_validation, r.full_validation == best_full),
            str(r.payload["rounds"] or ""),
            r.seconds_text,
        ]
        for r in results
    ]
    head = ["settings", "", "NDCG@10", "full NDCG@10", "rounds", "training, s"]
    return make_table(head, rows)


def _use(result: RunResult) -> str:
    """The mark of the settings that other tables of the page have."""
    configuration = result.payload["configuration"]
    data, method, factors = (configuration[name] for name in ("data", "method", "factors"))
    used = settings_of(method, factors, data)
    marks = {"used": used}
    if (method, data) in CHOSEN_IN_FULL and factors in (0, size_of(method, data)):
        marks["full choice"] = merge_sections(used, CHOSEN_IN_FULL[method, data])
    resolved = {mark: with_defaults(each, method, factors) for mark, each in marks.items()}
    return next((m for m, each in resolved.items() if each == result.payload["resolved"]), "")


def _changes(result: RunResult) -> str:
    """The settings of a grid's configuration, flat."""
    flat: dict[str, object] = {}
    for key, value in result.settings.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return ", ".join(f"{k} {v}" for k, v in flat.items() if k != "kind")
