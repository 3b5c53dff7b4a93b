"""`ncr snapshot`: the matrix that trainings learn from, as Parquet parts in a folder or a store."""

from __future__ import annotations

from pathlib import Path

from app.core.settings import Settings
from app.events.training_snapshot import Report, write_parts
from ncr_core.atomic_files import scratch_folder
from ncr_core.data.snapshot import SnapshotManifest, check_free, is_url, upload_snapshot


def write_snapshot(
    settings: Settings, address: str, *, parts: int | None = None, report: Report = lambda *_: None
) -> SnapshotManifest:
    """Writes a snapshot of the database to a folder or, by a URL, to object storage.

    Before the upload to a store, the snapshot lies below the data folder. The function blocks; see
    `write_parts`.

    Raises:
        DataError: There are no interactions, there is a snapshot already, or the folder cannot be
            written.
        StoreUnavailable: The store is unavailable.
        ConfigError: The URL cannot be used.
    """
    if not is_url(address):
        return write_parts(settings, Path(address).absolute(), parts=parts, report=report)
    check_free(address)  # before the database is read, which may take an hour
    with scratch_folder(settings.data_dir, ".snapshot-") as local:
        folder = local / "snapshot"
        manifest = write_parts(settings, folder, parts=parts, report=report)
        upload_snapshot(folder, address)
    return manifest
