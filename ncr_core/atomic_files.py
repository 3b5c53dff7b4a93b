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
from contextlib import contextmanager
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

    The function also removes folders of this prefix that killed processes left: those of this host
    as soon as their process has ended, and those of other hosts after a day.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.glob(f"{prefix}*"):
        if _is_left(old):
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / _OWNER).open("w") as owner:
            _try_to_lock(owner)
            owner.write(socket.gethostname())
            owner.flush()
            yield folder


def _is_left(folder: Path) -> bool:
    """Whether the process that made a scratch folder has ended, as far as one can know."""
    try:
        with (folder / _OWNER).open() as owner:  # other folders have no such file
            if owner.read() == socket.gethostname() and _try_to_lock(owner):
                return True
            return os.fstat(owner.fileno()).st_mtime < time.time() - LEFTOVER_SECONDS
    except OSError:
        return False


def _try_to_lock(file: IO[str]) -> bool:
    """Locks a file until it is closed, or its process ends; false if that is impossible."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):  # Windows; locked, or a file system without locks
        return False
    return True


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
