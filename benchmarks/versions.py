"""Compares two versions of the service: the answers they give, and how fast.

    python -m benchmarks.versions OLD_CHECKOUT [NEW_CHECKOUT] [--data PATH] [--timing]

Each checkout runs its own service from its own folder with this interpreter. The old version
imports the data (a synthetic catalogue, or PATH as `ncr import` takes it) and trains a few models;
both then get a copy of its data folder, so that the new one has to load and migrate what the old
one left.

Answers are compared byte by byte after ids, durations and times of now are taken out. Differences
in wording only (`detail` texts) are counted apart and are no failure; so are the lists of users of
whom nothing is known, whose positions for less popular items are drawn. The exit code is 1 if
anything else differs. `--timing` then measures `GET /recommend` against both in turns and prints
the ratio with its interval. Both versions on one commit show the noise of the comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import http.client
import json
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import numpy as np

from benchmarks.harness import publish
from benchmarks.load import Report, closed_loop, requests_for
from benchmarks.recorded_set import ENDED, NEW_ITEMS, Origin, RecordedSet, Request, fill, train
from tests.cluster.process import HOST, environment_with, free_port
from tests.cluster.servers import HttpServer

SETTLE_SECONDS = 4, 120  # until servers have the new items, which they look for every second
FEWER_USERS = 60  # in the repetitions
TRAININGS_OF_BOTH: tuple[dict[str, object], ...] = (
    {"model": "nbpr", "factors": 16, "users": "history", "epochs": 1},
    {"model": "neupr", "factors": 8, "epochs": 1, "force": True},
    {"model": "neupr", "factors": 8, "epochs": 1, "start": "warm"},
)
COMMANDS = (["models", "list"], ["models", "activate", "none"], ["train"])
DRAWN = "list, unknown user"
RUN_NCR = "from app.cli import main; main()"
# One thread: sums come in one order. PASSIVE: threads that wait leave the core to the other server.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "NCR_LOG_LEVEL": "warning"}

# Run inside the checkout: the options of its commands, and its settings with their defaults.
INTERFACE = """
import json, typer
from app.cli.main import app
from app.core.settings import Settings

def tree(command):
    if hasattr(command, "commands"):
        return {name: tree(inner) for name, inner in sorted(command.commands.items())}
    return {
        "/".join([*option.opts, *option.secondary_opts]): [
            str(getattr(option, "type", "")), option.required,
            str(option.default) if isinstance(option.default, (int, float, str)) else None]
        for option in command.params
    }

