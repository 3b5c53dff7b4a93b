"""Stores of checkpoints: folders of files that a manifest names with their SHA-256 sums."""

from __future__ import annotations

import json
import re
import shutil
import stat
from pathlib import Path
from typing import NamedTuple, Protocol

from app.core.logging import get_logger
from ncr_core.atomic_files import atomic_write
from ncr_core.errors import CheckpointError, StoreUnavailable
from ncr_core.manifest import MANIFEST, read_manifest, verify_file

log = get_logger(__name__)

VERSION = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4}")
CANDIDATES = ".candidates.safetensors"
MARK = "ncr-store.json"
"""The file that names the database that a store belongs to."""

# As `ncr_core.atomic_files` names what it has not finished.
_UNFINISHED = re.compile(rf"\.{VERSION.pattern}({re.escape(CANDIDATES)})?-[0-9a-f]{{12}}(-old)?")


class ForeignStore(CheckpointError):  # noqa: N818 - a state of the store
    """The store belongs to another database, and this service must not change the store."""


class UnknownVersions(CheckpointError):  # noqa: N818 - a state of the store
    """The store has no mark, and some of its versions may belong to another database."""


class CheckpointStore(Protocol):
    """Folders of versions, and the file of candidates beside each.

    Every method blocks. Failures are CheckpointError, and StoreUnavailable if another try may
    succeed.
    """

    remote: bool
    """Whether other machines see the files in `folder` only after `publish`."""

    def owners(self) -> dict[str, str | None]:
        """The instance id of the database in the mark of each place; None without a mark.

        A place is a folder or a URL. An object store has two places: the prefix and the local
        copies.
        """

    def versions(self) -> set[str]:
        """Every name in the store that has the form of a version."""

    def mark(self, owner: str) -> None:
        """Marks the places without a mark as places of the database ``owner``."""

    def folder(self, version: str) -> Path:
        """The local folder of a version, whether or not the folder exists."""

    def publish(self, version: str) -> None:
        """Makes a written version visible to other machines, and overwrites no file.

        A caller may retry the method.
        """

    def fetch(self, version: str, checksum: str | None = None) -> Path:
        """The version's local folder, downloaded if necessary.

        ``checksum`` is the SHA-256 of the manifest, which a download has to match.
        """

    def fetch_again(self, version: str, checksum: str) -> Path | None:
        """Replaces a damaged local copy by the store's copy; None if no copy needs replacement."""

    def publish_candidates(self, version: str) -> None:
        """Makes the precomputed candidates of a version visible to other machines."""

    def fetch_candidates(self, version: str) -> Path | None:
        """The local file of candidates, downloaded if necessary; None while no file exists."""

    def remove(self, version: str) -> None:
        """Removes a version and its candidates, unfinished parts included."""

    def list_old(self, before: float) -> list[str]:
        """Versions last written before a time (seconds since 1970).

        The method removes unfinished parts of the same age. Files with other names stay.
        """

    def close(self) -> None:
        """Ends calls in progress in other threads soon."""


def checked_version(version: str) -> str:
    """The version, which may then be part of a path.

    Raises:
        CheckpointError: the text does not have the form of a version.
    """
    if VERSION.fullmatch(version) is None:
        raise CheckpointError(f"{version[:64]!r} is not a version of a model")
    return version


class LocalCheckpointStore:
    """A folder, which several machines may share without copies."""

    remote = False

    def __init__(self, root: Path) -> None:
        self.root = root

    def owners(self) -> dict[str, str | None]:
        """The owner of the folder."""
        try:
            mark = (self.root / MARK).read_bytes()
        except FileNotFoundError:
            return {str(self.root): None}
        except OSError as error:
            raise StoreUnavailable(f"{self.root} cannot be read: {error.strerror}") from None
        return {str(self.root): owner_in(mark)}

    def versions(self) -> set[str]:
        """Names in the folder that have the form of a version."""
        return {path.name for path in self._paths() if VERSION.fullmatch(path.name)}

    def mark(self, owner: str) -> None:
        """Writes the mark unless there is one."""
        try:
            atomic_write(self.root / MARK, json.dumps({"database": owner}).encode())
        except FileExistsError:
            pass  # another process was faster
        except OSError as error:
            raise StoreUnavailable(f"{self.root} cannot be written: {error.strerror}") from None

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
        """Removes the version's folder, its candidates and their unfinished parts."""
        folder, candidates = self.folder(version), self.candidates(version)
        unfinished = [
            path
            for path in self._paths()
            if _UNFINISHED.fullmatch(path.name) and path.name.startswith(f".{version}")
        ]
        # The folder last: one that is left is found by `list_old`.
        for path in (*unfinished, candidates, folder):
            _delete(path)

    def list_old(self, before: float) -> list[str]:
        """Old folders of versions."""
        versions: list[str] = []
        for path in self._paths():
            unfinished = _UNFINISHED.fullmatch(path.name) is not None
            if not unfinished and VERSION.fullmatch(path.name) is None:
                continue  # somebody else's
            try:
                old = path.lstat().st_mtime < before
            except OSError:  # another worker has just removed it
                continue
            if old and unfinished:
                _delete(path)
            elif old and path.is_dir():
                versions.append(path.name)
        return versions

    def close(self) -> None:
        """Does nothing: no call takes long."""

    def _paths(self) -> list[Path]:
        return list(self.root.iterdir()) if self.root.is_dir() else []


def owner_in(mark: bytes) -> str:
    """The instance id in the content of a mark.

    Raises:
        CheckpointError: the content is not a mark.
    """
    try:
        owner = json.loads(mark)["database"]
    except (ValueError, TypeError, KeyError):
        owner = None
    if not isinstance(owner, str):
        raise CheckpointError(f"{MARK} does not name the database that the store belongs to")
    return owner


def _delete(path: Path) -> None:
    """Deletes a file or a folder, if it exists, and logs the deletion."""
    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    except FileNotFoundError:
        return
    log.info("removed from the checkpoint store", path=str(path))


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
        raise CheckpointError("the manifest names an unexpected file")
    sizes = [file.size for file in files.values()]
    if len(files) > MAX_FILES or sum(sizes) > MAX_BYTES or min(sizes, default=0) < 0:
        raise CheckpointError("the manifest names too many files or bytes")
    return files


def check_files(folder: Path, checksum: str) -> None:
    """Checks the manifest by its checksum, and every file by its SHA-256 in the manifest.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    verify_file(folder / MANIFEST, checksum)
    for name, file in manifest_files(folder).items():
        verify_file(folder / name, file.sha256)
