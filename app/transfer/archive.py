"""The file of a backup: a zip of tables and checkpoints, with a manifest of their SHA-256 sums.

Backups and exports never replace an existing file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, Field, ValidationError

from ncr_core.atomic_files import PRIVATE, atomic_file
from ncr_core.errors import NcrError

FORMAT: Literal["ncr-backup"] = "ncr-backup"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 * 2**20
BLOCK_BYTES = 1 << 20

_PART = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,191}"
# No other member is ever read, so no name leads out of the folders that are meant for it.
_MEMBER = re.compile(rf"tables/{_PART}\.jsonl|models/{_PART}|models/{_PART}/{_PART}")
# What Python's zipfile raises for damage, depending on where the damage is.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    ValueError,
)

OnBytes = Callable[[int], None]
Report = Callable[[str, int, int], None]
"""Called with a table's name or "models", the number that is done, and the total."""


def no_report(what: str, done: int, total: int) -> None:
    """Ignores progress."""


class TransferError(NcrError):
    """A backup or an export cannot be written, read or used. The message is one line."""


class TableEntry(BaseModel):
    """The manifest's entry of a table."""

    columns: list[str]
    rows: int = Field(ge=0)
    last_id: int | None
    """The highest id that the database has generated; None if it generates none."""


class Member(BaseModel):
    """The manifest's entry of a file in the zip."""

    sha256: str
    bytes: int = Field(ge=0)


class BackupManifest(BaseModel):
    """The contents of a backup."""

    format: Literal["ncr-backup"]
    version: int
    software: str
    revision: str
    """Alembic's revision of the schema."""
    dialect: str
    created_at: str
    tables: dict[str, TableEntry]
    missing_models: list[str]
    """Versions whose checkpoints were missing or damaged when the backup was written."""
    members: dict[str, Member]


def table_member(table: str) -> str:
    """The name of a table's member."""
    return f"tables/{table}.jsonl"


class ArchiveWriter:
    """Writes members one after another, and the manifest last."""

    def __init__(self, file: IO[bytes]) -> None:
        # The lowest level: while tables are packed, the database keeps a snapshot open.
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        self.members: dict[str, Member] = {}

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    @contextmanager
    def member(self, name: str) -> Iterator[Callable[[bytes], None]]:
        """Begins a member and yields the function that writes to it."""
        digest, size = hashlib.sha256(), 0
        with self._zip.open(name, "w", force_zip64=True) as out:

            def write(data: bytes) -> None:
                nonlocal size
                digest.update(data)
                size += len(data)
                out.write(data)

            yield write
        self.members[name] = Member(sha256=digest.hexdigest(), bytes=size)

    def finish(self, manifest: BackupManifest) -> None:
        """Writes the manifest."""
        self._zip.writestr(MANIFEST, manifest.model_dump_json(indent=1))


class Backup:
    """An open backup, whose names fit its manifest. Call `verify` before using its contents."""

    def __init__(self, path: Path) -> None:
        """Opens the file.

        Raises:
            TransferError: the file is not a backup, or its names do not fit its manifest.
            OSError: the file cannot be opened.
        """
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except _DAMAGE as error:
            raise TransferError(f"{path} is not a backup, or is cut short: {error}") from None
        try:
            self.manifest = self._manifest()
            self._check_names()
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> Backup:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    @property
    def total_bytes(self) -> int:
        """The unpacked size of all members, in bytes."""
        return sum(member.bytes for member in self.manifest.members.values())

    def models(self) -> dict[str, list[str]]:
        """The members of each version's checkpoint."""
        members: dict[str, list[str]] = {}
        for name in self.manifest.members:
            kind, version, *file = name.split("/")
            if kind == "models" and file:
                members.setdefault(version, []).append(name)
        return members

    def verify(self, on_bytes: OnBytes = lambda n: None) -> None:
        """Reads every member once.

        Args:
            on_bytes: called with the number of bytes read so far, of ``total_bytes``.

        Raises:
            TransferError: a member differs from the manifest.
        """
        bytes_read = 0
        for name, member in self.manifest.members.items():
            digest, size = hashlib.sha256(), 0
            with self.open(name) as file, self._damage_in(name):
                while data := file.read(BLOCK_BYTES):
                    digest.update(data)
                    size += len(data)
                    if size > member.bytes:
                        break
                    bytes_read += len(data)
                    on_bytes(bytes_read)
            if size != member.bytes or digest.hexdigest() != member.sha256:
                raise TransferError(
                    f"{self.path} is damaged: the SHA-256 of {name} is not the manifest's"
                )

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """A member's content."""
        with self._damage_in(name):
            file = self._zip.open(name)
        with file:
            yield file

    def _manifest(self) -> BackupManifest:
        with self._damage_in(MANIFEST):
            try:
                info = self._zip.getinfo(MANIFEST)
            except KeyError:
                raise TransferError(f"{self.path} is not a backup: no {MANIFEST} in it") from None
            with self._zip.open(info) as file:
                content = file.read(MAX_MANIFEST_BYTES + 1)
        if len(content) > MAX_MANIFEST_BYTES:
            raise TransferError(f"{self.path} has a manifest that is too large")
        try:
            manifest = BackupManifest.model_validate_json(content)
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise TransferError(
                f"{self.path} is not a backup: its manifest is wrong at {where or 'its beginning'}"
            ) from None
        if manifest.version != FORMAT_VERSION:
            raise TransferError(
                f"{self.path} is a backup of format {manifest.version}; "
                f"this version reads format {FORMAT_VERSION}"
            )
        return manifest

    def _check_names(self) -> None:
        expected = set(self.manifest.members) | {MANIFEST}
        tables = {table_member(table) for table in self.manifest.tables}
        names = [info.filename for info in self._zip.infolist()]
        for name in (*names, *expected):
            if name != MANIFEST and not _MEMBER.fullmatch(name):
                raise TransferError(f"{self.path} has an unexpected member: {name[:80]!a}")
        if len(names) != len(set(names)) or set(names) != expected or not tables <= expected:
            odd = sorted(set(names) ^ expected | tables - expected) or ["a repeated name"]
            raise TransferError(f"{self.path} differs from its manifest: {odd[0][:80]!a}")
        methods = {info.compress_type for info in self._zip.infolist()}
        if not methods <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise TransferError(f"{self.path} is damaged: it has an unknown compression")

    @contextmanager
    def _damage_in(self, name: str) -> Iterator[None]:
        try:
            yield
        except _DAMAGE as error:
            raise TransferError(f"{self.path} is damaged: {name}: {error}") from None
        except OSError as error:
            if error.errno != errno.EINVAL:  # of a place before the beginning of the file
                raise
            raise TransferError(f"{self.path} is damaged: {name} is missing") from None


def refuse_existing(path: Path) -> None:
    """Raises TransferError if the path exists already."""
    if os.path.lexists(path):
        raise TransferError(f"{path} exists already; the command overwrites nothing")


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write atomically, for its owner alone.

    Raises:
        TransferError: the file exists already.
    """
    try:
        with atomic_file(path, mode=PRIVATE) as file:
            yield file
    except FileExistsError:
        raise TransferError(f"{path} exists already; the command overwrites nothing") from None
