"""Activation of versions: changes of one row, each recorded in the history."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import Database
from app.core.errors import AppError, Conflict, NotFound, Unavailable
from app.core.logging import get_logger
from app.registry.repository import ModelRepository
from app.registry.schemas import Activation, ActivationChange, ModelRow, Reason
from app.webhooks.outbox import Outbox
from ncr_core.errors import CheckpointError, CheckpointReadError

log = get_logger(__name__)

ROLLBACKS = ("rolled_back", "returned")

Check = Callable[[ModelRow], Awaitable[object]]


class ActivationService:
    """Activates, pins and rolls back versions."""

    def __init__(self, database: Database, check: Check, outbox: Outbox) -> None:
        """Creates the service.

        Args:
            database: holds the active version and the history.
            check: reads a version's checkpoint before it is activated; raises CheckpointError.
            outbox: takes a message of each change of the active version.
        """
        self._outbox = outbox
        self._database = database
        self._repository = ModelRepository(database)
        self._check = check

    async def activate(
        self,
        version: str,
        reason: Reason,
        detail: dict[str, Any] | None,
        *,
        force: bool = False,
        pin: bool = False,
        if_active: str | None = None,
        by: str | None = None,
    ) -> Activation:
        """Activates a version; see `ModelRegistry.activate`."""
        row = await self._usable_version(version, force)
        try:
            await self._check(row)
        except CheckpointError as error:
            raise checkpoint_unusable(error) from None
        async with self._database.write() as conn:
            before = await self._repository.lock_activation(conn)
            if if_active is not None and before.version != if_active:
                raise Conflict("another activation came first", code="model_changed")
            if reason == "returned" and before.pinned:
                raise Conflict("the active version is pinned", code="pinned")
            # Checked again in the transaction: retention may have removed its files meanwhile.
            statuses = ("published", "rejected") if force else ("published",)
            if not await self._repository.with_status(conn, [version], *statuses):
                raise _not_usable(version, await self._repository.status(conn, version))
            if row.status == "rejected":
                await self._repository.publish_by_force(conn, row)
                detail = (detail or {}) | {"forced": True}
            if before.version != version or (pin and not before.pinned):
                if pin:
                    detail = (detail or {}) | {"pinned": True}
                previous = await self._previous(conn, before, version, reason)
                after = Activation(version, previous, before.generation + 1, before.pinned or pin)
                await self._repository.set_active(conn, before, after, reason, detail, by)
                if after.version != before.version:
                    told = change_told(before, after, detail)
                    await self._outbox.add(conn, f"model.{reason}", told)
                log.info("model activated", version=version, reason=reason)
        return await self._repository.activation()

    async def rollback(self, detail: dict[str, Any] | None, by: str | None) -> Activation:
        """Activates the version before the active one; see `ModelRegistry.rollback`."""
        async with self._database.read() as conn:
            before = await self._repository.activation(conn)
            stack = await self._undo_stack(conn, before)
            earlier = await self._rollback_target(conn, stack)
        if earlier is None:
            raise Conflict("no earlier version exists", code="no_previous_model")
        return await self.activate(earlier, "rolled_back", detail, if_active=before.version, by=by)

    async def unpin(self, by: str | None) -> Activation:
        """Removes the pin, so that newly trained versions are activated again."""
        async with self._database.write() as conn:
            before = await self._repository.lock_activation(conn)
            if before.pinned:
                after = before._replace(pinned=False, generation=before.generation + 1)
                detail = {"pinned": False}
                await self._repository.set_active(conn, before, after, "activated", detail, by)
        return await self._repository.activation()

    async def _usable_version(self, version: str, force: bool) -> ModelRow:
        row = await self._repository.get(version) if len(version) <= 256 else None
        if row is None:
            raise NotFound("the model version does not exist", code="unknown_model")
        if row.status != "published" and not (force and row.status == "rejected"):
            raise _not_usable(version, row.status)
        return row

    async def _previous(
        self, conn: AsyncConnection, before: Activation, version: str, reason: Reason
    ) -> str | None:
        """The version that a rollback will activate once ``version`` is active."""
        if before.version == version:
            return before.previous
        if reason not in ROLLBACKS:
            return before.version
        stack = await self._undo_stack(conn, before)
        return await self._rollback_target(conn, pop_to(stack, version))

    async def _undo_stack(self, conn: AsyncConnection, activation: Activation) -> list[str]:
        stack = undo_stack(await self._repository.changes(conn))
        if stack and stack[-1] == activation.version:
            return stack
        # The history begins later, as in a database from before there was one.
        return [v for v in (activation.previous, activation.version) if v is not None]

    async def _rollback_target(self, conn: AsyncConnection, stack: list[str]) -> str | None:
        """The last usable version below the top of the stack that differs from the top."""
        usable = await self._repository.with_status(conn, stack, "published")
        return next((v for v in stack[-2::-1] if v in usable and v != stack[-1]), None)


def change_told(
    before: Activation, after: Activation, detail: dict[str, Any] | None
) -> dict[str, Any]:
    """The data of a webhook about a change of the active version."""
    return {"version": after.version, "previous": before.version, "detail": detail}


def _not_usable(version: str, status: str | None) -> Conflict:
    if status == "deleted":
        return version_deleted(version)
    return Conflict(
        f"the gate rejected {version}: use force to activate the version", code="not_published"
    )


def checkpoint_unusable(error: CheckpointError) -> AppError:
    """The error of an unusable checkpoint: 503 if another try may succeed, else 409."""
    if isinstance(error, CheckpointReadError):
        return Unavailable(str(error), code="store_unavailable", retry_after=10)
    return Conflict(str(error), code="checkpoint_damaged")


def version_deleted(version: str) -> Conflict:
    """The error 409 for a version of which retention has kept only the metrics."""
    return Conflict(
        f"the files of {version} were deleted: only its metrics are kept", code="deleted_model"
    )


def undo_stack(changes: Iterable[ActivationChange]) -> list[str]:
    """The versions that led to the active version, which is the last.

    The stack works like the undo of an editor. A publication or an activation pushes a version, and
    a rollback pops the versions above its target. Two rollbacks thus go back by two versions, not
    to and fro.

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
    """The stack up to the last occurrence of a version, or the stack with the version pushed."""
    for position in reversed(range(len(stack))):
        if stack[position] == version:
            return stack[: position + 1]
    return [*stack, version]
