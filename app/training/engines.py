"""The engine of the trainings: the processes that train a model, by `NCR_TRAIN_ENGINE`."""

from __future__ import annotations

from app.core.settings import Settings
from ncr_core.training.rank_engine import RankEngine


def rank_engine(settings: Settings) -> RankEngine | None:
    """The engine of several ranks for a training; None: the calling process alone.

    Ranks run the phases and, of many items, the rankings of whole catalogues for the evaluation and
    the gate. The job's process reads the events, does everything else and writes the checkpoint.
    Ranks know neither the database nor the checkpoint store.

    Raises:
        ConfigError: The engine's library is not installed, or its cluster is open to the network.
    """
    if settings.train_engine == "local":
        return None
    ranks, tables = settings.train_ranks, settings.train_tables
    folder = settings.effective_train_folder
    if settings.train_engine == "torchrun":
        from ncr_core.training.torchrun import TorchrunEngine

        return TorchrunEngine(ranks, tables, folder)
    from ncr_core.training.ray_ranks import RayEngine

    return RayEngine(ranks, tables, folder, settings.ray_address)
