"""What schemathesis has to be told beside the document: what JSON Schema has no words for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import schemathesis
from hypothesis import strategies as st

from app.core.http import encode_cursor

schemathesis.openapi.format("cursor", st.integers(0, 10**18 - 1).map(encode_cursor))

SHORTEST_LIMIT = 64


@schemathesis.hook
def filter_path_parameters(context: schemathesis.HookContext, path_parameters: Any) -> bool:
    return _countable(path_parameters)


@schemathesis.hook
def filter_query(context: schemathesis.HookContext, query: Any) -> bool:
    """Lists hold strings: `true`, sent in place of a list, is a list of one string when it comes
    in, and refusing it cannot be asked for."""
    lists = [(query or {}).get(name) for name in ("category", "exclude")]
    return _countable(query) and all(
        items is None or (isinstance(items, list) and all(isinstance(item, str) for item in items))
        for items in lists
    )


@schemathesis.hook
def filter_body(context: schemathesis.HookContext, body: Any) -> bool:
    """No NUL in an item's attributes: at any depth takes a recursion to say."""
    items = body if isinstance(body, list) else [body]
    attributes = [item.get("attributes") for item in items if isinstance(item, dict)]
    return _countable(body) and "\0" not in "".join(_strings(attributes))


def _countable(value: Any) -> bool:
    """Limits are in bytes and JSON Schema counts characters: long strings in ASCII alone."""
    return all(
        text.isascii() or len(text.encode(errors="replace")) <= SHORTEST_LIMIT
        for text in _strings(value)
    )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            for part in pair:
                yield from _strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)
