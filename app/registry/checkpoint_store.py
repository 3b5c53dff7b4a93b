"""Stores of checkpoints: a folder, or object storage with a local folder of copies."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Protocol

from ncr_core.errors import CheckpointError, CheckpointReadError

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
