"""Commands of operators: `ncr db`, `jobs`, `models`, `trials` and `keys`."""

from __future__ import annotations

import asyncio
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from app.cli.common import console, print_table, quiet_settings, with_services
from app.core.access import Role
from ncr_core.errors import NcrError

if TYPE_CHECKING:
    from app.keys.schemas import KeyRow
    from app.wiring import Services

db = typer.Typer(
    help="Manage the schema of the database.", no_args_is_help=True, rich_markup_mode=None
)
jobs = typer.Typer(help="List jobs and fetch exports.", no_args_is_help=True, rich_markup_mode=None)
models = typer.Typer(help="Manage model versions.", no_args_is_help=True, rich_markup_mode=None)
trials = typer.Typer(
    help="Compare a second version, or other settings, with the active version.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
keys = typer.Typer(help="Manage API keys.", no_args_is_help=True, rich_markup_mode=None)

COMMAND = "ncr"
"""The actor of commands in the history of activations, in place of a key's id."""

Count = Annotated[int, typer.Option("-n", min=1, max=1000, help="The maximum number of rows.")]


@db.command()
def upgrade() -> None:
    """Migrate the database to the schema of this version. Servers may stay running."""
    import asyncio

    from app.core.migrations import upgrade as migrate
    from app.events.item_index import mend_at

    url = quiet_settings().effective_database_url
    console.print(f"the schema is at {migrate(url)}")
    if asyncio.run(mend_at(url)):
        console.print("the missing index of events by item is built")


@db.command()
def downgrade(
    revision: Annotated[
        str | None,
        typer.Argument(help="The earlier schema. Default: the schema before the current one."),
    ] = None,
) -> None:
    """Return the database to an earlier schema. Data that only the newer schema holds is deleted.

    First stop all servers and workers of this version.
    """
    from app.core.migrations import downgrade as migrate

    console.print(f"the schema is at {migrate(quiet_settings().effective_database_url, revision)}")


@jobs.command("list")
def list_jobs(n: Count = 20) -> None:
    """List jobs, newest first."""
    from app.jobs.schemas import JobOut

    async def work(services: Services) -> list[dict[str, Any]]:
        jobs, _ = await services.jobs.page(None, n)
        return [JobOut.model_validate(job).model_dump() for job in jobs]

    table = Table("job", "status", "model", "progress", "created", "version or error")
    for job in with_services(work, reads=True):
        progress = job["progress"] or {}
        where = (
            f"{progress.get('phase', '')} {progress.get('epoch', '')}/{progress.get('epochs', '')}"
        )
        table.add_row(
            job["job_id"],
            job["status"],
            _content(job),
            where if job["status"] == "running" and progress else "",
            job["created_at"],
            job["model_version"] or job["error"] or "",
        )
    print_table(table)


@jobs.command()
def download(
    job: Annotated[str, typer.Argument(help="The id of an export job.")],
    folder: Annotated[
        Path, typer.Argument(help="The folder to create. The folder must not exist yet.")
    ],
) -> None:
    """Fetch the files of an export from the checkpoint store, and verify them."""
    from app.registry.exports import ExportManifest, fetch_export
    from app.registry.service import open_export_store

    async def work(services: Services) -> ExportManifest:
        row = await services.jobs.get(job)
        if row.kind != "export" or row.status != "succeeded":
            raise NcrError(f"{job} is not a finished export: its status is {row.status}")
        store = open_export_store(services.settings)
        return await asyncio.to_thread(fetch_export, store, job, folder)

    try:
        manifest = with_services(work, reads=True)
    except FileExistsError:
        raise NcrError(f"{folder} exists already; the command overwrites nothing") from None
    for name, file in manifest.files.items():
        typer.echo(f"{folder / name}: {file.rows:,} rows, {file.bytes:,} bytes")


def _content(job: dict[str, Any]) -> str:
    """The content of a job: the model of a training, or the kind of another job."""
    if job["kind"] != "train":
        return str(job["kind"])
    return f"{job['params'].get('model')} {job['params'].get('factors')}"


def _status(model: dict[str, Any]) -> str:
    if model["active"]:
        return "active, pinned" if model["pinned"] else "active"
    return "" if model["status"] == "published" else str(model["status"])


@models.command("list")
def list_models(n: Count = 20) -> None:
    """List model versions, newest first."""

    async def work(services: Services) -> list[dict[str, Any]]:
        from app.registry.schemas import ModelOut

        activation = await services.models.activation()
        rows, _ = await services.models.page(None, n)
        return [ModelOut.from_row(row, activation).model_dump() for row in rows]

    table = Table("version", "", "model", "users", "items", "interactions", "NDCG@10", "created")
    for model in with_services(work, reads=True):
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


Version = Annotated[str, typer.Argument(help="The version to activate.")]
Force = Annotated[
    bool, typer.Option("--force", help="Activate the version even if the gate rejected it.")
]


@models.command()
def activate(version: Version, force: Force = False) -> None:
    """Activate a version. Running servers switch within seconds."""
    with_services(lambda services: services.models.activate(version, force=force, by=COMMAND))
    console.print(f"active: {version}")


@models.command()
def pin(version: Version, force: Force = False) -> None:
    """Activate a version and pin it. New versions stay inactive until the pin is removed."""
    with_services(
        lambda services: services.models.activate(version, force=force, pin=True, by=COMMAND)
    )
    console.print(f"active and pinned: {version}")


@models.command()
def unpin() -> None:
    """Remove the pin. The next published version becomes active."""
    activation = with_services(lambda services: services.models.unpin(by=COMMAND))
    console.print(f"active: {activation.version}, not pinned")


@models.command()
def rollback() -> None:
    """Activate the version that was active before. Each further call goes back by one version."""
    activation = with_services(lambda services: services.models.rollback(by=COMMAND))
    console.print(f"active: {activation.version}")


@models.command("history")
def list_history(n: Count = 20) -> None:
    """List activations with their time and reason, newest first."""

    async def work(services: Services) -> list[dict[str, Any]]:
        from app.registry.schemas import ActivationOut

        changes, _ = await services.models.history(n=n)
        return [ActivationOut.from_change(change).model_dump() for change in changes]

    table = Table("at", "version", "reason", "before", "by", "detail")
    for change in with_services(work, reads=True):
        table.add_row(
            change["at"],
            change["version"] or "",
            change["reason"],
            change["previous"] or "",
            change["by"] or "",
            ", ".join(f"{name}: {value}" for name, value in (change["detail"] or {}).items()),
        )
    print_table(table)


class Kind(StrEnum):
    """The kind of a trial."""

    INTERLEAVING = "interleaving"
    SETTINGS = "settings"
    SHADOW = "shadow"


@trials.command("list")
def list_trials(
    n: Annotated[int, typer.Option("-n", min=1, max=1000, help="The maximum number of rows.")] = 20,
) -> None:
    """List trials with their reports, newest first."""

    async def work(services: Services) -> list[dict[str, Any]]:
        from app.ab_tests.schemas import ABTestOut

        rows, _ = await services.trials.page(None, n)
        trials = [await services.trials.get(row.trial_id) for row in rows]
        return [ABTestOut.from_row(trial).model_dump() for trial in trials]

    table = Table("trial", "kind", "status", "served", "beside it", "share", "report")
    for trial in with_services(work, reads=True):
        table.add_row(
            trial["trial_id"],
            trial["kind"],
            trial["status"],
            trial["version_a"],
            _beside(trial),
            f"{trial['share']:g}",
            ", ".join(f"{name}: {_short(value)}" for name, value in trial["report"].items()),
        )
    print_table(table)


@trials.command()
def start(
    version: Annotated[
        str | None,
        typer.Argument(help="The version to compare with the active version.", show_default=False),
    ] = None,
    kind: Annotated[
        Kind,
        typer.Option(
            help="interleaving: a share of the users gets lists with items of both versions. "
            "shadow: the lists of the other version are only compared. settings: a share "
            "of the users gets lists with other settings."
        ),
    ] = Kind.INTERLEAVING,
    share: Annotated[
        float,
        typer.Option(
            help="The share of users (interleaving, settings) or of requests (shadow), above "
            "0 and at most 1."
        ),
    ] = 0.1,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting for the kind settings. The option may repeat.",
        ),
    ] = None,
    planned_clicked: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=1_000_000,
            help="The planned number of lists with a click (interleaving). Read the report at "
            "this number.",
        ),
    ] = None,
) -> None:
    """Start a trial. Running servers join within seconds."""
    if not 0 < share <= 1:
        raise typer.BadParameter("the share must be above 0 and at most 1", param_hint="--share")
    if settings and kind is not Kind.SETTINGS:
        raise typer.BadParameter("only a trial of kind settings takes settings", param_hint="--set")
    body: dict[str, Any] = {"kind": kind.value, "share": share}
    if version is not None:
        body["version"] = version
    if settings:
        body["settings"] = dict(map(_setting, settings))
    if planned_clicked is not None:
        body["planned_clicked"] = planned_clicked

    async def work(services: Services) -> str:
        from pydantic import ValidationError

        from app.ab_tests.schemas import parse_trial
        from app.core.requests import invalid_body

        try:
            params = parse_trial(body)
        except ValidationError as error:
            raise invalid_body(error) from None
        return (await services.trials.begin(params)).trial_id

    console.print(f"started: {with_services(work)}")


