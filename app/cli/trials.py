"""`ncr trials`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from app.cli.common import console, print_table, with_services

if TYPE_CHECKING:
    from app.services import Services

trials = typer.Typer(
    help="Two versions beside each other.", no_args_is_help=True, rich_markup_mode=None
)


class Kind(StrEnum):
    """What is tried."""

    INTERLEAVING = "interleaving"
    SHADOW = "shadow"


@trials.command("list")
def list_trials(
    n: Annotated[int, typer.Option("-n", min=1, max=1000, help="How many at most.")] = 20,
) -> None:
    """Show trials, newest first, and what has come of them."""

    async def work(services: Services) -> list[dict[str, Any]]:
        rows, _ = await services.trials.page(0, n)
        return [(await services.trials.get(row.trial_id)).as_json() for row in rows]

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
    version: Annotated[str, typer.Argument(help="What is tried beside the active version.")],
    kind: Annotated[
        Kind, typer.Option(help="Show lists drafted from both, or only compare their lists.")
    ] = Kind.INTERLEAVING,
    share: Annotated[
        float, typer.Option(help="Of users (interleaving) or requests (shadow), up to 1.")
    ] = 0.1,
) -> None:
    """Begin a trial; running servers take it up within seconds."""
    if not 0 < share <= 1:
        raise typer.BadParameter("a share lies above 0 and up to 1", param_hint="--share")

    async def work(services: Services) -> str:
        from app.trials.schemas import TrialParams

        # Checked where it is looked for: a version that cannot be is one that there is not.
        params = TrialParams.model_construct(kind=kind.value, version=version, share=share)
        return (await services.trials.begin(params)).trial_id

    console.print(f"begun: {with_services(work)}")


@trials.command()
def stop(trial: Annotated[str, typer.Argument(help="The trial to end.")]) -> None:
    """End a trial and keep its report."""
    with_services(lambda services: services.trials.end(trial))
    console.print(f"ended: {trial}")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    return str(value)
