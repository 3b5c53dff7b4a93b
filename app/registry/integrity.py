"""Integrity of a checkpoint's folder: the files that its manifest names, and their SHA-256 sums."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ncr_core.errors import CheckpointError
from ncr_core.manifest import MANIFEST, read_manifest, verify_file

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
        raise CheckpointError("the manifest names a file that no checkpoint has")
    sizes = [file.size for file in files.values()]
    if len(files) > MAX_FILES or sum(sizes) > MAX_BYTES or min(sizes, default=0) < 0:
        raise CheckpointError("the manifest names more than a checkpoint may hold")
    return files


def check_manifest(folder: Path, checksum: str) -> None:
    """Checks that the manifest is the one that was published.

    Raises:
        CheckpointError: the manifest is missing or another one.
    """
    verify_file(folder / MANIFEST, checksum)


def check_files(folder: Path, checksum: str) -> None:
    """Checks that the manifest and every file that it names are what was published.

    Raises:
        CheckpointError: something is missing or damaged.
    """
    check_manifest(folder, checksum)
    for name, file in manifest_files(folder).items():
        verify_file(folder / name, file.sha256)
