"""The processes that the service is made of, by the table that the compose file follows too."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.process import HOST, ROOT, Process, children_of, free_port

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
    """A Redis that keeps nothing, with the flags of the compose file."""

    name = "redis"

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://{HOST}:{self.port}/0"
        options = ("--bind", HOST, "--port", str(self.port), "--dir", str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(["redis-server", *options, *REDIS_FLAGS], folder / "redis.log")

    @staticmethod
    def available() -> bool:
        """Whether there is a redis-server on this machine."""
        return shutil.which("redis-server") is not None

    def is_ready(self) -> bool:
        """Whether it answers PING."""
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


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


class NcrServer(HttpServer):
    """`ncr serve`. ``env`` holds its settings, `NCR_*`."""

    name = "server"

    def __init__(self, env: Mapping[str, str], log: Path, *, with_worker: bool = False) -> None:
        port = free_port()
        options = ["--with-worker"] if with_worker else []
        super().__init__([*ncr_command("api", port), *options], log, port, env)


def training_pids_of(worker: int) -> list[int]:
    """The child processes in which the worker of this process runs its job."""
    pids = []
    for pid in children_of(worker):
        with contextlib.suppress(OSError):
            if "app.worker.child_process" in Path(f"/proc/{pid}/cmdline").read_text():
                pids.append(pid)
    return pids


class NcrWorker(Process):
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
