"""`ncr db`, `ncr jobs` and `ncr models`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from app.cli.common import console, print_table, quiet_settings, with_services

if TYPE_CHECKING:
    from app.wiring import Services

db = typer.Typer(help="Manage the database's schema.", no_args_is_help=True, rich_markup_mode=None)
jobs = typer.Typer(help="Show training jobs.", no_args_is_help=True, rich_markup_mode=None)
models = typer.Typer(help="Manage trained models.", no_args_is_help=True, rich_markup_mode=None)

Count = Annotated[int, typer.Option("-n", min=1, max=1000, help="Maximum number of rows.")]


@db.command()
def upgrade() -> None:
    """Migrate the database's schema to this version."""
    from app.core.migrations import head_revision
    from app.core.migrations import upgrade as migrate

    migrate(quiet_settings().effective_database_url)
    console.print(f"the schema is at {head_revision()}")


@jobs.command("list")
def list_jobs(n: Count = 20) -> None:
    """Show jobs, newest first."""
    from app.jobs.schemas import JobOut

    async def work(services: Services) -> list[dict[str, Any]]:
        jobs, _ = await services.jobs.page(0, n)
        return [JobOut.model_validate(job).model_dump() for job in jobs]

    table = Table("job", "status", "model", "progress", "created", "version or error")
    for job in with_services(work):
        progress = job["progress"] or {}
        where = (
            f"{progress.get('phase', '')} {progress.get('epoch', '')}/{progress.get('epochs', '')}"
        )
        table.add_row(
            job["job_id"],
            job["status"],
            f"{job['params'].get('model')} {job['params'].get('factors')}",
            where if job["status"] == "running" and progress else "",
            job["created_at"],
            job["model_version"] or job["error"] or "",
        )
    print_table(table)


def _status(model: dict[str, Any]) -> str:
    if model["active"]:
        return "active, pinned" if model["pinned"] else "active"
    return "" if model["status"] == "published" else str(model["status"])


@models.command("list")
def list_models(n: Count = 20) -> None:
    """Show models, newest first."""

    async def work(services: Services) -> list[dict[str, Any]]:
        from app.registry.schemas import ModelOut

        activation = await services.models.activation()
        rows, _ = await services.models.page(0, n)
        return [ModelOut.from_row(row, activation).model_dump() for row in rows]

    table = Table("version", "", "model", "users", "items", "interactions", "NDCG@10", "created")
    for model in with_services(work):
        ndcg = model["metrics"].get("sampled", {}).get("ndcg@10")
        table.add_row(
            model["version"],
            _status(model),
            f"{model['model']} {model['factors']}",
            f"{model['users']:,}",
            f"{model['items']:,}",
            f"{model['interactions']:,}",
            "" if ndcg is None else f"{ndcg:.4f}",
            model["created_at"],
        )
    print_table(table)


Version = Annotated[str, typer.Argument(help="The version to serve.")]
Force = Annotated[
    bool, typer.Option("--force", help="Also serve a version that the gate rejected.")
]


@models.command()
def activate(version: Version, force: Force = False) -> None:
    """Serve a version. Running servers switch within seconds."""
    with_services(lambda services: services.models.activate(version, force=force))
    console.print(f"active: {version}")


@models.command()
def pin(version: Version, force: Force = False) -> None:
    """Serve a version until it is unpinned, whatever is trained."""
    with_services(lambda services: services.models.activate(version, force=force, pin=True))
    console.print(f"active and pinned: {version}")


@models.command()
def unpin() -> None:
    """Serve newly trained models again, beginning with the next one."""
    activation = with_services(lambda services: services.models.unpin())
    console.print(f"active: {activation.version}, not pinned")


@models.command()
def rollback() -> None:
    """Serve the version that was served before. Repeat it to go further back."""
    activation = with_services(lambda services: services.models.rollback())
    console.print(f"active: {activation.version}")


@models.command("history")
def list_history(n: Count = 20) -> None:
    """Show which versions were served when and why, newest first."""

    async def work(services: Services) -> list[dict[str, Any]]:
        from app.registry.schemas import ActivationOut

        changes, _ = await services.models.history(n=n)
        return [ActivationOut.from_change(change).model_dump() for change in changes]

    table = Table("at", "version", "reason", "before", "detail")
    for change in with_services(work):
        table.add_row(
            change["at"],
            change["version"] or "",
            change["reason"],
            change["previous"] or "",
            ", ".join(f"{name}: {value}" for name, value in (change["detail"] or {}).items()),
        )
    print_table(table)
