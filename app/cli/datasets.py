"""`ncr import` and `ncr download`, and data sets as `ncr train` and `ncr evaluate` read them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app.cli.common import bar, console, with_services

if TYPE_CHECKING:
    from app.transfer.import_data import ImportReport
    from app.wiring import Services
    from ncr_core.data import Interactions, Split
    from ncr_core.data.readers import BadRow, Columns
    from ncr_core.reproduction.datasets import PublishedSplit

Format = Literal["auto", "movielens", "csv", "jsonl", "parquet"]
FormatOption = Annotated[Format, typer.Option("--format", help="What the files are.")]
UserColumn = Annotated[str, typer.Option(help="The column that holds the user.")]
ItemColumn = Annotated[str, typer.Option(help="The column that holds the item.")]
RatingColumn = Annotated[str, typer.Option(help="The column that holds the rating, if any.")]
TimeColumn = Annotated[str, typer.Option(help="The column that holds the time, if any.")]

DataOption = Annotated[Path, typer.Option("--data", help="A file or a folder of interactions.")]
Protocol = Literal["p1", "p2"]

MAX_SHOWN = 10


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("import")(import_)
    app.command()(download)


def columns_of(user: str, item: str, rating: str, timestamp: str) -> Columns:
    """The names of the columns, for the readers."""
    from ncr_core.data.readers import Columns

    return Columns(user=user, item=item, rating=rating, timestamp=timestamp)


class BadRows:
    """Shows the first bad rows and counts them all."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, row: BadRow) -> None:
        """Counts a row, and shows it if it is one of the first."""
        self.count += 1
        if self.count <= MAX_SHOWN:
            where = f"{row.file} line {row.line}" if row.line else row.file
            console.print(f"{where}: {row.reason}", markup=False)

    def summary(self) -> str:
        """The number of bad rows, as text."""
        return f"{self.count:,} bad rows left out" if self.count else "no bad rows"


def import_(
    path: Annotated[Path, typer.Argument(help="A file or a folder.")],
    format_: FormatOption = "auto",
    user_column: UserColumn = "user",
    item_column: ItemColumn = "item",
    rating_column: RatingColumn = "rating",
    timestamp_column: TimeColumn = "timestamp",
) -> None:
    """Import a data set into the service's database. A second time it adds nothing."""
    columns = columns_of(user_column, item_column, rating_column, timestamp_column)
    report = with_services(lambda services: run_import(services, path, format_, columns))
    if not report.good and not report.items_known:
        console.print("[red]nothing was imported[/red]")
        raise typer.Exit(1)


async def run_import(
    services: Services, path: Path, format_: Format, columns: Columns
) -> ImportReport:
    """Imports with a progress bar and says what came of it."""
    from app.transfer.import_data import import_preferences, import_source
    from ncr_core.data.readers import open_source

    source = open_source(path, format_, columns)
    bad_rows = BadRows()
    with bar() as progress:
        task = progress.add_task(f"read {source.name}", total=source.total_bytes or None)
        storing = progress.add_task("store, by user", total=None)
        report = await import_source(
            services,
            source,
            on_bad=bad_rows,
            on_bytes=lambda n: progress.advance(task, n),
            on_stored=lambda n: progress.advance(storing, n),
        )
        progress.update(storing, completed=report.good, total=report.good)
        progress.update(task, completed=source.total_bytes or 1, total=source.total_bytes or 1)
    preferences = await import_preferences(services, path, on_bad=bad_rows)
    if bad_rows.count > MAX_SHOWN:
        console.print(f"… and {bad_rows.count - MAX_SHOWN:,} more bad rows")
    typer.echo(
        f"{report.accepted:,} events added, {report.duplicates:,} already there, "
        f"{report.items:,} items described, {bad_rows.summary()}"
    )
    if preferences.accepted or preferences.duplicates:
        typer.echo(
            f"{preferences.accepted:,} preferences added, {preferences.duplicates:,} already there"
        )
    return report


def download(
    name: Annotated[str, typer.Argument(help="ml-100k, ml-1m, ml-latest-small, ml-20m …")],
    directory: Annotated[Path, typer.Argument(help="Where to put the set's folder.")],
) -> None:
    """Download a MovieLens data set from GroupLens, its home."""
    from app.transfer.download import BASE_URL, find_dataset, is_downloaded
    from app.transfer.download import download as fetch

    dataset = find_dataset(name)
    console.print(dataset.licence, markup=False)
    if is_downloaded(name, directory):
        console.print(f"{directory / name} is there already")
        typer.echo(str(directory / name))
        return
    with bar() as progress:
        task = progress.add_task(f"download {name}", total=None)

        def show(done: int, total: int | None) -> None:
            progress.update(task, completed=done, total=total)

        base = os.environ.get("NCR_DOWNLOAD_BASE_URL", BASE_URL)
        path = fetch(name, directory, base_url=base, on_progress=show)
    typer.echo(str(path))


def read_split(
    path: Path, protocol: Protocol, format_: Format, columns: Columns, min_interactions: int
) -> tuple[Split, dict[str, Any]]:
    """Reads a data set and splits it by a protocol.

    Args:
        path: A file or a folder; for p2 the folder that holds ncf-ml-1m and ml-1m.
        protocol: p1: the latest item of each user is for test; p2: the published NCF split.
        format_: What the files are.
        columns: The names of their columns.
        min_interactions: Interactions that an item needs, by p1.

    Returns:
        The split, and a description of the data set for a checkpoint's manifest.

    Raises:
        DataError: The data cannot be read, or leaves nothing to rank for some users.
    """
    from ncr_core.data import leave_latest_out
    from ncr_core.reproduction.datasets import check_rankable

    if protocol == "p2":
        split: Split = read_published_split(path)
        min_interactions = 1
    else:
        split = leave_latest_out(read_interactions(path, format_, columns, min_interactions))
    check_rankable(split)
    return split, {
        "name": path.name,
        "protocol": "leave-latest-out" if protocol == "p1" else protocol,
        "min_interactions": min_interactions,
        **counts(split.all_seen),
    }


def read_published_split(root: Path) -> PublishedSplit:
    """The published NCF split under a folder. Raises DataError where the rows have other ids."""
    from ncr_core.reproduction.datasets import load_ncf

    split = load_ncf(root)
    console.print(described(split.all_seen))
    return split


def read_interactions(path: Path, format_: Format, columns: Columns, at_least: int) -> Interactions:
    """Reads a data set and drops items with fewer interactions; prints what is left."""
    from ncr_core.data import min_interactions
    from ncr_core.data.dataset import read_source as read
    from ncr_core.data.readers import open_source

    source = open_source(path, format_, columns)
    bad = BadRows()
    with bar() as progress:
        task = progress.add_task(f"read {source.name}", total=source.total_bytes or None)
        interactions = read(source, on_bad=bad, on_bytes=lambda n: progress.advance(task, n))
    filtered = min_interactions(interactions, at_least)
    console.print(f"{described(filtered)} ({bad.summary()})")
    return filtered


def described(interactions: Interactions) -> str:
    """The counts of a data set, as a sentence has them."""
    return (
        f"{interactions.n_users:,} users, {interactions.n_items:,} items, "
        f"{interactions.nnz:,} interactions"
    )


def counts(interactions: Interactions) -> dict[str, int]:
    """The counts of a data set, as a manifest has them."""
    return {
        "users": interactions.n_users,
        "items": interactions.n_items,
        "interactions": interactions.nnz,
    }
