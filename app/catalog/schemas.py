"""Items in requests, in the database and in answers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, NamedTuple

import numpy as np
import orjson
from pydantic import BaseModel, Field

from app.core.requests import NO_NUL, Id, datetime_of, parse_timestamp, text_problem, text_schema

MAX_TITLE = 1024
MAX_CATEGORIES = 64
MAX_CATEGORY_BYTES = 128
MAX_ATTRIBUTES_BYTES = 16 * 1024
MAX_EMBEDDING = 1_024  # numbers
MAX_SINGLE = float(np.finfo(np.float32).max)
_NUMBER_BYTES = 4


Category = Annotated[str, Field(json_schema_extra=text_schema(MAX_CATEGORY_BYTES))]

Moment = Annotated[str, Field(json_schema_extra={"format": "date-time"})] | float


@dataclass(frozen=True, slots=True)
class Item:
    """A stored item."""

    id: str
    title: str | None
    categories: list[str]
    hidden: bool
    attributes: dict[str, Any]
    available_from: int | None = None
    """The start of availability in microseconds since 1970; None: no start."""
    available_until: int | None = None
    embedding: bytes | None = None
    """The bytes of float32 numbers, see `embedding_numbers`."""

    @property
    def embedding_length(self) -> int:
        """The length of the embedding, in numbers; 0 without an embedding."""
        return 0 if self.embedding is None else len(self.embedding) // _NUMBER_BYTES

    def content(self) -> dict[str, Any]:
        """Return attributes, categories and embedding of the item, for `ncr_core.content`."""
        content = dict(self.attributes)
        if self.categories:
            content["categories"] = self.categories
        if self.embedding is not None:
            content["embedding"] = embedding_numbers(self.embedding)
        return content

    def as_json(self) -> dict[str, Any]:
        """Return the item as clients see it."""
        return {
            "id": self.id,
            "title": self.title,
            "categories": self.categories,
            "hidden": self.hidden,
            "attributes": self.attributes,
            "available_from": _time_of(self.available_from),
            "available_until": _time_of(self.available_until),
            "embedding": embedding_numbers(self.embedding),
        }


class ItemProblem(NamedTuple):
    """Why an item is invalid."""

    code: str
    detail: str


class ItemIn(BaseModel):
    """The description of an item."""  # For the OpenAPI document only: `parse_item` validates.

    model_config = {"extra": "forbid"}

    id: Id | None = None
    title: (
        Annotated[str, Field(max_length=MAX_TITLE, json_schema_extra={"pattern": NO_NUL})] | None
    ) = None
    categories: list[Category] | None = Field(default=None, max_length=MAX_CATEGORIES)
    hidden: bool | None = Field(default=None, description="True if lists leave out the item.")
    attributes: dict[str, Any] | None = Field(
        default=None,
        description="Attributes of your own: at most 16 KiB of JSON, without NUL. Filters can "
        "use numbers, booleans, strings of at most 256 bytes, and lists of such "
        "strings.",
    )
    available_from: Moment | None = Field(
        default=None,
        description="The time from which lists can have the item, in ISO 8601 or epoch seconds.",
    )
    available_until: Moment | None = Field(
        default=None, description="The time from which lists leave out the item."
    )
    embedding: list[Annotated[float, Field(ge=-MAX_SINGLE, le=MAX_SINGLE)]] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_EMBEDDING,
        description="A vector of your own, such as an embedding of the text or picture of the "
        f"item. The vector has at most {MAX_EMBEDDING:,} numbers, stored in single "
        "precision. All vectors of items have the same length.",
    )


class ItemOut(BaseModel):
    """An item."""

    id: str
    title: str | None
    categories: list[str]
    hidden: bool
    attributes: dict[str, Any]
    available_from: datetime | None
    available_until: datetime | None
    embedding: list[float] | None


class ItemPage(BaseModel):
    """A page of the catalogue."""

    items: list[ItemOut]
    next_cursor: str | None


class RejectedItem(BaseModel):
    """A rejected item, by its index in the list."""

    index: int
    code: str
    detail: str


class ItemsAnswer(BaseModel):
    """The result of each row of `POST /items`."""

    accepted: int
    rejected: list[RejectedItem]


def parse_item(
    row: Any, *, item_id: str | None = None, base: Item | None = None
) -> Item | ItemProblem:
    """Validate an item of a client.

    Args:
        row: the parsed JSON.
        item_id: the id in the path, which an id in the body must equal.
        base: the stored item, for a merge patch: missing fields keep their values, and a null in
            ``attributes`` removes that attribute.
    """
    if not isinstance(row, dict):
        return ItemProblem("invalid_item", "an item must be a JSON object")
    for key in row:
        if key not in ItemIn.model_fields:
            return ItemProblem("unknown_field", f"unknown field {str(key)[:64]!r}")
    body_id = row.get("id")
    new_id = item_id if body_id is None else body_id
    if new_id is None:
        return ItemProblem("missing_id", "id is missing")
    if (problem := text_problem(new_id)) is not None:
        return ItemProblem("invalid_id", f"id {problem}")
    if item_id is not None and new_id != item_id:
        return ItemProblem("id_mismatch", "id differs from the one in the path")

    title = row.get("title", base.title if base else None)
    if title is not None and (problem := _title_problem(title)) is not None:
        return ItemProblem("invalid_title", f"title {problem}")
    categories = row.get("categories", base.categories if base else None)
    categories = [] if categories is None else categories
    if (problem := _categories_problem(categories)) is not None:
        return ItemProblem("invalid_categories", problem)
    hidden = row.get("hidden", base.hidden if base else None)
    if not (hidden is None or isinstance(hidden, bool)):
        return ItemProblem("invalid_hidden", "hidden must be true or false")
    attributes = row.get("attributes", base.attributes if base else None)
    attributes = {} if attributes is None else attributes
    if isinstance(attributes, dict) and base is not None and "attributes" in row:
        attributes = patched_attributes(base.attributes, row["attributes"])
    if (problem := attributes_problem(attributes)) is not None:
        return ItemProblem("invalid_attributes", f"attributes {problem}")
    times = {}
    for name in ("available_from", "available_until"):
        times[name] = getattr(base, name, None)
        if name in row:
            try:
                times[name] = None if row[name] is None else parse_timestamp(row[name])
            except ValueError as error:
                return ItemProblem(f"invalid_{name}", str(error).replace("timestamp", name))
    opens, closes = times["available_from"], times["available_until"]
    if opens is not None and closes is not None and opens >= closes:
        problem = "available_until must be after available_from"
        return ItemProblem("invalid_available_until", problem)
    embedding = base.embedding if base else None
    if "embedding" in row:
        given = row["embedding"]
        if given is not None and (problem := _embedding_problem(given)) is not None:
            return ItemProblem("invalid_embedding", f"embedding {problem}")
        embedding = None if given is None else _packed(given)
    return Item(
        new_id,
        title,
        list(dict.fromkeys(categories)),
        bool(hidden),
        attributes,
        opens,
        closes,
        embedding,
    )


def embedding_numbers(packed: bytes | None) -> list[float] | None:
    """The numbers of a stored embedding, each with the fewest digits that identify the float32."""
    if packed is None:
        return None
    digits = orjson.dumps(np.frombuffer(packed, "<f4"), option=orjson.OPT_SERIALIZE_NUMPY)
    numbers: list[float] = orjson.loads(digits)
    return numbers


def _packed(numbers: list[float]) -> bytes:
    return np.array(numbers, dtype="<f4").tobytes()


def _embedding_problem(embedding: Any) -> str | None:
    if not isinstance(embedding, list):
        return "must be a list of numbers"
    if not 1 <= len(embedding) <= MAX_EMBEDDING:
        return f"must have 1 to {MAX_EMBEDDING:,} numbers, not {len(embedding):,}"
    if not set(map(type, embedding)) <= {int, float}:
        return "must be a list of numbers"
    if not -MAX_SINGLE <= min(embedding) <= max(embedding) <= MAX_SINGLE:
        return "has a number that single precision cannot hold"
    return None


def other_length(item: Item, length: int) -> ItemProblem:
    """The problem of an item whose embedding has another length than other embeddings."""
    return ItemProblem(
        "embedding_length",
        f"embedding has {item.embedding_length:,} numbers, but the embeddings of other items "
        f"have {length:,}; to change the length, first set the other embeddings to null",
    )


def _time_of(micros: int | None) -> datetime | None:
    return None if micros is None else datetime_of(micros)


def _title_problem(title: Any) -> str | None:
    if isinstance(title, str) and len(title) > MAX_TITLE:
        return f"is longer than {MAX_TITLE} characters"
    return text_problem(title, 4 * MAX_TITLE) if title != "" else None


def _categories_problem(categories: Any) -> str | None:
    if not isinstance(categories, list):
        return "categories must be a list of strings"
    if len(categories) > MAX_CATEGORIES:
        return f"an item has at most {MAX_CATEGORIES} categories"
    for category in categories:
        if (problem := text_problem(category, MAX_CATEGORY_BYTES)) is not None:
            return f"a category {problem}"
    return None


def patched_attributes(base: dict[str, Any], change: dict[str, Any] | None) -> dict[str, Any]:
    """Apply a merge patch: a null removes an attribute, and a null change removes all."""
    merged = {} if change is None else {**base, **change}
    return {key: value for key, value in merged.items() if value is not None}


def attributes_problem(attributes: Any) -> str | None:
    """Return why attributes of an item or a user are invalid; None if they are valid."""
    if not isinstance(attributes, dict):
        return "must be an object"
    try:
        packed = orjson.dumps(attributes)
    except TypeError:
        return "cannot be stored as JSON: nested too deeply, or a number is too large"
    if len(packed) > MAX_ATTRIBUTES_BYTES:
        return f"are larger than {MAX_ATTRIBUTES_BYTES} bytes of JSON"
    if b"\\u0000" in packed and _has_nul(attributes):
        return "must not contain NUL"
    return None


def _has_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any("\0" in key or _has_nul(item) for key, item in value.items())
    return isinstance(value, list) and any(_has_nul(item) for item in value)
