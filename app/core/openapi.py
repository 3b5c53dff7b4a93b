"""The parts of the OpenAPI document that all routes have in common."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from app.core.access import AccessTable, RouteAccess
from app.core.errors import PROBLEM_SCHEMA, problem_responses

_WITH_BODY = ("post", "put", "patch")


def inline_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema of a body that a route reads itself, with all references replaced."""
    schema = model.model_json_schema()
    parts = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, list):
            return [inlined(one) for one in value]
        if not isinstance(value, dict):
            return value
        name = str(value.get("$ref", "")).removeprefix("#/$defs/")
        if name in parts:
            return inlined(parts[name])
        return {key: inlined(one) for key, one in value.items()}

    whole: dict[str, Any] = inlined(schema)
    return whole


def describe(app: FastAPI, table: AccessTable, *, keyed: bool) -> None:
    """Complete the OpenAPI document of an application.

    The framework does not know the keys, limits and errors of the middleware. Its description of
    validation errors also differs from the form of this service.

    Args:
        app: the application, with all its routes.
        table: the rules of the routes.
        keyed: requests need a key from the start.
    """
    generated = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(generated(), table, keyed)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _complete(document: dict[str, Any], table: AccessTable, keyed: bool) -> dict[str, Any]:
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas["Problem"] = PROBLEM_SCHEMA
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = {
        "key": {
            "type": "apiKey",
            "in": "header",
            "name": "X-API-Key",
            "description": "An API key. Requests need a key once the service has one.",
        },
        "bearer_key": {
            "type": "http",
            "scheme": "bearer",
            "description": "An API key, as an alternative to `X-API-Key`.",
        },
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "A token that `POST /tokens` signs for a user, valid for a few minutes.",
        },
    }
    for path, routes in document["paths"].items():
        for method, operation in routes.items():
            _complete_operation(method, operation, table.find(method.upper(), path), keyed)
    return document


def _complete_operation(
    method: str, operation: dict[str, Any], access: RouteAccess, keyed: bool
) -> None:
    responses: dict[str, Any] = operation.setdefault("responses", {})
    added = [503]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
        added.append(422)
    if access.role is not None:
        operation["security"] = [{"key": []}, {"bearer_key": []}]
        if access.for_tokens:
            operation["security"].append({"token": []})
        if not keyed:
            # The empty alternative: a service without a key, which only this machine can reach.
            operation["security"].append({})
        added += [401, 403, 422, 429]
        if method in _WITH_BODY:
            added += [413, 415]
    for status, response in problem_responses(*added).items():
        responses.setdefault(str(status), response)
    # A request that is not valid HTTP reaches no route: the server itself refuses it.
    malformed = responses.setdefault("400", problem_responses(400)[400])
    malformed["content"]["text/plain"] = {"schema": {"type": "string"}}
    operation["responses"] = dict(sorted(responses.items()))
