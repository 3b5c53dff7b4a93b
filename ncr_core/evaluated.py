"""The copy of a model that was measured: what later models are compared with.

Before a model is served it learns the items that were held out to measure it on. Its successor may
be measured on the same items, and nobody may be measured on what they have learned: so the
checkpoint keeps, beside the model, the parameters from before, of the users that are held out from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ncr_core.checkpoint import EVALUATED, read_verified
from ncr_core.data.interactions import IntArray
from ncr_core.errors import CheckpointError, ConfigError
from ncr_core.manifest import read_manifest
from ncr_core.models import ModelConfig, PairwiseRanker, build_model

ROWS, HELD_OUT = "evaluated.users", "evaluated.held_out"


@dataclass(frozen=True)
class Evaluated:
    """A model as it was measured, with the vectors of some of its users.

    ``rows`` (n,) are the users' rows in the checkpoint's ids, ascending; ``model`` has these users
    alone. ``held_out`` (n, 2) are the item rows held out of each, of test and validation, −1 where
    there is none: everything else that they had done by then has been learned.
    """

    model: PairwiseRanker
    rows: IntArray
    held_out: IntArray


def pack_evaluated(model: PairwiseRanker, rows: IntArray, held_out: IntArray) -> bytes:
    """The file's contents: a copy of the model's parameters now, users but ``rows`` left out."""
    tables = {part.weight.data_ptr() for part in model.user_parts()}
    at = torch.from_numpy(rows).to(model.device)
    tensors: dict[str, Tensor] = {
        name: (value[at] if value.data_ptr() in tables else value).detach().cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    tensors[ROWS] = torch.from_numpy(rows)
    tensors[HELD_OUT] = torch.from_numpy(held_out)
    return save(tensors)


def load_evaluated(folder: Path, device: torch.device | str = "cpu") -> Evaluated | None:
    """Reads and verifies the copy of a checkpoint; None if the checkpoint was written without one.

    Raises CheckpointError when it is damaged or does not fit the checkpoint.
    """
    manifest = read_manifest(folder)
    about: Any = manifest.get("files", {}).get(EVALUATED)
    if about is None:
        return None
    try:
        tensors = load(read_verified(folder / EVALUATED, str(about["sha256"])))
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
    return Evaluated(model, rows.astype(np.int64), held_out.astype(np.int64))


def rows_of(ids: Sequence[str], of: Sequence[str]) -> IntArray:
    """(n,) the rows that ``ids`` have among the ids ``of``, −1 for others."""
    row = {name: at for at, name in enumerate(of)}
    return np.fromiter((row.get(name, -1) for name in ids), np.int64, len(ids))


def _within(rows: IntArray, n: int, least: int) -> bool:
    return len(rows) == 0 or bool(least <= rows.min() <= rows.max() < n)
