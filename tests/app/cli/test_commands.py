"""Commands as functions: what they import, and options that follow from the configurations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_group
from typer.testing import CliRunner

from app.cli import train
from app.cli.train import with_hyperparameters
from ncr_core.errors import ConfigError
from ncr_core.recipes import recipe

LIGHT_MODULES = (
    *("cli.main", "cli.serve", "core.settings", "jobs.schemas", "transfer.import_data"),
    *("worker.worker", "wiring", "transfer.backup", "transfer.restore"),
)


@pytest.mark.slow
def test_commands_and_workers_load_no_torch_before_they_train_or_rank() -> None:
    """It takes seconds of a command, and two hundred megabytes of a worker."""
    imports = "; ".join(f"import app.{name}" for name in LIGHT_MODULES)
    script = f"{imports}; import sys; print(sorted({{'torch', 'numba'}} & sys.modules.keys()))"
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert process.stdout.strip() == "[]", process.stderr


OPTIONS = {
    *("--data", "--out", "--model", "--factors", "--layers", "--activation", "--init", "--epochs"),
    *("--negatives", "--batch-size", "--learning-rate", "--schedule", "--stopping", "--pretrain"),
    *("--no-pretrain", "--alpha", "--loss", "--l2", "--dropout", "--shared-negatives", "--start"),
    *("--attention-layers", "--tower-factors"),
    *("--users", "--window", "--item-bias", "--learn-weights", "--fixed-weights", "--seed"),
    *("--shared-embeddings", "--shared-towers", "--protocol", "--refit", "--min-interactions"),
    "--quantile",
    *("--device", "--format", "--user-column", "--item-column", "--rating-column"),
    *("--recipe", "--timestamp-column", "--ranks", "--tables"),
}


def test_the_options_are_the_contract() -> None:
    app = typer.Typer()
    train.register(app)
    params = get_group(app).commands["train"].params
    options = [option for param in params for option in (*param.opts, *param.secondary_opts)]
    assert set(options) - {"--install-completion", "--show-completion"} == OPTIONS


def test_only_what_was_given_reaches_the_recipe() -> None:
    app = typer.Typer()
    seen = {}

    @app.command()
    @with_hyperparameters
    def command(hyperparameters: dict[str, object]) -> None:
        seen.update(hyperparameters)

    options = ["--model", "nbpr", "--users", "history", "--window", "1", "--window", "0"]
    result = CliRunner().invoke(app, [*options, "--factors", "8", "--no-pretrain"])
    assert result.exit_code == 0, result.output
    assert seen == {
        "kind": "nbpr", "users": "history", "windows": (1, 0), "factors": 8, "pretrain": False,
    }  # fmt: skip
    assert recipe("default").with_(**seen).model.windows == (1, 0)


def test_sharded_tables_need_several_processes_and_a_model_that_has_them(tmp_path: Path) -> None:
    app = typer.Typer()
    train.register(app)
    command = ["--data", str(tmp_path), "--out", str(tmp_path / "new"), "--tables", "sharded"]
    for options, words in (
        ([], "give --ranks 2 or more"),
        (["--ranks", "2", "--model", "neupr"], "sharded is for nbpr and dncr"),
    ):
        result = CliRunner().invoke(app, ["train", *command, *options])
        assert isinstance(result.exception, ConfigError)
        assert words in str(result.exception)
