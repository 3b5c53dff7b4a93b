"""The topology of the compose file, from processes on this machine.

    python -m tests.cluster.topology [--port 8000] [--dir DIR]

PostgreSQL and Redis, the migrations, two servers behind a proxy and two workers, on 127.0.0.1 only
and in one folder, which is deleted at the end unless ``--dir`` names it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.cluster.process import ROOT, Process, ProcessError, environment_with, temporary_folder
from tests.cluster.servers import (
    NCR_ENVIRONMENT,
    PORT,
    SERVICES,
    NcrServer,
    NcrWorker,
    PostgresCluster,
    ProxyServer,
    RedisServer,
    ncr_command,
)

DATABASE = "ncr"
MIGRATION_SECONDS = 120.0


def missing_programs() -> list[str]:
    """Programs that the topology needs and this machine lacks."""
    needed = {"PostgreSQL": PostgresCluster.available(), "redis-server": RedisServer.available()}
    return [name for name, available in needed.items() if not available]


class Topology:
    """``with Topology() as topology:`` everything runs and is ready; at its end all is stopped.

    ``env`` are more settings of the service, `NCR_*`. Each process may be killed, paused and
    started again by itself, on the port that it had.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        port: int | None = None,
        admin_key: str | None = None,
        env: Mapping[str, str] | None = None,
        servers: int = SERVICES["api"].replicas,
        workers: int = SERVICES["worker"].replicas,
        redis: bool = True,
    ) -> None:
        self._own_folder = folder is None
        self.folder = temporary_folder("ncr-topology-") if folder is None else folder.resolve()
        logs = self.folder / "logs"
        self.postgres = PostgresCluster(self.folder / "postgres")
        self.redis = RedisServer(self.folder / "redis") if redis else None
        settings = {
            "NCR_DATA_DIR": str(self.folder / "data"),
            "NCR_DATABASE_URL": self.postgres.url_of(DATABASE),
            "NCR_REDIS_URL": self.redis.url if self.redis is not None else None,
            "NCR_ADMIN_KEY": admin_key,
        }
        self.environment = {
            name: settings[name] or "" for name in NCR_ENVIRONMENT if settings[name]
        }
        self.environment |= env or {}
        self.servers = [
            NcrServer(self.environment, logs / f"api-{n}.log") for n in range(1, servers + 1)
        ]
        self.workers = [
            NcrWorker(self.environment, logs / f"worker-{n}.log") for n in range(1, workers + 1)
        ]
        ports = [server.port for server in self.servers]
        self.proxy = ProxyServer(ports, logs / "proxy.log", port=port)
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """Where the proxy is."""
        return self.proxy.url

    @property
    def processes(self) -> dict[str, Process]:
        """All of them, by the names of the compose file's services."""
        processes: dict[str, Process] = {"postgres": self.postgres}
        if self.redis is not None:
            processes["redis"] = self.redis
        processes |= {f"api-{n}": server for n, server in enumerate(self.servers, 1)}
        processes |= {f"worker-{n}": worker for n, worker in enumerate(self.workers, 1)}
        return processes | {"proxy": self.proxy}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._own_folder:
                stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(self.postgres)
            self.postgres.create_database(DATABASE)
            if self.redis is not None:
                stack.enter_context(self.redis)
            self.migrate()
            # What was started last is stopped first: servers while the proxy still passes answers
            # on, and before what they stand on.
            stack.callback(self.proxy.close)
            stack.callback(close_all, [*self.servers, *self.workers])
            together: list[Process] = [*self.servers, *self.workers]
            for process in together:
                process.start(wait=False)
            for process in together:
                process.wait_ready()
            self.proxy.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def migrate(self) -> None:
        """`ncr db upgrade`; ProcessError with what it says when it fails."""
        done = subprocess.run(
            ncr_command("migrate"),
            env=environment_with(self.environment),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MIGRATION_SECONDS,
            check=False,
        )
        if done.returncode:
            raise ProcessError(f"ncr db upgrade: {done.stderr.strip()}")


def close_all(processes: Sequence[Process]) -> None:
    """Stops several at the same time: none waits for another one's draining."""
    for process in processes:
        process.resume()
        process.send(signal.SIGTERM)
    for process in processes:
        process.close()


def _describe(topology: Topology) -> str:
    lines = [f"{topology.url}  the proxy, before"]
    lines += [f"  {server.url}  {server.log}" for server in topology.servers]
    lines += [f"workers: {', '.join(str(worker.log) for worker in topology.workers)}"]
    lines += [f"PostgreSQL: {topology.postgres.url_of(DATABASE)}"]
    if topology.redis is not None:
        lines += [f"Redis: {topology.redis.url}"]
    key = " -H 'X-API-Key: …'" if "NCR_ADMIN_KEY" in topology.environment else ""
    json = "-H 'Content-Type: application/json'"
    post = f"-X POST {topology.url}/events {json}"
    lines += [
        "to try:",
        f'  curl{key} {post} -d \'{{"user": "ann", "item": "p-7"}}\'',
        f"  curl{key} '{topology.url}/recommend/ann?n=5'",
        f"  curl{key} -X POST {topology.url}/admin/train; curl{key} {topology.url}/admin/jobs",
        f"  kill -TERM {topology.servers[0].pid}   # a server drains; the other one answers",
        f"  kill -KILL {topology.workers[0].pid}   # the other worker takes its job up",
        "Ctrl-C stops all of it.",
    ]
    return "\n".join(lines)


def main() -> None:
    """The command: runs the topology in the foreground until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.topology",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--port", type=int, default=PORT, help="where the proxy listens")
    parser.add_argument("--dir", type=Path, help="the folder to use, and to keep")
    options = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        if missing := missing_programs():
            raise ProcessError(f"not found on this machine: {', '.join(missing)}")
        key = os.environ.get("NCR_ADMIN_KEY")
        with Topology(options.dir, port=options.port, admin_key=key) as topology:
            print(_describe(topology), flush=True)
            _watch(topology, stop)
            print("stopping", flush=True)
    except ProcessError as error:
        sys.exit(f"topology: {error}")


def _watch(topology: Topology, stop: threading.Event) -> None:
    """Says which processes end; others go on without them."""
    running = topology.processes
    while not stop.wait(1):
        for name, process in list(running.items()):
            if not process.running:
                print(f"{name} ended with {process.returncode}: {process.log}", flush=True)
                del running[name]


if __name__ == "__main__":
    main()
