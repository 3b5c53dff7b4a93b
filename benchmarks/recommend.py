"""How many lists a second one server gives, cached and ranked anew, and what it does under more
load than it can take.

    python -m benchmarks.recommend DATA_DIR
    python -m benchmarks.recommend cold DATA [PARAMS ...]
    python -m benchmarks.recommend rules DATA_DIR

DATA_DIR is the data folder of a service with a model, as `make demo` leaves it in var/demo/NAME;
the benchmark works on copies. The client runs beside the server, on the same cores.

The second form measures the first list of each user: after a start, a new model, and changes of one
item. DATA is what `ncr import` takes, or the data folder of a service with two published versions.
Each of PARAMS is a body of `POST /admin/train`, by default NeuPR with 8 factors and few epochs. It
is trained twice, so that one version can take the place of the other. Random users ask for a list,
none of them twice in a phase; after a change of an item they are those of the phase before. Each
phase stands between two of a route that does nothing. Half of the servers do not have what
a worker computes ahead.

The third form measures what rules cost: lists of 10 of the same users, in turns without a rule, by
ages by type (``seen=``), and without what was shown (``hide_shown=``), of known and unknown users.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import httpx2

from app.cli.common import quiet_settings, services_of
from app.cli.datasets import run_import
from app.jobs.schemas import TrainParams
from app.worker.worker import Worker
from benchmarks.harness import publish, run_command
from benchmarks.load import Report, Server, closed_loop, open_loop, requests_for, server
from ncr_core.data.readers import Columns

SECONDS = 5.0
ROUNDS = 3
CONNECTIONS = 32
USERS = 1_000


async def users_with_lists(base: str) -> list[str]:
    """Known users: those who get a list from the model. Their candidates are cached by then."""
    users: list[str] = []
    async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
        for prefix in ("", "user-"):
            for n in range(1, 10_000):
                answer = (await client.get(f"/recommend/{prefix}{n}")).json()
                if not answer["items"] or answer["items"][0]["source"] != "model":
                    break
                users.append(f"{prefix}{n}")
                if len(users) == USERS:
                    return users
    if not users:
        sys.exit("no known users named 1, 2, 3 … or user-1, user-2 …")
    return users


async def answer_bytes(base: str, users: list[str]) -> int:
    """The mean size of an answer."""
    async with httpx2.AsyncClient(base_url=base) as client:
        sizes = [len((await client.get(f"/recommend/{user}")).content) for user in users[:50]]
    return sum(sizes) // len(sizes)


def row(name: str, reports: list[Report], beside: float | None = None) -> list[Any]:
    """Medians over the rounds."""
    rate = median(report.rate() for report in reports)
    refused = median(report.rate(503) for report in reports)
    others = sum(
        n for report in reports for status, n in report.statuses.items() if status not in (200, 503)
    )
    return [
        name,
        rate,
        None if beside is None else rate / beside,
        median(report.quantile(0.5) for report in reports),
        median(report.quantile(0.99) for report in reports),
        refused,
        others,
    ]


async def cached(base: str) -> list[list[Any]]:
    """The same 1,000 lists over and over, in turns with routes that do nothing."""
    users = await users_with_lists(base)
    size = await answer_bytes(base, users)
    paths_by_name = {
        f"nothing, {size:,} bytes": ["/noop?bytes=" + str(size)],
        "nothing, a route of FastAPI": ["/noop-fastapi"],
        "/recommend, cached": [f"/recommend/{user}" for user in users],
        "/recommend, unknown users": [f"/recommend/nobody-{n}" for n in range(USERS)],
    }
    reports: dict[str, list[Report]] = {name: [] for name in paths_by_name}
    for _ in range(ROUNDS):
        for name, paths in paths_by_name.items():
            requests = cycle(requests_for(base, paths))
            reports[name].append(await closed_loop(base, requests, CONNECTIONS, SECONDS))
    beside = median(report.rate() for report in reports[next(iter(paths_by_name))])
    return [row(name, its_reports, beside) for name, its_reports in reports.items()]


async def anew(base: str) -> list[list[Any]]:
    """No list is kept, candidates are: every request is ranked."""
    users = await users_with_lists(base)
    requests = cycle(requests_for(base, [f"/recommend/{user}" for user in users]))
    closed = [await closed_loop(base, requests, CONNECTIONS, SECONDS) for _ in range(ROUNDS)]
    rows = [row(f"/recommend, ranked anew, {CONNECTIONS} connections", closed)]
    capacity = median(report.rate() for report in closed)
    for share in (0.7, 2.0):
        opened = [await open_loop(base, requests, share * capacity, SECONDS) for _ in range(ROUNDS)]
        rows.append(row(f"/recommend, {share:g} times that rate, open loop", opened))
    return rows


def main(data_dir: Path) -> None:
    with server(data_dir) as running:
        rows = asyncio.run(cached(running.url))
    with server(data_dir, list_cache_bytes=0) as running:
        rows += asyncio.run(anew(running.url))
    publish(
        "recommend",
        ["what", "200s/s", "of doing nothing", "p50 ms", "p99 ms", "503s/s", "errors"],
        rows,
        data=data_dir.name,
        connections=CONNECTIONS,
        seconds=SECONDS,
        rounds=ROUNDS,
    )


PHASE_SECONDS = 1.0  # of a phase: short enough that nobody is asked for twice
PARAMS = '{"model": "neupr", "factors": 8, "epochs": 2, "pretrain": false, "force": true}'
COLD_COLUMNS = [
    "model",
    "lists",
    "a second",
    "of nothing's",
    "p50 ms",
    "p99 ms",
    "nothing a second",
]
COLD_COLUMNS += ["nothing p99 ms", "errors"]
START, NEW_MODEL = "after a start", "after a new model"
CHANGES: dict[str, dict[str, Any]] = {
    "after an item's new attribute": {"attributes": {"price": 1}},
    "after an item was hidden": {"hidden": True},
}


async def prepare(data: Path, folder: Path, params: str) -> None:
    """Imports the data and publishes two versions; ends when no job is left."""
    settings = quiet_settings(data_dir=folder)
    async with services_of(settings) as services:
        await run_import(services, data, "auto", Columns())
        worker = Worker(services.database, services.models, settings)
        for seed in (1, 2):
            body = json.loads(params) | {"seed": seed}
            await services.jobs.submit_training(TrainParams.model_validate(body))
            while await worker.run_once():
                pass


async def model_of(folder: Path) -> str:
    """The kind and size of the active version."""
    async with services_of(quiet_settings(data_dir=folder)) as services:
        row = await services.models.get(str((await services.models.activation()).version))
    return f"{row.kind} {row.factors}"


async def all_users(folder: Path) -> list[str]:
    """The users, in the order of their ids. The last one is no part of a phase."""
    async with services_of(quiet_settings(data_dir=folder)) as services:
        return sorted(user for _, user, _ in await services.events.active_users(10**6))


async def phases(running: Server, users: list[str], seed: int) -> dict[str, tuple[Report, ...]]:
    """The phases of one server: the report of each, and those of doing nothing around it."""
    shuffled = random.Random(seed)
    reports = {}

    async def measure(name: str, order: list[str] | None = None) -> list[str]:
        order = order or shuffled.sample(users[:-1], len(users) - 1)
        lists = [f"/recommend/{user}" for user in order]
        reports[name] = tuple(
            [
                await closed_loop(running.url, paths, CONNECTIONS, PHASE_SECONDS, warm_up=0.0)
                for paths in (noop(), cycle(requests_for(running.url, lists)), noop())
            ]
        )
        return order

    def noop() -> Iterator[bytes]:
        return cycle(requests_for(running.url, ["/noop?bytes=1400"]))

    await measure(START)
    async with httpx2.AsyncClient(base_url=running.url, timeout=60) as client:
        versions = (await client.get("/admin/models")).json()["items"]
        other = next(row["version"] for row in versions if not row["active"])
        (await client.post(f"/admin/models/{other}/activate")).raise_for_status()
        probe = f"/recommend/{users[-1]}"
        while (await client.get(probe)).json()["model_version"] != other:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        order = await measure(NEW_MODEL)
        item = (await client.get("/items?n=1")).json()["items"][0]["id"]
        for name, change in CHANGES.items():
            (await client.patch(f"/items/{item}", json=change)).raise_for_status()
            await measure(name, order)
    return reports


def cold_row(name: str, rounds: list[tuple[Report, ...]]) -> list[Any]:
    """Medians over the rounds."""
    lists = [report for _, report, _ in rounds]
    nothing = [report for before, _, after in rounds for report in (before, after)]
    rate, of_nothing = (median(each.rate() for each in some) for some in (lists, nothing))
    return [
        name,
        rate,
        rate / of_nothing,
        median(each.quantile(0.5) for each in lists),
        median(each.quantile(0.99) for each in lists),
        of_nothing,
        median(each.quantile(0.99) for each in nothing),
        sum(count for each in lists for status, count in each.statuses.items() if status != 200),
    ]


def rows_of(folder: Path) -> list[list[Any]]:
    """The rows of one model."""
    users = asyncio.run(all_users(folder))
    rounds: dict[str, list[tuple[Report, ...]]] = defaultdict(list)
    for number in range(2 * ROUNDS):
        computed = number % 2 == 0
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(shutil.copytree(folder, Path(scratch) / "var"))
            if not computed:
                for path in copy.glob("models/*.candidates.safetensors"):
                    path.unlink()
            with server(copy) as running:
                reports = asyncio.run(phases(running, users, number))
        for name, its_reports in reports.items():
            rounds[name if computed else f"{name}, candidates not precomputed"].append(its_reports)
    return [cold_row(name, reports) for name, reports in rounds.items()]


def cold(data: Path, params: tuple[str, ...] = (PARAMS,)) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, body in enumerate(params or (PARAMS,)):
            folder = data
            if not (data / "ncr.db").exists():
                folder = Path(scratch) / str(number)
                asyncio.run(prepare(data, folder, body))
            rows += [[asyncio.run(model_of(folder)), *row] for row in rows_of(folder)]
    publish(
        "cold-lists",
        COLD_COLUMNS,
        rows,
        data=data.name,
        connections=CONNECTIONS,
        seconds=PHASE_SECONDS,
        rounds=ROUNDS,
    )


RULES = {
    "no rule": "",
    'seen={"*":"36500d"}': "?seen=%7B%22*%22:%2236500d%22%7D",
    'seen={"*":"1d"}': "?seen=%7B%22*%22:%221d%22%7D",
    "hide_shown=6h": "?hide_shown=6h",
}
RULES_SECONDS = 2.0


async def ruled(base: str) -> list[list[Any]]:
    """Rows of known and unknown users, each with its share of the rate without a rule."""
    groups = {
        "known users": [f"/recommend/{user}" for user in await users_with_lists(base)],
        "unknown users": [f"/recommend/nobody-{n}" for n in range(USERS)],
    }
    rows = []
    for group, paths in groups.items():
        reports: dict[str, list[Report]] = {name: [] for name in RULES}
        for _ in range(ROUNDS):
            for name, query in RULES.items():
                requests = cycle(requests_for(base, [path + query for path in paths]))
                report = await closed_loop(base, requests, CONNECTIONS, RULES_SECONDS)
                reports[name].append(report)
        without = median(report.rate() for report in reports["no rule"])
        rows += [row(f"{group}, {name}", of, without) for name, of in reports.items()]
    return rows


def rules(data_dir: Path) -> None:
    with server(data_dir) as running:
        rows = asyncio.run(ruled(running.url))
    publish(
        "rules",
        ["what", "200s/s", "of no rule", "p50 ms", "p99 ms", "503s/s", "errors"],
        rows,
        data=data_dir.name,
        connections=CONNECTIONS,
        seconds=RULES_SECONDS,
        rounds=ROUNDS,
    )


if __name__ == "__main__":
    run_command(main, cold=cold, rules=rules)
