"""The files of a training phase: the order that its ranks begin from, and their result."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ncr_core.atomic_files import atomic_write, scratch_folder
from ncr_core.data.interactions import Interactions, UserFeedback
from ncr_core.data.splits import Split
from ncr_core.errors import TrainingError
from ncr_core.model_config import ModelConfig
from ncr_core.models import PairwiseRanker
from ncr_core.tensor_files import map_tensors, write_tensors
from ncr_core.train_config import TrainConfig
from ncr_core.training.batches import Share, TrainingPart, may_be_parted
from ncr_core.training.ranks import mapped_model, without_pooled
from ncr_core.training.trainer import History, TrainingPhase, of_validated, remember

ORDER, MODEL, SPLIT = "order.json", "model.safetensors", "split.safetensors"
USERS = "users.safetensors"
OUTCOME, RESULT = "outcome.json", "result.safetensors"
PHASE_PREFIX = "ncr-phase-"
_FEEDBACK = ("seen", "disliked", "disliked_weights", "pairs", "pair_weights")


@dataclass(frozen=True)
class PhaseOrder:
    """The order of a phase: the arguments of `train_loop`.

    An order that `may_be_parted` has a part for each rank. A rank reads its part alone, and rank 0
    also reads the users whose validation items choose the epoch. The model of the ranks then has
    these users in place of all users.
    """

    model: PairwiseRanker
    split: Split
    config: TrainConfig
    phase: TrainingPhase
    later_phases: float = 0.0
    part: TrainingPart | None = None
    """The positives of a rank's users; None: they are those of ``split``."""

    def save(self, folder: Path, parts: int = 1) -> None:
        """Writes the order into an existing folder, without ids: the ranks need only rows.

        With several ``parts``, for as many ranks, an order that `may_be_parted` is written in
        parts. Raises DataError if there is nothing to learn from in parts.
        """
        split, sums = self.split, {}

        def write(name: str, arrays: dict[str, Any]) -> None:
            write_tensors(folder / name, {key: _tensor(value) for key, value in arrays.items()})
            sums[name] = _sum_of(folder / name)

        parts = parts if parts > 1 and may_be_parted(self.model.config, self.config) else 0
        if parts:
            for rank, part in enumerate(TrainingPart.every(split.train, parts)):
                write(part_name(rank), _arrays(part.interactions))
                share = part.share
            of_users = {"lengths": share.lengths, "dislikes": share.dislikes}
            write(USERS, {key: value for key, value in of_users.items() if value is not None})
            split = of_validated(split, self.config)
        write(SPLIT, _arrays(split.train) | {"validation": split.validation, "test": split.test})
        write_tensors(folder / MODEL, without_pooled(self.model))
        sums[MODEL] = _sum_of(folder / MODEL)
        order = {
            "model": self.model.config.as_dict(),
            "users": split.train.n_users,
            "items": split.train.n_items,
            "is_validated": bool((split.validation >= 0).any()),
            "training": self.config.as_dict(),
            "phase": asdict(self.phase),
            "later_phases": self.later_phases,
            "parts": parts,
            "sums": sums,
        }
        atomic_write(folder / ORDER, json.dumps(order).encode())

    @classmethod
    def load(cls, folder: Path, rank: int = 0, ranks: int = 1) -> PhaseOrder:
        """Reads the order of a rank.

        Raises:
            OSError: A file is missing or damaged.
            CheckpointError: A file with the right checksum is not of this format.
            TrainingError: The order has parts for another number of ranks.
        """
        order = json.loads((folder / ORDER).read_bytes())

        def verified(name: str) -> Path:
            path = folder / name
            if _sum_of(path) != order["sums"][name]:
                raise OSError(errno.EIO, "it differs from its checksum", str(path))
            return path

        def read(name: str) -> dict[str, Tensor]:
            return map_tensors(verified(name))

        users, items, parts = order["users"], order["items"], order["parts"]
        if parts not in (0, ranks):
            raise TrainingError(f"{ranks} ranks read an order for {parts} ranks")
        config = ModelConfig.from_dict(order["model"])
        model = mapped_model(verified(MODEL), config, users, items)
        part = None
        if parts:
            own = _interactions(read(part_name(rank)), items)
            of_users = {key: value.numpy() for key, value in read(USERS).items()}
            share = Share(rank, ranks, of_users["lengths"], of_users.get("dislikes"))
            part = TrainingPart(own, share)
        if rank == 0 or not parts:
            tensors = read(SPLIT)
            held_out = tensors["validation"].numpy(), tensors["test"].numpy()
            split = Split(_interactions(tensors, items), *held_out)
        else:  # no other rank measures the model
            nothing = np.zeros(users + 1, np.int64)
            held_out = np.full(users, 0 if order["is_validated"] else -1), np.full(users, -1)
            train = Interactions(nothing, nothing[:0], [""] * users, [""] * items)
            split = Split(train, *held_out)
        return cls(
            model,
            split,
            TrainConfig(**order["training"]),
            TrainingPhase(**order["phase"]),
            order["later_phases"],
            part,
        )


