"""`ncr reproduce`: the paper's tables and figures on real data, and what goes beyond them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.cli.common import EpochLines, console

if TYPE_CHECKING:
    from ncr_core.reproduction.suites import RunSpec

Target = Literal[
    "table1", "table2", "table3", "figure3", "figure4", "figure5", "figure6", "loss",
    "best", "forms", "sequential", "temporal", "tuning", "page",
]  # fmt: skip
SetName = Literal[
    "ml-1m", "ncf-ml-1m", "amusic-deepcf", "ml-1m-sasrec", "beauty-s3rec", "sports-s3rec",
    "ml-100k",
]  # fmt: skip


_DEFAULT_SETS = {"sequential": "ml-1m-sasrec", "temporal": "ml-100k"}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(reproduce)


def reproduce(
    target: Annotated[
        Target,
        typer.Argument(
            help="A table or figure of the paper; `best`: our models beside the strongest "
            "baselines; `sequential`: next items, by the protocol of SASRec; `temporal`: first "
            "items after one time for all; `forms`: eq. 7-9 and "
            "24; `tuning`: the grids; `page`: only the page."
        ),
    ],
    data: Annotated[
        Path | None, typer.Option("--data", help="The folder that holds the data sets' folders.")
    ] = None,
    data_set: Annotated[
        SetName | None,
        typer.Option(
            "--set",
            help="The data set: ml-1m, or of `sequential` ml-1m-sasrec and of `temporal` ml-100k.",
        ),
    ] = None,
    factors: Annotated[
        list[int] | None, typer.Option(help="Only this size; may be repeated.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Only this method; may be repeated.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full/--no-full", help="Rank over all unseen items too.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of training.")] = 0,
    results: Annotated[Path, typer.Option(help="Where results are kept.")] = Path(
        "benchmarks/results"
    ),
    work: Annotated[Path, typer.Option(help="Where trained models are kept.")] = Path(
        "var/reproduce"
    ),
    page: Annotated[
        Path | None, typer.Option(help="A page to make of all results, such as docs/results.md.")
    ] = None,
) -> None:
    """Reproduce a table or figure of the paper, with strong baselines and statistics beside it.

    Each result is a line of a JSON Lines file; what was run already with the same settings on the
    same data is not run again, so a run that was stopped goes on where it was.
    """
    from ncr_core.errors import ConfigError
    from ncr_core.reproduction.report import terminal_table, write_page
    from ncr_core.reproduction.runner import Runner, RunnerCallbacks
    from ncr_core.reproduction.suites import Selection, runs_of

    if target != "page":
        if data is None:
            raise ConfigError("--data is needed: the folder that holds ml-1m and the others")
        name = data_set or _DEFAULT_SETS.get(target, "ml-1m")
        selection = Selection(name, tuple(factors or ()), tuple(method or ()), full, seed)
        runs = runs_of(target, selection)
        if not runs:
            raise ConfigError(f"{target} has no run of these methods")
        with EpochLines() as lines:

            def on_start(run: RunSpec, number: int, count: int) -> None:
                position = f"[{number}/{count}] " if number else "first "
                console.print(f"{position}{run.name}")

            callbacks = RunnerCallbacks(
                started=on_start,
                progress=lambda progress: lines.show(vars(progress)),
                ranked=lines.users,
                skipped=lambda run: console.print(f"have {run.name}"),
            )
            finished = Runner(data, results, work, callbacks).run(runs)
        typer.echo(terminal_table(finished))
    if page is not None:
        write_page(results, page)
        typer.echo(f"wrote {page}")
    elif target == "page":
        raise ConfigError("--page is needed: the file to write")
