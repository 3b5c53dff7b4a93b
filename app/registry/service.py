"""The registry of models: their versions, checkpoints and activations."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import Database
from app.core.errors import NotFound
from app.core.logging import get_logger
from app.core.requests import text_problem
from app.core.settings import Settings
from app.core.tables import Place, instance_id, now_us
from app.registry.activation import ActivationService, change_told
from app.registry.checkpoint_store import (
    CANDIDATES,
    MARK,
    CheckpointStore,
    ForeignStore,
    LocalCheckpointStore,
    UnknownVersions,
    check_files,
    checked_version,
)
from app.registry.exports import ExportStore, LocalExportStore
from app.registry.repository import ModelRepository
from app.registry.retention import RetentionRule
from app.registry.schemas import Activation, ActivationChange, ClickThrough, ModelRow, Reason
from app.webhooks.outbox import Outbox
from ncr_core.errors import CheckpointError, CheckpointReadError
from ncr_core.manifest import MANIFEST, verify_file

if TYPE_CHECKING:  # torch, which commands that only list or copy models do without
    from ncr_core.checkpoint import Checkpoint, EvaluationSnapshot

log = get_logger(__name__)

MIN_LEFTOVER_SECONDS = 24 * 3600.0
MAX_NAMED = 3  # versions in an error

T = TypeVar("T")

VersionsInUse = Callable[[], Awaitable[Collection[str]]]
ClickThroughOf = Callable[[str], Awaitable[ClickThrough]]
EndJob = Callable[[AsyncConnection, ModelRow, bool], Awaitable[None]]


async def _no_versions() -> Collection[str]:
    return ()


async def _no_clicks(version: str) -> ClickThrough:
    return ClickThrough(lists=0, clicked=0, rate=None)


class ModelRegistry:
    """The versions of models, which never change, and the one row that names the active version."""

    def __init__(
        self,
        database: Database,
        store: CheckpointStore,
        retention: RetentionRule | None = None,
        *,
        versions_in_use: VersionsInUse = _no_versions,
        click_through: ClickThroughOf = _no_clicks,
        announce: Callable[[], None] = lambda: None,
        outbox: Outbox | None = None,
    ) -> None:
        """Creates a registry.

        Args:
            database: holds the rows of versions and activations.
            store: holds the checkpoints.
            retention: the rule by which versions keep their files.
            versions_in_use: names versions whose files another feature needs.
            click_through: gives the click-through of a version's lists.
            announce: called after a commit that changes which version is active.
            outbox: takes a message of each change of the active version.
        """
        self._database = database
        self._repository = ModelRepository(database)
        self._store = store
        self._retention = retention or RetentionRule()
        self._versions_in_use = versions_in_use
        self._announce = announce
        self._outbox = outbox or Outbox()
        self._activator = ActivationService(
            database, lambda row: self.load(row, "cpu"), self._outbox
        )
        self.click_through = click_through

    def new_version(self) -> str:
        """The name of a new version; names sort by time."""
        return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"

    def folder(self, version: str) -> Path:
        """The local folder of a version's checkpoint, whether or not the folder exists."""
        return self._store.folder(version)

    def stored_path(self, version: str) -> str:
        """The path of the folder in the version's row, the same for every store."""
        return f"models/{checked_version(version)}"

    def candidates_path(self, version: str) -> Path:
        """The local file for candidates that a worker has computed with a version."""
        folder = self.folder(version)
        return folder.with_name(f"{folder.name}{CANDIDATES}")

    async def local_folder(self, version: str) -> Path:
        """The verified local folder of a version, downloaded if necessary.

        Raises:
            NotFound: the version does not exist.
            CheckpointError: the version's checkpoint is missing or damaged.
        """
        row = await self.get(version)

        def verified(folder: Path) -> Path:
            check_files(folder, row.checksum)
            return folder

        return await asyncio.to_thread(self._read, row, verified)

    async def upload(self, version: str) -> None:
        """Brings a version from `folder` into the store, before the version is published.

        Raises:
            CheckpointError: the store could not be used, or has other contents by this name.
        """
        await asyncio.to_thread(self._store.publish, version)

    async def fetch_candidates(self, version: str) -> Path | None:
        """The local file of candidates; None while no file exists. Raises CheckpointError."""
        return await asyncio.to_thread(self._store.fetch_candidates, version)

    async def claim_store(self, known: Collection[str] = (), *, required: bool = True) -> None:
        """Checks that the store belongs to this database, and marks it if it has no mark yet.

        A store without a mark is claimed if this database knows every version in the store. The
        store is then empty, or an older release filled the store.

        Args:
            known: versions that this database is about to get.
            required: if false, a store that is unavailable or cannot be marked gives a warning.

        Raises:
            ForeignStore: the store belongs to another database.
            UnknownVersions: some versions in the store may be another database's.
            CheckpointError: the store could not be used, or its mark names no database.
        """
        name = await instance_id(self._database)
        try:
            owners = await asyncio.to_thread(self._store.owners)
            _refuse_other_owners(owners, name)
            if None not in owners.values():
                return
            versions = await asyncio.to_thread(self._store.versions)
            unknown = versions.difference(known, await self._repository.known_versions())
            if unknown:
                raise _unknown_versions(owners, versions, unknown)
            await asyncio.to_thread(self._store.mark, name)
            # Another database may have been faster.
            _refuse_other_owners(await asyncio.to_thread(self._store.owners), name)
        except ForeignStore:
            raise
        except CheckpointError as error:
            if required:
                raise
            log.warning("the checkpoint store is not marked yet", reason=str(error))

    async def discard(self, version: str) -> None:
        """Removes the files of a version, unless the registry has the version after all."""
        if await self._repository.get(version) is not None:
            return
        try:
            await asyncio.to_thread(self._store.remove, version)
        except CheckpointError as error:  # `sweep` will find it
            log.warning(
                "an unfinished checkpoint cannot be removed", version=version, reason=str(error)
            )

    async def sweep(self) -> None:
        """Removes files that killed workers left, if the store belongs to this database.

        The sweep removes old unfinished parts, and old versions without a row or with a row that is
        marked as deleted. Young files stay, because a worker may still write them. Files with names
        of another form stay.
        """
        written_before = time.time() - MIN_LEFTOVER_SECONDS
        try:
            await self.claim_store()
            for name in await asyncio.to_thread(self._store.list_old, written_before):
                row = await self._repository.get(name)
                if row is None or row.status == "deleted":
                    log.info("leftover checkpoint removed", folder=name)
                    await asyncio.to_thread(self._store.remove, name)
        except CheckpointError as error:
            log.warning("leftover checkpoints cannot be removed", reason=str(error))

    async def clean(self) -> list[str]:
        """Removes the files of the versions that expire by retention, and returns the versions.

        The rows of the versions stay. If a worker is killed after marking versions as deleted,
        `sweep` removes the remaining files. The store of another database stays unchanged.
        """
        try:
            await self.claim_store()
        except UnknownVersions:
            pass  # versions with a row of this database may go all the same
        except CheckpointError as error:
            log.warning("old checkpoints cannot be removed", reason=str(error))
            return []
        async with self._database.write() as conn:
            # Until the end of the transaction nobody can activate one of them.
            activation = await self._repository.lock_activation(conn)
            changes = await self._repository.changes(conn)
            versions = await self._repository.stored_versions(conn)
            in_use = await self._versions_in_use()
            expired = self._retention.expired(versions, activation, changes, in_use, now_us())
            if expired:
                await self._repository.mark_deleted(conn, expired)
        for version in expired:
            try:
                await asyncio.to_thread(self._store.remove, version)
            except CheckpointError as error:
                log.warning(
                    "an old checkpoint cannot be removed", version=version, reason=str(error)
                )
            else:
                log.info("old checkpoint removed", version=version)
        return expired

    def close(self) -> None:
        """Ends calls to the store in progress in other threads."""
        self._store.close()

    async def activation(self) -> Activation:
        """The active version."""
        return await self._repository.activation()

    async def serving(self) -> ModelRow | None:
        """The row of the active version, if there is one."""
        return await self._repository.serving()

    async def trained_seq(self) -> int:
        """The highest seq that any version, published or rejected, was trained up to; or 0."""
        return await self._repository.trained_seq()

    async def get(self, version: str) -> ModelRow:
        """A version's row. Raises NotFound."""
        row = await self._repository.get(version) if text_problem(version) is None else None
        if row is None:
            raise NotFound("the model version does not exist", code="unknown_model")
        return row

    async def stored_versions(self) -> set[str]:
        """The versions that are not marked as deleted."""
        async with self._repository.database.read() as conn:
            return {each.version for each in await self._repository.stored_versions(conn)}

    async def page(self, below: Place | None, n: int) -> tuple[list[ModelRow], Place | None]:
        """Versions, newest first, and the place of the next page; None after the last page."""
        rows = await self._repository.page(below, n + 1)
        last = rows[n - 1] if len(rows) > n else None
        return rows[:n], None if last is None else Place(last.created_at, last.version)

    async def load(self, row: ModelRow, device: str) -> Checkpoint:
        """Reads and verifies a version's checkpoint. Raises CheckpointError."""
        from ncr_core.checkpoint import load_checkpoint

        return await asyncio.to_thread(
            self._read, row, lambda folder: load_checkpoint(folder, device)
        )

    async def load_measured(
        self, row: ModelRow, device: str
    ) -> tuple[Checkpoint, EvaluationSnapshot | None]:
        """Reads and verifies a version's checkpoint and its evaluation snapshot.

        The snapshot is None if the checkpoint has no snapshot, or if the snapshot alone is damaged
        in every copy. Raises CheckpointError.
        """
        from ncr_core.checkpoint import load_evaluation_snapshot

        checkpoint = await self.load(row, device)
        try:
            return checkpoint, await asyncio.to_thread(
                self._read, row, lambda folder: load_evaluation_snapshot(folder, device)
            )
        except CheckpointReadError:
            raise  # another try may read the snapshot
        except CheckpointError as error:
            log.warning(
                "the evaluation snapshot cannot be read", version=row.version, reason=str(error)
            )
            return checkpoint, None

    def _read(self, row: ModelRow, read: Callable[[Path], T]) -> T:
        """The result of ``read`` on a version's folder, with a damaged copy fetched again."""
        # A row must not lead out of the store, whoever wrote it.
        if row.path != self.stored_path(row.version):
            raise CheckpointError(f"the checkpoint of {row.version} is not in the store")
        folder = self._store.fetch(row.version, row.checksum)
        try:
            verify_file(folder / MANIFEST, row.checksum)
            return read(folder)
        except CheckpointError as error:
            again = self._store.fetch_again(row.version, row.checksum)
            if again is None:
                raise
            log.warning("a damaged copy was fetched again", version=row.version, reason=str(error))
        return read(again)

    async def publish(
        self, row: ModelRow, detail: dict[str, Any] | None = None, *, end_job: EndJob | None = None
    ) -> str | None:
        """Adds a version and activates the version, all or nothing.

        The registry keeps a rejected version without activating it. While the active version is
        pinned, the new version stays inactive. If another version became active after the gate's
        comparison, the new version stays inactive without force. The gate's report in the stored
        metrics says whether the version is ``served``, and ``why`` not.

        Args:
            row: the version.
            detail: recorded in the history.
            end_job: called in the same transaction before the row is stored, with the row and
                whether the version becomes active. An error rolls the transaction back.

        Returns:
            the reason why the version is not active; None for an active version.
        """
        async with self._database.write() as conn:
            # From here on the active version stays what it is.
            before = await self._repository.lock_activation(conn)
            reason = _reason_not_to_serve(row, before)
            if gate := row.metrics.get("gate"):
                gate = gate | {"served": reason is None} | ({"why": reason} if reason else {})
                row = row._replace(metrics=row.metrics | {"gate": gate})
            if end_job is not None:
                await end_job(conn, row, reason is None)
            await self._repository.insert(conn, row)
            if reason is None:
                after = Activation(row.version, before.version, before.generation + 1)
                await self._repository.set_active(conn, before, after, "published", detail)
                await self._outbox.add(conn, "model.published", change_told(before, after, detail))
        if reason is None:
            self._announce()
        return reason

    async def activate(
        self,
        version: str,
        reason: Reason = "activated",
        detail: dict[str, Any] | None = None,
        *,
        force: bool = False,
        pin: bool = False,
        if_active: str | None = None,
        by: str | None = None,
    ) -> Activation:
        """Verifies a version's checkpoint and makes the version the active one.

        If the active version is pinned, the pin moves to the new version. After an error, the
        active version stays the same.

        Args:
            version: the version to activate.
            reason: recorded in the history.
            detail: recorded in the history.
            force: accept a version that the gate rejected, and publish the version.
            pin: keep the version active after later trainings.
            if_active: activate only if this version is still the active version.
            by: the id of the key that requests the activation, recorded in the history.

        Raises:
            NotFound: `unknown_model`.
            Conflict: `not_published`, `deleted_model`, `checkpoint_damaged`, `model_changed`, or
                `pinned` for an automatic return from a pinned version.
            Unavailable: `store_unavailable`: the store is unavailable, and no local copy exists.
        """
        activation = await self._activator.activate(
            version, reason, detail, force=force, pin=pin, if_active=if_active, by=by
        )
        self._announce()
        return activation

    async def rollback(
        self, detail: dict[str, Any] | None = None, *, by: str | None = None
    ) -> Activation:
        """Activates the version that was active before.

        The rollback skips versions that were rolled back from, and versions whose files are
        deleted. Raises Conflict `no_previous_model`.
        """
        activation = await self._activator.rollback(detail, by)
        self._announce()
        return activation

    async def unpin(self, *, by: str | None = None) -> Activation:
        """Removes the pin, so that the next trained version is activated again."""
        return await self._activator.unpin(by)

    async def history(
        self, version: str | None = None, below: int | None = None, n: int = 100
    ) -> tuple[list[ActivationChange], int | None]:
        """Changes of the active version, newest first, and the generation for the next page.

        ``version`` limits the changes to activations of this version. The next page has the changes
        below the generation, which is None after the last page.
        """
        rows = await self._repository.history(version, below, n + 1)
        return rows[:n], rows[n - 1].generation if len(rows) > n else None


