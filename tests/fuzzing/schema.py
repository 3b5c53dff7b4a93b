"""Runs schemathesis, by its command and as its own process, and reads what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fuzzing.server import FuzzedServer

CONFIG = Path(__file__).with_name("schemathesis.toml")


def fuzz_schema(
    server: FuzzedServer, examples: int, folder: Path, *, seed: int = 1, timeout: float = 300
) -> dict[str, Any]:
    """The report on every operation of the server; what was printed is in `output`.

    Raises subprocess.TimeoutExpired when it takes longer than ``timeout`` seconds.
    """
    report = folder / "schemathesis.json"
    headers = [part for item in server.headers.items() for part in ("-H", ": ".join(item))]
    command = "from schemathesis.cli import schemathesis; schemathesis()"
    done = subprocess.run(
        [
            *(sys.executable, "-c", command, "--config-file", str(CONFIG)),
            *("run", f"{server.url}/openapi.json", *headers, "-n", str(examples)),
            *("--seed", str(seed), "--generation-deterministic", "--no-color"),
            *("--report", "json", "--report-json-path", str(report)),
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=folder,
    )
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    result: dict[str, Any] = json.loads(report.read_text())
    return result | {"output": done.stdout}
