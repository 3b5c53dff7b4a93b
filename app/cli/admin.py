"""`ncr db`, `ncr jobs` and `ncr models`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from app.cli.common import console, print_table, quiet_settings, with_services

if TYPE_CHECKING:
    from app.services import Services

db = typer.Typer(help="The database's schema.", no_args_is_help=True, rich_markup_mode=None)
jobs = typer.Typer(help="Training jobs.", no_args_is_help=True, rich_markup_mode=None)
models = typer.Typer(help="Trained models.", no_args_is_help=True, rich_markup_mode=None)

Count = Annotated[int, typer.Option("-n", min=1, max=1000, help="How many at most.")]


@db.command()
def upgrade() -> None:
    """Bring the database's schema up to this version's."""
    from app.core.migrations import head_revision
    from app.core.migrations import upgrade as migrate

    migrate(quiet_settings().effective_database_url)
    console.print(f"the schema is at {head_revision()}")


@jobs.command("list")
def list_jobs(n: Count = 20) -> None:
    """Show jobs, newest first."""

    async def work(services: Services) -> list[dict[str, Any]]:
        return [row.as_json() for row in (await services.jobs.page(0, n))[0]]

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


def _standing(model: dict[str, Any]) -> str:
    if model["active"]:
        return "active, pinned" if model["pinned"] else "active"
    return "" if model["status"] == "published" else str(model["status"])


@models.command("list")
def list_models(n: Count = 20) -> None:
    """Show models, newest first."""

    async def work(services: Services) -> list[dict[str, Any]]:
        activation = await services.models.activation()
        rows, _ = await services.models.page(0, n)
        return [row.as_json(activation) for row in rows]

    table = Table("version", "", "model", "users", "items", "interactions", "NDCG@10", "created")
    for model in with_services(work):
        ndcg = model["metrics"].get("sampled", {}).get("ndcg@10")
        table.add_row(
            model["version"],
            _standing(model),
            f"{model['model']} {model['factors']}",
            f"{model['users']:,}",
            f"{model['items']:,}",
            f"{model['interactions']:,}",
            "" if ndcg is None else f"{ndcg:.4f}",
            model["created_at"],
        )
    print_table(table)


Version = Annotated[str, typer.Argument(help="The version to serve.")]
Force = Annotated[bool, typer.Option("--force", help="Also one that the gate has rejected.")]


@models.command()
def activate(version: Version, force: Force = False) -> None:
    """Serve this version; running servers swap within seconds."""
    with_services(lambda services: services.models.activate(version, force=force))
    console.print(f"active: {version}")


@models.command()
def pin(version: Version, force: Force = False) -> None:
    """Serve this version, and keep it whatever is trained, until it is unpinned."""
    with_services(lambda services: services.models.activate(version, force=force, pin=True))
    console.print(f"active and pinned: {version}")


@models.command()
def unpin() -> None:
    """Serve newly trained models again, from the next one on."""
    activation = with_services(lambda services: services.models.unpin())
    console.print(f"active: {activation.version}, not pinned")


@models.command()
def rollback() -> None:
    """Serve the version that was served before; again, and it is the one before that."""
    activation = with_services(lambda services: services.models.rollback())
    console.print(f"active: {activation.version}")


@models.command("history")
def list_history(n: Count = 20) -> None:
    """Show what was served when, and why, newest first."""

    async def work(services: Services) -> list[dict[str, Any]]:
        return [change.as_json() for change in (await services.models.history(n=n))[0]]

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
