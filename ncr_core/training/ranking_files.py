"""The files of a full ranking: the order that ranks begin from, and the positions that they find.

Each rank ranks the held-out items of its share of the users among the whole catalogue.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ncr_core.atomic_files import atomic_write
from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.data.splits import Split
from ncr_core.evaluation.protocols import full_ranks
from ncr_core.evaluation.vector_ranks import VectorRanks
from ncr_core.inference.shared_tables import SharedTables
from ncr_core.model_config import ModelConfig
from ncr_core.models.user_embeddings import user_state
from ncr_core.tensor_files import map_tensors, write_tensors
from ncr_core.training.phase_files import (
    MODEL,
    RESULT,
    SPLIT,
    read_outcome,
    sum_of,
    verified,
    write_outcome,
)
from ncr_core.training.ranks import Ranks, mapped_model

RANKING, TABLES = "ranking.json", "tables"


@dataclass(frozen=True)
class RankingOrder:
    """The order of a full ranking: the arguments of `full_ranks`, with the measured users alone."""

    model: VectorRanks
    split: Split
    """The users whose test item is to be found, with the items that their lists leave out."""
    seed: int

    @classmethod
    def of(cls, model: VectorRanks, split: Split, held_out: IntArray, seed: int) -> RankingOrder:
        """The order of the users with a held-out item; all of them have vectors."""
        users = np.flatnonzero(held_out >= 0)
        train = split.train
        # `full_ranks` leaves out what `Split.seen_items` has: training and both held-out items.
        seen = [split.seen_items(user) for user in users]
        lengths = np.array([len(items) for items in seen], dtype=np.int64)
        indptr = np.append(0, np.cumsum(lengths))
        items = np.concatenate([np.zeros(0, np.int64), *seen]).astype(train.items.dtype)
        own = Interactions(indptr, items, [""] * len(users), train.item_ids)
        at = torch.from_numpy(np.searchsorted(model.users, users)).to(model.vectors.device)
        ranks = VectorRanks(model.model, np.arange(len(users)), model.vectors[at], model.item_rows)
        nothing = np.full(len(users), -1, dtype=np.int64)
        return cls(ranks, Split(own, nothing, held_out[users]), seed)

    def save(self, folder: Path) -> None:
        """Writes the order into an existing folder. Raises OSError."""
        model, split = self.model.model, self.split
        of_users = user_state(model)
        state = {name: x.cpu() for name, x in model.state_dict().items() if name not in of_users}
        write_tensors(folder / MODEL, state)
        arrays = {"indptr": split.train.indptr, "items": split.train.items, "test": split.test}
        tensors: dict[str, Tensor] = {name: torch.from_numpy(x) for name, x in arrays.items()}
        tensors["vectors"] = self.model.vectors.cpu()
        tensors["item_rows"] = torch.from_numpy(self.model.item_rows)
        write_tensors(folder / SPLIT, tensors)
        order = {
            "model": model.config.as_dict(),
            "items": model.n_items,
            "seed": self.seed,
            "sums": {name: sum_of(folder / name) for name in (MODEL, SPLIT)},
        }
        atomic_write(folder / RANKING, json.dumps(order).encode())

    @classmethod
    def load(cls, folder: Path) -> RankingOrder:
        """Reads the order.

        Raises:
            OSError: A file is missing or damaged.
            CheckpointError: A file with the right checksum is not of this format.
        """
        order: dict[str, Any] = json.loads((folder / RANKING).read_bytes())
        config = ModelConfig.from_dict(order["model"])
        files = {name: verified(folder / name, order["sums"]) for name in (MODEL, SPLIT)}
        model = mapped_model(files[MODEL], config, 1, order["items"], user_state)
        tensors = map_tensors(files[SPLIT])
        vectors = tensors.pop("vectors")
        arrays = {name: x.numpy() for name, x in tensors.items()}
        test, item_rows = arrays["test"], arrays["item_rows"]
        ids = [""] * len(test), [""] * len(item_rows)
        train = Interactions(arrays["indptr"], arrays["items"], *ids)
        ranks = VectorRanks(model.eval(), np.arange(len(test)), vectors, item_rows)
        return cls(ranks, Split(train, np.full_like(test, -1), test), order["seed"])

    def sharing_tables(self, folder: Path) -> RankingOrder:
        """The order, whose ranking tables are a file of the folder that all ranks map.

        The first call writes the file, and has to end before another rank's call.

        Raises:
            OSError: The file cannot be written.
            CheckpointError: The file cannot be mapped.
        """
        model = self.model
        margins = SharedTables(folder / TABLES).margins(model.model, TABLES)
        shared = VectorRanks(model.model, model.users, model.vectors, model.item_rows, margins)
        return replace(self, model=shared)

    def positions(self, ranks: Ranks) -> tuple[IntArray, int]:
        """As `full_ranks`, by all ranks: each has to call this method, and gets the result."""
        test = np.full_like(self.split.test, -1)
        own = np.arange(ranks.rank, len(test), ranks.size)
        test[own] = self.split.test[own]
        every = np.zeros(len(test), dtype=np.int64)
        items = np.zeros(ranks.size, dtype=np.int64)
        every[own], items[ranks.rank] = full_ranks(self.model, self.split, test, self.seed)
        return ranks.summed(every), int(ranks.summed(items).max())


def save_positions(folder: Path, positions: IntArray, items: int) -> None:
    """Writes the outcome of a full ranking. Raises OSError."""
    write_tensors(folder / RESULT, {"positions": torch.from_numpy(positions)})
    write_outcome(folder, {"items": items})


def load_positions(folder: Path) -> tuple[IntArray, int] | None:
    """The outcome of a full ranking; None if there is none.

    Raises TrainingError if the outcome is a failure.
    """
    outcome = read_outcome(folder)
    if outcome is None:
        return None
    positions: IntArray = map_tensors(folder / RESULT)["positions"].numpy().copy()
    return positions, outcome["items"]
