"""Markdown tables and the text of their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ncr_core.reproduction.results_store import ResultsStore, RunResult
from ncr_core.reproduction.suites import RunSpec


def results_of(store: ResultsStore, runs: Iterable[RunSpec]) -> list[RunResult]:
    """The stored results of the runs; runs without a result are left out."""
    return [result for run in runs if (result := store.result(run)) is not None]


def label_of(result: RunResult) -> str:
    """The method and its number of factors."""
    return f"{result.method}, d = {result.factors}" if result.factors else result.method


def row_label(result: RunResult) -> str:
    """The label of a row; bold for our models."""
    return f"**{label_of(result)}**" if result.is_ours else label_of(result)


def with_interval(result: RunResult, kind: str, name: str) -> str:
    """A metric and its interval as text; empty if the metric was not measured."""
    value, interval = result.metric(kind, name), result.interval(kind, name)
    if value is None or interval is None:
        return ""
    return f"{value:.4f} ({interval[0]:.3f}–{interval[1]:.3f})"


def figure_text(value: float | None) -> str:
    """A figure with four decimal places; empty for None."""
    return "" if value is None else f"{value:.4f}"


def make_section(title: str, head: Sequence[str], lines: list[list[str]], note: str = "") -> str:
    """A section with a title, a table and a note; empty without lines."""
    return f"## {title}\n\n{make_table(head, lines)}{note}" if lines else ""


def make_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table, followed by an empty line."""
    rows = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows) + "\n"
