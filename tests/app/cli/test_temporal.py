"""`ncr train` and `ncr evaluate` with a split at one time for all users."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from app.cli import train
from ncr_core.data import load_interactions
from ncr_core.data.splits import temporal_split
from ncr_core.data.synthetic import synthetic_sittings
from ncr_core.errors import DataError


def _ncr(*arguments: str | Path) -> Result:
    app = typer.Typer()
    train.register(app)
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    rows = [f"{user},{item},{when:.0f}" for user, item, when in synthetic_sittings()]
    path = tmp_path / "ratings.csv"
    path.write_text("user,item,timestamp\n" + "\n".join(rows[:6000]) + "\n")
    return path


@pytest.mark.slow
def test_a_temporal_checkpoint_is_evaluated_by_the_gap(ratings: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    model = ["--model", "nbpr", "--users", "history", "--factors", "8", "--epochs", "1"]
    options = ["--protocol", "temporal", "--quantile", "0.7", "--min-interactions", "2"]
    trained = _ncr("train", "--data", ratings, "--out", out, *options, *model)
    assert trained.exit_code == 0, trained.output
    done = _ncr("evaluate", out, "--data", ratings, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    split = temporal_split(load_interactions(ratings).interactions, 0.7, 2)
    assert report["protocol"] == "temporal"
    assert report["gaps"]["all"]["users"] == int((split.test >= 0).sum()) > 20
    groups = [metrics for name, metrics in report["gaps"].items() if name != "all"]
    assert sum(metrics["users"] for metrics in groups) == report["gaps"]["all"]["users"]
    assert report["newcomers"] == split.newcomers
    other = _ncr("evaluate", out, "--data", ratings, "--protocol", "p1")
    assert isinstance(other.exception, DataError)
    assert "trained for protocol temporal" in str(other.exception)


def test_a_data_set_without_times_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("user,item\nu,a\nu,b\nv,a\nv,b\n")
    done = _ncr("train", "--data", path, "--out", tmp_path / "m", "--protocol", "temporal")
    assert isinstance(done.exception, DataError)
    assert "has no times" in str(done.exception)
