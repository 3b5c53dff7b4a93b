"""The registry of models, and their checkpoints in the store that is configured."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import Database
from app.core.errors import Conflict, NotFound, Unavailable
from app.core.logging import get_logger
from app.models.contents import check_files, check_manifest
from app.models.repository import ModelRepository
from app.models.schemas import Activation, ModelRow
from app.models.store import CANDIDATES, CheckpointStore, StoreUnavailable, checked
from ncr_core.checkpoint import Checkpoint, load_checkpoint
from ncr_core.errors import CheckpointError

log = get_logger(__name__)

LEFT_OVER_SECONDS = 24 * 3600.0


class ModelRegistry:
    """Versions are immutable; what changes is which one is active, in one row of the database."""

    def __init__(self, database: Database, store: CheckpointStore) -> None:
        self._database = database
        self._repository = ModelRepository(database)
        self._store = store

        self.announce: Callable[[], None] = lambda: None
        """Called after a commit that changes which version is active."""

    def new_version(self) -> str:
        """A version that sorts by its time."""
        return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"

    def folder(self, version: str) -> Path:
        """Where the checkpoint of a new version is to be written, on this machine."""
        return self._store.folder(version)

    def path_of(self, version: str) -> str:
        """The folder as the registry keeps it, wherever the store is."""
        return f"models/{checked(version)}"

    def candidates_path(self, version: str) -> Path:
        """The file for candidates that a worker has computed with a version, on this machine."""
        folder = self.folder(version)
        return folder.with_name(f"{folder.name}{CANDIDATES}")

    async def local_folder(self, version: str) -> Path:
        """A published version's folder on this machine, brought here if need be, and verified.

        Raises NotFound for an unknown version and CheckpointError for a damaged one.
        """
        row = await self.get(version)
        return await asyncio.to_thread(self._verified_folder, row)

    async def upload(self, version: str) -> None:
        """Brings a version that was written to `folder` into the store, before it is published.

        Raises CheckpointError, also where the store holds something else by this name.
        """
        await asyncio.to_thread(self._store.publish, version)

    async def fetch_candidates(self, version: str) -> Path | None:
        """The file of candidates; None while there is none. Raises CheckpointError."""
        return await asyncio.to_thread(self._store.fetch_candidates, version)

    async def discard(self, version: str) -> None:
        """Removes what was written of a version, unless it was published after all."""
        if await self._repository.get(version) is not None:
            return
        try:
            await asyncio.to_thread(self._store.remove, version)
        except CheckpointError as error:  # a sweep will find it
            log.warning("an unfinished checkpoint stays", version=version, reason=str(error))

    async def sweep(self) -> None:
        """Removes what workers that were killed have left: old folders that no version refers to.

        Not young ones, which another worker may just be writing.
        """
        try:
            for name in await asyncio.to_thread(
                self._store.list_old, time.time() - LEFT_OVER_SECONDS
            ):
                if await self._repository.get(name) is None:
                    log.info("left-over checkpoint removed", folder=name)
                    await asyncio.to_thread(self._store.remove, name)
        except CheckpointError as error:
            log.warning("left-over checkpoints stay", reason=str(error))

    def close(self) -> None:
        """Ends what is under way with the store, in other threads."""
        self._store.close()

    async def activation(self) -> Activation:
        return await self._repository.activation()

    async def get(self, version: str) -> ModelRow:
        """A version; 404 if there is none."""
        row = await self._repository.get(version) if len(version) <= 256 else None
        if row is None:
            raise NotFound("there is no such model version", code="unknown_model")
        return row

    async def page(self, offset: int, n: int) -> tuple[list[ModelRow], int | None]:
        """Versions, newest first, and where the next page begins."""
        rows = await self._repository.page(offset, n + 1)
        return rows[:n], offset + n if len(rows) > n else None

    async def load(self, row: ModelRow, device: str) -> Checkpoint:
        """Reads and verifies a version's checkpoint. Raises CheckpointError."""
        return await asyncio.to_thread(self._load, row, device)

    def _load(self, row: ModelRow, device: str) -> Checkpoint:
        folder = self._fetch(row)
        try:
            check_manifest(folder, row.version, row.checksum)
            return load_checkpoint(folder, device)
        except CheckpointError as error:
            again = self._fetch_again(row, error)
        return load_checkpoint(again, device)

    def _verified_folder(self, row: ModelRow) -> Path:
        folder = self._fetch(row)
        try:
            check_files(folder, row.version, row.checksum)
        except CheckpointError as error:
            return self._fetch_again(row, error)
        return folder

    def _fetch(self, row: ModelRow) -> Path:
        # A row must not lead out of the store, whoever wrote it.
        if row.path != self.path_of(row.version):
            raise CheckpointError(f"the checkpoint of {row.version} is not in the store")
        return self._store.fetch(row.version, row.checksum)

    def _fetch_again(self, row: ModelRow, error: CheckpointError) -> Path:
        """A damaged copy, replaced by what the store holds; raises ``error`` if there is none."""
        again = self._store.fetch_again(row.version, row.checksum)
        if again is None:
            raise error
        log.warning("a damaged copy was fetched again", version=row.version, reason=str(error))
        return again

    async def publish(self, conn: AsyncConnection, row: ModelRow) -> None:
        """Adds a version and makes it the active one, in the caller's transaction."""
        before = await self._repository.lock_activation(conn)
        await self._repository.insert(conn, row)
        await self._repository.set_active(conn, row.version, before.version)

    async def activate(self, version: str) -> Activation:
        """Makes a version the active one. The old one stays where a damaged one is refused, or
        the store is away and there is no copy here.
        """
        row = await self.get(version)
        if row.status != "published":
            raise Conflict(f"this version is {row.status}", code="not_published")
        try:
            await self.load(row, "cpu")
        except StoreUnavailable as error:
            raise Unavailable(str(error), code="store_unavailable", retry_after=10) from None
        except CheckpointError as error:
            raise Conflict(str(error), code="checkpoint_damaged") from None
        async with self._database.write() as conn:
            before = await self._repository.lock_activation(conn)
            if before.version != version:
                await self._repository.set_active(conn, version, before.version)
        self.announce()
        return await self.activation()

    async def rollback(self) -> Activation:
        """Activates the version that was active before."""
        before = await self.activation()
        if before.previous is None:
            raise Conflict("there is no earlier version to go back to", code="no_previous_model")
        return await self.activate(before.previous)
