"""The registry of models, and their checkpoints in the store that is configured."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import Database
from app.core.errors import NotFound
from app.core.http import text_problem
from app.core.logging import get_logger
from app.core.metadata import now_us
from app.models.activator import Activator
from app.models.contents import check_files, check_manifest
from app.models.history import Change, Reason
from app.models.repository import ModelRepository
from app.models.retention import Rule
from app.models.schemas import Activation, ModelRow
from app.models.store import CANDIDATES, CheckpointStore, checked
from ncr_core.errors import CheckpointError, CheckpointReadError

if TYPE_CHECKING:  # torch, which no command needs that only lists or copies models
    from ncr_core.checkpoint import Checkpoint
    from ncr_core.evaluated import Evaluated

log = get_logger(__name__)

LEFT_OVER_SECONDS = 24 * 3600.0


class ModelRegistry:
    """Versions are immutable; what changes is which one is active, in one row of the database."""

    def __init__(
        self, database: Database, store: CheckpointStore, retention: Rule | None = None
    ) -> None:
        """``retention`` says which versions keep their files."""
        self._database = database
        self._repository = ModelRepository(database)
        self._store = store
        self._retention = retention or Rule()
        self._activator = Activator(database, lambda row: self.load(row, "cpu"))

        self.announce: Callable[[], None] = lambda: None
        """Called after a commit that changes which version is active."""

        self.in_use: list[Callable[[], Awaitable[Collection[str]]]] = []
        """Each tells of versions whose files some other feature needs."""

        self.about: dict[str, Callable[[str], Awaitable[Any]]] = {}
        """What other features know of a version, by the name under which clients are shown it."""

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
        """Removes what workers that were killed have left: old folders that no version refers to,
        or one whose files were to be removed. Not young ones, which somebody may just be writing.
        """
        try:
            for name in await asyncio.to_thread(
                self._store.list_old, time.time() - LEFT_OVER_SECONDS
            ):
                row = await self._repository.get(name)
                if row is None or row.status == "deleted":
                    log.info("left-over checkpoint removed", folder=name)
                    await asyncio.to_thread(self._store.remove, name)
        except CheckpointError as error:
            log.warning("left-over checkpoints stay", reason=str(error))

    async def clean(self) -> list[str]:
        """Removes the files of versions that the rule lets go, and returns those versions.

        What the registry knows of them stays. A worker that is killed after it has said so, and
        before the files are gone, leaves them to a sweep.
        """
        async with self._database.write() as conn:
            # Nobody can activate one of them meanwhile, or they are active already.
            activation = await self._repository.lock_activation(conn)
            changes = await self._repository.changes(conn)
            stored = await self._repository.stored(conn)
            in_use = {version for ask in self.in_use for version in await ask()}
            gone = self._retention.to_remove(stored, activation, changes, in_use, now_us())
            if gone:
                await self._repository.mark_deleted(conn, gone)
        for version in gone:
            try:
                await asyncio.to_thread(self._store.remove, version)
            except CheckpointError as error:
                log.warning("an old checkpoint stays", version=version, reason=str(error))
            else:
                log.info("old checkpoint removed", version=version)
        return gone

    def close(self) -> None:
        """Ends what is under way with the store, in other threads."""
        self._store.close()

    async def activation(self) -> Activation:
        return await self._repository.activation()

    async def serving(self) -> ModelRow | None:
        """The version that is served, if there is one."""
        version = (await self._repository.activation()).version
        return None if version is None else await self._repository.get(version)

    async def trained_seq(self) -> int:
        """The seq up to which the latest training, published or rejected, has learned; or 0."""
        return await self._repository.trained_seq()

    async def get(self, version: str) -> ModelRow:
        """A version; 404 if there is none."""
        row = await self._repository.get(version) if text_problem(version) is None else None
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

    async def load_measured(
        self, row: ModelRow, device: str
    ) -> tuple[Checkpoint, Evaluated | None]:
        """A version's checkpoint, and the copy that it was measured by: None where it was written
        without one, or where that alone is damaged wherever it is kept. Raises CheckpointError.
        """
        return await asyncio.to_thread(self._load_measured, row, device)

    def _load_measured(self, row: ModelRow, device: str) -> tuple[Checkpoint, Evaluated | None]:
        from ncr_core.evaluated import load_evaluated

        checkpoint = self._load(row, device)
        try:
            try:
                return checkpoint, load_evaluated(self.folder(row.version), device)
            except CheckpointError as error:
                again = self._fetch_again(row, error)
            return checkpoint, load_evaluated(again, device)
        except CheckpointReadError:
            raise  # that says nothing of the copy: another try may read it
        except CheckpointError as error:
            log.warning("no measured copy to read", version=row.version, reason=str(error))
            return checkpoint, None

    def _load(self, row: ModelRow, device: str) -> Checkpoint:
        from ncr_core.checkpoint import load_checkpoint

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

    async def lock(self, conn: AsyncConnection) -> Activation:
        """What is served, and stays so until the caller's transaction ends."""
        return await self._repository.lock_activation(conn)

    async def publish(
        self,
        conn: AsyncConnection,
        row: ModelRow,
        detail: dict[str, Any] | None = None,
        *,
        serve: bool = True,
    ) -> bool:
        """Adds a version in the caller's transaction; whether it is served from then on.

        A published one is, unless what is served is pinned or it is not to ``serve``; a rejected
        one is not.
        """
        return await self._activator.publish(conn, row, detail, serve=serve)

    async def activate(
        self,
        version: str,
        reason: Reason = "activated",
        detail: dict[str, Any] | None = None,
        *,
        force: bool = False,
        pin: bool = False,
        if_active: str | None = None,
    ) -> Activation:
        """Makes a version the one that is served, and writes into the history why. The old one
        stays where a damaged one is refused, or the store is away and there is no copy here.

        ``force`` takes one that the gate has rejected, too: it is published from then on. ``pin``
        keeps it served whatever is trained. With ``if_active`` nothing is done unless that version
        is the one served. Raises NotFound, Unavailable, or Conflict: `not_published`,
        `deleted_model`, `checkpoint_damaged`, `model_changed`, and `pinned` for a return from what
        is pinned. What is pinned stays pinned: then it is ``version``.
        """
        activation = await self._activator.activate(
            version, reason, detail, force=force, pin=pin, if_active=if_active
        )
        self.announce()
        return activation

    async def rollback(self, detail: dict[str, Any] | None = None) -> Activation:
        """Activates the version that was served before this one, past those that were gone back
        from and those whose files are removed. Raises Conflict `no_previous_model`.
        """
        activation = await self._activator.rollback(detail)
        self.announce()
        return activation

    async def unpin(self) -> Activation:
        """What is trained from now on is served again once it is published."""
        return await self._activator.unpin()

    async def history(
        self, version: str | None = None, offset: int = 0, n: int = 100
    ) -> tuple[list[Change], int | None]:
        """What was served and why, newest first, of one version or all; where the next page
        begins.
        """
        rows = await self._repository.history(version, offset, n + 1)
        return rows[:n], offset + n if len(rows) > n else None
