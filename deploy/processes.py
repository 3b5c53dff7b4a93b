"""The processes that the service is made of, and what it stands on."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.postgres import PostgresCluster
from deploy.process import (
    HOST,
    ROOT,
    STOP_SECONDS,
    Process,
    ProcessError,
    children_of,
    environment_with,
    free_port,
    is_running,
    temporary_folder,
    wait_until,
)
from deploy.services import REDIS_FLAGS, SERVICES

__all__ = [
    "HOST",
    "ROOT",
    "STOP_SECONDS",
    "NcrServer",
    "NcrWorker",
    "PostgresCluster",
    "Process",
    "ProcessError",
    "ProxyServer",
    "RedisServer",
    "children_of",
    "environment_with",
    "free_port",
    "get_status",
    "is_running",
    "ncr_command",
    "temporary_folder",
    "wait_until",
]


class RedisServer(Process):
    """A Redis that keeps nothing, with the flags of the compose file."""

    name = "redis"

    def __init__(self, folder: Path, *, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"redis://{HOST}:{self.port}/0"
        place = ("--bind", HOST, "--port", str(self.port), "--dir", str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(["redis-server", *place, *REDIS_FLAGS], folder / "redis.log")

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


def ncr_command(service: str, port: int | None = None) -> list[str]:
    """The command of a service of the table, run by this interpreter from this checkout."""
    program, *arguments = SERVICES[service].command_line(HOST, port)
    if program != "ncr":
        raise ValueError(f"{service} is not a command of the service")
    return [sys.executable, "-c", "from app.cli import main; main()", *arguments]


class NcrServer(Process):
    """`ncr serve`. ``env`` holds its settings, `NCR_*`."""

    name = "server"

    def __init__(
        self,
        env: Mapping[str, str],
        log: Path,
        *,
        port: int | None = None,
        with_worker: bool = False,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://{HOST}:{self.port}"
        options = ["--with-worker"] if with_worker else []
        super().__init__([*ncr_command("api", self.port), *options], log, env=env)

    def is_ready(self) -> bool:
        """Whether `/health/ready` says so."""
        return get_status(self.port, "/health/ready") == 200


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
        found = []
        for pid in children_of(self.pid):
            with contextlib.suppress(OSError):
                if "app.jobs.child" in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
        return found


class ProxyServer(Process):
    """`python -m deploy.proxy` before these ports."""

    name = "proxy"

    def __init__(self, backends: Sequence[int], log: Path, *, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://{HOST}:{self.port}"
        command = [sys.executable, "-m", "deploy.proxy", "--listen", f"{HOST}:{self.port}"]
        for backend in backends:
            command += ["--backend", f"{HOST}:{backend}"]
        super().__init__(command, log)

    def is_ready(self) -> bool:
        """Whether a backend behind it is ready."""
        return get_status(self.port, "/health/ready") == 200


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
