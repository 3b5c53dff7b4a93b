"""The files of a training phase: the order that its ranks begin from, and their result.

Ranks of an order that `may_be_parted` read the positives of their own users from a snapshot
(`ncr_core.data.snapshot`), which is written once for all phases with the same positives.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ncr_core.atomic_files import atomic_write, scratch_folder
from ncr_core.data.interactions import Interactions, UserFeedback
from ncr_core.data.snapshot import MANIFEST, MAX_PARTS, Snapshot, SnapshotWriter, of_users
from ncr_core.data.splits import Split
from ncr_core.errors import TrainingError
from ncr_core.model_config import ModelConfig
from ncr_core.models import PairwiseRanker
from ncr_core.tensor_files import map_tensors, write_tensors
from ncr_core.train_config import TrainConfig
from ncr_core.training.batches import Share, TrainingPart, may_be_parted
from ncr_core.training.ranks import mapped_model, without_pooled
from ncr_core.training.trainer import History, TrainingPhase, remember
from ncr_core.training.validation import of_validated

ORDER, MODEL, SPLIT = "order.json", "model.safetensors", "split.safetensors"
USERS = "users.safetensors"
OUTCOME, RESULT = "outcome.json", "result.safetensors"
PHASE_PREFIX, PARTS_PREFIX = "ncr-phase-", "ncr-phase-parts-"
PART_SIZE = 2**24  # positives of a part, whose reading takes some hundred MiB
_FEEDBACK = ("seen", "disliked", "disliked_weights", "pairs", "pair_weights")


class RankParts:
    """The positives to train on as a snapshot with the same number of parts for each rank.

    The users of a rank are those of its `Share`, in the order of their rows, and not divided by a
    hash. Of other users a rank reads numbers alone. The snapshot has no ids and no times, and is
    removed with this object.
    """

    def __init__(self, parent: Path, ranks: int) -> None:
        """Stores the number of ranks, and the parent of the snapshot's folder."""
        self.ranks = ranks
        self._parent = parent
        self._written: Callable[[], Interactions | None] = lambda: None
        self._files = ExitStack()
        self._folder = parent
        weakref.finalize(self, self._files.close)

    def written(self, train: Interactions) -> Path:
        """The folder with the parts of ``train``, which is written at the first call.

        Raises:
            DataError: There is nothing to learn from.
            OSError: The folder cannot be written.
        """
        if self._written() is not train:
            self._written = lambda: None
            self._files.close()
            with ExitStack() as files:
                self._folder = files.enter_context(scratch_folder(self._parent, PARTS_PREFIX))
                self._write(train)
                self._files.push(files.pop_all())
            self._written = weakref.ref(train)
        os.utime(self._folder)  # in use: other machines remove folders of which nobody knows
        return self._folder

    def _write(self, train: Interactions) -> None:
        each = max(1, min(-(-train.nnz // (self.ranks * PART_SIZE)), MAX_PARTS // self.ranks))
        is_weighted = train.weights is not None
        writer = SnapshotWriter(self._folder, train.n_items, timed=False, weighted=is_weighted)
        for part in TrainingPart.every(train, self.ranks):
            for rows in np.array_split(np.arange(part.interactions.n_users), each):
                writer.add_part(of_users(part.interactions, rows))
            share = part.share
        writer.finish([""] * train.n_items)
        numbers = {"lengths": share.lengths, "dislikes": share.dislikes}
        known = {name: _tensor(x) for name, x in numbers.items() if x is not None}
        write_tensors(self._folder / USERS, known)


@dataclass(frozen=True)
class PhaseOrder:
    """The order of a phase: the arguments of `train_loop`.

    An order that `may_be_parted` has a part for each rank. A rank reads its part, and the users
    whose validation items choose the epoch. Its model has these users in place of all users.
    """

    model: PairwiseRanker
    split: Split
    config: TrainConfig
    phase: TrainingPhase
    later_phases: float = 0.0
    part: TrainingPart | None = None
    """The positives of a rank's users; None: they are those of ``split``."""

    def save(self, folder: Path, parts: RankParts | None = None) -> None:
        """Writes the order into an existing folder, without ids: the ranks need only rows.

        With ``parts``, the positives of an order that `may_be_parted` are in these parts.

        Raises:
            DataError: There is nothing to learn from in parts.
            OSError: A folder cannot be written.
        """
        split, sums = self.split, {}

        def wrote(path: Path) -> None:
            sums[path.name] = sum_of(path)

        if parts is not None and may_be_parted(self.model.config, self.config):
            of_parts = parts.written(split.train)
            for name in (MANIFEST, USERS):
                wrote(of_parts / name)
            split = of_validated(split, self.config)
        else:
            parts = None
        tensors = _arrays(split.train) | {"validation": split.validation, "test": split.test}
        write_tensors(folder / SPLIT, {name: _tensor(x) for name, x in tensors.items()})
        write_tensors(folder / MODEL, without_pooled(self.model))
        for name in (SPLIT, MODEL):
            wrote(folder / name)
        order = {
            "model": self.model.config.as_dict(),
            "users": split.train.n_users,
            "items": split.train.n_items,
            "remembered": split.train.remembered,
            "training": self.config.as_dict(),
            "phase": asdict(self.phase),
            "later_phases": self.later_phases,
            "parts": None if parts is None else {"ranks": parts.ranks, "folder": str(of_parts)},
            "sums": sums,
        }
        atomic_write(folder / ORDER, json.dumps(order).encode())

    @classmethod
    def load(cls, folder: Path, rank: int = 0, ranks: int = 1) -> PhaseOrder:
        """Reads the order of a rank.

        Raises:
            OSError: A file is missing or damaged.
            DataError: A part of the positives is missing or damaged.
            CheckpointError: A file with the right checksum is not of this format.
            TrainingError: The order has parts for another number of ranks.
        """
        order = json.loads((folder / ORDER).read_bytes())
        sums = order["sums"]
        users, items, parts = order["users"], order["items"], order["parts"]
        if parts is not None and parts["ranks"] != ranks:
            raise TrainingError(f"{ranks} ranks read an order for {parts['ranks']} ranks")
        config = ModelConfig.from_dict(order["model"])
        model = mapped_model(verified(folder / MODEL, sums), config, users, items)
        part = None
        if parts is not None:
            of_parts = Path(parts["folder"])
            verified(of_parts / MANIFEST, sums)
            tensors = map_tensors(verified(of_parts / USERS, sums))
            known = {name: x.numpy() for name, x in tensors.items()}
            share = Share(rank, ranks, known["lengths"], known.get("dislikes"))
            part = TrainingPart(_positives_of(of_parts, share), share)
        tensors = map_tensors(verified(folder / SPLIT, sums))
        held_out = tensors["validation"].numpy(), tensors["test"].numpy()
        train = replace(_interactions(tensors, items), remembered=order["remembered"])
        split = Split(train, *held_out)
        return cls(
            model,
            split,
            TrainConfig(**order["training"]),
            TrainingPhase(**order["phase"]),
            order["later_phases"],
            part,
        )


def _positives_of(folder: Path, share: Share) -> Interactions:
    """The positives of the users of a share, from the parts of `RankParts`."""
    snapshot = Snapshot.open(folder)
    own = snapshot.read(snapshot.manifest.share(share.rank, share.size))
    if own.feedback is None and share.dislikes is not None:
        # All ranks need preferences, if one has them: they add up the losses of each batch.
        own = replace(own, feedback=UserFeedback())
    return own


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


def verified(path: Path, sums: Mapping[str, str]) -> Path:
    """The path of a file with the sum of its name. Raises OSError for a file with another sum."""
    if sum_of(path) != sums[path.name]:
        raise OSError(errno.EIO, "it differs from its checksum", str(path))
    return path


def sum_of(path: Path) -> str:
    """The SHA-256 sum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_outcome(folder: Path) -> None:
    """Removes the outcome of ranks that were lost after they had written it."""
    (folder / OUTCOME).unlink(missing_ok=True)


def save_outcome(folder: Path, history: History) -> None:
    """Writes the outcome of a phase whose ``RESULT`` is written."""
    write_outcome(folder, {"history": vars(history)})


def save_failure(folder: Path, reason: str) -> None:
    """Writes the reason of a failure that every further try would repeat."""
    write_outcome(folder, {"failed": reason})


def load_result(folder: Path, model: PairwiseRanker) -> History | None:
    """Sets the model to the result and returns its history; None if there is no outcome.

    The caller has to `remember` the users of a model whose users' vectors are pooled.

    Raises TrainingError if the outcome is a failure.
    """
    outcome = read_outcome(folder)
    if outcome is None:
        return None
    result = map_tensors(folder / RESULT)
    if result.keys() != without_pooled(model).keys():
        raise TrainingError("the ranks have written another model than was to be trained")
    model.load_state_dict(result, strict=False)  # the vectors of pooled users stay as they are
    model.eval()
    return History(**outcome["history"])


def read_outcome(folder: Path) -> dict[str, Any] | None:
    """The outcome; None if there is none. Raises TrainingError if it is a failure."""
    try:
        outcome: dict[str, Any] = json.loads((folder / OUTCOME).read_bytes())
    except FileNotFoundError:
        return None
    if "failed" in outcome:
        raise TrainingError(outcome["failed"])
    return outcome


def write_outcome(folder: Path, outcome: dict[str, Any]) -> None:
    """Writes the outcome; its files are written before it."""
    atomic_write(folder / OUTCOME, json.dumps(outcome).encode(), replace=True)


def carry_out(
    order: PhaseOrder,
    parent: Path,
    run: Callable[[Path], str | None],
    parts: RankParts | None = None,
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
