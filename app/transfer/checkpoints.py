"""Checkpoints from the store into a backup, and back."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from app.core.errors import NotFound
from app.models.contents import files_of
from app.services import Services
from app.transfer.archive import BLOCK, ArchiveWriter, Backup, Report, TransferError
from app.transfer.files import sync_folder
from ncr_core.errors import CheckpointError
from ncr_core.manifest import MANIFEST


async def pack_checkpoint(services: Services, archive: ArchiveWriter, version: str) -> bool:
    """Adds a version's checkpoint and its candidates; False if there is no sound checkpoint."""
    try:
        folder = await services.models.local_folder(version)
        names = sorted((*files_of(folder), MANIFEST))
    except (CheckpointError, NotFound):
        return False
    candidates = None
    with contextlib.suppress(CheckpointError):  # they can be computed again
        candidates = await services.models.fetch_candidates(version)
    for name in names:  # and nothing else that may lie there
        await asyncio.to_thread(_pack, archive, f"models/{version}/{name}", folder / name)
    if candidates is not None:
        await asyncio.to_thread(_pack, archive, _candidates_member(version), candidates)
    return True


async def unpack_checkpoints(services: Services, backup: Backup, report: Report) -> int:
    """Puts the backup's checkpoints in their places and returns how many there are.

    Each appears whole or not at all. One that is there already with the same content stays, as when
    only the database is a new one; with other content it is a TransferError. After a failure later
    on they may stay as well: they do no harm, and the next attempt finds them.
    """
    models = backup.models()
    for done, (version, members) in enumerate(sorted(models.items()), 1):
        folder = services.models.folder(version)
        place = _check_same if folder.exists() else _unpack_folder
        await asyncio.to_thread(place, backup, folder, members)
        await services.models.upload(version)
        candidates, member = services.models.candidates_path(version), _candidates_member(version)
        if member in backup.manifest.members and not candidates.exists():
            await asyncio.to_thread(_unpack_file, backup, candidates, member)
        report("models", done, len(models))
    return len(models)


def _candidates_member(version: str) -> str:
    return f"models/{version}.candidates.safetensors"


def _pack(archive: ArchiveWriter, name: str, path: Path) -> None:
    with path.open("rb") as file, archive.member(name) as write:
        while data := file.read(BLOCK):
            write(data)


def _check_same(backup: Backup, folder: Path, members: list[str]) -> None:
    for name in members:
        path = folder / Path(name).name
        same = False
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            same = digest == backup.manifest.members[name].sha256
        if not same:
            raise TransferError(f"{folder} is there already, and not as in the backup")


def _unpack_folder(backup: Backup, folder: Path, members: list[str]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name in members:
            _copy(backup, name, staging / Path(name).name)
        staging.chmod(0o755)
        staging.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _unpack_file(backup: Backup, path: Path, member: str) -> None:
    staging = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        _copy(backup, member, staging)
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


def _copy(backup: Backup, member: str, path: Path) -> None:
    with backup.open(member) as source, path.open("wb") as file:
        shutil.copyfileobj(source, file, BLOCK)
        file.flush()
        os.fsync(file.fileno())
