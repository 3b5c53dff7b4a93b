"""The engine of the trainings: the processes that train a model, by `NCR_TRAIN_ENGINE`."""

from __future__ import annotations

from app.core.settings import Settings
from ncr_core.training.pretraining import PhaseRunner


def phase_runner(settings: Settings) -> PhaseRunner | None:
    """The runner of the phases of a training; None: the calling process.

    Only the phases run elsewhere. The job's process reads the events, evaluates the model, runs the
    gate and writes the checkpoint. Ranks know neither the database nor the checkpoint store.

    Raises:
        ConfigError: The engine's library is not installed, or its cluster is open to the network.
    """
    if settings.train_engine == "local":
        return None
    ranks, tables = settings.train_ranks, settings.train_tables
    folder = settings.effective_train_folder
    if settings.train_engine == "torchrun":
        from ncr_core.training.torchrun import TorchrunPhases

        return TorchrunPhases(ranks, tables, folder)
    from ncr_core.training.ray_ranks import RayPhases

    return RayPhases(ranks, tables, folder, settings.ray_address)
