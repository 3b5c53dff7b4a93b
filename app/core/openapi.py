"""What the OpenAPI document says of every route alike, and what it is good for besides."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.routing import compile_path

from app.core.errors import PROBLEM_SCHEMA, problem_responses

_METHODS = ("get", "put", "post", "delete", "patch", "options", "head", "trace")
_WITH_BODY = ("post", "put", "patch")


def describe(app: FastAPI, *, keyed: bool) -> None:
    """Let the document of an application tell what is not in its routes.

    Keys, limits and the last resort for errors are middleware, of which the framework knows
    nothing; and errors of validation it would describe in a form that they do not have here.
    ``keyed``: a key is needed from the start.
    """
    generated = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(generated(), keyed)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def allowed_methods(app: FastAPI, path: str) -> list[str]:
    """The methods by which a path can be called; the framework names those of one route only."""
    if not hasattr(app.state, "methods_of_paths"):
        app.state.methods_of_paths = [
            (compile_path(template)[0], [name.upper() for name in routes if name in _METHODS])
            for template, routes in sorted(app.openapi()["paths"].items(), key=_parameters_last)
        ]
    # A path without parameters goes before one that would match it too, as in OpenAPI.
    matching = [methods for pattern, methods in app.state.methods_of_paths if pattern.match(path)]
    return sorted(matching[0]) if matching else []


def _parameters_last(item: tuple[str, Any]) -> int:
    return item[0].count("{")


def _complete(document: dict[str, Any], keyed: bool) -> dict[str, Any]:
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
            "description": "Needed as soon as the service has a key.",
        }
    }
    for path, routes in document["paths"].items():
        for method, operation in routes.items():
            _complete_operation(path, method, operation, keyed)
    return document


def _complete_operation(path: str, method: str, operation: dict[str, Any], keyed: bool) -> None:
    responses: dict[str, Any] = operation.setdefault("responses", {})
    added = [503]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
        added.append(422)
    if not path.startswith("/health/"):
        # The empty alternative: a service without a key, which answers this machine only.
        operation["security"] = [{"key": []}] if keyed else [{"key": []}, {}]
        added += [401, 403, 429]
        if method in _WITH_BODY:
            added += [413, 415]
    for status, response in problem_responses(*added).items():
        responses.setdefault(str(status), response)
    # What cannot be read as HTTP does not come as far as a route: the server itself refuses it.
    unread = responses.setdefault("400", problem_responses(400)[400])
    unread["content"]["text/plain"] = {"schema": {"type": "string"}}
    operation["responses"] = dict(sorted(responses.items()))