settings = {name: str(field.default) for name, field in Settings.model_fields.items()}
print(json.dumps({"commands": tree(typer.main.get_command(app)), "settings": settings}))
"""

# Parts of answers that differ by nature.
_LIST_ID = re.compile(rb'("recommendation_id":"[^".]*)\.[0-9a-f]{11}\.[0-9a-f]{12}"')
_LIST_CURSOR = re.compile(rb',"next_cursor":"A[-\w]{40,}"')  # with the second that it is made in
_MEASURED = re.compile(
    rb'("(?:took_ms|eta_s|seconds|[a-z_]+_seconds|request_id)"): ?("[^"]*"|[-+.0-9eE]+)'
)
_PHASES = re.compile(rb'"seconds": ?[\[{][^][{}]*[]}]')  # of a training's phases or epochs
_NAME = re.compile(rb"\d{8}-\d{6}-[0-9a-f]{4,8}")
_TIME = re.compile(rb"20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)?")
_WORDING = re.compile(rb'"(?:detail|reason|error|msg)":"(?:[^"\\]|\\.)*"')
# Parts of the OpenAPI document that are prose or names of Python, not the interface.
_PROSE = ("description", "summary", "title", "operationId", "example", "examples")

CONNECTIONS, WARM_UP_SECONDS, RESAMPLES = 16, 0.2, 4000
TIMED_SETTINGS: dict[str, dict[str, object]] = {
    "cached": {"new_items_seconds": 0},
    "ranked anew": {"new_items_seconds": 0, "list_cache_bytes": 0},
}
COLUMNS = [
    "mode", "new / old", "95 % from", "to", "old 200s/s", "old p50 ms", "old p99 ms",
    "new 200s/s", "new p50 ms", "new p99 ms", "errors",
]  # fmt: skip


class Checkout:
    """A folder with a version of the repository, run with its own data folder."""

    def __init__(self, folder: Path, data_dir: Path) -> None:
        self.folder, self.data_dir = folder.resolve(), data_dir
        if not (self.folder / "app" / "cli").is_dir():
            raise SystemExit(f"{folder} is not a checkout of this repository")

    @property
    def commit(self) -> str:
        """The commit's first digits, with a ``+`` where files differ from it."""
        git = ["git", "-C", str(self.folder)]
        commands = ["rev-parse", "--short", "HEAD"], ["status", "--porcelain"]
        head, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True).stdout.strip()
            for command in commands
        )
        return (head or "unknown") + ("+" if changes else "")

    def environment(self, settings: Mapping[str, object]) -> dict[str, str]:
        """Environment variables of a process of this checkout."""
        named = {f"NCR_{name.upper()}": str(value) for name, value in settings.items()}
        paths = {"PYTHONPATH": str(self.folder), "NCR_DATA_DIR": str(self.data_dir)}
        return {**ENVIRONMENT, **paths, **named}

    def python(self, code: str, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of Python code run in the checkout."""
        process = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=self.folder,
            env=environment_with(self.environment({})),
            capture_output=True,
            text=True,
            timeout=600,
        )
        return process.returncode, process.stdout, process.stderr

    def interface(self) -> dict[str, Any]:
        """Commands with their options, and settings with their defaults."""
        code, out, error = self.python(INTERFACE)
        if code:
            raise RuntimeError(f"{self.folder}: {error[-2000:]}")
        interface: dict[str, Any] = json.loads(out.splitlines()[-1])
        return interface

    def schema(self) -> dict[str, str]:
        """The database's tables and indexes."""
        with sqlite3.connect(self.data_dir / "ncr.db") as connection:
            rows = connection.execute("SELECT name, sql FROM sqlite_master").fetchall()
        return {str(name): str(sql) for name, sql in rows}

    def serve(self, settings: Mapping[str, object], *options: str) -> CheckoutServer:
        """``ncr serve``; use it in a ``with`` statement."""
        return CheckoutServer(self, settings, options)


class CheckoutServer(HttpServer):
    """``ncr serve`` of a checkout."""

    def __init__(
        self, checkout: Checkout, settings: Mapping[str, object], options: tuple[str, ...]
    ) -> None:
        port = free_port()
        self.name = f"server of {checkout.folder}"
        self.data_dir = checkout.data_dir
        command = [sys.executable, "-c", RUN_NCR, "serve", "--host", HOST]
        super().__init__(
            [*command, "--port", str(port), *options],
            self.data_dir.with_name(f"{self.data_dir.name}.log"),
            port,
            checkout.environment(settings),
            cwd=checkout.folder,
        )


@dataclass(frozen=True)
class Answer:
    """What a version answered."""

    status: int
    body: bytes
    content_type: str = ""


class Comparison:
    """Compares answers of both versions and counts them by kind.

    ``known`` are the names of models and jobs made before both versions started.
    """

    def __init__(self, known: Iterable[str]) -> None:
        self._known = {name.encode() for name in known}
        self._begin = datetime.now(UTC).isoformat()[:19].encode()
        self.counts: dict[str, Counter[str]] = {}
        self.examples: dict[str, list[str]] = {}

    def compare(self, kind: str, request: str, old: Answer, new: Answer) -> None:
        """Compares two answers byte by byte, without what differs by nature."""
        bodies = [self.normalise(answer.body) for answer in (old, new)]
        heads = [f"{answer.status} {answer.content_type} ".encode() for answer in (old, new)]
        outcome = "differ"
        if heads[0] == heads[1] and bodies[0] == bodies[1]:
            outcome = "equal"
        elif heads[0] == heads[1] and len({_WORDING.sub(b"", body) for body in bodies}) == 1:
            outcome = "wording"
        self._count(kind, outcome, request, heads[0] + bodies[0], heads[1] + bodies[1])

    def compare_values(self, kind: str, old: dict[str, Any], new: dict[str, Any]) -> None:
        """Compares two documents entry by entry."""
        for key in dict.fromkeys([*old, *new]):
            a, b = old.get(key), new.get(key)
            self._count(
                kind, "equal" if a == b else "differ", key, str(a).encode(), str(b).encode()
            )

    def _count(self, kind: str, outcome: str, name: str, old: bytes, new: bytes) -> None:
        self.counts.setdefault(kind, Counter())[outcome] += 1
        examples = self.examples.setdefault(kind, [])
        if outcome != "equal" and len(examples) < 3:
            pairs = enumerate(zip(old, new, strict=False))
            position = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
            part = slice(max(0, position - 45), position + 90)
            cuts = (text[part].decode(errors="replace") for text in (old, new))
            examples.append("{}\n    old: …{}\n    new: …{}".format(name, *cuts))

    def normalise(self, body: bytes) -> bytes:
        """Takes out ids, durations and times that are new each time."""
        body = _LIST_ID.sub(rb'\1"', body)
        body = _LIST_CURSOR.sub(b"", body)
        body = _MEASURED.sub(rb"\1:0", body)
        body = _PHASES.sub(b'"seconds":{}', body)
        body = _NAME.sub(lambda m: m[0] if m[0] in self._known else b"<new>", body)
        return _TIME.sub(lambda m: m[0] if m[0][:19] < self._begin else b"<now>", body)

    def report(self) -> int:
        """Prints the counts and the first differences; returns the number of failures."""
        print(f"\n{'kind':58} {'equal':>7} {'wording':>8} {'differ':>7}")
        for kind, count in self.counts.items():
            print(f"{kind:58} {count['equal']:7,} {count['wording']:8,} {count['differ']:7,}")
        for kind, examples in self.examples.items():
            if examples:
                print(f"\n{kind}\n  " + "\n  ".join(examples))
        totals = sum(self.counts.values(), Counter())
        drawn = sum(n["differ"] for kind, n in self.counts.items() if kind.endswith(DRAWN))
        failures = totals["differ"] - drawn
        print(
            f"\n{totals['equal']:,} equal, {totals['wording']:,} differ in wording only, "
            f"{drawn:,} lists with drawn positions differ, {failures:,} differ"
        )
        return failures


def compare_answers(
    checkouts: tuple[Checkout, Checkout], recorded: RecordedSet, comparison: Comparison
) -> None:
    """The recorded set, documents, commands, exports, a training, and the database's schema."""
    # Without drawn positions in the lists of newcomers: the generator is no part of the contract.
    settings = {"new_items_seconds": 1, "exploration": 0}
    with (
        checkouts[0].serve(settings, "--with-worker") as old,
        checkouts[1].serve(settings, "--with-worker") as new,
    ):
        for requests in (
            recorded.reads("at first"),
            recorded.writes(),
            recorded.reads("after events"),
            recorded.errors(),
            recorded.activations(),
            recorded.reads("after a roll-back", FEWER_USERS),
        ):
            _settle((old, new))
            _compare_requests((old, new), list(requests), comparison)
        documents = [httpx2.get(f"{server.url}/openapi.json").json() for server in (old, new)]
        comparison.compare_values("OpenAPI, by route", *(_interface(one) for one in documents))
        metrics = [httpx2.get(f"{server.url}/metrics").text for server in (old, new)]
        types = [re.findall(r"^# TYPE (\S+) (\S+)", text, re.MULTILINE) for text in metrics]
        comparison.compare_values("metrics, by name", *(dict(pairs) for pairs in types))
        for order in TRAININGS_OF_BOTH:
            _compare_training((old, new), order, comparison)
        _settle((old, new))
        reads = recorded.reads("after trainings", FEWER_USERS)
        _compare_requests((old, new), list(reads), comparison)
    comparison.compare_values("database schema", *(one.schema() for one in checkouts))
    _compare_commands(checkouts, comparison)


def _settle(servers: tuple[CheckoutServer, CheckoutServer]) -> None:
    """Waits until both models have the new items, if there are any, and all jobs have ended."""
    time.sleep(SETTLE_SECONDS[0])
    until = time.monotonic() + SETTLE_SECONDS[1]
    while time.monotonic() < until:
        known = [_known_new_items(server.url) for server in servers]
        jobs = [httpx2.get(f"{server.url}/admin/jobs").json()["items"] for server in servers]
        idle = all(job["status"] in ENDED for queue in jobs for job in queue)
        if idle and known[0] == known[1] and len(known[0]) in (0, len(NEW_ITEMS)):
            return
        time.sleep(1)


def _known_new_items(url: str) -> set[str]:
    """The new items that the model of a server has a vector of."""
    answers = {item: httpx2.get(f"{url}/items/{item}/similar") for item in NEW_ITEMS}
    return {
        item
        for item, answer in answers.items()
        if answer.status_code == 200 and answer.json()["model_version"] is not None
    }


def _compare_requests(
    servers: tuple[CheckoutServer, CheckoutServer], requests: list[Request], comparison: Comparison
) -> None:
    """Each server gets one request after the other: nothing depends on what is ranked together."""
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda server: _answers(server.port, requests), servers))
    for request, old, new in zip(requests, *answers, strict=True):
        name = f"{request.method} {request.path[:200]} {request.body[:120]!r}"
        comparison.compare(request.kind, name, old, new)
    totals = sum(comparison.counts.values(), Counter())
    print(f"{totals['equal']:,} equal, {totals['differ']:,} not", flush=True)


