"""`ncr backup`, `ncr restore`, `ncr export` and `ncr snapshot`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TaskID

from app.cli.common import bar, console, with_services

if TYPE_CHECKING:
    from app.transfer.backup import BackupReport
    from app.transfer.export import ExportReport
    from app.transfer.restore import RestoreReport
    from app.wiring import Services
    from ncr_core.data.snapshot import SnapshotManifest

MAX_SHOWN = 10


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(backup)
    app.command()(restore)
    app.command()(export)
    app.command()(snapshot)


class _Steps:
    """A progress bar for each step, shown from the first step on."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._progress = bar()
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Steps:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tasks:
            self._progress.stop()

    def __call__(self, step: str, done: int, total: int) -> None:
        if not self._tasks:
            self._progress.start()
        if step not in self._tasks:
            self._tasks[step] = self._progress.add_task(f"{self._verb} {step}", total=total)
        self._progress.update(self._tasks[step], completed=done, total=total)


def backup(
    file: Annotated[Path, typer.Argument(help="The file to create. The file must not exist yet.")],
) -> None:
    """Write the database and all models to one file. Servers may stay running."""

    async def work(services: Services) -> BackupReport:
        from app.transfer.backup import write_backup

        with _Steps("back up") as steps:
            return await write_backup(services, file, steps)

    from app.transfer.archive import refuse_existing

    refuse_existing(file)
    report = with_services(work, reads=True)
    if report.missing:
        console.print(f"models without a valid checkpoint for the backup: {_some(report.missing)}")
    typer.echo(
        f"{file}: {report.rows['events']:,} events, {report.rows['users']:,} users, "
        f"{report.rows['items']:,} items, {report.models:,} models, {report.bytes:,} bytes"
    )


def restore(
    file: Annotated[Path, typer.Argument(help="The file that `ncr backup` wrote.")],
) -> None:
    """Restore a backup into an empty service. The command first verifies the backup."""
    from app.transfer.archive import Backup
    from app.transfer.restore import check_fits, restore_backup

    with Backup(file) as opened:
        check_fits(opened)
        with _Steps("verify") as steps:
            opened.verify(lambda done: steps(file.name, done, opened.total_bytes))

        async def work(services: Services) -> RestoreReport:
            with _Steps("restore") as steps:
                return await restore_backup(services, opened, steps)

        report = with_services(work)
        missing = opened.manifest.missing_models
    if missing:
        console.print(f"models whose checkpoints are not in the backup: {_some(missing)}")
    if report.ended_jobs:
        console.print(f"{report.ended_jobs:,} running jobs are marked as failed")
    typer.echo(
        f"{report.rows['events']:,} events, {report.rows['users']:,} users, "
        f"{report.rows['items']:,} items and {report.models:,} models restored"
    )


def export(
    directory: Annotated[Path, typer.Argument(help="The folder to write to.")],
    user: Annotated[str | None, typer.Option(help="Export only the data of this user.")] = None,
) -> None:
    """Export events, items, users and preferences as files for `ncr import`."""

    async def work(services: Services) -> ExportReport:
        from app.transfer.export import export as write_export

        with _Steps("export") as steps:
            return await write_export(services, directory, user=user, report=steps)

    report = with_services(work, reads=True)
    items = "" if user is not None else f" and {report.items:,} items"
    preferences = f", {report.preferences:,} preferences" if report.preferences else ""
    users = f", {report.users:,} described users" if report.users else ""
    shown = f", {report.shown:,} shown items" if report.shown else ""
    typer.echo(f"{directory}: {report.events:,} events{items}{preferences}{users}{shown}")


def snapshot(
    address: Annotated[
        str, typer.Argument(help="The folder to write, or a URL in object storage such as s3://….")
    ],
    parts: Annotated[
        int | None,
        typer.Option(
            min=1, max=4096, help="The number of parts. Default: by the size of the data."
        ),
    ] = None,
) -> None:
    """Write the training data as Parquet parts, for `ncr train` on other machines."""

    async def work(services: Services) -> SnapshotManifest:
        from app.transfer.snapshot import write_snapshot

        with _Steps("snapshot:") as steps:
            return await asyncio.to_thread(
                write_snapshot, services.settings, address, parts=parts, report=steps
            )

    manifest = with_services(work, reads=True)
    size = sum(part.bytes for part in manifest.parts)
    typer.echo(
        f"{address}: {manifest.n_interactions:,} interactions, {manifest.n_users:,} users, "
        f"{manifest.n_items:,} items, {len(manifest.parts):,} parts, {size:,} bytes"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more
