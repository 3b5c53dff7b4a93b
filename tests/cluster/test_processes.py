"""What the topology is made of: processes that die with their parent, a cluster, the proxy."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psycopg
import pytest

from tests.cluster.process import (
    HOST,
    ROOT,
    Process,
    ProcessError,
    children_of,
    free_port,
    is_running,
    temporary_folder,
    wait_until,
)
from tests.cluster.servers import PostgresCluster, ProxyServer, RedisServer, get_status
from tests.conftest import skip_or_fail

pytestmark = pytest.mark.e2e

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
SECONDS = 30


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tests.cluster.process import Process\n"
        f"child = Process({SLEEP!r}, Path(sys.argv[1])).start()\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "log")], cwd=ROOT, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    wait_until(lambda: not is_running(pid), SECONDS, "end of the child")


def test_a_process_is_stopped_paused_and_started_again(tmp_path: Path) -> None:
    with Process(SLEEP, tmp_path / "log", env={"NCR_DEVICE": "cpu"}) as process:
        first = process.pid
        assert first in children_of(os.getpid())
        with pytest.raises(ProcessError, match="running"):
            process.start()
        process.pause()
        with pytest.raises(ProcessError, match="did not end"):
            process.terminate(0.2)
        process.resume()
        assert process.wait() == -signal.SIGTERM
        process.start()
        assert process.pid != first
        process.kill()
        assert process.returncode == -signal.SIGKILL
        process.kill()  # gone already
        process.start()
        process.pause()
    assert not process.running


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(.2); raise SystemExit('no room')"]

    class NeverReady(Process):
        def is_ready(self) -> bool:
            return False

    with pytest.raises(ProcessError, match="ended with 1: no room"):
        NeverReady(command, tmp_path / "log").start()


@pytest.mark.postgres
def test_postgresql_keeps_committed_rows_when_killed() -> None:
    if not PostgresCluster.available():
        skip_or_fail("no initdb and postgres on this machine")
    folder = temporary_folder("ncr-test-")
    cluster = PostgresCluster(folder / "postgres", options={"max_connections": "20"})
    try:
        with cluster:
            url = cluster.create_database("ncr")
            assert cluster.create_database("ncr") == url
            other = psycopg.connect(url)
            with psycopg.connect(url) as connection:
                connection.execute("CREATE TABLE kept AS SELECT 1 AS n")
            other.execute("INSERT INTO kept VALUES (2)")
            sessions = children_of(cluster.pid)
            cluster.kill()
            assert not any(map(is_running, sessions))
            with pytest.raises(psycopg.OperationalError):
                other.commit()
            other.close()
            cluster.start()
            for again in (lambda: None, cluster.restart, lambda: cluster.stop_immediately()):
                again()
                if not cluster.running:
                    cluster.start()
                with cluster.connect("ncr") as connection:
                    assert connection.execute("SELECT n FROM kept").fetchall() == [(1,)]
        assert cluster.returncode == 0
    finally:
        cluster.close()
        shutil.rmtree(folder)


def test_redis_comes_back_empty_when_killed(tmp_path: Path) -> None:
    if not RedisServer.available():
        skip_or_fail("no redis-server on this machine")
    redis = pytest.importorskip("redis")
    with RedisServer(tmp_path / "redis") as server:
        client = redis.Redis.from_url(server.url, socket_timeout=5)
        client.set("key", "value")
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
        server.kill()
        assert not server.is_ready()
        server.start()
        assert client.get("key") is None
        client.close()
    assert server.returncode == 0


class Backend:
    """A server that says its name, or that it is not ready."""

    def __init__(self, name: str) -> None:
        self.ready = True
        backend = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                health = self.path == "/health/ready"
                self.send_response(503 if health and not backend.ready else 200)
                self.send_header("content-length", str(len(name)))
                self.end_headers()
                self.wfile.write(name.encode())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer((HOST, 0), Handler)
        self.server.daemon_threads = True
        self.port: int = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def backends() -> Iterator[list[Backend]]:
    backends = [Backend("a"), Backend("b")]
    yield backends
    for backend in backends:
        backend.close()


def ask(port: int) -> str:
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def test_proxy_balances_over_ready_servers_only(backends: list[Backend], tmp_path: Path) -> None:
    ports = [backend.port for backend in backends]
    with ProxyServer(ports, tmp_path / "log") as proxy:
        assert sorted(ask(proxy.port) for _ in range(6)) == [*"aaabbb"]
        connection = http.client.HTTPConnection(HOST, proxy.port, timeout=10)
        connection.request("GET", "/")
        name = connection.getresponse().read().decode()
        leaving = backends["ab".index(name)]
        leaving.ready = False
        wait_until(lambda: f"{leaving.port} is not ready" in proxy.log_text(), SECONDS, "a look")
        assert name not in {ask(proxy.port) for _ in range(6)}
        # What it has begun it goes on with, and bodies of any size pass.
        body = os.urandom(3 * 2**20)
        connection.request("POST", "/", body)
        assert connection.getresponse().read() == body
        connection.close()
        leaving.ready = True
        wait_until(lambda: ask(proxy.port) == name, SECONDS, "its return")


def test_proxy_skips_refusing_servers_and_falls_back_to_an_unready_one(
    backends: list[Backend], tmp_path: Path
) -> None:
    gone = free_port()
    with ProxyServer([gone, backends[0].port], tmp_path / "log") as proxy:
        assert {ask(proxy.port) for _ in range(6)} == {"a"}
        backends[0].ready = False
        wait_until(lambda: "is not ready" in proxy.log_text(), SECONDS, "a look")
        assert ask(proxy.port) == "a"
    assert proxy.returncode == 0


def test_proxy_answers_503_without_servers(tmp_path: Path) -> None:
    proxy = ProxyServer([free_port()], tmp_path / "log").start(wait=False)
    try:
        wait_until(lambda: get_status(proxy.port, "/") is not None, SECONDS, "an answer")
        assert get_status(proxy.port, "/") == 503
    finally:
        proxy.close()
