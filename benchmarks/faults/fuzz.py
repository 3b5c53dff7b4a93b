"""Whatever is sent, no answer is a 500 and none fails to come.

schemathesis over the whole OpenAPI document, a tenth as many examples an operation, and bodies
made by hypothesis on `POST /events`, against a server of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.harness import publish
from tests.fuzzing.bodies import Body, check_answer, for_each_body, post
from tests.fuzzing.server import KEY, FuzzedServer, fuzz_schema

COLUMNS = ["run", "requests", "operations", "5xx", "other failures", "hangs", "seconds"]


def main(count: int = 10_000) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with FuzzedServer(folder / "data", KEY) as server:
            rows = [_schema(server, count // 10, folder), _bodies(server, count)]
            alive, failed = server.lives(), server.failures()
    publish("faults-fuzz", COLUMNS, rows, server_alive=alive, failures_logged=len(failed))
    if not alive or failed or any(row[3] or row[4] or row[5] for row in rows):
        sys.exit("\n".join(["something failed", *failed[:5]]))


def _schema(server: FuzzedServer, examples: int, folder: Path) -> list[Any]:
    started = time.perf_counter()
    try:
        report = fuzz_schema(server, examples, folder, timeout=4 * 3600)
    except subprocess.TimeoutExpired:
        return ["schemathesis", None, None, None, None, 1, time.perf_counter() - started]
    if report["failures"] or report["errors"]:
        print(report["output"])
    failures = Counter({failure["type"]: failure["count"] for failure in report["failures"]})
    errors = failures.pop("ServerError", 0)
    hangs = sum("timeout" in str(error).lower() for error in report["errors"])
    others = failures.total() + len(report["errors"]) - hangs
    made, tested = report["test_cases"]["generated"], report["operations"]["tested"]
    seconds = time.perf_counter() - started
    return ["schemathesis", made, tested, errors, others, hangs, seconds]


def _bodies(server: FuzzedServer, count: int) -> list[Any]:
    counts: Counter[str] = Counter()
    started = time.perf_counter()

    def send(body: Body) -> None:
        counts["made"] += 1
        try:
            response = post(client, body)
            counts["5xx"] += response.status_code >= 500 and response.status_code != 503
            check_answer(body, response)
        except httpx2.TimeoutException:
            counts["hangs"] += 1
        except (AssertionError, httpx2.TransportError) as error:
            # Counted, and shown; the run goes on.
            counts["failures"] += 1
            print(repr(error)[:500], body.content[:200])

    with server.client() as client:
        for_each_body(count, send)
    others = max(0, counts["failures"] - counts["5xx"])
    seconds = time.perf_counter() - started
    return ["bodies of events", counts["made"], 1, counts["5xx"], others, counts["hangs"], seconds]
