"""Writes the types of both clients from the service's OpenAPI document: `answers.py`, `api.d.ts`.

python scripts/client.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from app.core.settings import Settings
from app.main import create_app

_CLIENTS = Path(__file__).resolve().parents[1] / "clients"
ANSWERS = _CLIENTS / "python" / "ncr_client" / "answers.py"
TYPES = _CLIENTS / "js" / "api.d.ts"
LITERAL = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
NAMES = {
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
}
HEAD = '''"""What the service answers. Made from its OpenAPI document by `scripts/client.py`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict
'''


def answers(document: dict[str, Any]) -> str:
    """A TypedDict for each schema of the document."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    return HEAD + "".join(f"\n\n{_typed_dict(name, schemas[name])}" for name in sorted(schemas))


def _typed_dict(name: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    lines = [f"class {name}(TypedDict):"]
    if description := schema.get("description"):
        lines.append(f'    """{description}"""')
        lines.append("")
    for field, of in schema.get("properties", {}).items():
        kind = _type(of)
        lines.append(f"    {field}: {kind if field in required else f'NotRequired[{kind}]'}")
    return "\n".join([*lines, "" if len(lines) > 1 else "    pass\n"])


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return f"Literal[{', '.join(repr(value) for value in values)}]".replace("'", '"')
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return " | ".join(dict.fromkeys(_type(one) for one in schema[choice]))
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(LITERAL.get(one, "Any") for one in kind)
    if kind == "array":
        return f"list[{_type(schema.get('items', {}))}]"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"dict[str, {_type(inner) if isinstance(inner, dict) else 'Any'}]"
    return LITERAL.get(str(kind), "Any")


def types(document: dict[str, Any]) -> str:
    """A TypeScript interface for each schema of the document."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    parts = [_interface(name, schemas[name]) for name in sorted(schemas)]
    head = (
        "/** What the service answers. Made from its OpenAPI document by `scripts/client.py`. */\n"
    )
    return "\n".join([head, *parts])


def _interface(name: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    lines = [f"/** {_comment(schema)} */"] if schema.get("description") else []
    lines.append(f"export interface {name} {{")
    for field, of in schema.get("properties", {}).items():
        if of.get("description"):
            lines.append(f"  /** {_comment(of)} */")
        lines.append(f"  {field}{'' if field in required else '?'}: {_typescript(of)};")
    return "\n".join([*lines, "}", ""])


def _comment(schema: dict[str, Any]) -> str:
    return " ".join(schema["description"].split()).replace("*/", "* /")


def _typescript(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema or "const" in schema:
        return " | ".join(json.dumps(one) for one in schema.get("enum", [schema.get("const")]))
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return " | ".join(dict.fromkeys(_typescript(one) for one in schema[choice]))
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(NAMES.get(one, "unknown") for one in kind)
    if kind == "array":
        inner = _typescript(schema.get("items", {}))
        return f"({inner})[]" if "|" in inner else f"{inner}[]"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"Record<string, {_typescript(values) if isinstance(values, dict) else 'unknown'}>"
    return NAMES.get(str(kind), "unknown")


def made() -> str:
    """What is to be in the file, as the linter of the repository wants it."""
    source = answers(create_app(Settings()).openapi())
    ruff = str(Path(sys.executable).with_name("ruff"))
    command = [ruff, "format", "--stdin-filename", str(ANSWERS), "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    ANSWERS.write_text(made())
    TYPES.write_text(types(create_app(Settings()).openapi()))
