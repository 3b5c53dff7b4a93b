"""Checkpoints in object storage through fsspec, with copies in a local folder.

A version's manifest is uploaded last and downloaded first, so a version with a manifest is whole.
The store's answers are not trusted: a version is refused unless names, sizes and SHA-256 sums are
those of its manifest.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import hashlib
import io
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal

import fsspec
from fsspec.asyn import AsyncFileSystem

from app.core.errors import SettingsError
from app.core.logging import get_logger
from app.registry.checkpoint_store import (
    CANDIDATES,
    MARK,
    VERSION,
    LocalCheckpointStore,
    StoreUnavailable,
    check_files,
    manifest_files,
    owner_in,
)
from ncr_core.atomic_files import atomic_file, atomic_folder
from ncr_core.errors import CheckpointError
from ncr_core.manifest import MANIFEST, MAX_MANIFEST_BYTES, file_sha256

log = get_logger(__name__)

CALL_SECONDS = 20.0
MIN_UPLOAD_BYTES_PER_SECOND = 2**18  # a larger file gets more time than CALL_SECONDS
BLOCK_BYTES = 8 * 2**20  # downloaded in one call
MAX_CANDIDATES_BYTES = 4 * 2**30
CANDIDATES_POLL_SECONDS = 10.0  # between two look-ups of the same candidates
MIN_COPIES, MIN_COPY_AGE_SECONDS = 4, 24 * 3600.0
"""Local copies that are never pruned: the newest few, and all that were used recently."""
ORPHAN_COPY_SECONDS = 7 * 24 * 3600.0
"""How long a local copy stays whose version is no longer in the store."""

# The exceptions' own messages may hold what was sent; these say what an operator can act on.
_REASONS = {
    "EndpointConnectionError": "the store cannot be reached",
    "ConnectTimeoutError": "the store cannot be reached",
    "ReadTimeoutError": "the store does not answer",
    "NoCredentialsError": "there are no credentials: set AWS_ACCESS_KEY_ID and so on",
    "PartialCredentialsError": "the credentials are incomplete: see AWS_ACCESS_KEY_ID and so on",
    "PermissionError": "the store refuses the credentials",
    "FileNotFoundError": "there is no such bucket or file",
}


class ObjectFiles:
    """Files below a URL, by their names relative to it.

    Every method blocks and may raise whatever fsspec raises; see `store_errors`.
    """

    def __init__(self, url: str) -> None:
        self._fs, root = _file_system(url)
        self._root = root.rstrip("/")
        self._closed = threading.Event()

    def size(self, name: str) -> int | None:
        """Size in bytes; None if there is no such file."""
        try:
            info = self._call("info", self._path(name))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def create(self, path: Path, name: str) -> None:
        """Uploads a file unless it is there already.

        Raises:
            CheckpointError: the file is there with other contents.
        """
        size = self.size(name)
        if size is None:
            try:
                self.put(path, name, mode="create")
                return
            except FileExistsError:  # a lost answer to this very upload, or somebody else
                size = self.size(name)
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            same = size == path.stat().st_size and self.get(name, nowhere, size) == file_sha256(
                path
            )
        if not same:
            raise CheckpointError(
                f"{name} is in the store with other contents; a checkpoint is never overwritten"
            )

    def put(self, path: Path, name: str, mode: str = "overwrite") -> None:
        """Uploads a file."""
        seconds = CALL_SECONDS + path.stat().st_size / MIN_UPLOAD_BYTES_PER_SECOND
        self._call("put_file", str(path), self._path(name), mode=mode, seconds=seconds)

    def get(self, name: str, file: IO[bytes], size: int) -> str:
        """Downloads the ``size`` bytes of a file into another and returns their SHA-256."""
        digest, position = hashlib.sha256(), 0
        while position < size:
            end = min(position + BLOCK_BYTES, size)
            block: bytes = self._call("cat_file", self._path(name), start=position, end=end)
            if len(block) != end - position:
                raise CheckpointError(f"the store returned another number of bytes of {name}")
            digest.update(block)
            file.write(block)
            position = end
        return digest.hexdigest()

    def list(self, folder: str) -> dict[str, float]:
        """Names below a folder, each with the time it was written (seconds since 1970)."""
        top = self._path(folder).rstrip("/")
        try:
            files = self._call("find", top, detail=True)
        except FileNotFoundError:
            return {}
        prefix = len(self._root) + 1
        return {
            path[prefix:]: _write_time(info)
            for path, info in files.items()
            if path.startswith(f"{top}/") and info["type"] == "file"
        }

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        try:
            self._call("rm_file", self._path(name))
        except FileNotFoundError:
            pass

    def close(self) -> None:
        """Ends calls in progress, and lets no new one begin."""
        self._closed.set()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(self, method: str, *args: Any, seconds: float | None = None, **options: Any) -> Any:
        """Calls a method of the file system; gives up after some time or when the store closes."""
        if not isinstance(self._fs, AsyncFileSystem):
            return getattr(self._fs, method)(*args, **options)
        deadline = time.monotonic() + (CALL_SECONDS if seconds is None else seconds)
        call = asyncio.run_coroutine_threadsafe(
            getattr(self._fs, f"_{method}")(*args, **options), self._fs.loop
        )
        while True:
            concurrent.futures.wait([call], timeout=0.2)
            if call.done():
                return call.result()
            if self._closed.is_set() or time.monotonic() > deadline:
                call.cancel()
                raise TimeoutError


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turns every error but a CheckpointError into StoreUnavailable, a line without secrets."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise StoreUnavailable(f"{what}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    name = type(error).__name__
    if isinstance(error, TimeoutError):
        return "the store does not answer"
    if name not in _REASONS and isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return _REASONS.get(name, name)


def _write_time(info: dict[str, Any]) -> float:
    written = info.get("LastModified") or info.get("mtime") or info.get("created")
    if isinstance(written, datetime):
        return written.timestamp()
    return float(written) if isinstance(written, int | float) else float("inf")  # unknown: not old


def _file_system(url: str) -> tuple[Any, str]:
    protocol = url.partition("://")[0]
    # No shared instances and no cached listings: other servers write to the same store.
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        options["config_kwargs"] = {
            "connect_timeout": 5,
            "read_timeout": 10,
            "retries": {"total_max_attempts": 2, "mode": "standard"},
        }
    if protocol in ("file", "local"):
        options["auto_mkdir"] = True
    try:
        file_system, root = fsspec.core.url_to_fs(url, **options)
    except ImportError:
        extra = (
            "pip install neural-collaborative-ranking[s3]"
            if protocol in ("s3", "s3a")
            else f"the package that fsspec names for {protocol}://"
        )
        raise SettingsError(f"NCR_CHECKPOINT_STORE: {protocol}:// needs {extra}") from None
    except Exception as error:
        raise SettingsError(
            f"NCR_CHECKPOINT_STORE cannot be used: {type(error).__name__}"
        ) from None
    if protocol in ("s3", "s3a"):
        file_system.retries = 1  # its own five, over botocore's, would take minutes
    return file_system, root


class RemoteCheckpointStore:
    """An object store with the same layout as a folder.

    A version is `<version>/…`, and its candidates are `<version>.candidates.safetensors`.
    """

    remote = True

    def __init__(self, url: str, copies: Path) -> None:
        """``copies`` is the local folder of downloaded versions."""
        self._url = url
        self._files = ObjectFiles(url)
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
                f"the checkpoint of {version} is damaged in the store: "
                "its manifest is not the published one"
            )

    def _prune(self, new: Path) -> None:
        """Removes local copies that have not been used for a while.

        A copy that is no longer in the store, because it was removed or lost, stays longer. Nothing
        is removed unless copies and store belong to one database.
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
