"""Data sets as `ncr train` and `ncr evaluate` read them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app.cli.common import bar, console
from app.cli.import_ import BadRows, Format

if TYPE_CHECKING:
    from ncr_core.data import Interactions, Split
    from ncr_core.data.readers import Columns
    from ncr_core.reproduction.published_splits import PublishedSplit

DataOption = Annotated[Path, typer.Option("--data", help="A file or a folder of interactions.")]
Protocol = Literal["p1", "p2"]


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
    from ncr_core.reproduction.published_splits import load_ncf

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
