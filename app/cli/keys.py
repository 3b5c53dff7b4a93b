"""`ncr keys`: API keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from app.cli.common import console, print_table, with_services
from app.core.access import Role

if TYPE_CHECKING:
    from app.keys.schemas import KeyRow
    from app.wiring import Services

keys = typer.Typer(
    help="Manage the API keys of clients.", no_args_is_help=True, rich_markup_mode=None
)


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="A name that tells keys apart.")],
    role: Annotated[
        list[Role] | None,
        typer.Option(help="read (the default), ingest or admin. May be repeated."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second. Default: NCR_RATE_LIMIT.")
    ] = None,
    burst: Annotated[
        int | None,
        typer.Option(help="Requests at once after a pause. Default: as many as in two seconds."),
    ] = None,
) -> None:
    """Create a key. It is shown only once."""

    async def work(services: Services) -> tuple[KeyRow, str]:
        return await services.keys.create(name, role or [Role.READ], rate, burst)

    row, key = with_services(work)
    console.print(f"key {row.key_id} ({row.roles}); send it as X-API-Key and keep it secret:")
    typer.echo(key)


@keys.command("list")
def list_keys() -> None:
    """Show keys, newest first, without their secrets."""
    from app.registry.schemas import iso

    table = Table("key", "name", "roles", "rate", "created", "revoked")
    for row in with_services(lambda services: services.keys.rows()):
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
    key_id: Annotated[str, typer.Argument(help="The id that `ncr keys list` shows.")],
) -> None:
    """Revoke a key. Running servers refuse it within a second."""
    with_services(lambda services: services.keys.revoke(key_id))
    console.print(f"revoked: {key_id}")
