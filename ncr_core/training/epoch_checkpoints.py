"""Checkpoints of a training after each epoch, from which its ranks resume after a loss.

`torch.distributed.checkpoint` gives their format: each rank writes its part. The model to serve is
written at the end alone, in the format of `ncr_core.checkpoint`. Only ranks import torch's module,
which takes most of a second.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from ncr_core.atomic_files import atomic_write
from ncr_core.training.ranks import Ranks

KEPT = 2  # the last ones: the latest may be half-written


class EpochCheckpoints:
    """The checkpoints of one phase of a training, in a folder that all its ranks share.

    A checkpoint is complete when its `values.json` exists. The folder is private to the training,
    because torch keeps a pickle there: an index of the tensors.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def latest(self, ranks: Ranks) -> int | None:
        """The last epoch that is stored completely, the same on every rank; None without any."""
        found = 0
        if ranks.is_first:
            names = [path.parent.name for path in self._folder.glob("epoch-*/values.json")]
            found = max((int(name.partition("-")[2]) for name in names), default=0)
        (epoch,) = ranks.agreed([float(found)])
        return int(epoch) or None

    def save(
        self, epoch: int, tensors: dict[str, Tensor], values: dict[str, Any], ranks: Ranks
    ) -> None:
        """Stores an epoch; every rank has to call this method.

        Args:
            epoch: the number of the epoch, from 1.
            tensors: the tensors of this rank. Tensors of one name on several ranks are equal, or
                parts of one DTensor.
            values: the values of rank 0, for JSON.
            ranks: the ranks of the training.
        """
        from torch.distributed.checkpoint.state_dict_saver import save

        folder = self._folder / f"epoch-{epoch}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process writes alone
            save(tensors, checkpoint_id=folder, no_dist=ranks.size == 1)
        if ranks.is_first:
            atomic_write(folder / "values.json", json.dumps(values).encode(), replace=True)
            shutil.rmtree(self._folder / f"epoch-{epoch - KEPT}", ignore_errors=True)

    def load(self, epoch: int, tensors: dict[str, Tensor], ranks: Ranks) -> dict[str, Any]:
        """Reads an epoch into these tensors, in place, and returns its values."""
        from torch.distributed.checkpoint.state_dict_loader import load

        folder = self._folder / f"epoch-{epoch}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(tensors, checkpoint_id=folder, no_dist=ranks.size == 1)
        values: dict[str, Any] = json.loads((folder / "values.json").read_bytes())
        return values
