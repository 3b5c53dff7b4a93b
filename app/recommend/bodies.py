"""What is asked for in a body."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from app.core.errors import PayloadTooLarge, Unprocessable
from app.core.http import invalid_body, read_json, text_problem, text_schema
from app.recommend.filters import Filters

MAX_LIST = 1_000
MAX_COMPARED = 100
MAX_USERS = 1_000
MAX_CATEGORIES = 64

CATEGORY = "Items in any of them."
EXCLUDE = "Items to leave out."
EXCLUDE_SEEN = "Leave out what the user has seen."
EXPLAIN = "`pairwise`: with the items of the user that each place is due to."
MIN_SEQ = "Take in every event up to this seq."
MODEL = (
    "A version to answer with, published or rejected, for a trial; it is loaded if need be. By "
    "default the active one."
)
DIVERSITY = (
    "How much of the order is given up for variety. Each place goes to the item with the largest "
    "(1 − diversity)·(1 − r/P) − diversity·(its highest similarity to the items above it), r being "
    "its place from 0 in the exact list of P = max(5n, 50) items, and similarities those of "
    "`/items/{id}/similar`. 0 is the exact list; the first place always stays."
)
Explain = Literal["none", "pairwise"]


def _checked(item: str) -> str:
    problem = text_problem(item)
    if problem is not None:
        raise ValueError(f"an id {problem}")
    return item


BodyId = Annotated[str, AfterValidator(_checked), Field(json_schema_extra=text_schema())]


class _Asked(BaseModel):
    """What all of them may say."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    min_seq: int | None = Field(default=None, ge=0, lt=2**53, description=MIN_SEQ)
    model: str | None = Field(default=None, max_length=256, description=MODEL)

    @field_validator("min_seq", "n", mode="before", check_fields=False)
    @classmethod
    def _whole(cls, value: Any) -> Any:
        # In JSON 5.0 is as whole a number as 5.
        return int(value) if isinstance(value, float) and value.is_integer() else value


class BatchBody(_Asked):
    """The body of `POST /recommend/batch`: the parameters of `GET /recommend/{user}` for many."""

    users: list[str] = Field(
        max_length=MAX_USERS,
        description="Each gets a result of its own, also one whose id is not valid. Users times "
        "`n` may be 100,000 at most.",
    )
    n: int = Field(default=10, ge=1, le=MAX_LIST, description="How many items for each.")
    exclude_seen: bool = Field(default=True, description=EXCLUDE_SEEN)
    category: list[str] = Field(
        default_factory=list, max_length=MAX_CATEGORIES, description=CATEGORY
    )
    exclude: list[BodyId] = Field(default_factory=list, max_length=MAX_LIST, description=EXCLUDE)
    explain: Explain = Field(default="none", description=EXPLAIN)
    diversity: float = Field(default=0.0, ge=0, le=1, description=DIVERSITY)

    def filters(self) -> Filters:
        """The parameters in their one form."""
        return filters_of(
            self.n,
            self.exclude_seen,
            self.category,
            self.exclude,
            self.explain,
            self.min_seq,
            self.model,
            self.diversity,
        )


class RerankBody(_Asked):
    """The body of `POST /rerank`."""

    user: BodyId
    items: list[BodyId] = Field(
        min_length=1,
        max_length=MAX_LIST,
        description="What is to be ranked, in the order that decides ties. An item that repeats "
        "counts at its first place.",
    )

    def filters(self) -> Filters:
        """The parameters in their one form."""
        return Filters(n=len(self.items), min_seq=self.min_seq, model=self.model)


class CompareBody(_Asked):
    """The body of `POST /compare`."""

    user: BodyId
    items: list[BodyId] = Field(
        min_length=1,
        max_length=MAX_COMPARED,
        description="What is to be compared. An item that repeats counts at its first place.",
    )

    def filters(self) -> Filters:
        """The parameters in their one form."""
        return Filters(n=len(self.items), min_seq=self.min_seq, model=self.model)


def filters_of(
    n: int,
    exclude_seen: bool,
    category: list[str],
    exclude: list[str],
    explain: Explain,
    min_seq: int | None,
    model: str | None,
    diversity: float,
) -> Filters:
    """The parameters of a list in their one form: repeated and in another order, categories and
    exclusions ask for the same.
    """
    return Filters(
        n,
        exclude_seen,
        tuple(sorted(set(category))),
        tuple(sorted(set(exclude))),
        min_seq,
        model,
        float(diversity),
        explain == "pairwise",
    )


Body = TypeVar("Body", bound=BaseModel)


async def body_of(request: Request, kind: type[Body], lists: dict[str, int]) -> Body:
    """The body as one of these.

    Raises PayloadTooLarge where one of the ``lists`` is longer than it may be, BadRequest for what
    is no JSON, and Unprocessable.
    """
    given = await read_json(request)
    for name, most in lists.items():
        found = given.get(name) if isinstance(given, dict) else None
        if isinstance(found, list) and len(found) > most:
            raise PayloadTooLarge(
                f"{name}: at most {most:,} are taken, these are {len(found):,}",
                code=f"too_many_{name}",
            )
    if not isinstance(given, dict):
        raise Unprocessable("the body must be an object")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise invalid_body(error) from None


def documented(kind: type[BaseModel]) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that takes such a body."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
