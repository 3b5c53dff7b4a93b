"""The client for pages, by Node's own test runner, against a real server."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
from pathlib import Path

import httpx2
import pytest

from tests.cluster.servers import NcrServer
from tests.conftest import skip_or_fail
from tests.e2e.support import ncr

CLIENT = Path(__file__).parents[2] / "clients" / "js"
NODE_MAJOR = 20


def node() -> str:
    """The path of a Node that is new enough."""
    found = shutil.which("node")
    if found is None:
        skip_or_fail("node is not on this machine")
    assert found is not None
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    if int(version.stdout.removeprefix("v").partition(".")[0]) < NODE_MAJOR:
        skip_or_fail(f"node is older than version {NODE_MAJOR}: {version.stdout.strip()}")
    return found


@pytest.mark.slow
def test_the_client_for_pages_works_with_a_real_server(tmp_path: Path) -> None:
    program = node()
    admin = "an-admin-key-for-the-test"
    env = {"NCR_DATA_DIR": str(tmp_path / "var"), "NCR_ADMIN_KEY": admin}
    with NcrServer(env, tmp_path / "server.log") as server:
        rows = [{"id": f"film-{n}"} for n in range(1, 10)]
        events = [{"user": f"u{u}", "item": f"film-{i}"} for u in range(5) for i in range(1, 10)]
        with httpx2.Client(base_url=server.url, headers={"X-API-Key": admin}) as client:
            client.post("/items", json=rows).raise_for_status()
            client.post("/events", json=events).raise_for_status()
        roles = [
            part
            for role in ("recommend", "events", "tokens", "history")
            for part in ("--role", role)
        ]
        created = ncr("keys", "create", "page", *roles, data_dir=tmp_path / "var")
        assert created.returncode == 0, created.stderr
        run = subprocess.run(
            [program, "--test", "test/"],
            cwd=CLIENT,
            env={**os.environ, "NCR_URL": server.url, "NCR_KEY": created.stdout.strip()},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "# pass 0" not in run.stdout
    with contextlib.closing(sqlite3.connect(tmp_path / "var" / "ncr.db")) as connection:
        # What the answers of the API do not show.
        attributed = "SELECT type FROM events WHERE recommendation_id IS NOT NULL"
        assert connection.execute(attributed).fetchall() == [("click",)]


def test_the_declarations_are_those_of_the_source(tmp_path: Path) -> None:
    """Where the compiler is there: `npm ci` in `clients/js` installs it."""
    compiler = CLIENT / "node_modules" / ".bin" / "tsc"
    if not compiler.exists():
        pytest.skip("tsc is not installed: run `npm ci` in clients/js")
    command = [compiler, "-p", "tsconfig.json", "--outDir", tmp_path]
    run = subprocess.run(command, cwd=CLIENT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    made = (tmp_path / "ncr.d.ts").read_text()
    assert made == (CLIENT / "ncr.d.ts").read_text(), "run `npm run types` in clients/js"
