"""Whatever is sent, the answer is one that the documentation knows, and the server goes on.

The long run is `make faults ARGS=fuzz`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzzing.bodies import check_answer, for_each_body, post
from tests.fuzzing.server import KEY, FuzzedServer, fuzz_schema

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedServer]:
    with FuzzedServer(tmp_path_factory.mktemp("fuzzed"), KEY) as server:
        yield server
        assert server.lives()
        assert server.failures() == []


def test_every_operation_conforms_to_its_openapi_schema(
    server: FuzzedServer, tmp_path: Path
) -> None:
    report = fuzz_schema(server, 15, tmp_path)
    assert report["failures"] == [], report["output"]
    assert report["errors"] == [], report["output"]
    assert report["complete"]
    assert report["operations"]["tested"] == report["operations"]["total"] >= 20
    assert report["test_cases"]["generated"] > 500


def test_random_bodies_posted_as_events_get_documented_answers(server: FuzzedServer) -> None:
    with server.client() as client:
        for_each_body(500, lambda body: check_answer(body, post(client, body)))
