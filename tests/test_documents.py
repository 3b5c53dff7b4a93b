"""The code blocks of the pages do what the pages say, in the order in which they stand.

Each page has a copy of one data folder, that of `ncr demo`, and a service of its own. Blocks of
`sh` and of `python` are run; those of other languages are shown only.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from app.cli import demo
from app.cli.common import quiet_settings
from ncr_core.data.synthetic import synthetic_catalogue
from tests.cluster.servers import NcrServer, NcrWorker
from tests.conftest import create, drop, url_of

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "getting-started.md",
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
    *sorted((ROOT / "clients").glob("*/README.md")),
]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.M | re.S)
SERVICE = re.compile(r"^((?:\w+=\S+ )*)ncr (serve|worker)\b(.*)$", re.M)
REFUSED = re.compile(r'"status": *[45]\d\d')
POSTGRESQL, REDIS = "postgresql://postgres@127.0.0.1:5432/ncr", "redis://127.0.0.1:6379/0"
RECIPE = "next-item"  # the first that `auto` tries; the others take a minute
SECONDS = 240

# The status of each answer goes to a file: only a block that shows an error may be refused.
CURL = '#!/bin/sh\nexec {curl} -sS -w "%{{stderr}}%{{http_code}}\\n" "$@" 2>>"{statuses}"\n'
NCR = '#!/bin/sh\nexec {python} -P -c "from app.cli.main import main; main()" "$@"\n'
PYTHON = '#!/bin/sh\nexec {python} "$@"\n'
INTERPRETER = """
import json, sys, traceback
answers, sys.stdout = sys.stdout, sys.stderr
names = {"__name__": "page"}
for line in sys.stdin:
    error = None
    try:
        exec(compile(json.loads(line), "page", "exec"), names)
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps(error), file=answers, flush=True)
"""
SKIPPED = "#!/bin/sh\nexit 0\n"  # what a reader has done before, or has another tool for


@dataclass(frozen=True)
class Block:
    """A block that is run, and the one that follows it on the page."""

    language: str
    code: str
    answer: str


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page that are run."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [
        Block(language, code, "".join(answer for _, answer in found[place + 1 : place + 2]))
        for place, (language, code) in enumerate(found)
        if language in ("sh", "python")
    ]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder that `ncr demo` makes, with a model that takes less time to train."""
    folder = tmp_path_factory.mktemp("prepared")
    url = f"sqlite:///{folder / 'ncr.db'}"
    settings = quiet_settings(
        data_dir=folder, database_url=url, redis_url=None, default_recipe=RECIPE
    )
    asyncio.run(demo._prepare(settings, None, 8000))
    return folder


class Server(NcrServer):
    """Forked from a process that has imported what takes seconds."""

    forked = True


class Worker(NcrWorker):
    """As `Server`."""

    forked = True


