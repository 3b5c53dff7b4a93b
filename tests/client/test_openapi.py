"""The client offers what the service's OpenAPI document describes: all of it, and nothing else."""

from __future__ import annotations

import asyncio
import inspect
import re
import runpy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from ncr_client import AsyncClient, Client

from app.core.settings import Settings
from app.main import create_app

ROOT = Path(__file__).parents[2]
# What their rows hold is the caller's business.
ROWS = ("post_events", "post_items", "post_users")
DESCRIBED = ("/items/{item}", "/users/{user}")
NOT_OFFERED = {("get", "/health/live")}  # for whoever watches over processes


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(Settings()).openapi()


def test_the_types_of_answers_follow_the_openapi_document() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "client.py"))
    assert script["ANSWERS"].read_text() == script["made"](), "run `python scripts/client.py`"


def test_the_types_of_the_client_for_pages_follow_the_openapi_document(
    document: dict[str, Any],
) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "client.py"))
    assert script["TYPES"].read_text() == script["types"](document), (
        "run `python scripts/client.py`"
    )


def test_both_clients_offer_the_same() -> None:
    both = [
        {
            name: str(inspect.signature(method))
            for name, method in vars(kind).items()
            if callable(method)
        }
        for kind in (AsyncClient, Client)
    ]
    rename = {"__aenter__": "__enter__", "__aexit__": "__exit__"}
    expected = {rename.get(name, name): of.replace("Async", "") for name, of in both[0].items()}
    assert expected == both[1]


def methods() -> list[str]:
    return [
        name
        for name, value in vars(AsyncClient).items()
        if not name.startswith("_") and inspect.isfunction(value) and name != "close"
    ]


async def sent_by(name: str) -> list[httpx2.Request]:
    """What the method sends, with something for each of its arguments."""
    sent: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request)
        return httpx2.Response(200, json={"items": [], "next_cursor": None, "status": "succeeded"})

    examples: dict[str, Any] = {
        "int": 3, "str": "x", "bool": True, "float": 0.5, "Sequence[str]": ["x", "y"],
        "Sequence[float]": [0.5],
        "dict[str, Any]": {"x": 1}, "datetime | str | float": 0.5,
        "Iterable[Mapping[str, Any]]": [{"user": "u", "item": "i"}],
        "Sequence[Mapping[str, Any]]": [{"id": "i"}], "Mapping[str, Any]": {"x": 1},
        "Mapping[str, str | int]": {"x": "1d"}, "str | int": "6h",
        "Sequence[Literal['categories', 'attributes']]": ["categories"],
    }  # fmt: skip
    async with AsyncClient(transport=httpx2.MockTransport(answer)) as client:
        method = getattr(client, name)
        arguments = {}
        for parameter in inspect.signature(method).parameters.values():
            kind = str(parameter.annotation).removesuffix(" | None").removesuffix(" | EllipsisType")
            values = re.match(r"Literal\['(.*?)'", kind.replace('"', "'"))
            arguments[parameter.name] = values[1] if values else examples[kind]
        result = method(**arguments)
        if isinstance(result, AsyncIterator):
            async for _ in result:
                pass
        else:
            await result
    return sent


def answer_of(name: str) -> str:
    """The TypedDict that the method returns, or gives one by one; or another type."""
    annotation = str(inspect.signature(getattr(AsyncClient, name)).return_annotation)
    match = re.search(r"answers\.(\w+)", annotation)
    return match[1] if match else annotation


def types_of(operation: dict[str, Any], schemas: dict[str, Any]) -> set[str]:
    """The schemas that an operation's answer may be of, or, of a page, that its rows are of."""
    names = set()
    for status, response in operation["responses"].items():
        if status.startswith("2"):
            schema = response.get("content", {}).get("application/json", {}).get("schema", {})
            name = schema.get("$ref", "").rpartition("/")[2]
            row = schemas.get(name, {}).get("properties", {}).get("items", {}).get("items", {})
            names |= {name, row.get("$ref", "").rpartition("/")[2]}
    return (names - {""}) or {"None", "str", "bool"}


def operation_of(document: dict[str, Any], request: httpx2.Request) -> tuple[str, dict[str, Any]]:
    """The path and the description of the operation that a request is for."""
    method, path = request.method.lower(), request.url.path
    matching = [
        template
        for template, operations in document["paths"].items()
        if method in operations and re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), path)
    ]
    # Where a path has a name in the place of an id, the name is meant.
    template = min(matching, key=lambda one: one.count("{"), default=None)
    assert template is not None, f"nothing takes {method} {path}"
    return template, document["paths"][template][method]


def body_of(operation: dict[str, Any]) -> dict[str, Any]:
    """The properties of an operation's JSON body, or of the rows of one that is a list.

    Of a body of several forms they are those of all.
    """
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    properties: dict[str, Any] = {}
    for form in schema.get("oneOf", [schema]):
        for name, of in form.get("items", form).get("properties", {}).items():
            properties.setdefault(name, {"anyOf": []})["anyOf"].append(of)
    return properties


def names_in(content: bytes) -> set[str]:
    """The names in a JSON body, or in the rows of one that is a list."""
    body = orjson.loads(content) if content else {}
    return set().union(*(body if isinstance(body, list) else [body]))


def choices(schema: dict[str, Any]) -> set[str]:
    """The strings that a value may be; none where any may."""
    own = {*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())}
    return own.union(*map(choices, schema.get("anyOf", ())))


def test_choices_are_those_of_the_service(document: dict[str, Any]) -> None:
    for name in methods():
        (request, *_) = asyncio.run(sent_by(name))
        operation = operation_of(document, request)[1]
        schemas = {p["name"]: p["schema"] for p in operation.get("parameters", ())}
        schemas |= body_of(operation)
        for parameter in inspect.signature(getattr(AsyncClient, name)).parameters.values():
            offered = re.match(r"Literal\[(.*?)\]", str(parameter.annotation))
            values = set(re.findall(r"[\w-]+", offered[1])) if offered else set()
            assert values == choices(schemas.get(parameter.name, {})), f"{name}: {parameter.name}"


def test_every_operation_is_offered_once_with_its_parameters(document: dict[str, Any]) -> None:
    offered: dict[tuple[str, str], str] = {}
    for name in methods():
        for request in asyncio.run(sent_by(name)):
            method = request.method.lower()
            template, operation = operation_of(document, request)
            known = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"}
            sent_query = set(request.url.params)
            cursor = {"cursor"} & known  # methods that give all pages begin without one
            assert sent_query | cursor == known, f"{name}: {sent_query ^ known}"
            sent, accepted = names_in(request.content), set(body_of(operation))
            # What the path or the query says is not said once more.
            left = accepted - known - ({"id"} if template in DESCRIBED else set())
            assert sent <= accepted if name in ROWS else sent == left, f"{name}: {sent ^ left}"
            assert answer_of(name) in types_of(operation, document["components"]["schemas"]), name
            if name not in ("post_event", "wait_for"):
                assert (method, template) not in offered, f"{name} and {offered[method, template]}"
                offered[method, template] = name
    every = {(method, path) for path, of in document["paths"].items() for method in of}
    assert every - set(offered) == NOT_OFFERED
