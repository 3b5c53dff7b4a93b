"""Stores of checkpoints: folders of files that a manifest names with their SHA-256 sums."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple, Protocol

from ncr_core.errors import CheckpointError, CheckpointReadError
from ncr_core.manifest import MANIFEST, read_manifest, verify_file

VERSION = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4}")
CANDIDATES = ".candidates.safetensors"


class StoreUnavailable(CheckpointReadError):  # noqa: N818 - named after the HTTP error
    """The store could not be used, which says nothing about the checkpoints in it."""


class CheckpointStore(Protocol):
    """Folders of versions, and the file of candidates beside each.

    Every method blocks. Failures are CheckpointError, and StoreUnavailable if another try may
    succeed.
    """

    remote: bool
    """Whether other machines see what was written to `folder` only once it is published."""

    def folder(self, version: str) -> Path:
        """The local folder of a version, whether or not it has been written."""

    def publish(self, version: str) -> None:
        """Makes a written version visible to others; overwrites nothing and may be retried."""

    def fetch(self, version: str, checksum: str | None = None) -> Path:
        """The version's local folder, downloaded if need be.

        ``checksum`` is the SHA-256 of its manifest, which a download has to match.
        """

    def fetch_again(self, version: str, checksum: str) -> Path | None:
        """Replaces a damaged local copy by the store's; None if there is nothing to replace."""

    def publish_candidates(self, version: str) -> None:
        """Makes the precomputed candidates of a version visible to others."""

    def fetch_candidates(self, version: str) -> Path | None:
        """The local file of candidates, downloaded if need be; None while there is none."""

    def remove(self, version: str) -> None:
        """Removes a version and its candidates, unfinished parts included."""

    def list_old(self, before: float) -> list[str]:
        """Folders last written before a time (seconds since 1970)."""

    def close(self) -> None:
        """Ends calls in progress in other threads soon."""


def checked_version(version: str) -> str:
    """The version, which may then be part of a path.

    Raises:
        CheckpointError: it does not have the form of a version.
    """
    if VERSION.fullmatch(version) is None:
        raise CheckpointError(f"{version[:64]!r} is not a version of a model")
    return version


class LocalCheckpointStore:
    """A folder, which several machines may share; nothing is copied."""

    remote = False

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, version: str) -> Path:
        """The version's folder."""
        return self.root / checked_version(version)

    def candidates(self, version: str) -> Path:
        """The file of candidates beside the version's folder."""
        return self.root / f"{checked_version(version)}{CANDIDATES}"

    def publish(self, version: str) -> None:
        """Does nothing: the folder is read where it was written."""

    def fetch(self, version: str, checksum: str | None = None) -> Path:
        """The version's folder."""
        return self.folder(version)

    def fetch_again(self, version: str, checksum: str) -> Path | None:
        """None: there is no other copy."""
        return None

    def publish_candidates(self, version: str) -> None:
        """Does nothing: the file is read where it was written."""

    def fetch_candidates(self, version: str) -> Path | None:
        """The file of candidates, if there is one."""
        path = self.candidates(version)
        return path if path.exists() else None

    def remove(self, version: str) -> None:
        """Removes any folder of the store by its name, with its candidates and staged parts."""
        if not version or version.startswith(".") or "/" in version:
            raise CheckpointError(f"{version[:64]!r} is not a folder of the checkpoint store")
        candidates = f"{version}{CANDIDATES}"
        for path in self._paths():
            # The candidates first: a folder that is left is found by `list_old`.
            if path.name == candidates or path.name.startswith(f".{candidates}"):
                path.unlink(missing_ok=True)
        for path in self._paths():
            if path.name == version or path.name.startswith(f".{version}-"):
                shutil.rmtree(path, ignore_errors=True)

    def list_old(self, before: float) -> list[str]:
        """Old folders; old unfinished files and folders are removed on the way."""
        folders: list[str] = []
        for path in self._paths():
            try:
                old = path.stat().st_mtime < before
            except OSError:  # another worker has just removed it
                continue
            if old and path.is_dir():
                if path.name.startswith("."):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    folders.append(path.name)
            elif old and path.name.startswith("."):
                path.unlink(missing_ok=True)
        return folders

    def close(self) -> None:
        """Does nothing: no call takes long."""

    def _paths(self) -> list[Path]:
        return list(self.root.iterdir()) if self.root.is_dir() else []


MAX_FILES, MAX_BYTES = 16, 64 * 2**30  # of a version

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


class ManifestFile(NamedTuple):
    """A manifest's entry of a file."""

    size: int
    """In bytes."""
    sha256: str


def manifest_files(folder: Path) -> dict[str, ManifestFile]:
    """Lists the files that a manifest names.

    Raises:
        CheckpointError: a name leads out of the folder, or the files are more or larger than a
            checkpoint may have.
    """
    manifest = read_manifest(folder)
    try:
        files = {
            str(name): ManifestFile(int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in manifest["files"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise CheckpointError("the manifest does not list its files") from None
    if not all(_NAME.fullmatch(name) for name in files) or MANIFEST in files:
        raise CheckpointError("the manifest names a file that no checkpoint has")
    sizes = [file.size for file in files.values()]
    if len(files) > MAX_FILES or sum(sizes) > MAX_BYTES or min(sizes, default=0) < 0:
        raise CheckpointError("the manifest names more than a checkpoint may hold")
    return files


def check_manifest(folder: Path, checksum: str) -> None:
    """Checks that the manifest is the one that was published.

    Raises:
        CheckpointError: the manifest is missing or another one.
    """
    verify_file(folder / MANIFEST, checksum)


def check_files(folder: Path, checksum: str) -> None:
    """Checks that the manifest and every file that it names are what was published.

    Raises:
        CheckpointError: something is missing or damaged.
    """
    check_manifest(folder, checksum)
    for name, file in manifest_files(folder).items():
        verify_file(folder / name, file.sha256)
