"""Whatever is sent, the answer is one that the documentation knows, and the server goes on.

NCR_FUZZ_EXAMPLES: how many bodies are made, and a tenth of it for each operation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzzing.bodies import Body, bodies, check_answer
from tests.fuzzing.schema import fuzz_schema
from tests.fuzzing.server import FuzzedServer

pytestmark = pytest.mark.e2e

EXAMPLES = int(os.environ.get("NCR_FUZZ_EXAMPLES", "0"))
KEY = "a-key-of-sixteen-or-more"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedServer]:
    with FuzzedServer(tmp_path_factory.mktemp("fuzzed"), KEY) as server:
        yield server
        assert server.lives()
        assert server.failures() == []


def test_every_operation_does_what_its_documentation_says(
    server: FuzzedServer, tmp_path: Path
) -> None:
    # Seconds a request in the worst case: the process ends even when the server hangs.
    limit = max(240, EXAMPLES)
    report = fuzz_schema(server.url, KEY, max(15, EXAMPLES // 10), tmp_path, timeout=limit)
    assert report["failures"] == [], report["output"]
    assert report["errors"] == [], report["output"]
    assert report["complete"]
    assert report["operations"]["tested"] == report["operations"]["total"] >= 20
    assert report["test_cases"]["generated"] > 500


def test_every_body_posted_as_events_is_answered(server: FuzzedServer) -> None:
    client = httpx2.Client(base_url=server.url, timeout=20, headers={"X-API-Key": KEY})

    @settings(
        max_examples=EXAMPLES or 500,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(bodies)
    def post(body: Body) -> None:
        headers = {"Content-Type": body.content_type}
        check_answer(body, client.post("/events", content=body.content, headers=headers))

    with client:
        post()
