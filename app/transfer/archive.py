"""The file of a backup: a zip of tables and checkpoints, and a manifest that vouches for each."""

from __future__ import annotations

import hashlib
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, Field, ValidationError

from ncr_core.errors import NcrError

FORMAT: Literal["ncr-backup"] = "ncr-backup"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST = 64 * 2**20
BLOCK = 1 << 20

_PART = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,191}"
# Nothing else is ever read from a zip, so no name in it leads out of the folders meant for it.
_MEMBER = re.compile(rf"tables/{_PART}\.jsonl|models/{_PART}|models/{_PART}/{_PART}")
# What Python's zipfile raises when it meets damage, depending on where it meets it.
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
"""Told what is being done, how much of it is, and of how much."""


def quietly(what: str, done: int, total: int) -> None:
    """A report to nobody."""


class TransferError(NcrError):
    """A backup or an export that cannot be written, read or used. The message is one line."""


class TableEntry(BaseModel):
    """What the manifest says of a table."""

    columns: list[str]
    rows: int = Field(ge=0)
    last_id: int | None
    """The highest id that the database had given out by itself; None where it gives out none."""


class Member(BaseModel):
    """What the manifest says of a file in the zip."""

    sha256: str
    bytes: int = Field(ge=0)


class Manifest(BaseModel):
    """What a backup holds."""

    format: Literal["ncr-backup"]
    version: int
    software: str
    revision: str
    """The revision of the schema, as Alembic names it."""
    dialect: str
    created_at: str
    tables: dict[str, TableEntry]
    missing_models: list[str]
    """Published versions whose checkpoints were not there to be backed up, or damaged."""
    members: dict[str, Member]


def table_member(table: str) -> str:
    """The name under which a table is in the zip."""
    return f"tables/{table}.jsonl"


class ArchiveWriter:
    """Writes members one after the other, the manifest last."""

    def __init__(self, file: IO[bytes]) -> None:
        # The lowest level: while tables are packed, the database holds a state for us.
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        self.members: dict[str, Member] = {}

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    @contextmanager
    def member(self, name: str) -> Iterator[Callable[[bytes], None]]:
        """Begins a member; gives what writes to it."""
        digest, size = hashlib.sha256(), 0
        with self._zip.open(name, "w", force_zip64=True) as out:

            def write(data: bytes) -> None:
                nonlocal size
                digest.update(data)
                size += len(data)
                out.write(data)

            yield write
        self.members[name] = Member(sha256=digest.hexdigest(), bytes=size)

    def finish(self, manifest: Manifest) -> None:
        """Writes the manifest."""
        self._zip.writestr(MANIFEST, manifest.model_dump_json(indent=1))


class Backup:
    """An open backup. Its names and its manifest fit each other; `verify` before using the rest."""

    def __init__(self, path: Path) -> None:
        """Opens it. Raises TransferError, or OSError where the file cannot be opened."""
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
        """The unpacked size of everything: what `verify` counts up to."""
        return sum(member.bytes for member in self.manifest.members.values())

    def models(self) -> dict[str, list[str]]:
        """The members of each version's checkpoint."""
        found: dict[str, list[str]] = {}
        for name in self.manifest.members:
            kind, version, *file = name.split("/")
            if kind == "models" and file:
                found.setdefault(version, []).append(name)
        return found

    def verify(self, on_bytes: OnBytes = lambda n: None) -> None:
        """Reads everything once. Raises TransferError for what is not as the manifest says.

        ``on_bytes`` is told how many bytes have been read, of ``total_bytes``.
        """
        done = 0
        for name, member in self.manifest.members.items():
            digest, size = hashlib.sha256(), 0
            with self.open(name) as file, self._damage_in(name):
                while data := file.read(BLOCK):
                    digest.update(data)
                    size += len(data)
                    if size > member.bytes:
                        break
                    done += len(data)
                    on_bytes(done)
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

    def _manifest(self) -> Manifest:
        with self._damage_in(MANIFEST):
            try:
                info = self._zip.getinfo(MANIFEST)
            except KeyError:
                raise TransferError(f"{self.path} is not a backup: no {MANIFEST} in it") from None
            with self._zip.open(info) as file:
                content = file.read(MAX_MANIFEST + 1)
        if len(content) > MAX_MANIFEST:
            raise TransferError(f"{self.path} has a manifest that is too large")
        try:
            manifest = Manifest.model_validate_json(content)
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
        wanted = set(self.manifest.members) | {MANIFEST}
        tables = {table_member(table) for table in self.manifest.tables}
        found = [info.filename for info in self._zip.infolist()]
        for name in (*found, *wanted):
            if name != MANIFEST and not _MEMBER.fullmatch(name):
                raise TransferError(f"{self.path} holds a file that no backup has: {name[:80]!a}")
        if len(found) != len(set(found)) or set(found) != wanted or not tables <= wanted:
            odd = sorted(set(found) ^ wanted | tables - wanted) or ["a name twice"]
            raise TransferError(f"{self.path} is not what its manifest says: {odd[0][:80]!a}")
        methods = {info.compress_type for info in self._zip.infolist()}
        if not methods <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise TransferError(f"{self.path} is damaged: it is packed in an unknown way")

    @contextmanager
    def _damage_in(self, name: str) -> Iterator[None]:
        try:
            yield
        except _DAMAGE as error:
            raise TransferError(f"{self.path} is damaged: {name}: {error}") from None
