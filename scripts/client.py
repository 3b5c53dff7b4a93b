"""Makes the parts of the Python client that follow from something else.

    python scripts/client.py

`answers.py` from the service's OpenAPI document, `client.py` from `async_client.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from app.core.settings import Settings
from app.main import create_app

FOLDER = Path(__file__).resolve().parent.parent / "clients" / "python" / "ncr_client"
LITERAL = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
HEAD = '''"""What the service answers. Made from its OpenAPI document by `scripts/client.py`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict
'''
# asyncio's words, and those of a thread.
WORDS = (
    (r"for asyncio; for threads it is made", "for threads; it is made"),
    (r"from this file by", "from `async_client.py` by"),
    (r"^import asyncio\n", ""),
    (r"AsyncIterator", "Iterator"),
    (r"httpx2\.AsyncBaseTransport", "httpx2.BaseTransport"),
    (r"AsyncClient", "Client"),
    (r"__aenter__", "__enter__"),
    (r"__aexit__", "__exit__"),
    (r"\.aclose\(", ".close("),
    (r"async (def|for|with) ", r"\1 "),
    (r"await asyncio\.sleep", "time.sleep"),
    (r"\(await ([^()]*\([^()]*\))\)", r"\1"),
    (r"await ", ""),
)


def answers(document: dict[str, Any]) -> str:
    """A TypedDict for each schema of the document."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    return HEAD + "".join(f"\n\n{_typed_dict(name, schemas[name])}" for name in sorted(schemas))


def threads(source: str) -> str:
    """The client for threads, from the one for asyncio."""
    for pattern, replacement in WORDS:
        source = re.sub(pattern, replacement, source, flags=re.MULTILINE)
    return source


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


def made() -> dict[str, str]:
    """The files' names and what is to be in them."""
    document = create_app(Settings()).openapi()
    return {
        "answers.py": _formatted(answers(document)),
        "client.py": _formatted(threads((FOLDER / "async_client.py").read_text())),
    }


def _formatted(source: str) -> str:
    """As the linter of the repository wants it."""
    ruff = str(Path(sys.executable).with_name("ruff"))
    for command in (["check", "--fix", "--select", "I"], ["format"]):
        done = subprocess.run(
            [ruff, *command, "--stdin-filename", str(FOLDER / "made.py"), "-"],
            input=source,
            capture_output=True,
            text=True,
            check=True,
        )
        source = done.stdout
    return source


def main() -> None:
    for name, content in made().items():
        (FOLDER / name).write_text(content)
        print(FOLDER / name)


if __name__ == "__main__":
    main()
