"""`ncr import` and `ncr download`, and the options of all commands that read a data set."""

from __future__ import annotations

import getpass
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.cli.common import bar, console, with_services

if TYPE_CHECKING:
    from app.events.imports import ImportCounts
    from app.transfer.import_data import ImportReport
    from app.wiring import Services
    from ncr_core.data.readers import BadRow, Columns, DataSource

Format = Literal["auto", "movielens", "csv", "jsonl", "parquet"]
FormatOption = Annotated[Format, typer.Option("--format", help="The format of the files.")]
UserColumn = Annotated[str, typer.Option(help="The name of the user column.")]
ItemColumn = Annotated[str, typer.Option(help="The name of the item column.")]
RatingColumn = Annotated[str, typer.Option(help="The name of the rating column, if any.")]
TimeColumn = Annotated[str, typer.Option(help="The name of the timestamp column, if any.")]

DataOption = Annotated[Path, typer.Option("--data", help="A file or a folder of interactions.")]
Protocol = Literal["p1", "p2", "temporal"]

MAX_SHOWN = 10


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("import")(import_)
    app.command()(download)


class BadRows:
    """Shows the first bad rows and counts them all."""

    def __init__(self, counts: ImportCounts | None = None) -> None:
        self.count = 0
        self._counts = counts

    def __call__(self, row: BadRow) -> None:
        """Counts a row, and shows it if it is one of the first."""
        self.count += 1
        if self._counts is not None:
            self._counts.reject(row.reason)
        if self.count <= MAX_SHOWN:
            where = f"{row.file} line {row.line}" if row.line else row.file
            console.print(f"{where}: {row.reason}", markup=False)

    def summary(self) -> str:
        """The number of bad rows, as text."""
        return f"{self.count:,} bad rows left out" if self.count else "no bad rows"


def import_(
    path: Annotated[Path, typer.Argument(help="A file or a folder of a data set.")],
    format_: FormatOption = "auto",
    user_column: UserColumn = "user",
    item_column: ItemColumn = "item",
    rating_column: RatingColumn = "rating",
    timestamp_column: TimeColumn = "timestamp",
) -> None:
    """Import a data set into the database of the service. A repeated import adds nothing."""
    from ncr_core.data.readers import Columns

    columns = Columns(user_column, item_column, rating_column, timestamp_column)
    report = with_services(lambda services: run_import(services, path, format_, columns))
    if not report.good and not report.items_known:
        console.print("[red]the import added nothing[/red]")
        raise typer.Exit(1)


async def run_import(
    services: Services, path: Path, format_: Format, columns: Columns
) -> ImportReport:
    """Imports a data set with a progress bar, and prints the outcome."""
    from ncr_core.data.readers import open_source

    source = open_source(path, format_, columns)
    async with services.events.imports.record("command", path.name, _account()) as counts:
        return await _import(services, path, source, counts)


async def _import(
    services: Services, path: Path, source: DataSource, counts: ImportCounts
) -> ImportReport:
    from app.transfer.import_data import import_preferences, import_source, import_users

    bad_rows = BadRows(counts)
    with bar() as progress:
        task = progress.add_task(f"read {source.name}", total=source.total_bytes or None)
        storing = progress.add_task("store, by user", total=None)
        indexing = progress.add_task("index by item", total=None, visible=False)
        report = await import_source(
            services,
            source,
            on_bad=bad_rows,
            on_bytes=lambda n: progress.advance(task, n),
            on_stored=lambda n: progress.advance(storing, n),
            on_index=partial(progress.update, indexing, visible=True),
        )
        progress.update(storing, completed=report.good, total=report.good)
        progress.update(task, completed=source.total_bytes or 1, total=source.total_bytes or 1)
    counts.accepted, counts.duplicates = report.accepted, report.duplicates
    if report.conflicts:
        counts.reject("the event_id belongs to another event", report.conflicts)
    users = await import_users(services, path, on_bad=bad_rows)
    preferences = await import_preferences(services, path, on_bad=bad_rows)
    if bad_rows.count > MAX_SHOWN:
        console.print(f"… and {bad_rows.count - MAX_SHOWN:,} more bad rows")
    typer.echo(
        f"{report.accepted:,} events added, {report.duplicates:,} already there, "
        f"{report.items:,} items described, {bad_rows.summary()}"
    )
    if users:
        typer.echo(f"{users:,} users described")
    if preferences.accepted or preferences.duplicates:
        typer.echo(
            f"{preferences.accepted:,} preferences added, {preferences.duplicates:,} already there"
        )
    return report


def _account() -> str | None:
    """The account that runs the command; None if the account has no name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None


def download(
    name: Annotated[
        str,
        typer.Argument(help="The name of the data set: ml-100k, ml-1m, ml-latest-small, ml-20m …"),
    ],
    directory: Annotated[
        Path, typer.Argument(help="The folder in which to create the folder of the data set.")
    ],
) -> None:
    """Download a MovieLens data set from GroupLens."""
    from app.transfer.download import BASE_URL, find_dataset, is_downloaded
    from app.transfer.download import download as fetch

    dataset = find_dataset(name)
    console.print(dataset.licence, markup=False)
    if is_downloaded(name, directory):
        console.print(f"{directory / name} exists already")
        typer.echo(str(directory / name))
        return
    with bar() as progress:
        task = progress.add_task(f"download {name}", total=None)

        def show(done: int, total: int | None) -> None:
            progress.update(task, completed=done, total=total)

        base = os.environ.get("NCR_DOWNLOAD_BASE_URL", BASE_URL)
        path = fetch(name, directory, base_url=base, on_progress=show)
    typer.echo(str(path))