def _reason_not_to_serve(row: ModelRow, active: Activation) -> str | None:
    """The reason why a new version is not activated; None if the version is activated."""
    if row.status == "rejected":
        return "rejected by the gate"
    if active.pinned:
        return "the active version is pinned"
    gate = row.metrics.get("gate")
    if gate and not gate["forced"] and gate["incumbent"] != active.version:
        # It might be worse than this one, which somebody chose meanwhile.
        return f"another version became active during the training: {active.version}"
    return None


def _refuse_other_owners(owners: dict[str, str | None], name: str) -> None:
    for place, owner in owners.items():
        if owner not in (None, name):
            raise ForeignStore(
                f"{place} holds the checkpoints of another database (its {MARK} names {owner}, and "
                f"this one is {name}): set another NCR_DATA_DIR or NCR_CHECKPOINT_STORE, or delete "
                f"{MARK} there if that database is gone"
            )


def _unknown_versions(
    owners: Collection[str], versions: set[str], unknown: set[str]
) -> ForeignStore | UnknownVersions:
    named = ", ".join(sorted(unknown)[:MAX_NAMED])
    more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
    place = " or ".join(owners)
    if unknown == versions:
        return ForeignStore(
            f"{place} holds only model versions that this database does not know "
            f"({named}{more}): set another NCR_DATA_DIR or NCR_CHECKPOINT_STORE. If killed "
            "trainings of this database left the versions, move them away"
        )
    return UnknownVersions(
        f"{place} holds model versions that this database does not know ({named}{more}): move "
        "them away. Until then, the service removes no leftover files there"
    )


def open_checkpoint_store(settings: Settings) -> CheckpointStore:
    """The store that the settings name.

    Raises:
        SettingsError: the store cannot be used.
    """
    local = settings.data_dir / "models"
    if settings.checkpoint_store is None:
        return LocalCheckpointStore(local)
    if "://" not in settings.checkpoint_store:
        return LocalCheckpointStore(Path(settings.checkpoint_store))
    from app.registry.object_store import RemoteCheckpointStore

    return RemoteCheckpointStore(settings.checkpoint_store, local)


def open_export_store(settings: Settings) -> ExportStore:
    """The exports of the store that the settings name. Raises SettingsError."""
    local = settings.data_dir / "models"
    if settings.checkpoint_store is None:
        return LocalExportStore(local)
    if "://" not in settings.checkpoint_store:
        return LocalExportStore(Path(settings.checkpoint_store))
    from app.registry.remote_exports import RemoteExportStore

    return RemoteExportStore(settings.checkpoint_store, local)
