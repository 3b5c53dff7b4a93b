"""The history of activations, and the version that a rollback leads to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

Reason = Literal["published", "activated", "rolled_back", "returned"]
ROLLBACKS = ("rolled_back", "returned")


class ActivationChange(NamedTuple):
    """A change of the active version."""

    generation: int
    version: str | None
    previous: str | None
    """The version that was active before; the version itself if it was only pinned or unpinned."""
    reason: Reason
    detail: dict[str, Any] | None
    at: int
    """Microseconds since 1970, UTC."""


def undo_stack(changes: Iterable[ActivationChange]) -> list[str]:
    """The versions that led to the active one, which is the last.

    It works like the undo of an editor: to publish or activate a version pushes it, and to roll
    back pops what was left behind. So rolling back twice goes back by two versions, not to and fro.

    Args:
        changes: the whole history, oldest first.
    """
    stack: list[str] = []
    for change in changes:
        if not stack and change.previous is not None:
            stack.append(change.previous)  # from before there was a history
        if change.version is None or (stack and stack[-1] == change.version):
            continue
        if change.reason in ROLLBACKS:
            stack = pop_to(stack, change.version)
        else:
            stack.append(change.version)
    return stack


def pop_to(stack: list[str], version: str) -> list[str]:
    """The stack up to the last occurrence of a version, which is pushed if there is none."""
    for position in reversed(range(len(stack))):
        if stack[position] == version:
            return stack[: position + 1]
    return [*stack, version]