@trials.command()
def stop(trial: Annotated[str, typer.Argument(help="The id of the trial to stop.")]) -> None:
    """Stop a trial and keep its report."""
    with_services(lambda services: services.trials.end(trial))
    console.print(f"stopped: {trial}")


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        expected = "expected NAME=VALUE, the value a number, true or false"
        raise typer.BadParameter(expected, param_hint="--set") from None


def _beside(trial: dict[str, Any]) -> str:
    settings = trial["settings"] or {}
    other = [] if trial["version_a"] == trial["version_b"] else [trial["version_b"]]
    return ", ".join([*other, *(f"{name}={value}" for name, value in settings.items())])


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    return str(value)


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="A name for the key.")],
    role: Annotated[
        list[Role] | None,
        typer.Option(
            help="A role of the key: a single role, or a bundle (read, ingest, admin). "
            "Default: read. The option may repeat."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="The rate limit in requests per second. Default: NCR_RATE_LIMIT."),
    ] = None,
    burst: Annotated[
        int | None,
        typer.Option(
            help="The burst: requests at once after a pause. Default: the requests of two seconds."
        ),
    ] = None,
) -> None:
    """Create an API key. The command shows the key only once."""

    async def work(services: Services) -> tuple[KeyRow, str]:
        return await services.keys.create(name, role or [Role.READ], rate, burst)

    row, key = with_services(work)
    console.print(f"key {row.key_id} ({row.roles}); send it as X-API-Key and keep it secret:")
    typer.echo(key)


@keys.command("list")
def list_keys() -> None:
    """List API keys without their secrets, newest first."""
    from app.registry.schemas import iso

    table = Table("key", "name", "roles", "rate", "created", "revoked")
    for row in with_services(lambda services: services.keys.rows(), reads=True):
        table.add_row(
            row.key_id,
            row.name,
            row.roles,
            "" if row.rate is None else f"{row.rate:g}/s",
            iso(row.created_at),
            iso(row.revoked_at) or "",
        )
    print_table(table)


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The id of the key, from `ncr keys list`.")],
) -> None:
    """Revoke an API key. Running servers refuse the key within a second."""
    with_services(lambda services: services.keys.revoke(key_id))
    console.print(f"revoked: {key_id}")
