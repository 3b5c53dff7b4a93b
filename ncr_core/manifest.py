"""Manifests of checkpoints: reading them, and verifying files against their SHA-256 sums.

The module needs neither the model nor torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ncr_core.errors import CheckpointError, CheckpointReadError

FORMAT = "ncr-checkpoint/1"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 4 * 2**20


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest of a checkpoint folder.

    Raises CheckpointError if the folder has no manifest of this format.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}")
    with _reading(path):
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path} is too large for a manifest")
        content = path.read_bytes()
    try:
        manifest = json.loads(content)
    except ValueError:
        raise CheckpointError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a manifest of format {FORMAT}")
    return manifest


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read in blocks, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_file(path: Path, sha256: str) -> None:
    """Checks a file against its SHA-256.

    Raises CheckpointError if the file is missing or has another SHA-256. Raises CheckpointReadError
    if the file could not be read; another try may succeed.
    """
    with _reading(path):
        actual = file_sha256(path)
    _compare(path, actual, sha256)


def read_verified(path: Path, sha256: str) -> bytes:
    """The content of a file; the returned bytes are checked as by `verify_file`."""
    with _reading(path):
        content = path.read_bytes()
    _compare(path, hashlib.sha256(content).hexdigest(), sha256)
    return content


def _compare(path: Path, actual: str, sha256: str) -> None:
    if actual != sha256:
        raise CheckpointError(f"{_label(path)} is damaged: its SHA-256 is not the recorded one")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        # A missing file is missing the next time too; a failing disk may answer.
        raise CheckpointError(f"{_label(path)} cannot be read: the file is missing") from None
    except OSError as error:
        raise CheckpointReadError(f"{_label(path)} cannot be read: {error.strerror}") from None


def _label(path: Path) -> str:
    """The name of a checkpoint's file for messages: without its path, as clients may see them."""
    return f"{path.name} of {path.parent.name}"
