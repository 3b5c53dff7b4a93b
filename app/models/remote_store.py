"""Checkpoints in object storage, by fsspec, with copies in a folder of this machine.

A version's manifest is uploaded last and downloaded first, so one that can be read is whole. What
the store answers is not trusted: names, sizes and SHA-256 sums are those of the manifest, or the
version is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.models.contents import check_files, check_manifest, files_of
from app.models.remote_files import RemoteFiles, told
from app.models.store import CANDIDATES, VERSION, LocalStore
from ncr_core.errors import CheckpointError
from ncr_core.manifest import MANIFEST, MAX_MANIFEST

MAX_CANDIDATES = 4 * 2**30
LOOK_SECONDS = 10.0  # between two looks for the same candidates
KEPT, KEPT_SECONDS = 4, 24 * 3600.0  # copies that stay: so many, and all that were used of late
GONE_SECONDS = 7 * 24 * 3600.0  # for how long one stays that the store has no more


class RemoteStore:
    """The same layout as in a folder: `<version>/…` and `<version>.candidates.safetensors`."""

    remote = True

    def __init__(self, url: str, copies: Path) -> None:
        self._files = RemoteFiles(url)
        self._copies = LocalStore(copies)
        self._look_at: dict[str, float] = {}

    def folder(self, version: str) -> Path:
        """The copy's folder."""
        return self._copies.folder(version)

    def publish(self, version: str) -> None:
        """Uploads the folder, its manifest last."""
        folder = self.folder(version)
        with told(f"the checkpoint {version} cannot be stored"):
            for name in (*files_of(folder), MANIFEST):
                self._files.create(folder / name, f"{version}/{name}")

    def fetch(self, version: str, checksum: str | None = None) -> Path:
        """The copy, downloaded if there is none yet."""
        folder = self.folder(version)
        if folder.is_dir():
            with contextlib.suppress(OSError):
                os.utime(folder)  # used: not the first to go
            return folder
        return self._download(version, checksum, replace=False)

    def fetch_again(self, version: str, checksum: str) -> Path | None:
        """Downloads a version whose copy here is not what its manifest says."""
        folder = self.folder(version)
        with contextlib.suppress(CheckpointError):
            check_files(folder, version, checksum)
            return None
        return self._download(version, checksum, replace=True)

    def publish_candidates(self, version: str) -> None:
        """Uploads the file; a later attempt of the same job puts its own in its place."""
        path = self._copies.candidates(version)
        if path.exists():  # none where another version has taken this one's place
            with told(f"the candidates of {version} cannot be stored"):
                self._files.put(path, path.name)

    def fetch_candidates(self, version: str) -> Path | None:
        """Looks for the file in the store every few seconds at most, however often it is asked."""
        path = self._copies.candidates(version)
        if path.exists():
            return path
        if time.monotonic() < self._look_at.get(version, 0.0):
            return None
        self._look_at = {version: time.monotonic() + LOOK_SECONDS}
        with told(f"the candidates of {version} cannot be fetched"):
            size = self._files.size(path.name)
            if size is None:
                return None
            if size > MAX_CANDIDATES:
                raise CheckpointError(f"the candidates of {version} are too large: {size} bytes")
            with self._staging(version) as staging:
                self._files.get(path.name, staging / path.name, size)
                (staging / path.name).replace(path)
        return path

    def remove(self, version: str) -> None:
        """Here and, what is named like a version, in the store."""
        self._copies.remove(version)
        if VERSION.fullmatch(version):
            with told(f"the checkpoint {version} cannot be removed"):
                names = sorted(self._files.list(version), key=lambda n: not n.endswith(MANIFEST))
                # What is beside it, then the manifest: half a version is none.
                for name in (f"{version}{CANDIDATES}", *names):
                    self._files.remove(name)

    def list_old(self, before: float) -> list[str]:
        """Versions in the store, and folders here."""
        newest: dict[str, float] = {}
        with told("the checkpoints cannot be listed"):
            for name, written in self._files.list("").items():
                version, slash, _ = name.partition("/")
                if slash and VERSION.fullmatch(version):
                    newest[version] = max(newest.get(version, 0.0), written)
        old = {version for version, written in newest.items() if written < before}
        # A copy here of what is young there is somebody's that has just been published.
        here = set(self._copies.list_old(before)) - (newest.keys() - old)
        return sorted(old | here)

    def close(self) -> None:
        """Calls that are under way end with an error."""
        self._files.close()

    def _download(self, version: str, checksum: str | None, *, replace: bool) -> Path:
        folder = self.folder(version)
        with (
            told(f"the checkpoint of {version} cannot be fetched"),
            self._staging(version) as staging,
        ):
            size = self._files.size(f"{version}/{MANIFEST}")
            if size is None:
                raise CheckpointError(
                    f"the checkpoint of {version} is not in the store, or not yet"
                )
            if size > MAX_MANIFEST:
                raise CheckpointError(f"the manifest of {version} is too large: {size} bytes")
            self._files.get(f"{version}/{MANIFEST}", staging / MANIFEST, size)
            if checksum is not None:
                check_manifest(staging, version, checksum)
            files = files_of(staging)
            total = sum(size for size, _ in files.values())
            if total > shutil.disk_usage(staging).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for name, (size, sha256) in files.items():
                there = self._files.size(f"{version}/{name}")
                if there != size or sha256 != self._files.get(
                    f"{version}/{name}", staging / name, size
                ):
                    raise CheckpointError(
                        f"{name} of {version} is damaged in the store: "
                        "its size or SHA-256 is not the manifest's"
                    )
            if replace and folder.exists():
                folder.rename(staging.with_name(f"{staging.name}-old"))
            if not folder.exists():  # or another thread was faster
                staging.chmod(0o755)
                staging.rename(folder)
        with contextlib.suppress(CheckpointError), told("copies cannot be pruned"):
            self._prune(folder)
        return folder

    @contextmanager
    def _staging(self, version: str) -> Iterator[Path]:
        root = self._copies.root
        root.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{version}-", dir=root))
        try:
            yield staging
        finally:
            for path in (staging, *root.glob(f"{staging.name}-*")):
                shutil.rmtree(path, ignore_errors=True)

    def _prune(self, new: Path) -> None:
        """Removes copies that have not been used for a while: later if the store has them no more,
        where they were removed, or are lost.
        """
        copies = [path for path in new.parent.iterdir() if VERSION.fullmatch(path.name)]
        copies.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in copies[KEPT:]:
            used = path.stat().st_mtime
            if path == new or used > time.time() - KEPT_SECONDS:
                continue
            there = self._files.size(f"{path.name}/{MANIFEST}") is not None
            if there or used < time.time() - GONE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
                self._copies.candidates(path.name).unlink(missing_ok=True)
