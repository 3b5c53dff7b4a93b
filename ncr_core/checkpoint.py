"""Checkpoints: immutable folders of safetensors, ids and a manifest with SHA-256 sums.

A folder with a manifest is whole, because the folder appears under its name at once, with the
manifest written last. A checkpoint has no pickled objects, so it can hold no code.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ncr_core.atomic_files import atomic_folder
from ncr_core.content import ContentMaps
from ncr_core.content.maps import pack_maps, unpack_maps
from ncr_core.data.interactions import IntArray
from ncr_core.errors import CheckpointError, ConfigError, DataError
from ncr_core.manifest import (
    FORMAT,
    MANIFEST,
    file_sha256,
    read_manifest,
    read_verified,
    verify_file,
)
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.ranking.candidates import REFERENCES, spread_over_popularity
from ncr_core.tensor_files import map_tensors, write_tensors

WEIGHTS, IDS = "model.safetensors", "ids.json"
ALIGNMENT = 64
"""The bytes to a multiple of which PyTorch aligns a new tensor on a CPU."""
MAX_COPIED_BYTES = 4 << 20
"""The largest tensor that is copied to an aligned address: a layer of 1,024 by 1,024 values.

Larger ones are tables of users or items, which are read by rows.
"""
EVALUATED = "evaluated.safetensors"
"""The file of an `EvaluationSnapshot`; not every checkpoint has one."""
ROWS, HELD_OUT = "evaluated.users", "evaluated.held_out"
INTERACTIONS = "interactions.safetensors"
"""The file of the interactions that a `Recommender` was fitted to; the service writes none."""
CONTENT = "content.safetensors"
"""The file of `ContentMaps`; not every checkpoint has one."""
CONTENT_CONFIG = "content.json"
"""The file of the configuration of `ContentMaps`, in JSON."""
ITEM_COUNTS = "item_counts"
"""The name of the tensor of item counts, which is stored beside the model's own tensors."""
MAX_TEMPERATURE = 1e30
FINITE_AT_ONCE = 2**22  # values
IDS_AT_ONCE = 2**16


@dataclass(frozen=True)
class Checkpoint:
    """A trained model with the ids of its rows."""

    model: PairwiseRanker
    user_ids: Sequence[str]
    item_ids: Sequence[str]
    item_counts: IntArray
    """Interactions of each item in training, (n_items,)."""
    reference_items: Sequence[int]
    """Rows of the items that scores are measured against, spread over popularity."""
    manifest: dict[str, Any]
    content: ContentMaps = field(default_factory=ContentMaps)
    """The placements of items and users by their attributes, if they were learned."""

    @property
    def trained_users(self) -> int:
        """The number of users that the model was trained on.

        There may be more than ``user_ids``: a fold-in makes the vectors of pooled users.
        """
        return int(self.manifest.get("trained_users", len(self.user_ids)))

    @property
    def names_all_users(self) -> bool:
        """Whether ``user_ids`` has all users that the model was trained on."""
        return len(self.user_ids) >= self.trained_users

    @property
    def temperature(self) -> float:
        """T of P(i preferred to j) = σ((z_ij − z_ji) / 2T); 1 for a model without calibration."""
        return _temperature(self.manifest)


