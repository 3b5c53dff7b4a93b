"""Plots of stored results, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ncr_core.models.baselines.extras import require

Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Name → x and y."""


def plot(path: Path, panels: Mapping[str, Lines], x_label: str) -> None:
    """Draws one panel beside the other, each named by its y axis, and writes an SVG file.

    Raises ConfigError where matplotlib is not installed.
    """
    require("matplotlib", "research")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # The same results give the same bytes: no date, no random ids.
    mpl.rcParams["svg.hashsalt"] = "ncr"
    figure = Figure(figsize=(4.6 * len(panels), 3.4), layout="constrained")
    for axes, (label, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for name, (x, y) in lines.items():
            axes.plot(x, y, marker="o" if len(x) <= 20 else None, markersize=3, label=name)
        axes.set_xlabel(x_label)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
