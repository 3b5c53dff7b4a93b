"""Exports in object storage."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from pathlib import Path

from app.core.logging import get_logger
from app.registry.exports import (
    EXPORT,
    FOLDER,
    ExportManifest,
    LocalExportStore,
    checked_export,
    checked_file,
    parsed_manifest,
)
from app.registry.object_store import open_files
from ncr_core.atomic_files import atomic_file
from ncr_core.errors import CheckpointError
from ncr_core.manifest import MANIFEST, MAX_MANIFEST_BYTES
from ncr_core.object_files import store_errors

log = get_logger(__name__)


class RemoteExportStore:
    """An object store, with files that are written to a local folder first and then uploaded."""

    def __init__(self, url: str, copies: Path) -> None:
        """``copies`` is the local folder of files before their upload."""
        self._url = url
        self._files = open_files(url)
        self._local = LocalExportStore(copies)

    def staging(self, export: str) -> AbstractContextManager[Path]:
        """A folder beside the local copies of checkpoints."""
        return self._local.staging(export)

    def publish(self, export: str, folder: Path) -> None:
        """Uploads the files, the manifest last."""
        with store_errors(f"the export {export} cannot be stored"):
            self._files.remove(self._name(export, MANIFEST))
            names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
            for name in (*names, MANIFEST):
                self._files.put(folder / name, self._name(export, name))

    def manifest(self, export: str) -> ExportManifest | None:
        """Downloads the manifest."""
        content, name = io.BytesIO(), self._name(export, MANIFEST)
        with store_errors(f"the export {export} cannot be fetched"):
            size = self._files.size(name)
            if size is None:
                return None
            self._files.get(name, content, min(size, MAX_MANIFEST_BYTES))
        return parsed_manifest(export, content.getvalue())

    def fetch(self, export: str, file: str, path: Path) -> None:
        """Downloads the file."""
        name = self._name(export, checked_file(file))
        with store_errors(f"the export {export} cannot be fetched"):
            size = self._files.size(name)
            if size is None:
                raise CheckpointError(f"{file} of the export {export} is missing")
            with atomic_file(path) as copy:
                self._files.get(name, copy, size)

    def remove(self, export: str) -> None:
        """Removes the files, the manifest first, and unfinished local folders."""
        self._local.remove_unfinished(export)
        with store_errors(f"the export {export} cannot be removed"):
            names = self._files.list(f"{FOLDER}/{checked_export(export)}")
            for name in sorted(names, key=lambda name: not name.endswith(MANIFEST)):
                self._files.remove(name)
            if names:
                log.info("removed from the checkpoint store", path=f"{self._url}/{FOLDER}/{export}")

    def remove_old(self, before: float) -> list[str]:
        """Removes old exports from the store, and old local folders of killed workers."""
        self._local.remove_old(before)
        newest: dict[str, float] = {}
        with store_errors("the exports cannot be listed"):
            for name, written in self._files.list(FOLDER).items():
                _, export, *file = name.split("/")
                if len(file) == 1 and EXPORT.fullmatch(export):
                    newest[export] = max(newest.get(export, 0.0), written)
        removed = [export for export, written in newest.items() if written < before]
        for export in removed:
            self.remove(export)
        return removed

    def _name(self, export: str, file: str) -> str:
        return f"{FOLDER}/{checked_export(export)}/{file}"
