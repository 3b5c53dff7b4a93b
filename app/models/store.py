"""Where checkpoints are kept: a folder, or object storage with a folder of copies before it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Protocol

from app.core.settings import Settings
from ncr_core.errors import CheckpointError, CheckpointReadError

VERSION = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4}")
CANDIDATES = ".candidates.safetensors"


class StoreUnavailable(CheckpointReadError):  # noqa: N818 - named after what a client is told
    """The store could not be used: that says nothing of the checkpoints in it."""


class CheckpointStore(Protocol):
    """Versions and the files beside them. Everything blocks; what fails is a CheckpointError, and
    a StoreUnavailable where another try may succeed.
    """

    remote: bool
    """Whether what is written to `folder` has to be published for other machines to see it."""

    def folder(self, version: str) -> Path:
        """Where a version is, or is to be written, on this machine."""

    def publish(self, version: str) -> None:
        """Lets others see a version that was written. May be tried again; overwrites nothing."""

    def fetch(self, version: str, checksum: str | None = None) -> Path:
        """The version's folder on this machine, brought here if need be.

        What is brought has to match ``checksum``, the SHA-256 of its manifest, if one is given.
        """

    def fetch_again(self, version: str, checksum: str) -> Path | None:
        """Replaces a damaged copy by what the store holds; None where there is nothing to do."""

    def publish_candidates(self, version: str) -> None:
        """Lets others see the candidates that were computed with a version."""

    def fetch_candidates(self, version: str) -> Path | None:
        """The file of candidates on this machine; None while there is none."""

    def remove(self, version: str) -> None:
        """Removes what there is of a version and beside it, unfinished parts too."""

    def list_old(self, before: float) -> list[str]:
        """Folders not written to since ``before`` (seconds since 1970)."""

    def close(self) -> None:
        """Ends calls that are under way in other threads, soon."""


def checked(version: str) -> str:
    """A version that is fit to be part of a path. Raises CheckpointError for any other."""
    if VERSION.fullmatch(version) is None:
        raise CheckpointError(f"{version[:64]!r} is not a version of a model")
    return version


class LocalStore:
    """A folder, perhaps one that several machines share; nothing is copied."""

    remote = False

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, version: str) -> Path:
        """The version's folder in this one."""
        return self.root / checked(version)

    def candidates(self, version: str) -> Path:
        """The file beside the version's folder."""
        return self.root / f"{checked(version)}{CANDIDATES}"

    def publish(self, version: str) -> None:
        """Where it was written is where it is read."""

    def fetch(self, version: str, checksum: str | None = None) -> Path:
        """The folder itself."""
        return self.folder(version)

    def fetch_again(self, version: str, checksum: str) -> Path | None:
        """There is no other copy."""
        return None

    def publish_candidates(self, version: str) -> None:
        """Where they were written is where they are read."""

    def fetch_candidates(self, version: str) -> Path | None:
        """The file itself."""
        path = self.candidates(version)
        return path if path.exists() else None

    def remove(self, version: str) -> None:
        """Also what was staged of it. The name may be that of any folder in this one."""
        if not version or version.startswith(".") or "/" in version:
            raise CheckpointError(f"{version[:64]!r} is not a folder of the checkpoint store")
        beside = f"{version}{CANDIDATES}"
        for path in self._paths():
            # The file beside it first: what is left of a folder is found again.
            if path.name == beside or path.name.startswith(f".{beside}"):
                path.unlink(missing_ok=True)
        for path in self._paths():
            if path.name == version or path.name.startswith(f".{version}-"):
                shutil.rmtree(path, ignore_errors=True)

    def list_old(self, before: float) -> list[str]:
        """Old folders; old parts of files and folders never finished are removed here."""
        found: list[str] = []
        for path in self._paths():
            try:
                old = path.stat().st_mtime < before
            except OSError:  # another worker has just removed it
                continue
            if old and path.is_dir():
                if path.name.startswith("."):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    found.append(path.name)
            elif old and path.name.startswith("."):
                path.unlink(missing_ok=True)
        return found

    def close(self) -> None:
        """Nothing is under way."""

    def _paths(self) -> list[Path]:
        return list(self.root.iterdir()) if self.root.is_dir() else []


def store_of(settings: Settings) -> CheckpointStore:
    """The store that the settings name. Raises SettingsError for one that cannot be used."""
    here = settings.data_dir / "models"
    if settings.checkpoint_store is None:
        return LocalStore(here)
    if "://" not in settings.checkpoint_store:
        return LocalStore(Path(settings.checkpoint_store))
    from app.models.remote_store import RemoteStore

    return RemoteStore(settings.checkpoint_store, here)
