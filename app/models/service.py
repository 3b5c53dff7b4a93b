"""The registry of models, and the folder that their checkpoints live in."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import Database
from app.core.errors import Conflict, NotFound
from app.core.logging import get_logger
from app.models.repository import ModelRepository
from app.models.schemas import Activation, ModelRow
from ncr_core.checkpoint import Checkpoint, load_checkpoint, manifest_checksum
from ncr_core.errors import CheckpointError

log = get_logger(__name__)

LEFT_OVER_SECONDS = 24 * 3600.0


class ModelRegistry:
    """Versions are immutable; what changes is which one is active, in one row of the database."""

    def __init__(self, database: Database, data_dir: Path) -> None:
        self._database = database
        self._repository = ModelRepository(database)
        self._data_dir = data_dir

    def new_version(self) -> str:
        """A version that sorts by its time."""
        return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"

    def folder(self, version: str) -> Path:
        """Where the checkpoint of a new version is to be written."""
        return self._data_dir / self.path_of(version)

    def path_of(self, version: str) -> str:
        """The folder as the registry keeps it, relative to the data folder."""
        return f"models/{version}"

    def candidates_path(self, version: str) -> Path:
        """The file for candidates that a worker has computed with a version."""
        folder = self.folder(version)
        return folder.with_name(f"{folder.name}.candidates.safetensors")

    async def discard(self, version: str) -> None:
        """Removes what was written of a version, unless it was published after all."""
        if await self._repository.get(version) is not None:
            return
        folder = self.folder(version)
        for path in (folder, *folder.parent.glob(f".{version}-*")):
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    async def sweep(self) -> None:
        """Removes what workers that were killed have left: old folders that no version refers to.

        Not young ones, which another worker may just be writing.
        """
        root = self._data_dir / self.path_of("")
        if not root.is_dir():
            return
        before = time.time() - LEFT_OVER_SECONDS
        for path in list(root.iterdir()):
            if path.is_file() and path.name.startswith(".") and path.stat().st_mtime < before:
                path.unlink(missing_ok=True)
            if path.is_dir() and path.stat().st_mtime < before:
                staging = path.name.startswith(".")
                if staging or await self._repository.get(path.name) is None:
                    log.info("left-over checkpoint removed", folder=path.name)
                    await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

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
        folder = self._data_dir / row.path
        try:
            checksum = manifest_checksum(folder)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of {row.version} cannot be read: {error.strerror}"
            ) from None
        if checksum != row.checksum:
            raise CheckpointError(
                f"the checkpoint of {row.version} is damaged: "
                "its manifest is not the one that was published"
            )
        return load_checkpoint(folder, device)

    async def publish(self, conn: AsyncConnection, row: ModelRow) -> None:
        """Adds a version and makes it the active one, in the caller's transaction."""
        before = await self._repository.lock_activation(conn)
        await self._repository.insert(conn, row)
        await self._repository.set_active(conn, row.version, before.version)

    async def activate(self, version: str) -> Activation:
        """Makes a version the active one. A damaged one is refused; the old one stays."""
        row = await self.get(version)
        if row.status != "published":
            raise Conflict(f"this version is {row.status}", code="not_published")
        try:
            await self.load(row, "cpu")
        except CheckpointError as error:
            raise Conflict(str(error), code="checkpoint_damaged") from None
        async with self._database.write() as conn:
            before = await self._repository.lock_activation(conn)
            if before.version != version:
                await self._repository.set_active(conn, version, before.version)
        return await self.activation()

    async def rollback(self) -> Activation:
        """Activates the version that was active before."""
        before = await self.activation()
        if before.previous is None:
            raise Conflict("there is no earlier version to go back to", code="no_previous_model")
        return await self.activate(before.previous)
