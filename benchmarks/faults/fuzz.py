"""Whatever is sent, no answer is a 500 and none fails to come.

    python -m benchmarks.faults.fuzz [BODIES]

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

from benchmarks.report import publish
from tests.fuzzing.bodies import Body, check_answer, for_each_body, post
from tests.fuzzing.schema import fuzz_schema
from tests.fuzzing.server import KEY, FuzzedServer

COLUMNS = ["run", "requests", "operations", "5xx", "other failures", "hangs", "seconds"]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
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
    found = Counter({failure["type"]: failure["count"] for failure in report["failures"]})
    errors = found.pop("ServerError", 0)
    hangs = sum("timeout" in str(error).lower() for error in report["errors"])
    others = sum(found.values()) + len(report["errors"]) - hangs
    made, tested = report["test_cases"]["generated"], report["operations"]["tested"]
    seconds = time.perf_counter() - started
    return ["schemathesis", made, tested, errors, others, hangs, seconds]


def _bodies(server: FuzzedServer, count: int) -> list[Any]:
    found: Counter[str] = Counter()
    started = time.perf_counter()

    def send(body: Body) -> None:
        found["made"] += 1
        try:
            response = post(client, body)
            found["5xx"] += response.status_code >= 500 and response.status_code != 503
            check_answer(body, response)
        except httpx2.TimeoutException:
            found["hangs"] += 1
        except (AssertionError, httpx2.TransportError) as error:
            # Counted, and shown; the run goes on.
            found["failures"] += 1
            print(repr(error)[:500], body.content[:200])

    with server.client() as client:
        for_each_body(count, send)
    others = max(0, found["failures"] - found["5xx"])
    seconds = time.perf_counter() - started
    return ["bodies of events", found["made"], 1, found["5xx"], others, found["hangs"], seconds]


if __name__ == "__main__":
    main()
