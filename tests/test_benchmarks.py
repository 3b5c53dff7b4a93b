"""What `make bench` leaves behind."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as bench
from benchmarks import harness


def test_make_bench_leaves_the_published_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those are of real data; these are of the demo's, or of whatever is at hand."""
    published, own = tmp_path / "results", tmp_path / "var" / "bench"
    modules: list[str] = []

    def run(command: list[str], *, env: dict[str, str], check: bool) -> None:
        modules.append(command[2])
        monkeypatch.setenv(harness.RESULTS_VARIABLE, env[harness.RESULTS_VARIABLE])
        harness.publish(command[2].rpartition(".")[2], ["n"], [[1]])

    monkeypatch.setattr(harness, "RESULTS", published)
    monkeypatch.setattr(bench, "RESULTS", own)
    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "checkpoint", str(tmp_path)])
    bench.main()
    assert modules == ["benchmarks.ranker", "benchmarks.recommend", "benchmarks.ingest"]
    assert sorted(path.stem for path in own.iterdir()) == ["ingest", "ranker", "recommend"]
    assert not published.exists()
