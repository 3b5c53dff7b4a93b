"""The copy of a model as it was evaluated, which later models are compared with.

Before a model is served it learns the items that were held out to evaluate it on. Its successor may
be evaluated on the same items, and no model may be evaluated on what it has learned. The checkpoint
therefore keeps, beside the model, the parameters from before, for the users with held-out items.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ncr_core.checkpoint import EVALUATED
from ncr_core.data.interactions import IntArray
from ncr_core.errors import CheckpointError, ConfigError
from ncr_core.manifest import read_manifest, read_verified
from ncr_core.models import ModelConfig, PairwiseRanker, build_model

ROWS, HELD_OUT = "evaluated.users", "evaluated.held_out"


@dataclass(frozen=True)
class EvaluationSnapshot:
    """A model as it was evaluated, with the vectors of some of its users."""

    model: PairwiseRanker
    """It has the n users of ``rows`` alone."""
    rows: IntArray
    """(n,) the users' rows in the checkpoint's ids, ascending."""
    held_out: IntArray
    """(n, 2) item rows held out of each user for test and validation, −1 where there is none.

    The model has learned everything else that the user had done by then."""


def pack_evaluation_snapshot(model: PairwiseRanker, rows: IntArray, held_out: IntArray) -> bytes:
    """Serialize a copy of the model's present parameters, with the users of ``rows`` alone.

    Args:
        model: the model, before it learns the held-out items.
        rows: (n,) rows of users, ascending.
        held_out: (n, 2) item rows held out of each, −1 where there is none.

    Returns:
        the contents of the file beside the checkpoint.
    """
    tables = {part.weight.data_ptr() for part in model.user_parts()}
    index = torch.from_numpy(rows).to(model.device)
    tensors: dict[str, Tensor] = {
        name: (value[index] if value.data_ptr() in tables else value).detach().cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    tensors[ROWS] = torch.from_numpy(rows)
    tensors[HELD_OUT] = torch.from_numpy(held_out)
    return save(tensors)


def load_evaluation_snapshot(
    folder: Path, device: torch.device | str = "cpu"
) -> EvaluationSnapshot | None:
    """Read and verify the snapshot of a checkpoint; None if it was written without one.

    Raises CheckpointError if the snapshot is damaged or does not fit its checkpoint.
    """
    manifest = read_manifest(folder)
    entry: Any = manifest.get("files", {}).get(EVALUATED)
    if entry is None:
        return None
    try:
        tensors = load(read_verified(folder / EVALUATED, str(entry["sha256"])))
        rows, held_out = tensors.pop(ROWS).numpy(), tensors.pop(HELD_OUT).numpy()
        config = ModelConfig.from_dict(manifest["model"])
        n_users, n_items = int(manifest["n_users"]), int(manifest["n_items"])
    except (KeyError, TypeError, ValueError, SafetensorError, ConfigError) as error:
        raise CheckpointError(f"{EVALUATED} of {folder} cannot be read: {error!r}") from None
    fits = held_out.shape == (len(rows), 2) and _within(rows, n_users, 0)
    if not fits or not _within(held_out, n_items, -1) or (np.diff(rows) <= 0).any():
        raise CheckpointError(f"{EVALUATED} of {folder} does not fit its checkpoint")
    if not all(bool(torch.isfinite(value).all()) for value in tensors.values()):
        raise CheckpointError(f"{EVALUATED} of {folder} holds values that are not finite")
    model = build_model(config, len(rows), n_items)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError(f"{EVALUATED} of {folder} does not fit: {reason}") from None
    model.requires_grad_(False).eval().to(device)
    return EvaluationSnapshot(model, rows.astype(np.int64), held_out.astype(np.int64))


def _within(rows: IntArray, n: int, lowest: int) -> bool:
    return len(rows) == 0 or bool(lowest <= rows.min() <= rows.max() < n)
