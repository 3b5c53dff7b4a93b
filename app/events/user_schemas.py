"""Users in requests, in the database and in answers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

from app.catalog.schemas import attributes_problem, patched_attributes
from app.core.requests import Id, text_problem


@dataclass(frozen=True, slots=True)
class User:
    """A stored user."""

    id: str
    attributes: dict[str, Any]
    created_at: int
    """Microseconds since 1970, UTC."""


@dataclass(frozen=True, slots=True)
class NewUser:
    """A valid description of a user."""

    id: str
    attributes: dict[str, Any]


class UserProblem(NamedTuple):
    """Why a description is invalid."""

    code: str
    detail: str


class UserIn(BaseModel):
    """The description of a user."""  # For the OpenAPI document only: `parse_user` validates.

    model_config = {"extra": "forbid"}

    id: Id | None = None
    attributes: dict[str, Any] | None = Field(
        default=None, description="Attributes of your own: at most 16 KiB of JSON, without NUL."
    )


class UserOut(BaseModel):
    """A user."""

    id: str
    attributes: dict[str, Any]
    created_at: datetime


class UserPage(BaseModel):
    """A page of users."""

    items: list[UserOut]
    next_cursor: str | None


class RejectedUser(BaseModel):
    """A rejected user, by its index in the list."""

    index: int
    code: str
    detail: str


class MergeIn(BaseModel):
    """The user that another user is merged into."""

    model_config = {"extra": "forbid"}

    into: Id = Field(description="The user who gets the events and preferences.")


class MergeOut(BaseModel):
    """The result of a merge."""

    id: str
    into: str
    events: int
    preferences: int
    last_seq: int = Field(
        description="A value for `min_seq`: a list of `into` with this seq includes the "
        "moved events and preferences."
    )


class UsersAnswer(BaseModel):
    """The result of each row of `POST /users`."""

    accepted: int
    rejected: list[RejectedUser]


class Merged(NamedTuple):
    """A merge: the user who remains, and the numbers of moved events and preferences."""

    into_id: int
    """The internal id."""
    into: str
    """The client's id."""
    events: int
    preferences: int
    last_seq: int


def parse_user(
    row: Any, *, user_id: str | None = None, base: User | None = None
) -> NewUser | UserProblem:
    """Validate a description by a client, as `app.catalog.schemas.parse_item` does.

    Args:
        row: the parsed JSON.
        user_id: the id in the path, which an id in the body must equal.
        base: the stored user, for a merge patch.
    """
    if not isinstance(row, dict):
        return UserProblem("invalid_user", "a user must be a JSON object")
    for key in row:
        if key not in UserIn.model_fields:
            return UserProblem("unknown_field", f"unknown field {str(key)[:64]!r}")
    body_id = row.get("id")
    new_id = user_id if body_id is None else body_id
    if new_id is None:
        return UserProblem("missing_id", "id is missing")
    if (problem := text_problem(new_id)) is not None:
        return UserProblem("invalid_id", f"id {problem}")
    if user_id is not None and new_id != user_id:
        return UserProblem("id_mismatch", "id differs from the one in the path")
    attributes = row.get("attributes")
    if base is not None and "attributes" not in row:
        attributes = base.attributes
    elif base is not None and (attributes is None or isinstance(attributes, dict)):
        attributes = patched_attributes(base.attributes, attributes)
    attributes = {} if attributes is None else attributes
    if (problem := attributes_problem(attributes)) is not None:
        return UserProblem("invalid_attributes", f"attributes {problem}")
    return NewUser(new_id, attributes)
