"""Files and folders that appear under their names whole, or not at all.

A writer creates the content beside its place under a hidden name (`.<name>-<random>`), flushes the
content to the disk with fsync, and renames it. A reader never sees a half-written file, even after
a power cut. A killed process leaves only the hidden file or folder behind.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

PRIVATE = 0o600
_FOLDER_MODE = 0o755
LEFTOVER_SECONDS = 86_400.0
_OWNER = ".owner"
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def atomic_write(path: Path, content: bytes, *, replace: bool = False) -> None:
    """Writes a whole file; see `atomic_file`."""
    with atomic_file(path, replace=replace) as file:
        file.write(content)


@contextmanager
def atomic_file(path: Path, *, replace: bool = False, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file to write, which appears under its name when the block ends without an error.

    Args:
        path: the file; its folder is made if needed.
        replace: whether a file of that name may be replaced.
        mode: the permissions, less the process's umask.

    Raises:
        FileExistsError: the name is taken, before or after the block, and ``replace`` is false.
    """
    if not replace:
        _refuse_taken(path)
    staging = _staging(path)
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replace:
            staging.replace(path)
        else:
            _rename_to_free_name(staging, path)
        sync(path.parent)
    finally:
        staging.unlink(missing_ok=True)


@contextmanager
def atomic_folder(
    folder: Path, *, existing: Literal["refuse", "keep", "replace"] = "refuse"
) -> Iterator[Path]:
    """An empty folder to fill, which appears under its name when the block ends without an error.

    Args:
        folder: the folder's place; its parents are made if needed.
        existing: the treatment of a folder that has the name already. ``keep`` keeps that folder
            and drops the new content, as when another process was faster. ``replace`` removes that
            folder after the block. Both options replace an empty folder.

    Raises:
        FileExistsError: the name is taken, before or after the block, and ``existing`` is
            ``refuse``.
    """
    if existing == "refuse":
        _refuse_taken(folder)
    staging = _staging(folder)
    staging.mkdir(mode=0o700)
    old = staging.with_name(f"{staging.name}-old")
    try:
        yield staging
        for path in staging.rglob("*"):
            sync(path)
        sync(staging)
        staging.chmod(_FOLDER_MODE)
        if existing == "refuse":
            _refuse_taken(folder)
        elif existing == "replace" and folder.exists():
            folder.rename(old)
        try:
            staging.rename(folder)
        except OSError as error:
            if existing == "refuse" or error.errno not in _TAKEN or not folder.is_dir():
                if old.exists():
                    old.rename(folder)
                raise
        sync(folder.parent)
    finally:
        for path in (staging, old):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder for temporary files, which is removed at the end.

    The function also removes folders of this prefix that killed processes left: those of this
    machine at once, by a lock that a process holds until it ends, and those of others after a day.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.glob(f"{prefix}*"):
        _remove_if_left(old)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with (folder / _OWNER).open("wb") as owner:
        try:
            if _lock(owner) == "locked":
                owner.write(_machine())
                owner.flush()
            yield folder
        finally:
            _remove_scratch(folder)


def _remove_if_left(folder: Path) -> None:
    """Removes a scratch folder if the process that made it has ended, as far as one can know."""
    with suppress(OSError), (folder / _OWNER).open("rb+") as owner:  # no other folder has this file
        lock = _lock(owner) if owner.read() == _machine() else "unknown"
        newest = max(folder.stat().st_mtime, os.fstat(owner.fileno()).st_mtime)
        is_old = newest < time.time() - LEFTOVER_SECONDS
        if lock == "locked" or (lock == "unknown" and is_old):
            _remove_scratch(folder)


def _remove_scratch(folder: Path) -> None:
    """Removes what can be removed, the owner last: a removal that is killed can be repeated."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _OWNER:
                path.unlink(missing_ok=True)
        (folder / _OWNER).unlink(missing_ok=True)
        folder.rmdir()


def _lock(file: IO[bytes]) -> Literal["locked", "held", "unknown"]:
    """Locks a file until it is closed or its process ends; ``held`` if another process has it."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except (ImportError, OSError):  # Windows, or a file system without locks
        return "unknown"
    return "locked"


def _machine() -> bytes:
    """A name of this machine since its start, which is the same in all of its containers."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return socket.gethostname().encode()


def sync(path: Path) -> None:
    """Flushes a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _staging(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # kept apart from a name that is taken
        code = errno.ENOTDIR
        raise NotADirectoryError(code, os.strerror(code), error.filename) from None
    # Cut, so that a name that the file system just allows has room for what is added.
    return path.with_name(f".{path.name[:100]}-{secrets.token_hex(6)}")


def _refuse_taken(path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def _rename_to_free_name(staging: Path, path: Path) -> None:
    try:
        path.hardlink_to(staging)  # unlike a rename, it fails where the name is taken
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        _refuse_taken(path)
        staging.rename(path)
