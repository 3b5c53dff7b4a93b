"""The OpenAPI document and its pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.core.settings import load_settings
from app.main import create_app
from tests.app.conftest import client_of

pytestmark = pytest.mark.anyio


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, routes in document["paths"].items()
        for method, operation in routes.items()
    }


async def test_responses_of_middleware_are_documented(client: httpx2.AsyncClient) -> None:
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
    keys: list[dict[str, list[str]]] = [{"key": []}, {"bearer_key": []}]
    for key, expected in ((None, [*keys, {}]), ("k" * 16, keys)):
        app = create_app(load_settings(data_dir=tmp_path, admin_key=key))
        for name, operation in operations(app.openapi()).items():
            token = name in ("GET /recommend/{user}", "POST /recommend", "POST /events")
            either = [*keys, {"token": []}, *expected[2:]] if token else expected
            assert operation.get("security") == (None if "/health/" in name else either), name


async def test_metrics_are_documented_as_text(client: httpx2.AsyncClient) -> None:
    documented = (await client.get("/openapi.json")).json()["paths"]["/metrics"]["get"]
    assert list(documented["responses"]["200"]["content"]) == ["text/plain"]
    assert (await client.get("/metrics")).headers["content-type"].startswith("text/plain")


async def test_integral_floats_are_accepted_as_integers(client: httpx2.AsyncClient) -> None:
    """To JSON Schema 64.0 is an integer; a number too large for the database was never one."""
    good = await client.post("/admin/train", json={"batch_size": 64.0, "seed": 1e3})
    assert good.status_code == 202
    job = (await client.get(f"/admin/jobs/{good.json()['job_id']}")).json()
    assert (job["params"]["batch_size"], job["params"]["seed"]) == (64, 1000)
    for value in (1.5, True, "3", 1e30, 2**64 - 1):
        refused = await client.post("/admin/train", json={"min_interactions": value})
        assert refused.status_code == 422, value


async def test_the_documentation_needs_no_network(open_app: FastAPI) -> None:
    async with client_of(open_app) as client:
        for page in ("/docs", "/redoc"):
            html = (await client.get(page)).text
            assert not re.findall(r"https?://", html), page
            for url in re.findall(r"""(?:src|href)=["']([^"']+)["']""", html):
                assert (await client.get(url)).status_code == 200, url
        schema = (await client.get("/openapi.json")).json()
        assert {"/events", "/items/{item}", "/users/{user}/events"} <= set(schema["paths"])
        post = schema["paths"]["/events"]["post"]
        assert set(post["requestBody"]["content"]) == {"application/json", "application/x-ndjson"}
        assert "HTTPValidationError" not in str(post)


async def test_bounds_are_written_as_json_schema_has_them(client: httpx2.AsyncClient) -> None:
    """A validator before a bound makes pydantic write the bound by its own name."""
    text = (await client.get("/openapi.json")).text
    assert re.findall(r'"(?:ge|gt|le|lt)":', text) == []
    body = (await client.get("/openapi.json")).json()["paths"]["/rerank"]["post"]["requestBody"]
    min_seq = body["content"]["application/json"]["schema"]["properties"]["min_seq"]
    assert min_seq["anyOf"][0]["minimum"] == 0