@dataclass
class Reader:
    """Somebody who follows a page from top to bottom."""

    folder: Path
    data: Path
    stack: ExitStack
    places: dict[str, str] = field(default_factory=dict)
    """What stands in the place of the addresses that the pages have."""
    servers: list[NcrServer | NcrWorker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.work, self.tools = self.folder / "work", self.folder / "tools"
        self.statuses, self.variables = self.folder / "statuses", self.folder / "variables"
        self.work.mkdir()
        self.tools.mkdir()
        self.variables.touch()
        scripts = {
            "curl": CURL.format(curl=shutil.which("curl"), statuses=self.statuses),
            "ncr": NCR.format(python=sys.executable),
            "python": PYTHON.format(python=sys.executable),
            **dict.fromkeys(("make", "pip", "npm", "docker"), SKIPPED),
        }
        for name, text in scripts.items():
            (self.tools / name).write_text(text)
            (self.tools / name).chmod(0o755)
        self.env = {name: text for name, text in os.environ.items() if not name.startswith("NCR_")}
        self.env |= {
            "PATH": f"{self.tools}{os.pathsep}{self.env['PATH']}",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'clients' / 'python'}",
            "NCR_DATA_DIR": str(self.data),
            "NCR_DEFAULT_RECIPE": RECIPE,
            "NCR_DRAIN_NOTICE_SECONDS": "0",
        }
        self._interpreter: subprocess.Popen[str] | None = None

    def follow(self, block: Block) -> None:
        """Runs a block. Raises AssertionError if it fails, or an answer is an error."""
        code = self._in_place(block.code)
        self.statuses.write_text("")
        if block.language == "python":
            self._run_python(code)
        else:
            rest = 0
            for service in SERVICE.finditer(code):
                self._run_shell(code[rest : service.start()])
                self._start(service[1], service[2], service[3])
                rest = service.end()
            self._run_shell(code[rest:])
        statuses = [int(line) for line in self.statuses.read_text().split("\n") if line.isdigit()]
        assert statuses or "curl" not in code or block.language == "python"
        assert all(status < 400 for status in statuses) or REFUSED.search(block.answer), statuses

    def start_service(self) -> None:
        """The service that a page finds."""
        self._start("", "serve", " --with-worker")

    def _in_place(self, code: str) -> str:
        for shown, own in self.places.items():
            code = code.replace(shown, own)
        for server in self.servers:
            if isinstance(server, NcrServer):
                code = code.replace("localhost:8000", f"127.0.0.1:{server.port}")
        return code

    def _start(self, variables: str, command: str, options: str) -> None:
        env = self.env | dict(pair.split("=", 1) for pair in variables.split())
        settings = {name: text for name, text in env.items() if name.startswith("NCR_")}
        log = self.folder / f"service-{len(self.servers)}.log"
        service: NcrServer | NcrWorker
        if command == "serve":
            while self.servers:
                self.servers.pop().close()
            service = Server(settings, log, with_worker="--with-worker" in options)
        else:
            service = Worker(settings, log)
        self.servers.append(service)
        self.stack.callback(service.close)
        service.start()

    def _run_shell(self, code: str) -> None:
        if not code.strip():
            return
        script = f'set -ea\n. "{self.variables}"\n{code}\nset +a\nexport -p > "{self.variables}"\n'
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.work,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        for line in self.variables.read_text().splitlines():
            if found := re.match(r'declare -x (NCR_\w+)="(.*)"$', line):
                self.env[found[1]] = found[2]

    def _run_python(self, code: str) -> None:
        if self._interpreter is None:
            self._interpreter = subprocess.Popen(
                [sys.executable, "-P", "-c", INTERPRETER],
                cwd=self.work,
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.stack.enter_context(self._interpreter)
            self.stack.callback(self._interpreter.kill)
        assert self._interpreter.stdin is not None
        assert self._interpreter.stdout is not None
        self._interpreter.stdin.write(json.dumps(code) + "\n")
        self._interpreter.stdin.flush()
        error = json.loads(self._interpreter.stdout.readline())
        assert error is None, f"{code}\n{error}"


def put_movies(folder: Path) -> None:
    """A small data set with ids as MovieLens has them."""
    folder.mkdir()
    catalogue = synthetic_catalogue(n_users=200)

    def number(name: str) -> str:
        return "1196" if name == "film-480" else name.partition("-")[2]

    items = [f"{number(item.id)},{item.title}" for item in catalogue.items]
    (folder / "items.csv").write_text("\n".join(["item,title", *items]))
    rows = [f"{number(user)},{number(item)},{time}" for user, item, time in catalogue.interactions]
    (folder / "ratings.csv").write_text("\n".join(["user,item,timestamp", *rows]))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(
    page: Path, prepared: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_of(page)
    if not blocks:
        pytest.skip("the page has no code to run")
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    code = "".join(block.code for block in blocks)
    data = shutil.copytree(prepared, tmp_path / "data")
    with ExitStack() as stack:
        reader = Reader(tmp_path, data, stack)
        if REDIS in code:
            reader.places[REDIS] = request.getfixturevalue("redis_url")
            reader.env["NCR_REDIS_PREFIX"] = request.getfixturevalue("redis_prefix")
        if POSTGRESQL in code:
            request.getfixturevalue("postgres")
            name = create()
            stack.callback(drop, name)
            reader.places[POSTGRESQL] = url_of(name)
        if "ml-1m" in code:
            put_movies(reader.work / "ml-1m")
        if "localhost:8000" in code:
            reader.start_service()
        for block in blocks:
            reader.follow(block)
