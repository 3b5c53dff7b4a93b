"""What schemathesis has to be told beside the document: what JSON Schema has no words for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import schemathesis
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import negative_data_rejection

from app.core.requests import encode_cursor
from app.recommend.cursor import ListCursor

NUMBERS = st.integers(0, 10**18 - 1)
PLACES = st.builds(encode_cursor, NUMBERS, st.from_regex(r":[a-z0-9.-]{1,64}", fullmatch=True))
schemathesis.openapi.format("cursor", NUMBERS.map(encode_cursor))
schemathesis.openapi.format("place-cursor", PLACES)
VALUES = st.booleans() | st.integers(-9, 9) | st.sampled_from(["x", "y"])
OPERATORS = ["eq", "ne", "in", "nin", "lt", "lte", "gt", "gte", "exists", "contains", "like"]
OPERANDS = VALUES | st.lists(VALUES, max_size=3)
ONE = OPERANDS | st.dictionaries(st.sampled_from(OPERATORS), OPERANDS, max_size=2)
FILTERS = st.recursive(
    st.dictionaries(st.sampled_from(["a", "b"]), ONE, max_size=2),
    lambda inner: st.fixed_dictionaries(
        {}, optional={"and": st.lists(inner, max_size=3), "or": st.lists(inner), "not": inner}
    ),
    max_leaves=6,
)
BOOSTS = st.lists(st.fixed_dictionaries({"filter": FILTERS, "by": st.floats(-101, 101)}))
INCLUDED = ["categories", "attributes", "attributes,categories"]
schemathesis.openapi.format("filter", FILTERS.map(json.dumps))
schemathesis.openapi.format("boost", BOOSTS.map(json.dumps))
schemathesis.openapi.format("include", st.sampled_from(INCLUDED))
AGES = st.sampled_from(["forever", "0s", "90s", "30m", "6h", "14d", 0, 3600, "-1d", "1w"])
RULES = st.dictionaries(st.sampled_from(["purchase", "view", "dislike", "*"]), AGES, max_size=4)
schemathesis.openapi.format("seen-rule", RULES.map(json.dumps))

LISTS = st.builds(
    lambda shown: ListCursor(None, 0, 0, np.array(sorted(shown), np.int64)).encode(b"", b""),
    st.sets(st.integers(0, 2**31), max_size=50),
)
schemathesis.openapi.format("list-cursor", LISTS)

SHORTEST_LIMIT = 64
# An event by itself is answered as a list of one.
BY_ROW = {"POST /items", "POST /preferences", "POST /users"}
SELECTION = {"invalid_filter", "filter_type_mismatch", "invalid_boost", "invalid_include"}
RULED = SELECTION | {"invalid_seen", "invalid_hide_shown"}
AVAILABILITY = {"invalid_available_from", "invalid_available_until"}
BEYOND_THE_SCHEMA = {
    "GET /recommend/{user}": RULED | {"invalid_cursor"},  # it is another list's
    "POST /recommend": RULED | {"invalid_cursor"},
    "GET /items/{item}/similar": RULED | {"invalid_cursor"},
    "POST /recommend/batch": RULED,
    "POST /rerank": SELECTION,
    "GET /popular": SELECTION | {"invalid_cursor"},
    "GET /trending": SELECTION | {"invalid_cursor"},
    "PUT /items/{item}": AVAILABILITY | {"embedding_length"},
    "PATCH /items/{item}": AVAILABILITY | {"embedding_length"},
    "POST /compare": {"item_not_ranked"},
    "POST /admin/train": {"cannot_start_warm", "recipe_chooses", "parameters_do_not_fit"},
    "POST /admin/export": {"invalid_request"},  # neither tables nor lists
    "POST /admin/trials": {"same_version"},
    "POST /preferences": {"same_item", "unknown_item", "invalid_timestamp"},  # of a date: its year
}


@schemathesis.hook
def filter_path_parameters(context: schemathesis.HookContext, path_parameters: Any) -> bool:
    return _countable(path_parameters)


@schemathesis.hook
def filter_query(context: schemathesis.HookContext, query: Any) -> bool:
    """Lists hold strings: `true`, sent in place of a list, is a list of one string when it comes
    in, and refusing it cannot be asked for. A list or an object in place of a string is
    one of its strings when it comes in."""
    lists = [(query or {}).get(name) for name in ("category", "exclude")]
    prefix = (query or {}).get("prefix")
    return (
        _countable(query)
        and not isinstance(prefix, list | dict)
        and all(
            items is None
            or (isinstance(items, list) and all(isinstance(item, str) for item in items))
            for items in lists
        )
    )


@schemathesis.hook
def filter_body(context: schemathesis.HookContext, body: Any) -> bool:
    """No NUL in attributes: at any depth takes a recursion to say."""
    items = body if isinstance(body, list) else [body]
    attributes = [item.get("attributes") for item in items if isinstance(item, dict)]
    return _countable(body) and "\0" not in "".join(_strings(attributes))


@schemathesis.check
def a_bad_object_is_refused(
    context: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> bool | None:
    """Where a list is answered row by row, an object by itself is refused as anywhere else."""
    if case.operation.label not in BY_ROW or isinstance(case.body, list):
        return None
    return negative_data_rejection(context, response, case)


@schemathesis.check
def refused_for_what_no_schema_tells(
    context: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """What the schema allows may be refused for the reasons that are named here alone."""
    reasons = BEYOND_THE_SCHEMA.get(case.operation.label)
    allowed = case.meta is not None and case.meta.generation.mode.is_positive
    if reasons is not None and allowed and response.status_code == 422:
        assert response.json()["code"] in reasons, response.text


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
