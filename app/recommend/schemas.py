"""Queries, request bodies and response models of lists."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self, TypeVar

from fastapi import Request
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from app.ab_tests.schemas import TrialSettings
from app.catalog.filters import (
    BOOST,
    FILTER,
    AttributeFilter,
    Boost,
    parse_boosts,
    parse_filter,
)
from app.core.errors import PayloadTooLarge, Unprocessable
from app.core.requests import invalid_body, read_json, text_problem, text_schema
from app.events.seen_rule import (
    ALWAYS_SEEN,
    DURATION,
    SeenRule,
    hidden_time_of,
    seen_rule_of,
)
from app.recommend.cursor import BodyCursor

MAX_LIST = 1_000
MAX_COMPARED = 100
MAX_USERS = 1_000
MAX_CATEGORIES = 64
MAX_REASONS = 3  # of a place
SEQ_BOUND = 2**53  # no seq is as large, and readers of JSON hold whole numbers exactly up to it

CATEGORY = "Items in any of them."
EXCLUDE = "Items to leave out."
EXCLUDE_SEEN = "Leave out what the user has seen."
SEEN = (
    'For how long an event keeps its item out, by the event\'s type: `{"purchase":"14d",'
    '"view":"0s","*":"forever"}`. `"*"`, by default `"forever"`, is all types that are not named. '
    'Ages are a number of `s`, `m`, `h` or `d`, or `"forever"`; types are free, at most 32. A '
    "disliked item comes back only if the type of the negative event is named. It counts where "
    "`exclude_seen` is true. By default `NCR_SEEN`."
)
HIDE_SHOWN = (
    "For how long items that a list with `hide_shown` showed to the user are left out, unless they "
    "got an event since: seconds, or a number of `s`, `m`, `h` or `d`; at most 30 days. 0: not at "
    "all. By default `NCR_HIDE_SHOWN`."
)
EXPLAIN = "`pairwise`: with the items of the user that each place is due to."
MIN_SEQ = "Take in every event up to this seq."
MODEL = (
    "A version to answer with, published or rejected, for a trial; it is loaded if need be. By "
    "default the active one."
)
DIVERSITY = (
    "How much of the order is given up for variety. Each place goes to the item with the largest "
    "(1 − diversity)·(1 − r/P) − diversity·s. Here r is the item's place, from 0, in the exact "
    "list of P = max(5n, 50) items. s is its highest similarity to the items above it, as in "
    "`/items/{id}/similar`. With 0 the list is the exact one. The first place always stays."
)
NEXT_CURSOR = (
    "Send it as `cursor` with the same parameters for the next places. Null at the end, and after "
    "1,000 places; the page after may be empty."
)
Explain = Literal["none", "pairwise"]


DETAILS = ("attributes", "categories")
INCLUDE = "`categories`, `attributes` or both, with a comma between: shown of each item."


def parse_include(names: Iterable[Any]) -> tuple[str, ...]:
    """The details that are asked for, sorted, each once.

    Raises:
        Unprocessable: there is no such detail.
    """
    wanted = set()
    for name in names:
        if name not in DETAILS:
            raise Unprocessable(
                f"include: there is no {str(name)[:64]!r}; there are {', '.join(DETAILS)}",
                code="invalid_include",
            )
        wanted.add(name)
    return tuple(sorted(wanted))


def read_include(text: str | None) -> tuple[str, ...]:
    """The details in a query string. Raises as `parse_include`."""
    return () if text is None else parse_include(part.strip() for part in text.split(","))


TRIABLE = frozenset(TrialSettings.model_fields)
"""The parameters that a trial may set."""
STRING_BYTES = 60  # of a Python string without its characters


@dataclass(frozen=True)
class RecommendationQuery:
    """The parameters of a list, checked, in one form for all requests for the same list."""

    n: int = 10
    exclude_seen: bool = True
    categories: tuple[str, ...] = ()
    """Sorted, each once."""
    exclude: tuple[str, ...] = ()
    """Sorted, each once."""
    min_seq: int | None = None
    model: str | None = None
    diversity: float = 0.0
    explain: bool = False
    filter: AttributeFilter | None = None
    boost: tuple[Boost, ...] = ()
    """Sorted, each filter once."""
    include: tuple[str, ...] = ()
    """What the answer shows of items; no list depends on it."""
    page: int | None = None
    """The places of a page, where ``n`` are those of all pages."""
    seen: SeenRule | None = None
    """What comes back; None: by the settings."""
    hide_shown: int | None = None
    """For how long what was shown is hidden, in microseconds; None: by the settings."""
    exploration: float | None = None
    """The share of a newcomer's list that is drawn; None: the service's setting."""
    given: frozenset[str] = frozenset()
    """Those of the parameters in `TRIABLE` that the request itself has; no list depends on it."""

    @classmethod
    def canonical(
        cls,
        *,
        n: int,
        exclude_seen: bool,
        category: Iterable[str],
        exclude: Iterable[str],
        min_seq: int | None,
        model: str | None,
        diversity: float,
        explain: Explain,
        filter: AttributeFilter | None = None,  # noqa: A002 - as a request has it
        boost: tuple[Boost, ...] = (),
        include: tuple[str, ...] = (),
        seen: SeenRule | None = None,
        hide_shown: int | None = None,
        given: Iterable[str] = (),
    ) -> RecommendationQuery:
        """The query of parameters as a request gives them, in any order and repeated."""
        return cls(
            n,
            exclude_seen,
            tuple(sorted({*category})),
            tuple(sorted({*exclude})),
            min_seq,
            model,
            float(diversity),
            explain == "pairwise",
            filter,
            boost,
            include,
            seen=seen,
            hide_shown=hide_shown,
            given=TRIABLE.intersection(given),
        )

    @cached_property
    def key(self) -> Hashable:
        """What a list depends on of the query."""
        rules: tuple[Hashable, ...] = ()
        if self.seen is not None or self.hide_shown is not None:
            rules = (None if self.seen is None else self.seen.key, self.hide_shown)
        return (
            self.n,
            self.exclude_seen,
            self.categories,
            self.exclude,
            self.diversity,
            self.explain,
            None if self.filter is None else self.filter.key,
            tuple((one.filter.key, one.by) for one in self.boost),
            self.page if self.diversity else None,
            *rules,
            # No part of other keys: those of the version before are in cursors and in Redis.
            *(() if self.exploration is None else (self.exploration,)),
        )

    @cached_property
    def list_digest(self) -> bytes:
        """A digest of what all pages of a list have in common; ``n`` only where it decides."""
        n = self.n if self.diversity else 0
        key = (replace(self, n=n, explain=False).key, self.model)
        return hashlib.blake2b(
            repr(key).encode("utf-8", "backslashreplace"), digest_size=16
        ).digest()

    @cached_property
    def key_bytes(self) -> int:
        """The memory of the strings in the key, in bytes."""
        return sum(STRING_BYTES + 4 * len(x) for x in (*self.categories, *self.exclude))


def _checked(item: str) -> str:
    problem = text_problem(item)
    if problem is not None:
        raise ValueError(f"an id {problem}")
    return item


BodyId = Annotated[str, AfterValidator(_checked), Field(json_schema_extra=text_schema())]


class _Body(BaseModel):
    """The parameters of every body."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    min_seq: int | None = Field(default=None, ge=0, lt=SEQ_BOUND, description=MIN_SEQ)
    model: str | None = Field(default=None, max_length=256, description=MODEL)

    @field_validator("min_seq", "n", mode="before", check_fields=False)
    @classmethod
    def _whole(cls, value: Any) -> Any:
        # In JSON 5.0 is as whole a number as 5.
        return int(value) if isinstance(value, float) and value.is_integer() else value


