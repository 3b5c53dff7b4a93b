"""An engine of several ranks: it trains phases, and ranks over whole catalogues."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from ncr_core.atomic_files import scratch_folder
from ncr_core.data.interactions import IntArray
from ncr_core.data.splits import Split
from ncr_core.errors import TrainingError
from ncr_core.evaluation.protocols import Ranks, full_ranks
from ncr_core.evaluation.vector_ranks import VectorRanks
from ncr_core.model_config import ModelConfig
from ncr_core.models import PairwiseRanker
from ncr_core.train_config import TrainConfig
from ncr_core.training.phase_files import PHASE_PREFIX, PhaseOrder, RankParts, carry_out
from ncr_core.training.ranking_files import RankingOrder, load_positions
from ncr_core.training.ranks import Tables, check_sharded
from ncr_core.training.trainer import History, OnProgress, TrainingPhase

MAX_RESTARTS = 3
"""The most restarts of all ranks, from the last stored epoch, after the loss of a rank."""
MIN_PRODUCTS, MIN_COMPARISONS = 5e9, 5e7
"""The least users times items for ranks: of a model that is a product of vectors, and of any other
model. Two threads take about a minute for either. The start of ranks, and their reading of the
model, take some 10 s."""

PRIVATE_VARIABLES = ("NCR_", "AWS_", "AZURE_", "FSSPEC_", "GOOGLE_", "PG", "REDIS")
"""Beginnings of the names of variables that may hold passwords, of which ranks need none."""


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for ranks: without ``PRIVATE_VARIABLES``."""
    return {
        name: value
        for name, value in environment.items()
        if not name.upper().startswith(PRIVATE_VARIABLES)
    }


class RankEngine(ABC):
    """Trains phases with ``ranks`` processes, see `PhaseRunner`, and ranks over catalogues."""

    def __init__(self, ranks: int, tables: Tables, folder: Path) -> None:
        """Stores the arguments, and starts no process yet.

        Args:
            ranks: the number of processes.
            tables: how the processes keep the embedding tables.
            folder: the parent of a temporary folder for each phase, and of one with the data of
                the ranks; made if it is missing.
        """
        self._ranks = ranks
        self.tables: Tables = tables
        """How the processes keep the embedding tables."""
        self._folder = folder
        self._parts = RankParts(folder, ranks) if tables == "replicated" and ranks > 1 else None

    def __call__(
        self,
        model: PairwiseRanker,
        split: Split,
        config: TrainConfig,
        phase: TrainingPhase,
        on_progress: OnProgress | None = None,
        later_phases: float = 0.0,
    ) -> History:
        """Runs `train_loop` in several processes; the model is at its best epoch afterwards.

        Raises:
            TrainingError: The processes cannot be started, a rank would have no user, the loss is
                not finite, or the ranks were lost too often.
            OSError: The folder cannot be written.
        """
        _check_users(split, self._ranks)
        self._connect()
        order = PhaseOrder(model, split, config, phase, later_phases)
        return carry_out(
            order, self._folder, lambda folder: self._run(folder, on_progress), self._parts
        )

    def check(self, config: ModelConfig) -> None:
        """Raises ConfigError if the ranks cannot train such a model."""
        if self.tables == "sharded":
            check_sharded(config)

    def full_ranks(
        self, model: Ranks, split: Split, held_out: IntArray, seed: int
    ) -> tuple[IntArray, int]:
        """As `protocols.full_ranks`, by the ranks if they have more threads than this process.

        This process ranks for few users or items, for other models than `VectorRanks`, and for a
        model on a GPU. With sharded tables, rank 0 writes the ranking tables into a file, and all
        ranks map it. If the ranks are lost, a warning names the reason, and this process ranks.

        Raises OSError if the folder cannot be written.
        """
        if not self._ranks_sooner(model, split, int((held_out >= 0).sum())):
            return full_ranks(model, split, held_out, seed)
        assert isinstance(model, VectorRanks)  # noqa: S101 - others are not ranked sooner
        try:
            self._connect()
            with scratch_folder(self._folder, PHASE_PREFIX) as folder:
                RankingOrder.of(model, split, held_out, seed).save(folder)
                problem = self._run(folder, None)
                found = load_positions(folder)
            if found is None:
                raise TrainingError(problem or "the ranks ended without a result")
        except TrainingError as error:  # a trained model is worth more than the time
            warnings.warn(f"one process ranks, which takes longer: {error}", stacklevel=2)
            return full_ranks(model, split, held_out, seed)
        return found

    def _ranks_sooner(self, model: Ranks, split: Split, users: int) -> bool:
        """Whether the ranks need less time for so many users than this process."""
        if not isinstance(model, VectorRanks) or model.vectors.device.type != "cpu":
            return False
        if users < self._ranks:
            return False
        if model.ranks_catalogue:
            is_long = users * model.model.n_items >= MIN_PRODUCTS
        else:
            is_long = users * split.train.n_items >= MIN_COMPARISONS
        return is_long and self._threads() > torch.get_num_threads()

    @abstractmethod
    def _threads(self) -> int:
        """The number of threads of all ranks together."""

    @abstractmethod
    def _connect(self) -> None:
        """Connects to the cluster of the processes. Raises TrainingError."""

    @abstractmethod
    def _run(self, folder: Path, on_progress: OnProgress | None) -> str | None:
        """Runs ranks on the order in a folder to their end, and returns the problem, if any."""


def _check_users(split: Split, ranks: int) -> None:
    """Raises TrainingError if a rank would have no user."""
    users = int(np.count_nonzero(np.diff(split.train.indptr)))
    if users < ranks:
        raise TrainingError(
            f"{ranks} ranks are more than the {users} users to train on: set NCR_TRAIN_RANKS to "
            f"{users} or less, or --ranks of ncr train"
        )
