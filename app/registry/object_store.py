"""Checkpoints in object storage through fsspec, with copies in a local folder.

A version's manifest is uploaded last and downloaded first, so that a version with a manifest is
whole. A download does not trust the store, and refuses a version unless names, sizes and SHA-256
sums are those of the manifest.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import time
from pathlib import Path
from typing import Literal

from app.core.errors import SettingsError
from app.core.logging import get_logger
from app.registry.checkpoint_store import (
    CANDIDATES,
    MARK,
    VERSION,
    LocalCheckpointStore,
    check_files,
    manifest_files,
    owner_in,
)
from ncr_core.atomic_files import atomic_file, atomic_folder
from ncr_core.errors import CheckpointError, ConfigError
from ncr_core.manifest import MANIFEST, MAX_MANIFEST_BYTES
from ncr_core.object_files import ObjectFiles, store_errors

log = get_logger(__name__)

MAX_CANDIDATES_BYTES = 4 * 2**30
CANDIDATES_POLL_SECONDS = 10.0  # between two look-ups of the same candidates
MIN_COPIES, MIN_COPY_AGE_SECONDS = 4, 24 * 3600.0
"""The number of latest used local copies that stay, and the time since its last use that each other
copy stays, in seconds."""
ORPHAN_COPY_SECONDS = 7 * 24 * 3600.0
"""The time since its last use that a copy stays whose version is no longer in the store."""


def open_files(url: str) -> ObjectFiles:
    """The files of the store. Raises SettingsError."""
    try:
        return ObjectFiles(url)
    except ConfigError as error:
        raise SettingsError(f"NCR_CHECKPOINT_STORE cannot be used: {error}") from None


class RemoteCheckpointStore:
    """An object store with the same layout as a folder.

    A version is `<version>/…`, and its candidates are `<version>.candidates.safetensors`.
    """

    remote = True

    def __init__(self, url: str, copies: Path) -> None:
        """``copies`` is the local folder of downloaded versions."""
        self._url = url
        self._files = open_files(url)
        self._copies = LocalCheckpointStore(copies)
        self._next_poll: dict[str, float] = {}

    def owners(self) -> dict[str, str | None]:
        """The owners of the local copies and of the prefix."""
        mark = io.BytesIO()
        with store_errors(f"{self._url} cannot be read"):
            size = self._files.size(MARK)
            if size is None:
                return self._copies.owners() | {self._url: None}
            self._files.get(MARK, mark, min(size, MAX_MANIFEST_BYTES))
        return self._copies.owners() | {self._url: owner_in(mark.getvalue())}

    def versions(self) -> set[str]:
        """Versions in the store and among the local copies."""
        return self._copies.versions() | self._stored_versions().keys()

    def mark(self, owner: str) -> None:
        """Marks the local copies and uploads their mark, unless the prefix has one."""
        self._copies.mark(owner)
        with store_errors(f"{self._url} cannot be written"), contextlib.suppress(FileExistsError):
            if self._files.size(MARK) is None:
                self._files.put(self._copies.root / MARK, MARK, mode="create")

    def folder(self, version: str) -> Path:
        """The local copy's folder."""
        return self._copies.folder(version)

    def publish(self, version: str) -> None:
        """Uploads the folder, its manifest last."""
        folder = self.folder(version)
        with store_errors(f"the checkpoint {version} cannot be stored"):
            for name in (*manifest_files(folder), MANIFEST):
                self._files.create(folder / name, f"{version}/{name}")

    def fetch(self, version: str, checksum: str | None = None) -> Path:
        """The local copy, downloaded if there is none yet."""
        folder = self.folder(version)
        if folder.is_dir():
            with contextlib.suppress(OSError):
                os.utime(folder)  # in use: `_prune` removes it last
            return folder
        return self._download(version, checksum, "keep")

    def fetch_again(self, version: str, checksum: str) -> Path | None:
        """Downloads a version again if its local copy is damaged."""
        folder = self.folder(version)
        with contextlib.suppress(CheckpointError):
            check_files(folder, checksum)
            return None
        return self._download(version, checksum, "replace")

    def publish_candidates(self, version: str) -> None:
        """Uploads the file; a later attempt of the same job replaces it."""
        path = self._copies.candidates(version)
        if path.exists():  # not if another version became active meanwhile
            with store_errors(f"the candidates of {version} cannot be stored"):
                self._files.put(path, path.name)

    def fetch_candidates(self, version: str) -> Path | None:
        """Looks the file up in the store at most every `CANDIDATES_POLL_SECONDS`."""
        path = self._copies.candidates(version)
        if path.exists():
            return path
        if time.monotonic() < self._next_poll.get(version, 0.0):
            return None
        self._next_poll = {version: time.monotonic() + CANDIDATES_POLL_SECONDS}
        with store_errors(f"the candidates of {version} cannot be fetched"):
            size = self._files.size(path.name)
            if size is None:
                return None
            if size > MAX_CANDIDATES_BYTES:
                raise CheckpointError(f"the candidates of {version} are too large: {size} bytes")
            with atomic_file(path, replace=True) as file:
                self._files.get(path.name, file, size)
        return path

    def remove(self, version: str) -> None:
        """Removes a version locally and in the store."""
        self._copies.remove(version)
        with store_errors(f"the checkpoint {version} cannot be removed"):
            names = sorted(self._files.list(version), key=lambda n: not n.endswith(MANIFEST))
            # The file beside it first, then the manifest: half a version is none.
            for name in (f"{version}{CANDIDATES}", *names):
                self._files.remove(name)
            if names:
                log.info("removed from the checkpoint store", path=f"{self._url}/{version}")

    def list_old(self, before: float) -> list[str]:
        """Old versions in the store, and old local copies."""
        newest = self._stored_versions()
        old = {version for version, written in newest.items() if written < before}
        # An old local copy of a version that is young in the store was just published.
        local = set(self._copies.list_old(before)) - (newest.keys() - old)
        return sorted(old | local)

    def close(self) -> None:
        """Makes calls in progress end with an error."""
        self._files.close()

    def _stored_versions(self) -> dict[str, float]:
        """Versions in the store, each with the time it was last written (seconds since 1970)."""
        newest: dict[str, float] = {}
        with store_errors("the checkpoints cannot be listed"):
            for name, written in self._files.list("").items():
                version, slash, _ = name.partition("/")
                if slash and VERSION.fullmatch(version):
                    newest[version] = max(newest.get(version, 0.0), written)
        return newest

    def _download(
        self, version: str, checksum: str | None, existing: Literal["keep", "replace"]
    ) -> Path:
        folder = self.folder(version)
        with (
            store_errors(f"the checkpoint of {version} cannot be fetched"),
            atomic_folder(folder, existing=existing) as staging,
        ):
            self._download_manifest(version, checksum, staging)
            files = manifest_files(staging)
            if sum(file.size for file in files.values()) > shutil.disk_usage(staging).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for name, file in files.items():
                key = f"{version}/{name}"
                with (staging / name).open("wb") as copy:
                    if (
                        self._files.size(key) != file.size
                        or self._files.get(key, copy, file.size) != file.sha256
                    ):
                        raise CheckpointError(
                            f"{name} of {version} is damaged in the store: "
                            "its size or SHA-256 is not the manifest's"
                        )
        with contextlib.suppress(CheckpointError), store_errors("copies cannot be pruned"):
            self._prune(folder)
        return folder

    def _download_manifest(self, version: str, checksum: str | None, staging: Path) -> None:
        key = f"{version}/{MANIFEST}"
        size = self._files.size(key)
        if size is None:
            raise CheckpointError(f"the checkpoint of {version} is not in the store, or not yet")
        if size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"the manifest of {version} is too large: {size} bytes")
        with (staging / MANIFEST).open("wb") as file:
            actual = self._files.get(key, file, size)
        if checksum is not None and actual != checksum:
            raise CheckpointError(
                f"the checkpoint of {version} is damaged in the store: its manifest differs "
                "from the published manifest"
            )

    def _prune(self, new: Path) -> None:
        """Removes local copies that have not been used for ``MIN_COPY_AGE_SECONDS``.

        A copy whose version was removed from the store or lost stays for ``ORPHAN_COPY_SECONDS``.
        All copies stay unless copies and store belong to one database.
        """
        owners = set(self.owners().values())
        if None in owners or len(owners) > 1:
            return
        copies = [path for path in new.parent.iterdir() if VERSION.fullmatch(path.name)]
        copies.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in copies[MIN_COPIES:]:
            used = path.stat().st_mtime
            if path == new or used > time.time() - MIN_COPY_AGE_SECONDS:
                continue
            stored = self._files.size(f"{path.name}/{MANIFEST}") is not None
            if stored or used < time.time() - ORPHAN_COPY_SECONDS:
                self._copies.remove(path.name)