BodyFilter = Annotated[
    # Any: what is wrong with it is told by `parse_filter`.
    Any,
    Field(description=FILTER, json_schema_extra={"type": ["object", "null"]}),
]


BodyBoost = Annotated[Any, Field(description=BOOST, json_schema_extra={"type": ["array", "null"]})]


BodyInclude = Annotated[
    list[str],
    Field(
        max_length=len(DETAILS),
        description="What is shown of each item.",
        json_schema_extra={"items": {"enum": list(DETAILS)}},
    ),
]


BodySeen = Annotated[Any, Field(description=SEEN, json_schema_extra={"type": ["object", "null"]})]
BodyHideShown = Annotated[
    Any,
    Field(
        description=HIDE_SHOWN,
        json_schema_extra={"type": ["string", "integer", "null"], "pattern": DURATION},
    ),
]
UNRULED: dict[str, Any] = {"seen": ALWAYS_SEEN, "hide_shown": 0}
"""Of queries whose answers are no lists of the service's own choice."""


def boosts_of(value: Any) -> tuple[Boost, ...]:
    """The boosts in a body. Raises as `parse_boosts`."""
    return () if value is None else parse_boosts(value)


def filter_of(value: Any) -> AttributeFilter | None:
    """The filter in a body. Raises as `parse_filter`."""
    return None if value is None else parse_filter(value)


