"""The processes that the service is made of, by the table that the compose file follows too."""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import psycopg
from psycopg import sql

from tests.cluster.process import (
    HOST,
    ROOT,
    STOP_SECONDS,
    Process,
    ProcessError,
    Started,
    children_of,
    environment_with,
    free_port,
    is_running,
    wait_until,
)

PORT = 8000
NCR_ENVIRONMENT = ("NCR_DATA_DIR", "NCR_DATABASE_URL", "NCR_REDIS_URL", "NCR_ADMIN_KEY")
# Nothing is kept on disk, and the least recently used entries make room.
REDIS_FLAGS = ("--save", "", "--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru")


@dataclass(frozen=True)
class Service:
    """One kind of process: its command, its environment variables, how many there are.

    ``{host}`` and ``{port}`` in a command are where it listens; an empty one is the image's own.
    """

    command: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    port: int | None = None
    published: bool = False
    replicas: int = 1

    def command_line(self, host: str = "0.0.0.0", port: int | None = None) -> tuple[str, ...]:
        """The command with its address; by default that of the compose file."""
        return tuple(part.format(host=host, port=port or self.port) for part in self.command)


_SERVE = ("ncr", "serve", "--host", "{host}", "--port", "{port}")
SERVICES: dict[str, Service] = {
    "migrate": Service(("ncr", "db", "upgrade"), NCR_ENVIRONMENT),
    "api": Service(_SERVE, NCR_ENVIRONMENT, port=PORT, replicas=2),
    "worker": Service(("ncr", "worker"), NCR_ENVIRONMENT, replicas=2),
    "proxy": Service(port=PORT, published=True),
    "postgres": Service(environment=("POSTGRES_USER", "POSTGRES_PASSWORD", "POSTGRES_DB")),
    "redis": Service(("redis-server", *REDIS_FLAGS)),
}


def ncr_command(service: str, port: int | None = None) -> list[str]:
    """The command of a service of the table, run by this interpreter from this checkout."""
    program, *arguments = SERVICES[service].command_line(HOST, port)
    if program != "ncr":
        raise ValueError(f"{service} is not a command of the service")
    return [sys.executable, "-c", "from app.cli import main; main()", *arguments]


# Such a process is forked from one that has imported what `ncr` imports, which takes seconds.
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(
    ["tests.cluster.servers", "app.cli.main", "app.main", "app.transfer", "app.worker", "ncr_core"]
)


class ForkedCommand:
    """`ncr` with these arguments in a process of its own, with the methods of `Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        stdout: str | Path,
        stderr: str | Path,
    ) -> None:
        args = (["ncr", *arguments], dict(env), str(stdout), str(stderr))
        self._process = _FORK.Process(target=_become_ncr, args=args)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code once it has ended; subprocess.TimeoutExpired after so many seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("ncr", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


def _become_ncr(arguments: list[str], env: dict[str, str], stdout: str, stderr: str) -> None:
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(env)
    for number, name in ((1, stdout), (2, stderr)):
        file = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.argv = arguments
    from app.cli import main

    main()


def get_status(port: int, path: str, timeout: float = 2.0) -> int | None:
    """The status of a GET on a connection of its own; None when there is no answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


class RedisServer(Process):
    """A Redis that keeps nothing, with a password and the flags of the compose file."""

    name = "redis"

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        password = secrets.token_hex(8)
        self.url = f"redis://:{password}@{HOST}:{self.port}/0"
        options = ["--bind", HOST, "--port", str(self.port), "--dir", str(folder)]
        options += ["--requirepass", password]
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(["redis-server", *options, *REDIS_FLAGS], folder / "redis.log")

    @staticmethod
    def available() -> bool:
        """Whether there is a redis-server on this machine."""
        return shutil.which("redis-server") is not None

    def is_ready(self) -> bool:
        """Whether it answers PING, if only by asking for the password."""
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


class NcrProcess(Process):
    """A process that runs `ncr`; `forked` starts it in a tenth of the time."""

    forked = False

    def _launch(self, log: IO[bytes]) -> Started:
        if not self.forked:
            return super()._launch(log)
        arguments = self.command[self.command.index("-c") + 2 :]
        return ForkedCommand(arguments, environment_with(self.env), self.log, self.log)


class HttpServer(Process):
    """A process that serves the HTTP API, or passes requests on to one that does."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        port: int,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self.port = port
        self.url = f"http://{HOST}:{port}"
        super().__init__(command, log, env=env, cwd=cwd)

    def is_ready(self) -> bool:
        """Whether `/health/ready` says so."""
        return get_status(self.port, "/health/ready") == 200


class NcrServer(NcrProcess, HttpServer):
    """`ncr serve`. ``env`` holds its settings, `NCR_*`."""

    name = "server"

    def __init__(self, env: Mapping[str, str], log: Path, *, with_worker: bool = False) -> None:
        port = free_port()
        options = ["--with-worker"] if with_worker else []
        super().__init__([*ncr_command("api", port), *options], log, port, env)

    def start_from(self, checkout: Path) -> Self:
        """Starts it, on the port that it had, as the version of another checkout."""
        self._cwd = checkout
        self.env["PYTHONPATH"] = str(checkout)
        return self.start()


def training_pids_of(worker: int) -> list[int]:
    """The child processes in which the worker of this process runs its job."""
    pids = []
    for pid in children_of(worker):
        with contextlib.suppress(OSError):
            if "app.worker.child_process" in Path(f"/proc/{pid}/cmdline").read_text():
                pids.append(pid)
    return pids


class NcrWorker(NcrProcess):
    """`ncr worker`. ``env`` holds its settings, `NCR_*`."""

    name = "worker"

    def __init__(self, env: Mapping[str, str], log: Path) -> None:
        super().__init__(ncr_command("worker"), log, env=env)

    def is_ready(self) -> bool:
        """Whether it says that it looks for jobs."""
        return self.running and "worker started" in self.log_text()

    def training_pids(self) -> list[int]:
        """The processes that do its job under way, if there is one."""
        return training_pids_of(self.pid)


class ProxyServer(HttpServer):
    """`python -m tests.cluster.proxy` before these ports."""

    name = "proxy"

    def __init__(self, backends: Sequence[int], log: Path, *, port: int | None = None) -> None:
        port = port or free_port()
        command = [sys.executable, "-m", "tests.cluster.proxy", "--listen", str(port)]
        for backend in backends:
            command += ["--backend", str(backend)]
        super().__init__(command, log, port)


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
