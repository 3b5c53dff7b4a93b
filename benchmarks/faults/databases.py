"""A database of its own for a run, and a look into it past the service."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from deploy.processes import PostgresCluster, environment_with, ncr_command, temporary_folder

KINDS = ("sqlite", "postgresql")


@dataclass(frozen=True)
class Place:
    """Where a service keeps everything."""

    folder: Path
    url: str | None
    """None: SQLite in the folder."""
    cluster: PostgresCluster | None

    def env(self, **more: str) -> dict[str, str]:
        """The service's settings."""
        env = {"NCR_DATA_DIR": str(self.folder / "var"), "NCR_LOG_FORMAT": "json"}
        if self.url is not None:
            env["NCR_DATABASE_URL"] = self.url
        return env | more

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """The rows of a statement, by a connection of its own."""
        if self.url is not None:
            with psycopg.connect(self.url) as connection:
                return connection.execute(statement).fetchall()
        with contextlib.closing(sqlite3.connect(self.folder / "var" / "ncr.db")) as connection:
            return connection.execute(statement).fetchall()

    def damage(self) -> str | None:
        """What SQLite finds wrong with its file; None for nothing."""
        if self.url is not None:
            return None
        found = self.query("PRAGMA integrity_check")[0][0]
        return None if found == "ok" else str(found)


@contextlib.contextmanager
def place(kind: str, folder: Path | None = None) -> Iterator[Place]:
    """A folder, and a cluster in it for `postgresql`; both gone at the end."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = temporary_folder("ncr-faults-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if kind == "sqlite":
            yield Place(folder, None, None)
            return
        cluster = stack.enter_context(PostgresCluster(folder / "postgres"))
        yield Place(folder, cluster.create_database("ncr"), cluster)


def upgrade(place: Place) -> None:
    """`ncr db upgrade`, which SQLite does by itself."""
    if place.url is None:
        return
    done = subprocess.run(
        ncr_command("migrate"),
        env=environment_with(place.env()),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
