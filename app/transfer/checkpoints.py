"""Checkpoints in a backup: packed from the store, and restored into it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import IO

from app.core.errors import NotFound
from app.registry.checkpoint_store import manifest_files
from app.transfer.archive import BLOCK_BYTES, ArchiveWriter, Backup, Report, TransferError
from app.wiring import Services
from ncr_core.atomic_files import atomic_file, atomic_folder
from ncr_core.errors import CheckpointError
from ncr_core.manifest import MANIFEST, verify_file


async def pack_checkpoint(services: Services, archive: ArchiveWriter, version: str) -> bool:
    """Adds a version's checkpoint and candidates; returns False if the checkpoint is not intact."""
    try:
        folder = await services.models.local_folder(version)
        names = sorted((*manifest_files(folder), MANIFEST))
    except (CheckpointError, NotFound):
        return False
    candidates = None
    with contextlib.suppress(CheckpointError):  # they can be computed again
        candidates = await services.models.fetch_candidates(version)
    for name in names:  # no other files that the folder may hold
        await asyncio.to_thread(_pack, archive, f"models/{version}/{name}", folder / name)
    if candidates is not None:
        await asyncio.to_thread(_pack, archive, _candidates_member(version), candidates)
    return True


async def unpack_checkpoints(services: Services, backup: Backup, report: Report) -> int:
    """Restores the backup's checkpoints to the store, and returns their number.

    Each checkpoint appears whole or not at all. An existing checkpoint with the same content stays,
    as when only the database is new. After a later failure, restored checkpoints may stay without
    harm, and the next attempt reuses them.

    Raises:
        TransferError: a checkpoint of the same version exists with other content.
    """
    models = backup.models()
    for number, (version, members) in enumerate(sorted(models.items()), 1):
        folder = services.models.folder(version)
        place = _check_same if folder.exists() else _unpack_folder
        await asyncio.to_thread(place, backup, folder, members)
        await services.models.upload(version)
        candidates, member = services.models.candidates_path(version), _candidates_member(version)
        if member in backup.manifest.members and not candidates.exists():
            await asyncio.to_thread(_unpack_file, backup, candidates, member)
        report("models", number, len(models))
    return len(models)


def _candidates_member(version: str) -> str:
    return f"models/{version}.candidates.safetensors"


def _pack(archive: ArchiveWriter, name: str, path: Path) -> None:
    with path.open("rb") as file, archive.member(name) as write:
        while data := file.read(BLOCK_BYTES):
            write(data)


def _check_same(backup: Backup, folder: Path, members: list[str]) -> None:
    for name in members:
        try:
            verify_file(folder / Path(name).name, backup.manifest.members[name].sha256)
        except CheckpointError:
            raise TransferError(f"{folder} exists already and differs from the backup") from None


def _unpack_folder(backup: Backup, folder: Path, members: list[str]) -> None:
    with atomic_folder(folder) as staging:
        for name in members:
            with (staging / Path(name).name).open("wb") as file:
                _copy(backup, name, file)


def _unpack_file(backup: Backup, path: Path, member: str) -> None:
    with atomic_file(path, replace=True) as file:
        _copy(backup, member, file)


def _copy(backup: Backup, member: str, file: IO[bytes]) -> None:
    with backup.open(member) as source:
        shutil.copyfileobj(source, file, BLOCK_BYTES)
