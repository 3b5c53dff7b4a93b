"""Opens the checkpoint store that the settings name."""

from __future__ import annotations

from pathlib import Path

from app.core.settings import Settings
from app.registry.checkpoint_store import CheckpointStore, LocalCheckpointStore


def open_checkpoint_store(settings: Settings) -> CheckpointStore:
    """The store that the settings name.

    Raises:
        SettingsError: the store cannot be used.
    """
    local = settings.data_dir / "models"
    if settings.checkpoint_store is None:
        return LocalCheckpointStore(local)
    if "://" not in settings.checkpoint_store:
        return LocalCheckpointStore(Path(settings.checkpoint_store))
    from app.registry.object_store import RemoteCheckpointStore

    return RemoteCheckpointStore(settings.checkpoint_store, local)
