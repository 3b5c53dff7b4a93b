"""The page of all routes, made from the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

HEAD = """# HTTP routes

*For integrators who look up a route, a parameter or an answer.*

The site's build makes this page from the OpenAPI document of the service. A running server has the
document at `/openapi.json`, and a page to try the routes at `/docs`.
[Integrate the service](../how-to/integrate.md) shows the main routes in use.
"""
METHODS = ("get", "post", "put", "patch", "delete")


def page(document: Mapping[str, Any]) -> str:
    """The Markdown page of an OpenAPI document."""
    parts = [HEAD]
    for tag in document["tags"]:
        parts.append(f"\n## {tag['name']}\n\n{tag.get('description', '')}\n")
        for path, operations in document["paths"].items():
            for method in METHODS:
                operation = operations.get(method)
                if operation is not None and tag["name"] in operation["tags"]:
                    parts.extend(_operation(path, method, operation))
    parts.append("\n## Bodies and answers\n")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts.extend(_component(name, schema))
    return "".join(parts)


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n### `{method.upper()} {path}`\n\n{operation.get('summary', '')}.\n"
    if operation.get("description"):
        yield f"\n{operation['description']}\n"
    parameters = operation.get("parameters", [])
    if parameters:
        yield "\n| parameter | place | type | default | meaning |\n|---|---|---|---|---|\n"
    for parameter in parameters:
        schema = parameter["schema"]
        default = _code(schema["default"]) if "default" in schema else ""
        default = "required" if parameter.get("required") else default
        text = parameter.get("description", schema.get("description", ""))
        yield _row(f"`{parameter['name']}`", parameter["in"], _type(schema), default, text)
    body = operation.get("requestBody")
    if body:
        yield "\nBody: " + _contents(body["content"]) + ".\n"
    yield "\n| status | answer | meaning |\n|---|---|---|\n"
    for status, response in sorted(operation["responses"].items()):
        yield _row(status, _contents(response.get("content", {})), response["description"])


def _component(name: str, schema: Schema) -> Iterator[str]:
    yield f"\n### {name}\n"
    if schema.get("description"):
        yield f"\n{schema['description']}\n"
    if "enum" in schema:
        yield "\n" + ", ".join(_code(value) for value in schema["enum"]) + "\n"
    properties = schema.get("properties", {})
    if not properties:
        return
    yield "\n| field | type | default | meaning |\n|---|---|---|---|\n"
    required = schema.get("required", ())
    for field, its in properties.items():
        default = _code(its["default"]) if "default" in its else ""
        default = "required" if field in required and not default else default
        yield _row(f"`{field}`", _type(its), default, its.get("description", ""))


def _contents(content: Mapping[str, Any]) -> str:
    kinds = [
        f"{_type(media['schema'])} (`{kind}`)" if media.get("schema") else f"`{kind}`"
        for kind, media in content.items()
    ]
    return " or ".join(kinds)


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[several]))
    if "allOf" in schema:
        return " and ".join(_type(each) for each in schema["allOf"])
    if "const" in schema:
        return _code(schema["const"])
    if "enum" in schema:
        return ", ".join(_code(value) for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}" + _bounds(schema, "Items")
    if kind == "string":
        return "string" + _bounds(schema, "Length")
    if kind in ("integer", "number"):
        return kind + _interval(schema)
    return kind


def _bounds(schema: Schema, what: str) -> str:
    least, most = schema.get(f"min{what}"), schema.get(f"max{what}")
    if most is None:
        return f", at least {least}" if least else ""
    return f", {least or 0} to {most:,}"


def _interval(schema: Schema) -> str:
    bounds = [
        f"{sign} {schema[key]:,}"
        for key, sign in (
            ("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")
        )
        if key in schema
    ]  # fmt: skip
    return f" {', '.join(bounds)}" if bounds else ""


def _code(value: Any) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _row(*cells: str) -> str:
    texts = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(texts)} |\n"