class _ListBody(_Body):
    """The parameters of `GET /recommend/{user}` in a body."""

    n: int = Field(default=10, ge=1, le=MAX_LIST, description="How many items a list has.")
    exclude_seen: bool = Field(default=True, description=EXCLUDE_SEEN)
    category: list[str] = Field(
        default_factory=list, max_length=MAX_CATEGORIES, description=CATEGORY
    )
    exclude: list[BodyId] = Field(default_factory=list, max_length=MAX_LIST, description=EXCLUDE)
    explain: Explain = Field(default="none", description=EXPLAIN)
    diversity: float = Field(default=0.0, ge=0, le=1, description=DIVERSITY)
    filter: BodyFilter = None
    boost: BodyBoost = None
    include: BodyInclude = Field(default_factory=list)
    seen: BodySeen = None
    hide_shown: BodyHideShown = None

    def query(self) -> RecommendationQuery:
        """The parameters as a query.

        Raises:
            Unprocessable: the filter, a boost, a detail or a rule is none.
        """
        parsed = {"filter", "boost", "include", "seen", "hide_shown"}
        given = self.model_dump(include={*_ListBody.model_fields} - parsed)
        return RecommendationQuery.canonical(
            **given,
            filter=filter_of(self.filter),
            boost=boosts_of(self.boost),
            include=parse_include(self.include),
            seen=None if self.seen is None else seen_rule_of(self.seen),
            hide_shown=hidden_time_of(self.hide_shown),
            given=self.model_fields_set,
        )


class BatchBody(_ListBody):
    """The body of `POST /recommend/batch`: the parameters of `GET /recommend/{user}` for many."""

    users: list[str] = Field(
        max_length=MAX_USERS,
        description="Each gets a result of its own, also one whose id is not valid. Users times "
        "`n` may be 100,000 at most.",
    )


