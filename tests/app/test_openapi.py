"""The OpenAPI document against the service; what fuzzing found is here by itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs

from app.core.http import encode_cursor, text_problem, text_schema
from app.core.settings import load_settings
from app.main import create_app

pytestmark = pytest.mark.anyio


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, routes in document["paths"].items()
        for method, operation in routes.items()
    }


async def test_what_middleware_answers_is_documented(client: httpx2.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert "HTTPValidationError" not in str(document)
    for name, operation in operations(document).items():
        expected = {"400", "503"}
        if "/health/" not in name:
            expected |= {"401", "403", "429"}
            if name.startswith(("POST", "PUT", "PATCH")):
                expected |= {"413", "415"}
        assert expected <= set(operation["responses"]), name
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                schema = response["content"]["application/problem+json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/Problem"}, (name, status)
        assert operation["responses"]["503"]["headers"]["Retry-After"]["required"]
    assert "Problem" in document["components"]["schemas"]
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert references <= set(document["components"]["schemas"])


async def test_the_key_is_documented(tmp_path: Path) -> None:
    for key, expected in ((None, [{"key": []}, {}]), ("k" * 16, [{"key": []}])):
        app = create_app(load_settings(data_dir=tmp_path, admin_key=key))
        for name, operation in operations(app.openapi()).items():
            assert operation.get("security") == (None if "/health/" in name else expected), name


async def test_metrics_are_documented_as_text(client: httpx2.AsyncClient) -> None:
    documented = (await client.get("/openapi.json")).json()["paths"]["/metrics"]["get"]
    assert list(documented["responses"]["200"]["content"]) == ["text/plain"]
    assert (await client.get("/metrics")).headers["content-type"].startswith("text/plain")


async def test_405_names_all_methods_of_the_path(client: httpx2.AsyncClient) -> None:
    """The framework named those of the first route that has the path."""
    for path, allowed in (
        ("/items", "GET, POST"),
        ("/items/a%2Fb", "DELETE, GET, PATCH, PUT"),
        ("/admin/models/rollback", "POST"),
        ("/admin/models/x", "GET"),
        ("/health/live", "GET"),
    ):
        response = await client.options(path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed), path


async def test_numbers_that_are_whole_are_whole(client: httpx2.AsyncClient) -> None:
    """To JSON Schema 64.0 is an integer; a number too large for the database was never one."""
    good = await client.post("/admin/train", json={"batch_size": 64.0, "seed": 1e3})
    assert good.status_code == 202
    job = (await client.get(f"/admin/jobs/{good.json()['job_id']}")).json()
    assert (job["params"]["batch_size"], job["params"]["seed"]) == (64, 1000)
    for value in (1.5, True, "3", 1e30, 2**64 - 1):
        refused = await client.post("/admin/train", json={"min_interactions": value})
        assert refused.status_code == 422, value


def test_the_schema_of_texts_is_what_is_checked() -> None:
    schema = text_schema(64)
    for text in ("", "a", "a" * 64, "a" * 65, "a\0", "\0", "a\nb", "é"):
        fits = schema["minLength"] <= len(text) <= schema["maxLength"]
        assert (fits and bool(re.search(schema["pattern"], text))) is not bool(
            text_problem(text, 64)
        ), repr(text)


@pytest.mark.parametrize("path", ["/items", "/admin/jobs", "/admin/models"])
async def test_cursors_far_beyond_the_end(client: httpx2.AsyncClient, path: str) -> None:
    cursor = encode_cursor(10**18 - 1)
    assert (await client.get(path, params={"cursor": cursor})).status_code == 200


async def test_a_body_that_breaks_off_is_no_failure_of_ours(app: FastAPI) -> None:
    """Every client that hung up while sending was an exception in the log and a 500."""
    for content_type in (b"application/json", b"application/x-ndjson"):
        messages = [
            {"type": "http.request", "body": b'{"user": ', "more_body": True},
            {"type": "http.disconnect"},
        ]
        sent: list[Any] = []

        async def receive(messages: list[dict[str, Any]] = messages) -> dict[str, Any]:
            return messages.pop(0)

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/events",
            "raw_path": b"/events",
            "query_string": b"",
            "headers": [(b"content-type", content_type), (b"content-length", b"100")],
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 1),
        }
        with capture_logs() as logs:
            await app(scope, receive, send)
        assert sent[0]["status"] == 400
        assert b"incomplete_body" in sent[1]["body"]
        assert not [line for line in logs if line["event"] == "request failed"]
