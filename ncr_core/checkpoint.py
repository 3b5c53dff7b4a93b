"""Checkpoints: an immutable folder of safetensors, ids and a manifest with SHA-256 sums.

The manifest is written last and the folder appears under its name at once, so a folder with a
manifest is whole. Nothing here unpickles: a checkpoint can hold no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ncr_core.data.interactions import IntArray
from ncr_core.errors import CheckpointError, CheckpointReadError, ConfigError
from ncr_core.manifest import FORMAT, MANIFEST, read_manifest
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.ranking.candidates import REFERENCES, spread_over_popularity

WEIGHTS, IDS = "model.safetensors", "ids.json"
EVALUATED = "evaluated.safetensors"  # see ncr_core.evaluated; not in every checkpoint
COUNTS = "item_counts"  # a tensor beside the model's own
HOTTEST = 1e30  # no temperature is


@dataclass(frozen=True)
class Checkpoint:
    """A trained model with the ids of its rows.

    ``item_counts`` is (n_items,) interactions in training; ``reference_items`` are the item rows
    that scores are measured against, spread over popularity.
    """

    model: PairwiseRanker
    user_ids: Sequence[str]
    item_ids: Sequence[str]
    item_counts: IntArray
    reference_items: Sequence[int]
    manifest: dict[str, Any]

    @property
    def temperature(self) -> float:
        """T of P(i preferred to j) = σ((z_ij − z_ji) / 2T); 1 where it was never fitted."""
        return _temperature(self.manifest)


def save_checkpoint(
    folder: Path,
    model: PairwiseRanker,
    *,
    user_ids: Sequence[str],
    item_ids: Sequence[str],
    item_counts: IntArray,
    metrics: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    evaluated: bytes | None = None,
    calibration: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes a checkpoint and returns its manifest; makes the folder's parents.

    ``metrics``, ``training``, ``data`` and ``calibration`` (of ``Calibration.as_dict``) go into the
    manifest as they are; ``evaluated`` is what ``pack_evaluated`` gave. Raises CheckpointError when
    ``folder`` exists already: a version never changes.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; a checkpoint is never overwritten")
    folder.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    tensors[COUNTS] = torch.from_numpy(item_counts.astype(np.int64))
    contents = {
        WEIGHTS: save(tensors),
        IDS: json.dumps({"users": list(user_ids), "items": list(item_ids)}).encode(),
    }
    if evaluated is not None:
        contents[EVALUATED] = evaluated
    references = spread_over_popularity(tensors[COUNTS], REFERENCES)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model.config.as_dict(),
        "n_users": model.n_users,
        "n_items": model.n_items,
        "reference_items": references.tolist(),
        "metrics": metrics or {},
        "calibration": calibration or {},
        "training": training or {},
        "data": data or {},
        "software": software_versions(),
        "files": {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            for name, content in contents.items()
        },
    }
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, content in contents.items():
            _write_durably(staging / name, content)
        _write_durably(staging / MANIFEST, json.dumps(manifest, indent=1).encode())
        staging.chmod(0o755)
        staging.rename(folder)
        _sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return manifest


def load_checkpoint(folder: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Reads a checkpoint and verifies every sum, shape and value.

    The model is frozen and in evaluation mode. Raises CheckpointError when anything is missing,
    damaged, of other sizes than the manifest says, or not finite.
    """
    manifest = read_manifest(folder)
    try:
        config = ModelConfig.from_dict(manifest["model"])
        n_users, n_items = int(manifest["n_users"]), int(manifest["n_items"])
        references = [int(i) for i in manifest["reference_items"]]
        sums = {name: str(manifest["files"][name]["sha256"]) for name in (WEIGHTS, IDS)}
        _temperature(manifest)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"the manifest of {folder} is incomplete: {error!r}") from None
    ids = _ids(folder / IDS, sums[IDS])
    try:
        tensors = load(read_verified(folder / WEIGHTS, sums[WEIGHTS]))
    except SafetensorError as error:
        raise CheckpointError(f"{folder / WEIGHTS} is damaged: {error}") from None
    if len(ids["users"]) != n_users or len(ids["items"]) != n_items:
        raise CheckpointError(f"{folder} has other numbers of ids than its manifest says")
    if references and not 0 <= min(references) <= max(references) < n_items:
        raise CheckpointError(f"{folder} names reference items that it does not have")
    counts = tensors.pop(COUNTS, None)
    if counts is None or counts.shape != (n_items,):
        raise CheckpointError(f"{folder} has no item counts for its {n_items} items")
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{folder} holds values in {name!r} that are not finite")
    model = build_model(config, n_users, n_items)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder} does not fit its own configuration: {str(error).splitlines()[-1].strip()}"
        ) from None
    model.requires_grad_(False).eval().to(device)
    return Checkpoint(model, ids["users"], ids["items"], counts.numpy(), references, manifest)


def _temperature(manifest: dict[str, Any]) -> float:
    """Raises CheckpointError for what is no temperature."""
    calibration = manifest.get("calibration") or {}
    found = calibration.get("temperature", 1.0) if isinstance(calibration, dict) else None
    if not isinstance(found, int | float) or not 0 < found < HOTTEST:
        raise CheckpointError(f"{found!r:.50} is not the temperature of a calibration")
    return float(found)


def _ids(path: Path, sha256: str) -> dict[str, list[str]]:
    ids = json.loads(read_verified(path, sha256))
    kinds = {"users", "items"}
    if (
        not isinstance(ids, dict)
        or set(ids) != kinds
        or not all(isinstance(ids[kind], list) for kind in kinds)
    ):
        raise CheckpointError(f"{path} does not hold the ids of users and items")
    return ids


def software_versions() -> dict[str, str]:
    """Versions that a result depends on."""
    try:
        own = version("neural-collaborative-ranking")
    except PackageNotFoundError:  # used from a source tree by its path alone
        own = "source"
    return {
        "ncr": own,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def read_verified(path: Path, sha256: str) -> bytes:
    """The file's content. Raises CheckpointError unless it has this SHA-256."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} cannot be read: it is not there") from None
    except OSError as error:
        raise CheckpointReadError(f"{path} cannot be read: {error.strerror}") from None
    # The bytes that were summed are the bytes that are parsed.
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's")
    return content


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