class RecommendBody(_ListBody):
    """The body of `POST /recommend`: at least one of `user`, `items` and `item` is there."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
                for name in ("user", "items", "item")
            ]
        }
    )

    cursor: BodyCursor = None
    user: BodyId | None = Field(default=None, description="Whose events count, too.")
    items: list[BodyId] | None = Field(
        default=None,
        max_length=MAX_LIST,
        description="A basket or a session, the latest item last. The list is that of a user who "
        "took these items up after all else that is known of them; nothing is stored. An item that "
        "repeats counts at its last place.",
    )
    item: BodyId | None = Field(
        default=None,
        description="What is being looked at: it counts as the latest of `items`, and it is never "
        "in the list.",
    )

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if self.user is None and self.items is None and self.item is None:
            raise ValueError("a list needs `user`, `items` or `item`")
        return self

    def query(self) -> RecommendationQuery:
        """The parameters as a query. Raises as that of a batch."""
        query = super().query()
        if self.item is None:
            return query
        return replace(query, exclude=tuple(sorted({*query.exclude, self.item})))


class RerankBody(_Body):
    """The body of `POST /rerank`."""

    user: BodyId
    items: list[BodyId] = Field(
        min_length=1,
        max_length=MAX_LIST,
        description="What is to be ranked, in the order that decides ties. An item that repeats "
        "counts at its first place.",
    )
    filter: BodyFilter = None
    boost: BodyBoost = None
    include: BodyInclude = Field(default_factory=list)

    def query(self) -> RecommendationQuery:
        """The parameters as a query. Raises as that of `BatchBody`."""
        return RecommendationQuery(
            n=len(self.items),
            min_seq=self.min_seq,
            model=self.model,
            filter=filter_of(self.filter),
            boost=boosts_of(self.boost),
            include=parse_include(self.include),
            **UNRULED,
        )


class CompareBody(_Body):
    """The body of `POST /compare`."""

    user: BodyId
    items: list[BodyId] = Field(
        min_length=1,
        max_length=MAX_COMPARED,
        description="What is to be compared. An item that repeats counts at its first place.",
    )

    def query(self) -> RecommendationQuery:
        """The parameters as a query."""
        return RecommendationQuery(
            n=len(self.items), min_seq=self.min_seq, model=self.model, **UNRULED
        )


Body = TypeVar("Body", bound=BaseModel)


async def body_of(request: Request, kind: type[Body], max_lengths: dict[str, int]) -> Body:
    """The body of a request as a model.

    Raises:
        PayloadTooLarge: a list is longer than its maximum.
        BadRequest: the body is no JSON.
        Unprocessable: a field is wrong.
    """
    content = await read_json(request)
    for name, max_length in max_lengths.items():
        value = content.get(name) if isinstance(content, dict) else None
        if isinstance(value, list) and len(value) > max_length:
            raise PayloadTooLarge(
                f"{name}: at most {max_length:,} are taken, these are {len(value):,}",
                code=f"too_many_{name}",
            )
    if not isinstance(content, dict):
        raise Unprocessable("the body must be an object")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise invalid_body(error) from None


def body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that takes a body of this kind."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


Source = Literal["model", "fold_in", "popular"]


class Because(BaseModel):
    """One of the user's own items, and what it does for a place."""

    id: str
    title: str | None
    effect: float = Field(
        description="By how much the log-odds that the item is preferred to the other items shown "
        "would be lower, on average, if the user had not had this one."
    )


class _Details(BaseModel):
    """What is shown of an item on request."""

    categories: list[str] | SkipJsonSchema[None] = Field(
        default=None, description="With `include=categories`. Otherwise it is not there."
    )
    attributes: dict[str, Any] | SkipJsonSchema[None] = Field(
        default=None, description="With `include=attributes`. Otherwise it is not there."
    )


class RecommendedItem(_Details):
    """One place of the list."""

    id: str
    title: str | None
    rank: int = Field(ge=1, le=MAX_LIST, description="From 1.")
    score: float | None = Field(
        ge=0,
        le=1,
        description="Mean probability that the user prefers the item to the model's reference "
        "items; comparable within a model version. Null for `popular`.",
    )
    source: Source = Field(
        description="`model`: known to the model; `fold_in`: with events or "
        "attributes it was not trained on; "
        "`popular`: nothing is known of the user, or the item is not known to the model."
    )
    preferred_over_next: float | None = Field(
        ge=0,
        le=1,
        description="Probability that the user prefers the item to the one a rank below. Null "
        "where it is not known, as of the last item.",
    )
    because: Annotated[list[Because], Field(max_length=MAX_REASONS)] | SkipJsonSchema[None] = Field(
        default=None,
        description="With `explain=pairwise`: up to three of the user's own items, those that it "
        "is due to most, the first one most of all; empty for `popular`. Otherwise it is not "
        "there.",
    )