def part_name(rank: int) -> str:
    """The name of the file with the positives of a rank's users."""
    return f"part-{rank}.safetensors"


def _arrays(interactions: Interactions) -> dict[str, Any]:
    arrays: dict[str, Any] = {"indptr": interactions.indptr, "items": interactions.items}
    if interactions.weights is not None:
        arrays["weights"] = interactions.weights
    if interactions.feedback is not None:
        feedback = interactions.feedback
        arrays |= {f"feedback.{name}": getattr(feedback, name) for name in _FEEDBACK}
    return arrays


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """An array as a tensor, without a copy if possible."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _interactions(tensors: dict[str, Tensor], n_items: int) -> Interactions:
    arrays = {name: value.numpy() for name, value in tensors.items()}
    feedback = None
    if "feedback.seen" in arrays:
        feedback = UserFeedback(*(arrays[f"feedback.{name}"] for name in _FEEDBACK))
    indptr, weights = arrays["indptr"], arrays.get("weights")
    users, items = [""] * (len(indptr) - 1), [""] * n_items
    return Interactions(indptr, arrays["items"], users, items, weights, feedback)


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_outcome(folder: Path) -> None:
    """Removes the outcome of ranks that were lost after they had written it."""
    (folder / OUTCOME).unlink(missing_ok=True)


def save_outcome(folder: Path, history: History) -> None:
    """Writes the outcome of a phase whose ``RESULT`` is written."""
    _write_outcome(folder, {"history": vars(history)})


def save_failure(folder: Path, reason: str) -> None:
    """Writes the reason of a failure that every further try would repeat."""
    _write_outcome(folder, {"failed": reason})


def load_result(folder: Path, model: PairwiseRanker) -> History | None:
    """Sets the model to the result and returns its history; None if there is no outcome.

    The caller has to `remember` the users of a model whose users' vectors are pooled.

    Raises TrainingError if the outcome is a failure.
    """
    try:
        outcome: dict[str, Any] = json.loads((folder / OUTCOME).read_bytes())
    except FileNotFoundError:
        return None
    if "failed" in outcome:
        raise TrainingError(outcome["failed"])
    result = map_tensors(folder / RESULT)
    if result.keys() != without_pooled(model).keys():
        raise TrainingError("the ranks have written another model than was to be trained")
    model.load_state_dict(result, strict=False)  # the vectors of pooled users stay as they are
    model.eval()
    return History(**outcome["history"])


def _write_outcome(folder: Path, outcome: dict[str, Any]) -> None:
    atomic_write(folder / OUTCOME, json.dumps(outcome).encode(), replace=True)


def carry_out(
    order: PhaseOrder, parent: Path, run: Callable[[Path], str | None], parts: int = 1
) -> History:
    """Lets other processes train a phase; the model is at its best epoch afterwards.

    Args:
        order: the phase to train.
        parent: the parent of the phase's folder.
        run: starts the processes on the folder, waits for their end, and returns the problem, if
            known.
        parts: as in `PhaseOrder.save`.

    Raises:
        TrainingError: The processes left a failure or no result.
        DataError: There is nothing to learn from.
        OSError: The folder cannot be written.
    """
    with scratch_folder(parent, PHASE_PREFIX) as folder:
        order.save(folder, parts)
        problem = run(folder)
        history = load_result(folder, order.model)
    if history is None:
        raise TrainingError(problem or "the ranks of the training ended without a result")
    remember(order.model, order.split.train)
    return history
