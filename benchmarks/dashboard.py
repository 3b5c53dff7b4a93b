"""Pages of the dashboard on a large service: time, bytes over the wire, and processor time.

    python -m benchmarks.dashboard FOLDER [REQUESTS]

FOLDER is a data folder that `python -m benchmarks.size data FOLDER 5000000x100000` made. What a
busy service has besides is added to it once: lists and clicks of the last 48 hours, rows counted by
hour for 90 days, an interleaving trial beyond its planned size, and a training that runs.

Each page is asked for REQUESTS times (30), one after the other, in rounds over all pages, by a
browser that has signed in with a key:

first     the first time that the server makes the page, in ms
ms        the median and the slowest of a tenth; what takes long to count is kept for a while
kB        the page over the wire, and with all files that it loads: the first visit
CPU ms    of the server a page, with all its threads
share     of a core, and so of the lists that a server with a core of its own makes, where one
          browser asks for the page every 10 seconds, and for `job, live` every 2 as the page does

Signing in is measured the same way.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from itertools import cycle
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import quote

import httpx2
import numpy as np
import orjson

from benchmarks.harness import publish, run_command
from benchmarks.load import closed_loop, requests_for, server_in_place

REQUESTS = 30
VISIT_SECONDS, POLL_SECONDS = 10.0, 2.0
HOURS, DAYS = 48, 90
LISTS_AN_HOUR, CLICKED = 20_000, 100_000
TRIAL_LISTS, TRIAL_CLICKED = 40_000, 4_000
EVENT_TYPES = ("view", "click", "cart", "purchase", "rating")
COLUMNS = ["page", "first", "ms", "ms, 9 of 10", "kB", "kB, first visit", "CPU ms", "share"]
LIST_USERS, LIST_SECONDS = 300, 10.0


async def fill(folder: Path) -> dict[str, str]:
    """Adds what a busy service has, once; the ids of what the pages show."""
    from app.core.settings import load_settings
    from app.jobs.repository import JobRepository
    from app.wiring import build_services

    settings = load_settings(data_dir=folder, log_level="error")
    services = await build_services(settings)
    try:
        trials, _ = await services.trials.page(None, 1)
        if not trials:
            await _add_activity(services)
            await _add_trial(services)
            jobs = JobRepository(services.database)
            await jobs.insert("train", {"recipe": "auto", "trigger": "request"})
            claim = None
            while claim is None or claim.kind != "train":  # candidates that wait come first
                claim = await jobs.claim("benchmark", 10**15, 3)
                assert claim is not None
            curve = [
                {"phase": "train", "epoch": n, "loss": 0.7 / n, "ndcg": 0.1 + n / 1000}
                for n in range(1, 101)
            ]
            progress = {"phase": "train", "epoch": 100, "epochs": 200, "eta_s": 90.0}
            progress |= {"loss": 0.007, "ndcg": 0.2, "peak_bytes": 2**31, "curve": curve}
            await jobs.heartbeat(claim, 10**15, progress)
            trials, _ = await services.trials.page(None, 1)
        jobs_of, _ = await services.jobs.page(None, 10)
        popular = await services.events.popularity()
        user = "user-77"
        return {
            "user": user,
            "item": (await services.catalog.catalogue()).external_ids[
                max(popular[1], key=lambda pair: pair[1])[0]
            ],
            "version": str((await services.models.activation()).version),
            "job": next(
                job.job_id for job in jobs_of if (job.kind, job.status) == ("train", "running")
            ),
            "trial": trials[0].trial_id,
        }
    finally:
        await services.close()


async def _add_activity(services: Any) -> None:
    """Counts of 90 days, and the lists and clicks of two."""
    from app.core.bulk import insert_many
    from app.core.ids import HOUR_MS, hour_now
    from app.events.schemas import NewEvent
    from app.events.tables import event_counts

    now = hour_now()
    rows = [
        (hour, verdict, name, 1_000)
        for hour in range(now - DAYS * 24, now)
        for verdict, name in (
            *(("accepted", name) for name in EVENT_TYPES),
            ("rejected", "missing_user"),
            ("duplicate", ""),
        )
    ]
    async with services.database.write() as conn:
        await insert_many(conn, event_counts, ("hour", "verdict", "name", "rows"), rows)
    version = (await services.models.activation()).version
    for hour in range(HOURS):
        services.trials.impressions._new_lists[version, now - hour] += LISTS_AN_HOUR
    await services.trials.flush()
    random = np.random.default_rng(0)
    for _ in range(CLICKED // 10_000):
        events = []
        for n in range(10_000):
            hour = now - int(random.integers(HOURS))
            name = f"{version}.{hour * HOUR_MS + n:x}.{secrets.token_hex(6)}"
            user, item = f"user-{random.integers(100_000)}", f"item-{random.integers(10_000)}"
            events.append(NewEvent(name, user, item, "click", None, hour * HOUR_MS * 1000, name))
        await services.events.import_rows(events)


async def _add_trial(services: Any) -> None:
    """An interleaving trial of the version against a copy of its row."""
    from app.ab_tests.repository import ABTestRepository
    from app.ab_tests.schemas import PLANNED_CLICKED, ABTestRow
    from app.core.ids import HOUR_MS
    from app.core.tables import now_us
    from app.events.schemas import NewEvent

    began = now_us() - 7 * 24 * HOUR_MS * 1_000
    version = str((await services.models.activation()).version)
    trial = ABTestRow(
        "trial-bench", "interleaving", version, f"{version}-b", 0.1, "running", began,
        ended_at=None, report=None, planned_clicked=PLANNED_CLICKED,
    )  # fmt: skip
    await ABTestRepository(services.database).insert(trial)
    known = (await services.catalog.catalogue()).internal_ids
    items = [f"item-{n}" for n in range(20)]
    teams = [known[item] for item in items]
    random = np.random.default_rng(1)
    rows, events = [], []
    for n in range(TRIAL_LISTS):
        at = began + int(random.integers(7 * 24 * HOUR_MS)) * 1_000
        name = f"{trial.trial_id}.{at // 1000:x}.{n:012x}"
        rows.append((name, trial.trial_id, 1 + int(random.integers(100_000)),
                     orjson.dumps({"a": teams[::2], "b": teams[1::2]}).decode(), at))  # fmt: skip
        if n < TRIAL_CLICKED:
            item = items[int(random.integers(20))]
            user = f"user-{random.integers(100_000)}"
            events.append(NewEvent(name, user, item, "click", None, at, name))
    await ABTestRepository(services.database).add_impressions(rows)
    await services.events.import_rows(events)


def pages(ids: dict[str, str]) -> dict[str, str]:
    """Paths by a name for each."""
    user, item = quote(ids["user"], safe=""), quote(ids["item"], safe="")
    named = {
        "overview": "",
        "users": "/users",
        "users, by a beginning": "/users?q=user-12",
        "users, by a part": "/users?q=er-123",
        "user": f"/users/{user}",
        "user, another diversity": f"/users/{user}?diversity=0.5",
        "user, what if": f"/users/{user}?like={item}",
        "items": "/items",
        "items, by a part": "/items?q=tem%201",
        "item, the most popular": f"/items/{item}",
        "which of the two": "/which",
        "models": "/models",
        "model": f"/models/{ids['version']}",
        "jobs": "/jobs",
        "job": f"/jobs/{ids['job']}",
        "job, live": f"/jobs/{ids['job']}/live",
        "trials": "/trials",
        "trial": f"/trials/{ids['trial']}",
        "data": "/data",
    }
    return {name: f"/dashboard{path}" for name, path in named.items()}


def cpu_seconds(pid: int) -> float:
    """Of a process and its threads (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wire_bytes(response: httpx2.Response) -> int:
    """The body as it came."""
    return int(response.headers.get("content-length", 0)) or len(response.content)


def first_visit(client: httpx2.Client, response: httpx2.Response) -> int:
    """The page and the files that it loads."""
    files = set(re.findall(r'(?:src|href)="(/dashboard/static/[^"]+)"', response.text))
    return wire_bytes(response) + sum(wire_bytes(client.get(file)) for file in files)


def measure(client: httpx2.Client, pid: int, path: str, n: int) -> tuple[list[float], float]:
    """Seconds of each request, and the server's processor time a request."""
    seconds, before = [], cpu_seconds(pid)
    for _ in range(n):
        started = time.perf_counter()
        response = client.get(path)
        seconds.append(time.perf_counter() - started)
        assert response.status_code == 200, (path, response.status_code, response.text[:500])
    return seconds, (cpu_seconds(pid) - before) / n


def sign_in(client: httpx2.Client, key: str) -> None:
    headers = {"Origin": str(client.base_url).rstrip("/"), "Cookie": ""}
    answer = client.post("/dashboard/sign-in", data={"key": key}, headers=headers)
    assert answer.status_code == 303, answer.text[:500]
    client.headers["Cookie"] = answer.headers["set-cookie"].partition(";")[0]


def main(folder: Path, requests: int = REQUESTS) -> None:
    ids = asyncio.run(fill(folder))
    key = secrets.token_hex(16)
    with server_in_place(folder, admin_key=key) as running:
        started = cpu_seconds(running.pid)
        logins = []
        client = httpx2.Client(base_url=running.url, timeout=60.0)
        for _ in range(requests):
            begun = time.perf_counter()
            sign_in(client, key)
            logins.append(time.perf_counter() - begun)
        login_cpu = (cpu_seconds(running.pid) - started) / requests
        # What a list costs: the measure of what pages take away.
        users = cycle(
            [
                request.replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
                for request in requests_for(
                    running.url, [f"/recommend/user-{n}" for n in range(LIST_USERS)]
                )
            ]
        )
        asyncio.run(closed_loop(running.url, users, 8, 2.0))
        before = cpu_seconds(running.pid)
        report = asyncio.run(closed_loop(running.url, users, 8, LIST_SECONDS))
        lists = sum(report.statuses.values())
        assert set(report.statuses) == {200}, report.statuses
        list_cpu = (cpu_seconds(running.pid) - before) / lists
        rows: list[list[Any]] = []
        named = pages(ids)
        first: dict[str, float] = {}
        for name, path in named.items():
            begun = time.perf_counter()
            client.get(path)
            first[name] = 1e3 * (time.perf_counter() - begun)
        time.sleep(5)
        seconds: dict[str, list[float]] = {name: [] for name in named}
        cpu: dict[str, list[float]] = {name: [] for name in named}
        for _ in range(3):
            for name, path in named.items():
                taken, each = measure(client, running.pid, path, max(1, requests // 3))
                seconds[name] += taken
                cpu[name].append(each)
        rows.append(["sign in", None, 1e3 * median(logins), 1e3 * quantiles(logins, n=10)[-1],
                     None, None, 1e3 * login_cpu, None])  # fmt: skip
        for name, path in named.items():
            response = client.get(path)
            each = sum(cpu[name]) / len(cpu[name])
            every = POLL_SECONDS if name == "job, live" else VISIT_SECONDS
            rows.append(
                [name, first[name], 1e3 * median(seconds[name]),
                 1e3 * quantiles(seconds[name], n=10)[-1],
                 wire_bytes(response) / 1e3, first_visit(client, response) / 1e3, 1e3 * each,
                 f"{each / every:.2%}"]
            )  # fmt: skip
    publish(
        "pages", COLUMNS, rows, cores=os.cpu_count(), load=round(os.getloadavg()[0], 1),
        lists_a_second=round(report.rate()), cpu_ms_a_list=round(1e3 * list_cpu, 3),
    )  # fmt: skip


if __name__ == "__main__":
    run_command(main)