class Recommendation(BaseModel):
    """The answer of `GET /recommend/{user}` and `POST /rerank`."""

    recommendation_id: str = Field(
        description="Send it with the events that the list leads to: clicks are counted by it."
    )
    user: str
    model_version: str | None
    as_of_seq: int = Field(
        ge=0, description="Every event of this user up to here has been taken in."
    )
    took_ms: float = Field(ge=0)
    items: list[RecommendedItem] = Field(max_length=MAX_LIST, description="Best first.")
    next_cursor: str | None = Field(description=NEXT_CURSOR)


class BasketRecommendation(Recommendation):
    """The answer of `POST /recommend`."""

    user: str | None = Field(description="Null where the body names none.")  # type: ignore[assignment]
    ignored: list[str] = Field(description="Those of `items` and `item` that do not exist.")


class BatchList(Recommendation):
    """The list of one of the users of a batch."""

    status: Literal[200]


class BatchRefusal(BaseModel):
    """Why one of the users of a batch gets none."""

    status: int = Field(description="As of an answer by itself.", ge=400)
    code: str
    detail: str


class BatchAnswer(BaseModel):
    """The answer of `POST /recommend/batch`."""

    results: list[BatchList | BatchRefusal] = Field(description="In the order of the users.")


class Comparison(BaseModel):
    """The answer of `POST /compare`."""

    user: str
    model_version: str
    as_of_seq: int = Field(description="Every event of this user up to here has been taken in.")
    source: Source = Field(
        description="`popular`: nothing is known of the user, the probabilities are those of the "
        "mean of all users."
    )
    items: list[str] = Field(description="Each once: what the rows and columns stand for.")
    probability: list[list[float]] = Field(
        description="How probably the user prefers the item of the row to that of the column."
    )
    order: list[str] = Field(description="The items, best first.")


class SimilarItem(_Details):
    """An item that is like another."""

    id: str
    title: str | None
    score: float = Field(ge=-1, le=1, description="Its similarity, at most 1.")


class SimilarItems(BaseModel):
    """The answer of `GET /items/{id}/similar`."""

    recommendation_id: str = Field(
        description="Send it with the events that the list leads to: clicks are counted by it."
    )
    item: str
    model_version: str | None = Field(
        description="The version that `score` is by: the cosine of what it knows of the items, "
        "their popularity left out. Null where the model does not know the item, or there is no "
        "model: then it is the cosine of who took them up."
    )
    items: list[SimilarItem] = Field(max_length=MAX_LIST, description="Most alike first.")
    next_cursor: str | None = Field(description=NEXT_CURSOR)


class PopularItem(BaseModel):
    """A popular item."""

    id: str
    title: str | None
    rank: int
    users: int = Field(description="Users with a positive event about it, each once.")


class PopularItems(BaseModel):
    """The answer of `GET /popular`."""

    window: str | None = Field(description="Null: all time.")
    items: list[PopularItem] = Field(description="Most users first.")
    next_cursor: str | None = Field(description=NEXT_CURSOR)


class TrendingItem(BaseModel):
    """An item on the rise."""

    id: str
    title: str | None
    rank: int
    users: int = Field(description="Users in the window, each once.")
    users_before: int = Field(description="Users in the window before.")


class TrendingItems(BaseModel):
    """The answer of `GET /trending`."""

    window: str
    items: list[TrendingItem] = Field(description="The clearest rise first.")
    next_cursor: str | None = Field(description=NEXT_CURSOR)


NoQuestions = Literal["seen_everything", "asked_everything", "too_few_items"]
"""Why there are no questions."""


class QuestionItem(BaseModel):
    """An item that is asked about."""

    id: str
    title: str | None


class Question(BaseModel):
    """Which of the two would the user rather have? The answer goes to `POST /preferences`."""

    a: QuestionItem
    b: QuestionItem
    information: float | None = Field(
        description="Bits that the answer is expected to tell of the user's taste, beyond those of "
        "the questions before it; null where no model knows."
    )


class Questions(BaseModel):
    """Questions, the most telling first."""

    user: str
    model_version: str | None
    as_of_seq: int
    source: Literal["model", "popular"]
    items: list[Question]
    reason: NoQuestions | None = Field(
        description="Why there are no questions; null where there are."
    )