@dataclass(frozen=True)
class EvaluationSnapshot:
    """A model as it was evaluated, for the comparison with later models.

    Before a model is served, the model learns its held-out items. An evaluation of its successor
    may use the same items, but no evaluation may use items that a model has learned. The checkpoint
    therefore also keeps the parameters from before that step, for the users with held-out items.
    """

    model: PairwiseRanker
    """The model of the n users of ``rows`` alone."""
    rows: IntArray
    """(n,) the users' rows in the checkpoint's ids, ascending."""
    held_out: IntArray
    """(n, 2) item rows of each user's held-out test and validation item, −1 for none.

    The model has learned all other interactions of the user up to that time."""


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
    evaluated: EvaluationSnapshot | None = None,
    calibration: dict[str, Any] | None = None,
    interactions: bytes | None = None,
    content: ContentMaps | None = None,
    trained_users: int | None = None,
) -> str:
    """Writes a checkpoint and returns the SHA-256 of its manifest.

    The manifest holds the SHA-256 sums of the other files.

    Args:
        folder: a folder that does not exist yet; its parents are made.
        model: the model to save.
        user_ids: ids of the model's users, in the order of its rows.
        item_ids: ids of the model's items, in the order of its rows.
        item_counts: interactions of each item in training, (n_items,).
        metrics: metrics of the model, for the manifest.
        training: configuration and history of the training, for the manifest.
        data: description of the data, for the manifest.
        evaluated: the model as it was evaluated, for the comparison with later models.
        calibration: the result of `Calibration.as_dict`, for the manifest.
        interactions: the content of the file of interactions; None: no file.
        content: the placements of items and users by attributes, if they were learned.
        trained_users: the number of users that the model was trained on; None: all have an id.

    Raises:
        CheckpointError: the folder exists already; a version never changes.
    """
    tensors = _state_of(model)
    tensors[ITEM_COUNTS] = torch.from_numpy(item_counts.astype(np.int64))
    files: dict[str, dict[str, Tensor] | Iterable[bytes]] = {
        WEIGHTS: tensors,
        IDS: _ids_in_json(user_ids, item_ids),
    }
    if evaluated is not None:
        rows = {ROWS: evaluated.rows, HELD_OUT: evaluated.held_out}
        files[EVALUATED] = _state_of(evaluated.model) | {
            name: torch.from_numpy(r) for name, r in rows.items()
        }
    if interactions is not None:
        files[INTERACTIONS] = [interactions]
    if content is not None and content:
        config, arrays = pack_maps(content)
        files[CONTENT_CONFIG] = [json.dumps(config).encode()]
        files[CONTENT] = arrays
    references = spread_over_popularity(tensors[ITEM_COUNTS], REFERENCES)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model.config.as_dict(),
        "n_users": model.n_users,
        "n_items": model.n_items,
        "trained_users": model.n_users if trained_users is None else trained_users,
        "reference_items": references.tolist(),
        "metrics": metrics or {},
        "calibration": calibration or {},
        "training": training or {},
        "data": data or {},
        "software": software_versions(),
        "files": {},
    }
    try:
        with atomic_folder(folder) as staging:
            for name, file in files.items():
                path = staging / name
                if isinstance(file, dict):
                    write_tensors(path, file)
                else:
                    with path.open("wb") as stream:
                        stream.writelines(file)
                manifest["files"][name] = {
                    "sha256": file_sha256(path),
                    "bytes": path.stat().st_size,
                }
            content_of_manifest = json.dumps(manifest, indent=1).encode()
            (staging / MANIFEST).write_bytes(content_of_manifest)
    except FileExistsError:
        raise CheckpointError(
            f"{folder} exists already; a checkpoint is never overwritten"
        ) from None
    return hashlib.sha256(content_of_manifest).hexdigest()


def _ids_in_json(user_ids: Sequence[str], item_ids: Sequence[str]) -> Iterator[bytes]:
    """The content of the file of ids, some ids at a time."""
    for before, ids in ((b'{"users": [', user_ids), (b'], "items": [', item_ids)):
        yield before
        rest = iter(ids)
        separator = b""
        while some := list(islice(rest, IDS_AT_ONCE)):
            yield separator + json.dumps(some)[1:-1].encode()
            separator = b", "
    yield b"]}"


def _state_of(model: PairwiseRanker) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in model.state_dict().items()}


