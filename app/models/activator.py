"""Which version is served: changes of one row, each written into the history."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import Database
from app.core.errors import Conflict, NotFound
from app.core.logging import get_logger
from app.models.history import BACKWARDS, Reason, gone_back, way_back
from app.models.repository import ModelRepository
from app.models.schemas import Activation, ModelRow
from app.models.told import deleted, told_of
from ncr_core.errors import CheckpointError

log = get_logger(__name__)

Check = Callable[[ModelRow], Awaitable[object]]


class Activator:
    """Activates, pins and rolls back. ``check`` reads a version's checkpoint before it is served;
    it raises CheckpointError.
    """

    def __init__(self, database: Database, check: Check) -> None:
        self._database = database
        self._repository = ModelRepository(database)
        self._check = check

    async def publish(
        self, conn: AsyncConnection, row: ModelRow, detail: dict[str, Any] | None, *, serve: bool
    ) -> bool:
        """Adds a version, and serves it if it is a published one, it is to be served and nothing is
        pinned; whether it is served.
        """
        before = await self._repository.lock_activation(conn)
        await self._repository.insert(conn, row)
        if row.status != "published" or before.pinned or not serve:
            return False
        after = Activation(row.version, before.version, before.generation + 1)
        await self._repository.set_active(conn, before, after, "published", detail)
        return True

    async def activate(
        self,
        version: str,
        reason: Reason,
        detail: dict[str, Any] | None,
        *,
        force: bool = False,
        pin: bool = False,
        if_active: str | None = None,
    ) -> Activation:
        """Serves a version once its checkpoint is verified, as ``ModelRegistry.activate`` says."""
        row = await self._usable(version, force)
        try:
            await self._check(row)
        except CheckpointError as error:
            raise told_of(error) from None
        async with self._database.write() as conn:
            before = await self._repository.lock_activation(conn)
            if if_active is not None and before.version != if_active:
                raise Conflict(
                    "another version has been activated in the meantime", code="model_changed"
                )
            if reason == "returned" and before.pinned:
                raise Conflict("the version that is served is pinned", code="pinned")
            # Once more, in the transaction: it may have been cleaned away in the meantime.
            statuses = ("published", "rejected") if force else ("published",)
            if not await self._repository.of_status(conn, [version], *statuses):
                raise _unusable(version, await self._repository.status(conn, version))
            if row.status == "rejected":
                await self._repository.publish_by_force(conn, row)
                detail = (detail or {}) | {"forced": True}
            if before.version != version or (pin and not before.pinned):
                if pin:
                    detail = (detail or {}) | {"pinned": True}
                previous = await self._previous(conn, before, version, reason)
                after = Activation(version, previous, before.generation + 1, before.pinned or pin)
                await self._repository.set_active(conn, before, after, reason, detail)
                log.info("model activated", version=version, reason=reason)
        return await self._repository.activation()

    async def rollback(self, detail: dict[str, Any] | None) -> Activation:
        """Goes one step back on the way to the version that is served."""
        async with self._database.read() as conn:
            before = await self._repository.activation(conn)
            way = await self._way(conn, before)
            earlier = await self._earlier(conn, way)
        if earlier is None:
            raise Conflict("there is no earlier version to go back to", code="no_previous_model")
        return await self.activate(earlier, "rolled_back", detail, if_active=before.version)

    async def unpin(self) -> Activation:
        """Lets what is trained be served again."""
        async with self._database.write() as conn:
            before = await self._repository.lock_activation(conn)
            if before.pinned:
                after = before._replace(pinned=False, generation=before.generation + 1)
                detail = {"pinned": False}
                await self._repository.set_active(conn, before, after, "activated", detail)
        return await self._repository.activation()

    async def _usable(self, version: str, force: bool) -> ModelRow:
        row = await self._repository.get(version) if len(version) <= 256 else None
        if row is None:
            raise NotFound("there is no such model version", code="unknown_model")
        if row.status != "published" and not (force and row.status == "rejected"):
            raise _unusable(version, row.status)
        return row

    async def _previous(
        self, conn: AsyncConnection, before: Activation, version: str, reason: Reason
    ) -> str | None:
        """Where a rollback will lead once ``version`` is served."""
        if before.version == version:
            return before.previous
        if reason not in BACKWARDS:
            return before.version
        way = await self._way(conn, before)
        return await self._earlier(conn, gone_back(way, version))

    async def _way(self, conn: AsyncConnection, now: Activation) -> list[str]:
        way = way_back(await self._repository.changes(conn))
        if way and way[-1] == now.version:
            return way
        # The history begins later, as in a database from before there was one.
        return [version for version in (now.previous, now.version) if version is not None]

    async def _earlier(self, conn: AsyncConnection, way: list[str]) -> str | None:
        """The last version before the end of the way that can be served, and is another one."""
        usable = await self._repository.of_status(conn, way, "published")
        return next((v for v in way[-2::-1] if v in usable and v != way[-1]), None)


def _unusable(version: str, status: str | None) -> Conflict:
    if status == "deleted":
        return deleted(version)
    return Conflict(
        f"{version} was rejected by the gate: it is served only by force", code="not_published"
    )
