"""Files in object storage, or in any other file system of fsspec.

Every call to an asynchronous file system, such as S3, ends in bounded time. An error is one line
without secrets, which an operator can act on.
"""

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
from typing import IO, Any

from ncr_core.errors import CheckpointError, ConfigError, NcrError, StoreUnavailable
from ncr_core.manifest import file_sha256
from ncr_core.optional_imports import require

CALL_SECONDS = 20.0
MIN_UPLOAD_BYTES_PER_SECOND = 2**18  # a larger file gets more time than CALL_SECONDS
BLOCK_BYTES = 8 * 2**20  # downloaded in one call

# The exceptions' own messages may hold what was sent; these say what an operator can act on.
_REASONS = {
    "EndpointConnectionError": "the store cannot be reached",
    "ConnectTimeoutError": "the store cannot be reached",
    "ReadTimeoutError": "the store does not answer",
    "NoCredentialsError": "the credentials are missing: set AWS_ACCESS_KEY_ID and the related "
    "variables",
    "PartialCredentialsError": "the credentials are incomplete: set AWS_ACCESS_KEY_ID and the "
    "related variables",
    "PermissionError": "the store refuses the credentials",
    "FileNotFoundError": "the bucket or file does not exist",
}


class ObjectFiles:
    """Files below a URL, by their names relative to the URL.

    Every method blocks, and may raise any error of fsspec; see `store_errors`.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError if fsspec has no file system for the URL."""
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
        """Downloads the ``size`` bytes of a file into another and returns their SHA-256.

        Raises CheckpointError if the store returns another number of bytes.
        """
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
        """The files below a folder: write times by name, in seconds since 1970, ∞ if unknown."""
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
        """Ends calls: a call that is in progress or begins later may last 0.2 seconds at most."""
        self._closed.set()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(self, method: str, *args: Any, seconds: float | None = None, **options: Any) -> Any:
        """Calls a method of the file system.

        A call to an asynchronous file system raises TimeoutError after ``seconds``, by default
        ``CALL_SECONDS``, or when the store closes.
        """
        if not self._fs.async_impl:
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
    """Turns every error but those of this library into StoreUnavailable."""
    try:
        yield
    except NcrError:
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
    core = require("fsspec.core", "service")
    try:
        file_system, root = core.url_to_fs(url, **options)
    except ImportError:
        extra = (
            "pip install neural-collaborative-ranking[s3]"
            if protocol in ("s3", "s3a")
            else f"the package that fsspec names for {protocol}://"
        )
        raise ConfigError(f"{protocol}:// needs {extra}") from None
    except Exception as error:
        raise ConfigError(f"the store's address cannot be used: {type(error).__name__}") from None
    if protocol in ("s3", "s3a"):
        file_system.retries = 1  # its own five, over botocore's, would take minutes
    return file_system, root
