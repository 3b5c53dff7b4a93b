"""What `make bench` leaves behind, and what benchmarks measure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks import harness
from benchmarks.fold_in_quality import ItemSetting
from ncr_core.data import build_interactions


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
    (file,) = own.iterdir()  # one process, and so one file
    assert sorted(json.loads(file.read_text())) == ["ingest", "ranker", "recommend"]
    assert not published.exists()


def test_a_new_item_is_asked_for_as_of_before_its_users_took_it_up() -> None:
    """By what they did later, and by other left-out items, nothing is measured."""
    rows = [(user, item, time) for user in "ab" for time, item in enumerate(["p", "X", "q", "Y"])]
    rows += [("c", item, time) for time, item in enumerate(["q", "p"])]
    every = build_interactions(rows)
    every = every.reindex(every.user_ids, ["p", "q", "X", "Y"])
    a, b, c = (np.array([every.user_ids.index(name)]) for name in "abc")
    setting = ItemSetting(every, np.array([2, 3]), [a, a], [b, b], [c, c])
    known = [[each.items.tolist() for each in own] for own in setting.histories(setting.askers)]
    assert known == [[[0]], [[0, 1]]]
    strangers = [own[0].items.tolist() for own in setting.histories(setting.strangers)]
    assert all(items in ([], [1]) for items in strangers)
