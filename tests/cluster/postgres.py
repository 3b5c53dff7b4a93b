"""A PostgreSQL cluster of one's own: made in a folder, killed and restarted at will."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psycopg
from psycopg import sql

from tests.cluster.process import (
    HOST,
    STOP_SECONDS,
    Process,
    ProcessError,
    children_of,
    free_port,
    is_running,
    wait_until,
)

SUPERUSER = "postgres"
SOCKET_PATH_BYTES = 100  # the operating system takes no longer ones
INITDB_SECONDS = 120.0


def find_binaries() -> Path | None:
    """The folder of `initdb` and `postgres`: on the PATH, else the newest of Debian's folders."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    debian = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    folders += sorted(debian, key=lambda path: float(path.parent.name), reverse=True)
    for folder in folders:
        if all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres")):
            return folder
    return None


def _unprivileged_user() -> str | None:
    """Whom to run as: PostgreSQL refuses root. None: as whoever this is."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise ProcessError("PostgreSQL refuses to run as root, and there is no user postgres")


class PostgresCluster(Process):
    """A server with a data folder of its own, durable as by default, open to this machine only.

    ``folder`` belongs to it alone; where this process is root, the user that PostgreSQL then runs
    as needs a way to it. ``options`` are settings of `postgresql.conf`.
    """

    name = "postgres"
    death_signal = signal.SIGQUIT  # it ends its own processes at once, and recovers when started

    def __init__(self, folder: Path, *, options: Mapping[str, str] | None = None) -> None:
        binaries = find_binaries()
        self.folder = folder
        self.data = folder / "data"
        self.port = free_port()
        self._binaries = binaries
        socket_file = folder / f".s.PGSQL.{self.port}"
        settings = {
            "listen_addresses": HOST,
            "port": str(self.port),
            "unix_socket_directories": (
                str(folder) if len(os.fsencode(socket_file)) < SOCKET_PATH_BYTES else ""
            ),
            **(options or {}),
        }
        command = [str((binaries or Path()) / "postgres"), "-D", str(self.data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        super().__init__(command, folder / "postgres.log", user=_unprivileged_user(), cwd=folder)

    @staticmethod
    def available() -> bool:
        """Whether there is a PostgreSQL server on this machine."""
        return find_binaries() is not None

    def url_of(self, database: str = "postgres") -> str:
        """Where a database of the cluster is."""
        return f"postgresql://{SUPERUSER}@{HOST}:{self.port}/{database}"

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[object, ...]]:
        """A connection of one's own; each statement is a transaction."""
        return psycopg.connect(self.url_of(database), autocommit=True, connect_timeout=2)

    def create_database(self, name: str) -> str:
        """Creates a database unless it is there, and says where it is."""
        with self.connect() as connection:
            query = "SELECT 1 FROM pg_database WHERE datname = %s"
            if connection.execute(query, (name,)).fetchone() is None:
                create = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
                connection.execute(create)
        return self.url_of(name)

    def start(self, *, wait: bool = True) -> Self:
        """Starts the server; the first time in a folder that takes some seconds."""
        if self._binaries is None:
            raise ProcessError("no PostgreSQL server here: initdb and postgres are not found")
        if not (self.data / "PG_VERSION").exists():
            self._make(self._binaries / "initdb")
        return super().start(wait=wait)

    def _make(self, initdb: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._user is not None:
            shutil.chown(self.folder, self._user, self._user)
        # Trust: it listens on this machine only and holds nothing but what its owner puts there.
        how = ("--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "-U", SUPERUSER)
        done = subprocess.run(
            [initdb, "-D", self.data, *how],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INITDB_SECONDS,
            user=self._user,
            group=self._user,
            extra_groups=None if self._user is None else [],
            cwd=self.folder,
            check=False,
        )
        if done.returncode:
            raise ProcessError(f"initdb: {done.stderr.strip() or done.stdout.strip()}")

    def is_ready(self) -> bool:
        """Whether it takes connections."""
        if not self.running:
            return False
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def stop_immediately(self) -> int:
        """Shuts down and leaves the rest to recovery; the exit code."""
        self.send(signal.SIGQUIT)
        return self.wait()

    def terminate(self, seconds: float = STOP_SECONDS) -> int:
        """A fast shutdown: SIGTERM would wait for every client to go."""
        self.send(signal.SIGINT)
        return self.wait(seconds)

    def kill(self) -> None:
        """SIGKILL for the server and all its sessions, as when the machine loses them."""
        if not self.running:
            return
        self.pause()  # no new session while they are counted
        sessions = children_of(self.pid)
        super().kill()
        for pid in sessions:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # While one of them holds on to the shared memory no new server starts.
        wait_until(lambda: not any(map(is_running, sessions)), 10, "end of killed sessions")
