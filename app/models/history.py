"""What was served when, and where a rollback leads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from app.models.schemas import iso

Reason = Literal["published", "activated", "rolled_back", "returned"]
BACKWARDS = ("rolled_back", "returned")


class Change(NamedTuple):
    """A change of what is served; ``at`` in microseconds since 1970, UTC.

    ``previous`` is what was served before it. A version that was only pinned or unpinned is its own
    previous one.
    """

    generation: int
    version: str | None
    previous: str | None
    reason: str
    detail: dict[str, Any] | None
    at: int

    def as_json(self) -> dict[str, Any]:
        """The change as clients see it."""
        return {**self._asdict(), "at": iso(self.at)}


def way_back(changes: Iterable[Change]) -> list[str]:
    """The versions that led to the one served now, which is the last; ``changes`` oldest first.

    As in an editor's undo: to publish or activate a version goes one step on, to roll back or
    return goes back, and what was gone back from is on the way no more. So rolling back twice goes
    back by two versions, not to and fro.
    """
    way: list[str] = []
    for change in changes:
        if not way and change.previous is not None:
            way.append(change.previous)  # from before there was a history
        if change.version is None or (way and way[-1] == change.version):
            continue
        if change.reason in BACKWARDS:
            way = gone_back(way, change.version)
        else:
            way.append(change.version)
    return way


def gone_back(way: list[str], version: str) -> list[str]:
    """The way up to where ``version`` was served last; one step on if it never was."""
    at = [i for i, earlier in enumerate(way) if earlier == version]
    return way[: at[-1] + 1] if at else [*way, version]
