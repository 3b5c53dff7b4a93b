"""`ncr reproduce`: the paper's tables and figures on real data, and further experiments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.cli.common import EpochLines, console

if TYPE_CHECKING:
    from ncr_core.reproduction.suites import RunSpec

Target = Literal[
    "table1", "table2", "table3", "figure3", "figure4", "figure5", "figure6", "loss",
    "best", "paper", "forms", "sequential", "temporal", "recall", "tuning", "page",
]  # fmt: skip
SetName = Literal[
    "ml-1m", "ncf-ml-1m", "amusic-deepcf", "ml-1m-sasrec", "beauty-s3rec", "sports-s3rec",
    "ml-100k", "gowalla-lightgcn",
]  # fmt: skip


_DEFAULT_SETS = {
    "sequential": "ml-1m-sasrec",
    "temporal": "ml-100k",
    "recall": "gowalla-lightgcn",
}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(reproduce)


def reproduce(
    target: Annotated[
        Target,
        typer.Argument(
            help="A table or figure of the paper, or one of these. best: our models and the "
            "strongest baselines. paper: the paper's models with its own settings. sequential: "
            "next items by the protocol of SASRec. temporal: the first item of each user after one "
            "time for all users. recall: sets of test items without an order. forms: eq. 7-9 and "
            "24. tuning: the grids. page: only the page of results."
        ),
    ],
    data: Annotated[
        Path | None, typer.Option("--data", help="The folder with a folder for each data set.")
    ] = None,
    data_set: Annotated[
        SetName | None,
        typer.Option(
            "--set",
            help="The data set. Default: ml-1m, for sequential ml-1m-sasrec, for temporal ml-100k, "
            "for recall gowalla-lightgcn.",
        ),
    ] = None,
    factors: Annotated[
        list[int] | None,
        typer.Option(help="Run only this number of factors. The option may repeat."),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Run only this method. The option may repeat.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full/--no-full", help="Also rank over all unseen items.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the training.")] = 0,
    results: Annotated[Path, typer.Option(help="The folder for results.")] = Path(
        "benchmarks/results"
    ),
    work: Annotated[Path, typer.Option(help="The folder for trained models.")] = Path(
        "var/reproduce"
    ),
    page: Annotated[
        Path | None, typer.Option(help="The page of all results to write, such as docs/results.md.")
    ] = None,
) -> None:
    """Reproduce a table or figure of the paper, with strong baselines and statistics.

    Each result is a line of a JSON Lines file. A repeated command skips finished runs with the same
    settings and data, and so continues a stopped command.
    """
    from ncr_core.errors import ConfigError
    from ncr_core.reproduction.report import terminal_table, write_page
    from ncr_core.reproduction.runner import Runner, RunnerCallbacks
    from ncr_core.reproduction.suites import Selection, runs_of

    if target != "page":
        if data is None:
            raise ConfigError("--data is required: the folder of the data sets, such as ml-1m")
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
        raise ConfigError("--page is required: the file to write")
