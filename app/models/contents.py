"""What a checkpoint's folder has to hold, by its manifest."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from ncr_core.errors import CheckpointError, CheckpointReadError
from ncr_core.manifest import MANIFEST, manifest_checksum, read_manifest

MAX_FILES, MAX_BYTES = 16, 64 * 2**30  # of a version

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


def files_of(folder: Path) -> dict[str, tuple[int, str]]:
    """Bytes and SHA-256 of each file that a manifest names, plain names only.

    Raises CheckpointError, also for more than a checkpoint may hold.
    """
    manifest = read_manifest(folder)
    try:
        files = {
            str(name): (int(about["bytes"]), str(about["sha256"]))
            for name, about in manifest["files"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise CheckpointError("the manifest does not say what files there are") from None
    if not all(_NAME.fullmatch(name) for name in files) or MANIFEST in files:
        raise CheckpointError("the manifest names files that no checkpoint has")
    sizes = [size for size, _ in files.values()]
    if len(files) > MAX_FILES or sum(sizes) > MAX_BYTES or min(sizes, default=0) < 0:
        raise CheckpointError("the manifest names more than a checkpoint may hold")
    return files


def check_manifest(folder: Path, version: str, checksum: str) -> None:
    """Raises CheckpointError where the manifest is not the one that was published."""
    try:
        found = manifest_checksum(folder)
    except OSError as error:
        raise _not_read(error)(
            f"the checkpoint of {version} cannot be read: {error.strerror}"
        ) from None
    if found != checksum:
        raise CheckpointError(
            f"the checkpoint of {version} is damaged: "
            "its manifest is not the one that was published"
        )


def check_files(folder: Path, version: str, checksum: str) -> None:
    """Raises CheckpointError where the manifest or a file is not what was published."""
    check_manifest(folder, version, checksum)
    for name, (_, sha256) in files_of(folder).items():
        try:
            with (folder / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _not_read(error)(
                f"{name} of {version} cannot be read: {error.strerror}"
            ) from None
        if found != sha256:
            raise CheckpointError(
                f"{name} of {version} is damaged: its SHA-256 is not the manifest's"
            )


def _not_read(error: OSError) -> type[CheckpointError]:
    """What is not there will not be there the next time either; a failing disk may answer."""
    return CheckpointError if isinstance(error, FileNotFoundError) else CheckpointReadError
