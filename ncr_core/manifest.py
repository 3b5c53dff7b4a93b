"""A checkpoint's manifest: what is in its folder. Read without the model, and without torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ncr_core.errors import CheckpointError, CheckpointReadError

FORMAT = "ncr-checkpoint/1"
MANIFEST = "manifest.json"
MAX_MANIFEST = 4 * 2**20


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder. Raises CheckpointError."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST:
            raise CheckpointError(f"{path} is too large for a manifest")
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointReadError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a manifest of format {FORMAT}")
    return manifest


def manifest_checksum(folder: Path) -> str:
    """SHA-256 of the manifest, which itself holds those of the other files."""
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
