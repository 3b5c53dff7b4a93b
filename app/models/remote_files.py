"""Single files in object storage: each call bounded in time, each failure one line."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem

from app.core.errors import SettingsError
from app.models.store import StoreUnavailable
from ncr_core.errors import CheckpointError

CALL_SECONDS = 20.0
SLOWEST = 2**18  # bytes a second, which an upload may take longer for
PIECE = 8 * 2**20  # bytes that are downloaded in one call

# Their own messages may hold what was sent; these say what an operator can act on.
_REASONS = {
    "EndpointConnectionError": "the store cannot be reached",
    "ConnectTimeoutError": "the store cannot be reached",
    "ReadTimeoutError": "the store does not answer",
    "NoCredentialsError": "there are no credentials: set AWS_ACCESS_KEY_ID and so on",
    "PartialCredentialsError": "the credentials are incomplete: see AWS_ACCESS_KEY_ID and so on",
    "PermissionError": "the store refuses the credentials",
    "FileNotFoundError": "there is no such bucket or file",
}


class RemoteFiles:
    """Files below a URL, named relative to it. Everything blocks and may raise what fsspec raises;
    `told` makes one line of that.
    """

    def __init__(self, url: str) -> None:
        self._fs, root = _file_system(url)
        self._root = root.rstrip("/")
        self._closed = threading.Event()

    def size(self, name: str) -> int | None:
        """In bytes; None if there is no such file."""
        try:
            info = self._call("info", self._path(name))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def create(self, path: Path, name: str) -> None:
        """Uploads what is not there yet. Raises CheckpointError for other contents."""
        size = self.size(name)
        if size is None:
            try:
                self.put(path, name, mode="create")
                return
            except FileExistsError:  # a lost answer to this very upload, or somebody else
                size = self.size(name)
        with path.open("rb") as file:
            own = hashlib.file_digest(file, "sha256").hexdigest()
        if size != path.stat().st_size or self._read(name, size, None) != own:
            raise CheckpointError(
                f"{name} is in the store with other contents; a checkpoint is never overwritten"
            )

    def put(self, path: Path, name: str, mode: str = "overwrite") -> None:
        """Uploads a file."""
        seconds = CALL_SECONDS + path.stat().st_size / SLOWEST
        self._call("put_file", str(path), self._path(name), mode=mode, seconds=seconds)

    def get(self, name: str, path: Path, size: int) -> str:
        """Downloads the ``size`` bytes that a file has; their SHA-256."""
        return self._read(name, size, path)

    def list(self, folder: str) -> dict[str, float]:
        """Names below a folder, and when each was written (seconds since 1970)."""
        top = self._path(folder).rstrip("/")
        try:
            found = self._call("find", top, detail=True)
        except FileNotFoundError:
            return {}
        below = len(self._root) + 1
        return {
            path[below:]: _written(info)
            for path, info in found.items()
            if path.startswith(f"{top}/") and info["type"] == "file"
        }

    def remove(self, name: str) -> None:
        """Removes a file; one that is gone already is none to complain of."""
        try:
            self._call("rm_file", self._path(name))
        except FileNotFoundError:
            pass

    def close(self) -> None:
        """Ends what is under way, and lets nothing begin."""
        self._closed.set()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _read(self, name: str, size: int, path: Path | None) -> str:
        digest, at = hashlib.sha256(), 0
        with path.open("wb") if path is not None else open(os.devnull, "wb") as file:  # noqa: PTH123
            while at < size:
                end = min(at + PIECE, size)
                piece: bytes = self._call("cat_file", self._path(name), start=at, end=end)
                if len(piece) != end - at:
                    raise CheckpointError(f"the store gave another number of bytes of {name}")
                digest.update(piece)
                file.write(piece)
                at = end
        return digest.hexdigest()

    def _call(self, method: str, *args: Any, seconds: float | None = None, **more: Any) -> Any:
        """A file system's method, given up when its time is over or the store is closed."""
        if not isinstance(self._fs, AsyncFileSystem):
            return getattr(self._fs, method)(*args, **more)
        until = time.monotonic() + (CALL_SECONDS if seconds is None else seconds)
        call = asyncio.run_coroutine_threadsafe(
            getattr(self._fs, f"_{method}")(*args, **more), self._fs.loop
        )
        while True:
            concurrent.futures.wait([call], timeout=0.2)
            if call.done():
                return call.result()
            if self._closed.is_set() or time.monotonic() > until:
                call.cancel()
                raise TimeoutError


@contextmanager
def told(what: str) -> Iterator[None]:
    """Lets a CheckpointError pass and makes a StoreUnavailable of whatever else goes wrong, without
    what a library says of it.
    """
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


def _written(info: dict[str, Any]) -> float:
    when = info.get("LastModified") or info.get("mtime") or info.get("created")
    if isinstance(when, datetime):
        return when.timestamp()
    return float(when) if isinstance(when, int | float) else float("inf")  # unknown: not old


def _file_system(url: str) -> tuple[Any, str]:
    protocol = url.partition("://")[0]
    # Instances are not shared and listings not kept: other servers write to the same store.
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
        found, root = fsspec.core.url_to_fs(url, **options)
    except ImportError:
        extra = (
            "pip install neural-collaborative-ranking[s3]"
            if protocol in ("s3", "s3a")
            else f"what fsspec needs for {protocol}://"
        )
        raise SettingsError(f"NCR_CHECKPOINT_STORE: {protocol}:// needs {extra}") from None
    except Exception as error:
        reason = f"{type(error).__name__}"
        raise SettingsError(f"NCR_CHECKPOINT_STORE cannot be used: {reason}") from None
    if protocol in ("s3", "s3a"):
        found.retries = 1  # its own five, over botocore's, would take minutes
    return found, root
