"""Data sets as `ncr train` and `ncr evaluate` read them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.common import bar, console
from app.cli.data import BadRows, Format

if TYPE_CHECKING:
    from ncr_core.data import Interactions
    from ncr_core.data.published import PublishedSplit
    from ncr_core.data.readers import Columns

DataOption = Annotated[Path, typer.Option("--data", help="A file or a folder of interactions.")]


def published(root: Path) -> PublishedSplit:
    """The published NCF split under a folder. Raises DataError where the rows have other ids."""
    from ncr_core.data.published import load_ncf

    split = load_ncf(root)
    console.print(described(split.all_seen))
    return split


def read_interactions(path: Path, format_: Format, columns: Columns, at_least: int) -> Interactions:
    """Reads and filters a data set, and says what is left of it."""
    from ncr_core.data import build_interactions, min_interactions
    from ncr_core.data.readers import open_source

    source = open_source(path, format_, columns)
    bad = BadRows()
    with bar() as progress:
        task = progress.add_task(f"read {source.name}", total=source.total_bytes or None)
        chunks = source.interactions(on_bad=bad, on_bytes=lambda n: progress.advance(task, n))
        interactions = build_interactions(
            (
                row.user,
                row.item,
                row.timestamp if row.timestamp is not None else float(row.position or 0),
            )
            for chunk in chunks
            for row in chunk
        )
    kept = min_interactions(interactions, at_least)
    console.print(f"{described(kept)} ({bad.summary()})")
    return kept


def described(interactions: Interactions) -> str:
    return (
        f"{interactions.n_users:,} users, {interactions.n_items:,} items, "
        f"{interactions.nnz:,} interactions"
    )


def counts(interactions: Interactions) -> dict[str, Any]:
    return {
        "users": interactions.n_users,
        "items": interactions.n_items,
        "interactions": interactions.nnz,
    }