def load_checkpoint(folder: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Reads a checkpoint and verifies every sum, shape and value.

    The model is frozen and in evaluation mode. On a CPU, its large parameters are the file mapped
    into memory, which several processes share.

    Raises:
        CheckpointError: a file is missing, damaged, of another size than the manifest says, or
            holds values that are not finite.
    """
    manifest = read_manifest(folder)
    try:
        config = ModelConfig.from_dict(manifest["model"])
        n_users, n_items = int(manifest["n_users"]), int(manifest["n_items"])
        references = [int(i) for i in manifest["reference_items"]]
        sums = {name: str(manifest["files"][name]["sha256"]) for name in (WEIGHTS, IDS)}
        int(manifest.get("trained_users", n_users))
        _temperature(manifest)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"the manifest of {folder} is incomplete: {error!r}") from None
    ids = _read_ids(folder / IDS, sums[IDS])
    verify_file(folder / WEIGHTS, sums[WEIGHTS])
    tensors = map_tensors(folder / WEIGHTS)
    if len(ids["users"]) != n_users or len(ids["items"]) != n_items:
        raise CheckpointError(f"{folder} has another number of ids than its manifest says")
    if references and not 0 <= min(references) <= max(references) < n_items:
        raise CheckpointError(f"{folder} names reference items that it does not have")
    counts = tensors.pop(ITEM_COUNTS, None)
    if counts is None or counts.shape != (n_items,):
        raise CheckpointError(f"{folder} has no item counts for its {n_items} items")
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise CheckpointError(f"{folder} holds values in {name!r} that are not finite")
    try:
        model = model_of(config, n_users, n_items, tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder} does not fit its own configuration: {str(error).splitlines()[-1].strip()}"
        ) from None
    model.requires_grad_(False).eval().to(device)
    content = _read_content(folder, manifest, model)
    return Checkpoint(
        model, ids["users"], ids["items"], counts.numpy(), references, manifest, content
    )


def _read_content(folder: Path, manifest: dict[str, Any], model: PairwiseRanker) -> ContentMaps:
    """The placements of a checkpoint; empty for a checkpoint without placements."""
    entries: Any = manifest["files"]
    if CONTENT not in entries:
        return ContentMaps()
    try:
        stored, tensors = (
            read_verified(folder / name, str(entries[name]["sha256"]))
            for name in (CONTENT_CONFIG, CONTENT)
        )
        return unpack_maps(json.loads(stored), load(tensors), model)
    except (KeyError, TypeError, ValueError, SafetensorError, DataError) as error:
        raise CheckpointError(f"{CONTENT} of {folder} cannot be read: {error}") from None


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite, checked in parts to save memory."""
    parts = torch.split(tensor.flatten(), FINITE_AT_ONCE)
    return all(bool(torch.isfinite(part).all()) for part in parts)


def model_of(
    config: ModelConfig, n_users: int, n_items: int, tensors: dict[str, Tensor]
) -> PairwiseRanker:
    """A model that uses the large tensors without a copy.

    Raises RuntimeError if they do not fit.
    """
    with torch.device("meta"):
        model = build_model(config, n_users, n_items)
    types = {name: value.dtype for name, value in model.state_dict().items()}
    cast = {name: value.to(types.get(name, value.dtype)) for name, value in tensors.items()}
    model.load_state_dict({name: _aligned(value) for name, value in cast.items()}, assign=True)
    return model


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor at an address as PyTorch chooses it, if it is small enough to copy.

    On some processors, MKL rounds a product with a vector by the vector's address. Tensors in a
    file begin anywhere, so that a loaded model would differ in last bits from the saved one.
    """
    moves = tensor.data_ptr() % ALIGNMENT != 0 and tensor.nbytes <= MAX_COPIED_BYTES
    return tensor.clone() if moves else tensor


def _temperature(manifest: dict[str, Any]) -> float:
    calibration = manifest.get("calibration") or {}
    value = calibration.get("temperature", 1.0) if isinstance(calibration, dict) else None
    if not isinstance(value, int | float) or not 0 < value < MAX_TEMPERATURE:
        raise CheckpointError(f"{value!r:.50} is not the temperature of a calibration")
    return float(value)


def _read_ids(path: Path, sha256: str) -> dict[str, list[str]]:
    ids = json.loads(read_verified(path, sha256))
    kinds = {"users", "items"}
    if (
        not isinstance(ids, dict)
        or set(ids) != kinds
        or not all(isinstance(ids[kind], list) for kind in kinds)
    ):
        raise CheckpointError(f"{path} does not hold the ids of users and items")
    return ids


def load_evaluation_snapshot(
    folder: Path, device: torch.device | str = "cpu"
) -> EvaluationSnapshot | None:
    """Read and verify the snapshot of a checkpoint; None for a checkpoint without snapshot.

    On a CPU, the large parameters of its model are the file mapped into memory.

    Raises CheckpointError if the snapshot is damaged or does not fit its checkpoint.
    """
    manifest = read_manifest(folder)
    entry: Any = manifest.get("files", {}).get(EVALUATED)
    if entry is None:
        return None
    try:
        verify_file(folder / EVALUATED, str(entry["sha256"]))
        tensors = map_tensors(folder / EVALUATED)
        rows, held_out = tensors.pop(ROWS).numpy(), tensors.pop(HELD_OUT).numpy()
        config = ModelConfig.from_dict(manifest["model"])
        n_users, n_items = int(manifest["n_users"]), int(manifest["n_items"])
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{EVALUATED} of {folder} cannot be read: {error!r}") from None
    fits = held_out.shape == (len(rows), 2) and _within(rows, n_users, 0)
    if not fits or not _within(held_out, n_items, -1) or (np.diff(rows) <= 0).any():
        raise CheckpointError(f"{EVALUATED} of {folder} does not fit its checkpoint")
    if not all(is_finite(value) for value in tensors.values()):
        raise CheckpointError(f"{EVALUATED} of {folder} holds values that are not finite")
    try:
        model = model_of(config, len(rows), n_items, tensors)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError(f"{EVALUATED} of {folder} does not fit: {reason}") from None
    model.requires_grad_(False).eval().to(device)
    return EvaluationSnapshot(model, rows.astype(np.int64), held_out.astype(np.int64))


def _within(rows: IntArray, n: int, lowest: int) -> bool:
    return len(rows) == 0 or bool(lowest <= rows.min() <= rows.max() < n)


def software_versions() -> dict[str, str]:
    """Versions of the software that a result depends on."""
    try:
        ncr = version("neural-collaborative-ranking")
    except PackageNotFoundError:  # used from a source tree by its path alone
        ncr = "source"
    return {
        "ncr": ncr,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
