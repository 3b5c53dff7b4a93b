"""The command `ncr`. An error is one line on standard error and a non-zero exit status."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from app import __version__
from app.cli import (
    admin,
    datasets,
    demo,
    reproduce,
    serve,
    train,
    transfer,
)

app = typer.Typer(
    name="ncr",
    help="Recommendations from neural collaborative ranking.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for module in (demo, serve, datasets, transfer, train, reproduce):
    module.register(app)
app.add_typer(admin.db, name="db")
app.add_typer(admin.jobs, name="jobs")
app.add_typer(admin.models, name="models")
app.add_typer(admin.trials, name="trials")
app.add_typer(admin.keys, name="keys")


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Recommendations from neural collaborative ranking."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run a command. An error that a user can fix becomes one line."""
    # `--version` needs no command.
    if sys.argv[1:] == ["--version"]:
        typer.echo(__version__)
        return
    try:
        app()
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped\n")
        sys.exit(130)
    except Exception as error:
        sys.stderr.write(f"ncr: {_one_line(error)}\n")
        sys.exit(1)


def _one_line(error: Exception) -> str:
    from sqlalchemy.exc import SQLAlchemyError

    from app.core.errors import AppError, SettingsError
    from ncr_core.errors import NcrError

    if isinstance(error, AppError):
        return error.detail
    if isinstance(error, NcrError | SettingsError):
        return str(error)
    if isinstance(error, SQLAlchemyError):
        reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
        return f"the database: {reason}"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    raise error
