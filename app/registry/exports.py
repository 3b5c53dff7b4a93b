"""Exports in the checkpoint store: `exports/<job id>/`, whole or absent, each with a manifest.

Exports lie beside the versions of models, in a local folder or in object storage. The store removes
exports by age. The store writes a manifest last and removes it first, so that an export with a
manifest is whole.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, Field, ValidationError

from app.core.logging import get_logger
from ncr_core.atomic_files import atomic_file, atomic_folder, sync
from ncr_core.errors import CheckpointError, StoreUnavailable
from ncr_core.manifest import MANIFEST, MAX_MANIFEST_BYTES, file_sha256, verify_file

log = get_logger(__name__)

FOLDER = "exports"
FORMAT: Literal["ncr-export/1"] = "ncr-export/1"
MAX_FILES = 16  # of an export
COPY_BYTES = 2**20
FOLDER_MODE = 0o755

EXPORT = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{8}|key-[0-9a-f]{32}")
"""The form of a job's id, which is the name of its export."""
_UNFINISHED = re.compile(rf"\.(?:{EXPORT.pattern})-[0-9a-f]{{12}}(-old)?")
_FILE = re.compile(r"[a-z]{1,40}\.(jsonl|parquet)")


class ExportedFile(BaseModel):
    """The manifest's entry of a file."""

    rows: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: str


class ExportManifest(BaseModel):
    """The contents of an export."""

    format: Literal["ncr-export/1"] = FORMAT
    software: str
    job_id: str
    created_at: str
    as_of_seq: int
    """The last seq of the events when the export began."""
    model_version: str | None
    """The version that ranked the lists; None without lists, or where popular items are served."""
    params: dict[str, Any]
    """The request."""
    users_without_list: int
    """Users for whom the service has nothing to recommend."""
    files: dict[str, ExportedFile]


class ExportStore(Protocol):
    """Exports by the id of their job.

    Every method blocks. Failures are CheckpointError.
    """

    def staging(self, export: str) -> AbstractContextManager[Path]:
        """An empty local folder to fill, which is deleted at the end of the block."""

    def publish(self, export: str, folder: Path) -> None:
        """Makes a filled folder the export, in place of an earlier attempt's files.

        The caller writes the manifest before, by `write_manifest`, and may retry `publish`.
        """

    def manifest(self, export: str) -> ExportManifest | None:
        """The manifest; None while the export does not exist."""

    def fetch(self, export: str, file: str, path: Path) -> None:
        """Copies a file of an export to a new local path, whole or not at all."""

    def remove(self, export: str) -> None:
        """Removes an export, if it exists, and its unfinished parts on this machine."""

    def remove_old(self, before: float) -> list[str]:
        """Removes exports last written before a time, in seconds since 1970; returns their ids.

        The method removes unfinished parts of the same age. Files with other names stay.
        """


def checked_export(export: str) -> str:
    """The id, which may then be part of a path. Raises CheckpointError."""
    if EXPORT.fullmatch(export) is None:
        raise CheckpointError(f"{export[:64]!r} is not the id of an export")
    return export


def checked_file(file: str) -> str:
    """The name of an export's file, which may then be part of a path. Raises CheckpointError."""
    if file != MANIFEST and _FILE.fullmatch(file) is None:
        raise CheckpointError(f"{file[:64]!r} is not a file of an export")
    return file


def described(path: Path, rows: int) -> ExportedFile:
    """The manifest's entry of a written file."""
    return ExportedFile(rows=rows, bytes=path.stat().st_size, sha256=file_sha256(path))


def write_manifest(folder: Path, manifest: ExportManifest) -> None:
    """Writes the manifest of an export into its folder."""
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n")


def fetch_export(store: ExportStore, export: str, folder: Path) -> ExportManifest:
    """Copies an export to a new local folder, whole or not at all, and verifies its files.

    Raises:
        CheckpointError: the export does not exist, a file is damaged, or the store is unavailable.
        FileExistsError: the folder exists already.
    """
    manifest = store.manifest(export)
    if manifest is None:
        raise CheckpointError(f"the files of the export {export} are not in the store, or not yet")
    with atomic_folder(folder) as staging:
        for name, file in manifest.files.items():
            store.fetch(export, name, staging / name)
            verify_file(staging / name, file.sha256)
        write_manifest(staging, manifest)
    return manifest


