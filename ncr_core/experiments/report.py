"""Results as text: for the terminal after a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

HEAD = ("cell", "val NDCG@10", "HR@10", "NDCG@10", "full HR@10", "full NDCG@10", "train s")


def table_of(results: Iterable[Mapping[str, Any]]) -> str:
    """One line a result, columns aligned."""
    rows = [HEAD, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    metrics = result.get("metrics", {})
    figures = [
        metrics.get(kind, {}).get(name) for kind in ("sampled", "full") for name in ("hr", "ndcg")
    ]
    validation = (result["validation"] or {}).get("ndcg")
    return (
        result["cell"].partition("/")[2],
        figure(validation),
        *(figure(x) for x in figures),
        f"{result['seconds']['train']:.0f}",
    )


def figure(value: float | None) -> str:
    """Four places, nothing for None."""
    return "" if value is None else f"{value:.4f}"
