"""`ncr trials`: A/B tests of a second version."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from app.cli.common import console, print_table, with_services

if TYPE_CHECKING:
    from app.wiring import Services

trials = typer.Typer(
    help="Compare a second version with the active one.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Kind(StrEnum):
    """The kind of a trial."""

    INTERLEAVING = "interleaving"
    SHADOW = "shadow"


@trials.command("list")
def list_trials(
    n: Annotated[int, typer.Option("-n", min=1, max=1000, help="Maximum number of rows.")] = 20,
) -> None:
    """Show trials and their reports, newest first."""

    async def work(services: Services) -> list[dict[str, Any]]:
        from app.ab_tests.schemas import ABTestOut

        rows, _ = await services.trials.page(0, n)
        trials = [await services.trials.get(row.trial_id) for row in rows]
        return [ABTestOut.from_row(trial).model_dump() for trial in trials]

    table = Table("trial", "kind", "status", "served", "beside it", "share", "report")
    for trial in with_services(work):
        table.add_row(
            trial["trial_id"],
            trial["kind"],
            trial["status"],
            trial["version_a"],
            trial["version_b"],
            f"{trial['share']:g}",
            ", ".join(f"{name}: {_short(value)}" for name, value in trial["report"].items()),
        )
    print_table(table)


@trials.command()
def start(
    version: Annotated[str, typer.Argument(help="The version to compare with the active one.")],
    kind: Annotated[
        Kind,
        typer.Option(help="interleaving shows lists of both versions; shadow only compares them."),
    ] = Kind.INTERLEAVING,
    share: Annotated[
        float,
        typer.Option(help="Fraction of users (interleaving) or of requests (shadow), up to 1."),
    ] = 0.1,
) -> None:
    """Start a trial. Running servers take part within seconds."""
    if not 0 < share <= 1:
        raise typer.BadParameter("the share has to be above 0 and at most 1", param_hint="--share")

    async def work(services: Services) -> str:
        from app.ab_tests.schemas import ABTestParams

        # The service checks the version: an invalid name is an unknown version.
        params = ABTestParams.model_construct(kind=kind.value, version=version, share=share)
        return (await services.trials.begin(params)).trial_id

    console.print(f"started: {with_services(work)}")


@trials.command()
def stop(trial: Annotated[str, typer.Argument(help="The trial to stop.")]) -> None:
    """Stop a trial and keep its report."""
    with_services(lambda services: services.trials.end(trial))
    console.print(f"stopped: {trial}")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    return str(value)