def discard(store: ExportStore, export: str) -> None:
    """Removes the files of a job without a result, in part or whole.

    `ExportStore.remove_old` finds the files that stay after an error.
    """
    with suppress(CheckpointError):
        store.remove(export)


def parsed_manifest(export: str, content: bytes) -> ExportManifest:
    """The manifest in the content of its file. Raises CheckpointError."""
    try:
        manifest = ExportManifest.model_validate_json(content)
    except ValidationError:
        raise CheckpointError(f"the manifest of the export {export} is damaged") from None
    if len(manifest.files) > MAX_FILES or not all(map(_FILE.fullmatch, manifest.files)):
        raise CheckpointError(f"the manifest of the export {export} names unexpected files")
    return manifest


class LocalExportStore:
    """A folder, which several machines may share."""

    def __init__(self, root: Path) -> None:
        self._root = root / FOLDER

    @contextmanager
    def staging(self, export: str) -> Iterator[Path]:
        """A hidden folder beside the export's folder; `remove` deletes the folder after a kill."""
        self._root.mkdir(parents=True, exist_ok=True)
        folder = self._root / f".{checked_export(export)}-{secrets.token_hex(6)}"
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, export: str, folder: Path) -> None:
        """Renames the folder."""
        target = self._root / checked_export(export)
        for path in (*folder.iterdir(), folder):
            sync(path)
        if target.exists():
            old = folder.with_name(f"{folder.name}-old")
            target.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        folder.chmod(FOLDER_MODE)
        folder.rename(target)
        sync(self._root)
        self.remove_unfinished(export)

    def manifest(self, export: str) -> ExportManifest | None:
        """Reads the manifest in the export's folder."""
        path = self._root / checked_export(export) / MANIFEST
        try:
            with path.open("rb") as file:
                content = file.read(MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailable(f"the export cannot be read: {error.strerror}") from None
        return parsed_manifest(export, content)

    def fetch(self, export: str, file: str, path: Path) -> None:
        """Copies the file."""
        source = self._root / checked_export(export) / checked_file(file)
        try:
            with source.open("rb") as content, atomic_file(path) as copy:
                shutil.copyfileobj(content, copy, COPY_BYTES)
        except FileNotFoundError:
            raise CheckpointError(f"{file} of the export {export} is missing") from None

    def remove(self, export: str) -> None:
        """Removes the export's folder, and the unfinished folders of killed processes."""
        self._delete(self._root / checked_export(export))
        self.remove_unfinished(export)

    def remove_unfinished(self, export: str) -> None:
        """Removes an export's unfinished folders; no process may still write the export."""
        for path in self._root.glob(f".{checked_export(export)}-*"):
            if _UNFINISHED.fullmatch(path.name) and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)

    def remove_old(self, before: float) -> list[str]:
        """Removes old folders."""
        removed: list[str] = []
        for path in list(self._root.iterdir()) if self._root.is_dir() else []:
            unfinished = _UNFINISHED.fullmatch(path.name) is not None
            if not unfinished and EXPORT.fullmatch(path.name) is None:
                continue  # somebody else's
            try:
                old = _latest_write(path) < before
            except OSError:  # another worker has just removed it
                continue
            if old and path.is_dir() and not path.is_symlink():
                self._delete(path)
                if not unfinished:
                    removed.append(path.name)
        return removed

    def _delete(self, path: Path) -> None:
        if path.is_dir():
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
            log.info("removed from the checkpoint store", path=str(path))


def _latest_write(folder: Path) -> float:
    """The time of the latest write to a folder or a file in it, in seconds since 1970.

    A long export keeps writing to files in the same folder.
    """
    times = [folder.lstat().st_mtime]
    if folder.is_dir():
        times += [path.lstat().st_mtime for path in folder.iterdir()]
    return max(times)
