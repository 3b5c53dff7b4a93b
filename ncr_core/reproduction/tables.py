"""Markdown tables and the text of their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ncr_core.reproduction.results_store import ResultsStore, RunResult
from ncr_core.reproduction.suites import RunSpec


@dataclass(frozen=True)
class Comparison:
    """The comparison of one of our models with a baseline."""

    rival: str
    difference: float
    """The mean over users of the NDCG@10 of our model minus that of the baseline."""
    p: float
    """The p of the paired t-test, adjusted for all comparisons of the page."""

    @property
    def p_text(self) -> str:
        """The p as text, four decimal places at most."""
        return "p < 0.0001" if self.p < 1e-4 else f"p = {self.p:.4f}"

    def text(self) -> str:
        """The text of the comparison for a table cell."""
        return f"{self.difference:+.4f} against {self.rival}, {self.p_text}"


def results_of(store: ResultsStore, runs: Iterable[RunSpec]) -> list[RunResult]:
    """The stored results of the runs; runs without a result are left out."""
    return [result for run in runs if (result := store.result(run)) is not None]


def label_of(result: RunResult) -> str:
    """The method and its number of factors."""
    return f"{result.label}, d = {result.factors}" if result.factors else result.label


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


def bold_figure(value: float | None, bold: bool) -> str:
    """A figure as `figure_text` gives it, bold or not."""
    text = figure_text(value)
    return f"**{text}**" if bold else text


def make_section(title: str, head: Sequence[str], lines: list[list[str]], note: str = "") -> str:
    """A section with a title, a table and a note; empty without lines."""
    return f"## {title}\n\n{make_table(head, lines)}{note}" if lines else ""


def make_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table, followed by an empty line."""
    rows = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows) + "\n"
