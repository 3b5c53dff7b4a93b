"""`ncr train` has an option for every hyper-parameter, and passes on those that were given."""

from __future__ import annotations

import typer
from typer.main import get_command
from typer.testing import CliRunner

from app.cli import train
from app.cli.train import with_hyperparameters
from ncr_core.recipes import recipe

OPTIONS = {
    *("--data", "--out", "--model", "--factors", "--layers", "--activation", "--init", "--epochs"),
    *("--negatives", "--batch-size", "--learning-rate", "--schedule", "--stopping", "--pretrain"),
    *("--no-pretrain", "--alpha", "--loss", "--l2", "--dropout", "--shared-negatives", "--start"),
    *("--users", "--window", "--item-bias", "--learn-weights", "--fixed-weights", "--seed"),
    *("--shared-embeddings", "--shared-towers", "--protocol", "--refit", "--min-interactions"),
    *("--device", "--format", "--user-column", "--item-column", "--rating-column"),
    "--timestamp-column",
}


def test_the_options_are_the_contract() -> None:
    app = typer.Typer()
    train.register(app)
    options = [o for param in get_command(app).params for o in (*param.opts, *param.secondary_opts)]
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
