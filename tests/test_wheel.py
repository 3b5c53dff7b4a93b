"""The wheel, built and installed: its commands work from any folder, whatever lies there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from functools import partial
from pathlib import Path

import httpx2
import pytest

from tests.cluster.process import Process, free_port, wait_until
from tests.cluster.servers import get_status

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]
# As they are imported, where that is not as they are installed.
SECONDS = 240.0  # for anything to happen on a busy machine
MODULES = {"psycopg-binary": "psycopg_binary", "fastapi-offline": "fastapi_offline"}


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Without anything that leads Python to the checkout."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=inherited | env,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def checked(*command: str | Path, cwd: Path, **env: str) -> str:
    done = run(*command, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the build back end that is installed, from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder]
    checked(*PIP, "wheel", *options, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, which sees the packages that are installed here."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    checked(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = folder.glob("lib/*/site-packages")
    # A plain line adds a folder, but runs none of its own .pth files, so not the checkout's.
    (packages / "outside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A folder whose files have the names of the service's modules."""
    (tmp_path / "app").mkdir()
    for name in (
        "app.py",
        "app/__init__.py",
        "ncr_core.py",
        "migrations.py",
        "typing_extensions.py",
    ):
        (tmp_path / name).write_text(
            "raise SystemExit('a file of the working directory was run')\n"
        )
    return tmp_path


def test_the_wheel_holds_both_packages_and_the_migrations(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    checkout = {
        f"app/_{path.relative_to(ROOT)}" for path in (ROOT / "migrations").rglob("*.py")
    } | {
        str(path.relative_to(ROOT))
        for part in ("app", "ncr_core")
        for path in (ROOT / part).rglob("*.py")
    }
    assert checkout <= names
    assert {"app/py.typed", "ncr_core/py.typed"} <= names
    foreign = {name.partition("/")[0] for name in names} - {"app", "ncr_core"}
    assert all(name.endswith(".dist-info") for name in foreign)


def test_the_library_needs_less_than_the_service(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    required = re.findall(r"^Requires-Dist: ([\w-]+)([^\n]*)$", text, re.M)
    plain = {name for name, rest in required if "extra ==" not in rest}
    assert {"numpy", "torch", "safetensors", "pyarrow", "numba"} <= plain
    assert not plain & {"fastapi", "sqlalchemy", "typer", "uvicorn", "redis", "alembic"}
    assert "Provides-Extra: service" in text


def test_commands_run_from_a_folder_that_has_an_app_of_its_own(
    environment: Path, crowded: Path
) -> None:
    ncr = environment / "bin" / "ncr"
    assert checked(ncr, "--version", cwd=crowded).strip() == PROJECT["version"]
    assert "serve" in checked(ncr, "--help", cwd=crowded)
    data = crowded / "ratings.csv"
    data.write_text("user,item\n" + "".join(f"u{n % 30},i{n * n % 41}\n" for n in range(400)))
    checked(ncr, "db", "upgrade", cwd=crowded)
    assert "events added" in checked(ncr, "import", data, cwd=crowded)
    options = ["--model", "nbpr", "--factors", "4", "--epochs", "1"]
    checked(ncr, "train", "--data", data, *options, "--out", "model", cwd=crowded)
    assert (crowded / "var" / "ncr.db").is_file()
    assert (crowded / "model" / "manifest.json").is_file()


def test_the_service_trains_and_serves_from_a_folder_that_has_an_app_of_its_own(
    environment: Path, crowded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # a new folder: every kernel, for no list
    port = free_port()
    command = [str(environment / "bin" / "ncr"), "serve", "--with-worker", "--port", str(port)]
    server = Process(command, crowded / "server.log", cwd=crowded)
    server.start(wait=False)
    try:
        ready = partial(get_status, port, "/health/ready")
        wait_until(lambda: not server.running or ready() == 200, SECONDS, "the server's start")
        assert server.running, server.log_text()
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            events = [{"user": f"u{n % 30}", "item": f"i{n * n % 41}"} for n in range(400)]
            assert client.post("/events", json=events).json()["accepted"] == len(events)
            order = {"model": "nbpr", "factors": 4, "epochs": 1}
            job = client.post("/admin/train", json=order).json()["job_id"]
            status = lambda: client.get(f"/admin/jobs/{job}").json()["status"]  # noqa: E731
            wait_until(lambda: status() not in ("queued", "running"), SECONDS, "the training's end")
            assert status() == "succeeded", server.log_text()
    finally:
        server.close()


def test_without_the_service_the_command_says_what_to_install(
    environment: Path, tmp_path: Path
) -> None:
    blocked = [re.split(r"[>=<;\s]", one)[0] for one in PROJECT["optional-dependencies"]["service"]]
    names = [MODULES.get(name, name.replace("-", "_")) for name in blocked]
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {names}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    done = run(environment / "bin" / "ncr", "--help", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "pip install 'neural-collaborative-ranking[service]'" in line
    python = environment / "bin" / "python"
    code = (
        "import importlib, pkgutil, ncr_core\n"
        "for module in pkgutil.walk_packages(ncr_core.__path__, 'ncr_core.'):\n"
        "    if 'triton' not in module.name:\n"
        "        importlib.import_module(module.name)\n"
        "print(ncr_core.__file__)\n"
    )
    where = checked(python, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path)).strip()
    assert where.startswith(str(environment))