def _answers(port: int, requests: list[Request]) -> list[Answer]:
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    answers = []
    for request in requests:
        headers = {"Content-Type": request.content_type} if request.body else {}
        connection.request(request.method, request.path, request.body or None, headers)
        response = connection.getresponse()
        content_type = response.headers.get("content-type", "")
        answers.append(Answer(response.status, response.read(), content_type))
    connection.close()
    return answers


def _interface(document: dict[str, Any]) -> dict[str, Any]:
    """Operations of an OpenAPI document without prose.

    References are resolved: the name of a schema is no part of the interface.
    """
    schemas = document.get("components", {}).get("schemas", {})

    def strip(part: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(part, list):
            return [strip(one, inside) for one in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            name = str(part["$ref"]).rpartition("/")[2]
            return "recursive" if name in inside else strip(schemas[name], (*inside, name))
        # A property may be called `title`: then its value is a schema.
        return {
            key: strip(value, inside)
            for key, value in sorted(part.items())
            if key not in _PROSE or isinstance(value, dict)
        }

    return {
        f"{method.upper()} {path}": strip(operation, ())
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }


def _compare_training(
    servers: tuple[CheckoutServer, CheckoutServer], order: dict[str, object], comparison: Comparison
) -> None:
    """The same training on both: the job's report, and every file of the checkpoint."""
    jobs, files = [], []
    for server in servers:
        with httpx2.Client(base_url=server.url, timeout=60) as client:
            job = train(client, order)
        jobs.append(Answer(200, json.dumps(job, separators=(",", ":")).encode()))
        folder = server.data_dir / "models" / str(job["model_version"])
        digests = {}
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            content = path.read_bytes()
            # The manifest's own text says what differs.
            text = path.suffix == ".json" and len(content) < 100_000
            digests[path.name] = (
                comparison.normalise(content).decode()
                if text
                else hashlib.sha256(content).hexdigest()
            )
        files.append(digests)
    comparison.compare("training, job", str(order), *jobs)
    comparison.compare_values("training, files of the checkpoint", *files)


def _compare_commands(checkouts: tuple[Checkout, Checkout], comparison: Comparison) -> None:
    interfaces = [checkout.interface() for checkout in checkouts]
    for part in ("commands", "settings"):
        comparison.compare_values(f"{part}, by name", *(one[part] for one in interfaces))
    exports: list[dict[str, str]] = []
    for checkout in checkouts:
        target = checkout.data_dir.with_name(f"{checkout.data_dir.name}-export")
        code, _, error = checkout.python(RUN_NCR, "export", str(target))
        files = sorted(target.iterdir()) if target.is_dir() else []
        exports.append({f.name: comparison.normalise(f.read_bytes()).decode() for f in files})
        exports[-1]["exit"] = f"{code} {error if code else ''}"
    comparison.compare_values("export, by file", *exports)
    for arguments in COMMANDS:
        outputs = (checkout.python(RUN_NCR, *arguments) for checkout in checkouts)
        answers = [Answer(code, (out + error).encode()) for code, out, error in outputs]
        comparison.compare("output of commands", " ".join(arguments), *answers)


def compare_speed(
    checkouts: tuple[Checkout, Checkout], users: list[str], rounds: int, turns: int, seconds: float
) -> Iterator[list[Any]]:
    """Yields a row of the table for each mode: ratio with interval, then medians of both versions.

    Servers are started anew for each of the ``rounds``, since where a process lies in memory makes
    a difference too; each has so many ``turns``, pairs of measurements of so many ``seconds``.
    """
    paths = [f"/recommend/{quote(user, safe='')}" for user in users]
    for mode, settings in TIMED_SETTINGS.items():
        reports: tuple[list[Report], list[Report]] = [], []
        for number in range(rounds):
            with ExitStack() as stack:
                servers = [stack.enter_context(one.serve(settings)) for one in checkouts]
                urls = [server.url for server in servers]
                asyncio.run(_measure(urls, paths, reports, turns, seconds, number))
        logs = np.log([new.rate() / old.rate() for old, new in zip(*reports, strict=True)])
        drawn = np.random.default_rng(0).integers(len(logs), size=(RESAMPLES, len(logs)))
        low, high = np.quantile(logs[drawn].mean(1), (0.025, 0.975))
        row: list[Any] = [mode, *(round(float(np.exp(x)), 4) for x in (logs.mean(), low, high))]
        for version in reports:
            row.append(round(float(np.median([report.rate() for report in version]))))
            quantiles = [[report.quantile(q) for report in version] for q in (0.5, 0.99)]
            row += [round(float(np.median(values)), 3) for values in quantiles]
        yield [*row, sum(one.statuses.total() - one.statuses[200] for one in reports[1])]


async def _measure(
    urls: list[str],
    paths: list[str],
    reports: tuple[list[Report], list[Report]],
    turns: int,
    seconds: float,
    seed: int,
) -> None:
    rng = random.Random(seed)
    for url in urls:
        async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
            for path in paths:
                (await client.get(path)).raise_for_status()
    requests = [cycle(requests_for(url, paths)) for url in urls]
    for _ in range(turns):
        for index in rng.sample((0, 1), 2):
            load = closed_loop(urls[index], requests[index], CONNECTIONS, seconds, WARM_UP_SECONDS)
            reports[index].append(await load)


def prepare(checkout: Checkout, data: Path | None) -> None:
    """Imports the data and trains some models with the old version."""
    if data is not None:
        code, out, error = checkout.python(RUN_NCR, "import", str(data.resolve()))
        if code:
            raise SystemExit(f"ncr import {data}: {error}")
        print(out.strip())
    with (
        checkout.serve({"new_items_seconds": 0}, "--with-worker") as server,
        httpx2.Client(base_url=server.url, timeout=120) as client,
    ):
        fill(client, imported=data is not None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("old", type=Path)
    add("new", type=Path, nargs="?", default=Path(__file__).parents[1])
    add("--data", type=Path, help="a file or folder that `ncr import` takes")
    add("--origin", type=Path, help="keep the old version's data folder here, for the next time")
    add("--users", type=int, default=500, help="how many users lists are requested for")
    add("--timing", action="store_true", help="also measure the speed of both")
    add("--only-timing", action="store_true", help="measure only the speed")
    add("--rounds", type=int, default=3, help="starts of both servers, per mode")
    add("--turns", type=int, default=12, help="pairs of measurements per round")
    add("--seconds", type=float, default=1.0, help="length of a measurement")
    add(
        "--save",
        metavar="NAME",
        default="",
        help="keep the timing as NAME in results/versions.json",
    )
    options = parser.parse_args()
    commits = [Checkout(folder, folder).commit for folder in (options.old, options.new)]
    print("old {}, new {}".format(*commits), flush=True)
    failures = 0
    with tempfile.TemporaryDirectory(prefix="ncr-versions-") as name:
        scratch = Path(name)
        source = Checkout(options.old, options.origin or scratch / "origin")
        if not (source.data_dir / "ncr.db").exists():
            prepare(source, options.data)
        origin = Origin.read(source.data_dir)
        recorded = RecordedSet(origin, options.users)
        print(f"{len(origin.users):,} users, {len(origin.items):,} items, models {origin.versions}")

        def copies(purpose: str) -> tuple[Checkout, Checkout]:
            folders = [scratch / f"{version}{purpose}" for version in ("old", "new")]
            for folder in folders:
                shutil.copytree(origin.folder, folder)
            return Checkout(options.old, folders[0]), Checkout(options.new, folders[1])

        if not options.only_timing:
            comparison = Comparison([*origin.versions, *origin.jobs])
            try:
                compare_answers(copies(""), recorded, comparison)
            finally:
                failures = comparison.report()
        if options.timing or options.only_timing:
            speed = options.rounds, options.turns, options.seconds
            publish(
                options.save,
                COLUMNS,
                list(compare_speed(copies("-timing"), recorded.users, *speed)),
                data=str(options.data or "synthetic"),
                old=commits[0],
                new=commits[1],
            )
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
