"""The files of a training phase: the order that its ranks begin from, and their result."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ncr_core.atomic_files import atomic_write
from ncr_core.data.interactions import Interactions, UserFeedback
from ncr_core.data.splits import Split
from ncr_core.errors import TrainingError
from ncr_core.model_config import ModelConfig
from ncr_core.models import PairwiseRanker, build_model
from ncr_core.train_config import TrainConfig
from ncr_core.training.trainer import History, TrainingPhase

ORDER, MODEL, SPLIT = "order.json", "model.safetensors", "split.safetensors"
OUTCOME, RESULT = "outcome.json", "result.safetensors"
PHASE_PREFIX = "ncr-phase-"
LEFTOVER_SECONDS = 86_400.0
_FEEDBACK = ("seen", "disliked", "disliked_weights", "pairs", "pair_weights")


@dataclass(frozen=True)
class PhaseOrder:
    """The order of a phase: the arguments of `train_loop`."""

    model: PairwiseRanker
    split: Split
    config: TrainConfig
    phase: TrainingPhase
    later_phases: float = 0.0

    def save(self, folder: Path) -> None:
        """Writes the order into an existing folder, without ids: the ranks need only rows."""
        split, train = self.split, self.split.train
        arrays: dict[str, Any] = {
            "indptr": train.indptr,
            "items": train.items,
            "validation": split.validation,
            "test": split.test,
        }
        if train.weights is not None:
            arrays["weights"] = train.weights
        if train.feedback is not None:
            arrays |= {f"feedback.{name}": getattr(train.feedback, name) for name in _FEEDBACK}
        tensors = {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
        save_file(tensors, folder / SPLIT)
        save_file(_on_cpu(self.model.state_dict()), folder / MODEL)
        order = {
            "model": self.model.config.as_dict(),
            "users": train.n_users,
            "items": train.n_items,
            "training": self.config.as_dict(),
            "phase": asdict(self.phase),
            "later_phases": self.later_phases,
        }
        atomic_write(folder / ORDER, json.dumps(order).encode())

    @classmethod
    def load(cls, folder: Path) -> PhaseOrder:
        """Reads an order. Raises OSError."""
        order = json.loads((folder / ORDER).read_bytes())
        arrays = {name: value.numpy() for name, value in load_file(folder / SPLIT).items()}
        feedback = None
        if "feedback.seen" in arrays:
            feedback = UserFeedback(*(arrays[f"feedback.{name}"] for name in _FEEDBACK))
        users, items = order["users"], order["items"]
        train = Interactions(
            arrays["indptr"],
            arrays["items"],
            [""] * users,
            [""] * items,
            arrays.get("weights"),
            feedback,
        )
        model = build_model(ModelConfig.from_dict(order["model"]), users, items)
        model.load_state_dict(load_file(folder / MODEL))
        return cls(
            model,
            Split(train, arrays["validation"], arrays["test"]),
            TrainConfig(**order["training"]),
            TrainingPhase(**order["phase"]),
            order["later_phases"],
        )


@contextmanager
def phase_folder(parent: Path) -> Iterator[Path]:
    """Makes a new folder for the files of a phase, and removes the folder at the end.

    The function also removes the folders of killed trainings that are a day old.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.glob(f"{PHASE_PREFIX}*"):
        with suppress(OSError):
            is_old = old.stat().st_mtime < time.time() - LEFTOVER_SECONDS
            if is_old and (old / ORDER).is_file():  # made here, whatever else is in the folder
                shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PHASE_PREFIX, dir=parent) as name:
        yield Path(name)


def save_result(folder: Path, model: PairwiseRanker, history: History) -> None:
    """Writes a trained model, and the outcome as the last file."""
    save_file(_on_cpu(model.state_dict()), folder / RESULT)
    _write_outcome(folder, {"history": vars(history)})


def save_failure(folder: Path, reason: str) -> None:
    """Writes the reason of a failure that every further try would repeat."""
    _write_outcome(folder, {"failed": reason})


def load_result(folder: Path, model: PairwiseRanker) -> History | None:
    """Sets the model to the result and returns its history; None if there is no outcome.

    Raises TrainingError if the outcome is a failure.
    """
    try:
        outcome: dict[str, Any] = json.loads((folder / OUTCOME).read_bytes())
    except FileNotFoundError:
        return None
    if "failed" in outcome:
        raise TrainingError(outcome["failed"])
    model.load_state_dict(load_file(folder / RESULT))
    model.eval()
    return History(**outcome["history"])


def _write_outcome(folder: Path, outcome: dict[str, Any]) -> None:
    atomic_write(folder / OUTCOME, json.dumps(outcome).encode(), replace=True)


def _on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}


def carry_out(order: PhaseOrder, parent: Path, run: Callable[[Path], str | None]) -> History:
    """Lets other processes train a phase; the model is at its best epoch afterwards.

    Args:
        order: the phase to train.
        parent: the parent of the phase's folder.
        run: starts the processes on the folder, waits for their end, and returns the problem, if
            known.

    Raises:
        TrainingError: The processes left a failure or no result.
        OSError: The folder cannot be written.
    """
    with phase_folder(parent) as folder:
        order.save(folder)
        problem = run(folder)
        history = load_result(folder, order.model)
    if history is None:
        raise TrainingError(problem or "the ranks of the training ended without a result")
    return history
