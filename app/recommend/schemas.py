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
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
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
from app.core.requests import (
    Integer,
    as_integer,
    invalid_body,
    read_json,
    text_problem,
    text_schema,
)
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

CATEGORY = "Categories. The list has only items in at least one of them."
EXCLUDE = "Items that the list leaves out."
EXCLUDE_SEEN = "Leave out the items that the user has seen."
SEEN = (
    "The time that an event keeps its item out of the list, by the type of the event: "
    '`{"purchase":"14d","view":"0s","*":"forever"}`. The key `"*"` stands for '
    'all types that the rule does not name. Its default is `"forever"`. An age is '
    '`"forever"` or a number with the unit `s`, `m`, `h` or `d`. A rule names at most 32 '
    "types, of any name. A disliked item returns only if the rule names the type of the "
    "negative event. The rule applies only if `exclude_seen` is true. The default is "
    "`NCR_SEEN`."
)
HIDE_SHOWN = (
    "The time that the list leaves out items that an earlier list with `hide_shown` showed to "
    "the user. An item with a later event of the user is not affected. The value is a number "
    "of seconds, or a number with the unit `s`, `m`, `h` or `d`, at most 30 days. With 0, no "
    "item is left out for this reason. The default is `NCR_HIDE_SHOWN`."
)
EXPLAIN = (
    "With `pairwise`, each item of the list names the items of the user that explain its place."
)
MIN_SEQ = "The list includes every event up to this seq."
MODEL = (
    "The version that makes the list, for a trial. The version may be published or rejected. "
    "The server loads the version if necessary. The default is the active version."
)
DIVERSITY = (
    "The weight of variety against the exact order. Each place goes to the item with the "
    "largest (1 − diversity)·(1 − r/P) − diversity·s. Here r is the place of the item in the "
    "exact list of P = max(5n, 50) items, counted from 0. The value s is the highest "
    "similarity of the item to the items above, as in `/items/{id}/similar`. With 0, the list "
    "is the exact one. The first place never changes."
)
NEXT_CURSOR = (
    "The value for `cursor` in the request for the next places. All other parameters except "
    "`n` must stay the same. The value is null at the end of the list, and after 1,000 "
    "places. The next page can be empty."
)
Explain = Literal["none", "pairwise"]


DETAILS = ("attributes", "categories")
INCLUDE = (
    "The details of each item that the response shows: `categories`, `attributes` or "
    "both, separated by a comma."
)


def parse_include(names: Iterable[Any]) -> tuple[str, ...]:
    """The requested details, sorted, each once.

    Raises:
        Unprocessable: a detail is unknown.
    """
    wanted = set()
    for name in names:
        if name not in DETAILS:
            raise Unprocessable(
                f"include: unknown detail {str(name)[:64]!r}; the details are {', '.join(DETAILS)}",
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
    """The checked parameters of a list, in one form for all requests for the same list."""

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
    """The details of items that the answer shows; no list depends on them."""
    page: int | None = None
    """The number of places of a page, where ``n`` counts the places of all pages."""
    seen: SeenRule | None = None
    """The rule by which seen items return; None: the rule of the settings."""
    hide_shown: int | None = None
    """The time that shown items stay hidden, in microseconds; None: the time of the settings."""
    exploration: float | None = None
    """The share of a newcomer's list that is drawn; None: the service's setting."""
    given: frozenset[str] = frozenset()
    """The parameters in `TRIABLE` that the request itself has; no list depends on them."""

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
        """The key of the parameters that a list depends on."""
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
        """A digest of the parameters that all pages of a list share; ``n`` only with diversity."""
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

    # The bounds before the validator: else the document would not have them.
    min_seq: Annotated[int, Field(ge=0, lt=SEQ_BOUND), BeforeValidator(as_integer)] | None = Field(
        default=None, description=MIN_SEQ
    )
    model: str | None = Field(default=None, max_length=256, description=MODEL)


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
        description="The details of each item that the response shows.",
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
"""The parameters of queries that no rule applies to, such as rerank, compare and questions."""


def boosts_of(value: Any) -> tuple[Boost, ...]:
    """The boosts in a body. Raises as `parse_boosts`."""
    return () if value is None else parse_boosts(value)


def filter_of(value: Any) -> AttributeFilter | None:
    """The filter in a body. Raises as `parse_filter`."""
    return None if value is None else parse_filter(value)


class _ListBody(_Body):
    """The parameters of `GET /recommend/{user}` in a body."""

    n: Integer = Field(default=10, ge=1, le=MAX_LIST, description="The number of items in a list.")
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
            Unprocessable: the filter, a boost, a detail or a rule is invalid.
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
    """The body of `POST /recommend/batch`: users, and the parameters of `GET /recommend/{user}`."""

    users: list[str] = Field(
        max_length=MAX_USERS,
        description="The users of the batch. Each user gets a result, including users with an "
        "invalid id. The number of users times `n` is at most 100,000.",
    )


class RecommendBody(_ListBody):
    """The body of `POST /recommend`, with at least one of `user`, `items` and `item`."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
                for name in ("user", "items", "item")
            ]
        }
    )

    cursor: BodyCursor = None
    user: BodyId | None = Field(
        default=None, description="The user whose events the list considers."
    )
    items: list[BodyId] | None = Field(
        default=None,
        max_length=MAX_LIST,
        description="A basket or a session, with the latest item last. The items count as the "
        "user's latest positive events, and the server does not store them. A "
        "repeated item counts at its last position.",
    )
    item: BodyId | None = Field(
        default=None,
        description="The item that the user looks at. The item counts as the latest of "
        "`items`, and the list never has it.",
    )

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if self.user is None and self.items is None and self.item is None:
            raise ValueError("a list needs `user`, `items` or `item`")
        return self

    def query(self) -> RecommendationQuery:
        """The parameters as a query. Raises as `BatchBody.query`."""
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
        description="The items to rank. Equal items keep the order of the request. A repeated "
        "item counts at its first position.",
    )
    filter: BodyFilter = None
    boost: BodyBoost = None
    include: BodyInclude = Field(default_factory=list)

    def query(self) -> RecommendationQuery:
        """The parameters as a query. Raises as `BatchBody.query`."""
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
        description="The items to compare. A repeated item counts at its first position.",
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
        BadRequest: the body is not JSON.
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
    """An item of the user that explains a place in the list."""

    id: str
    title: str | None
    effect: float = Field(
        description="The decrease of the mean log-odds if the user did not have this item. "
        "The log-odds compare the recommended item with each other item in the "
        "list."
    )


class _Details(BaseModel):
    """What is shown of an item on request."""

    categories: list[str] | SkipJsonSchema[None] = Field(
        default=None, description="Categories, only with `include=categories`."
    )
    attributes: dict[str, Any] | SkipJsonSchema[None] = Field(
        default=None, description="Attributes, only with `include=attributes`."
    )


class RecommendedItem(_Details):
    """An item in the list."""

    id: str
    title: str | None
    rank: int = Field(ge=1, le=MAX_LIST, description="The place in the list, from 1.")
    score: float | None = Field(
        ge=0,
        le=1,
        description="The mean probability that the user prefers the item to the reference "
        "items of the model. Scores are comparable within a model version. The "
        "score is null for `popular`.",
    )
    source: Source = Field(
        description="The data behind the place. `model`: the model knows the user and the "
        "item. `fold_in`: the model folds in events or attributes that it was not "
        "trained on, or all events of a user whose vector it does not store. `popular`: the "
        "service knows nothing of the user, or the model does not know the item."
    )
    preferred_over_next: float | None = Field(
        ge=0,
        le=1,
        description="The probability that the user prefers the item to the item one rank "
        "below. The value is null where the probability is unknown, such as for "
        "the last item.",
    )
    because: Annotated[list[Because], Field(max_length=MAX_REASONS)] | SkipJsonSchema[None] = Field(
        default=None,
        description="Up to three items of the user that explain the place, the most important "
        "item first. The field exists only with `explain=pairwise`. The list is "
        "empty for `popular`.",
    )


class Recommendation(BaseModel):
    """The response of `GET /recommend/{user}` and `POST /rerank`."""

    recommendation_id: str = Field(
        description="The id to send with events that result from this list. The service "
        "counts clicks by this id."
    )
    user: str
    model_version: str | None
    as_of_seq: int = Field(
        ge=0, description="The list includes every event of this user up to this seq."
    )
    took_ms: float = Field(ge=0)
    items: list[RecommendedItem] = Field(max_length=MAX_LIST, description="The items, best first.")
    next_cursor: str | None = Field(description=NEXT_CURSOR)


class BasketRecommendation(Recommendation):
    """The response of `POST /recommend`."""

    user: str | None = Field(description="The user of the request, or null.")  # type: ignore[assignment]
    ignored: list[str] = Field(
        description="The ids in `items` and `item` that the service does not know."
    )


class BatchList(Recommendation):
    """The list of a user in a batch."""

    status: Literal[200]


class BatchRefusal(BaseModel):
    """The problem of a user in a batch who gets no list."""

    status: int = Field(description="The status of the same request outside a batch.", ge=400)
    code: str
    detail: str


class BatchAnswer(BaseModel):
    """The response of `POST /recommend/batch`."""

    results: list[BatchList | BatchRefusal] = Field(
        description="The results in the order of the users."
    )


class Comparison(BaseModel):
    """The response of `POST /compare`."""

    user: str
    model_version: str
    as_of_seq: int = Field(description="The list includes every event of this user up to this seq.")
    source: Source = Field(
        description="With `popular`, the service knows nothing of the user. The probabilities "
        "are then those of the mean user."
    )
    items: list[str] = Field(
        description="The items of the rows and the columns, without repetition."
    )
    probability: list[list[float]] = Field(
        description="The probability that the user prefers the item of the row to the item of "
        "the column."
    )
    order: list[str] = Field(description="The items, best first.")


class SimilarItem(_Details):
    """A similar item."""

    id: str
    title: str | None
    score: float = Field(
        ge=-1, le=1, description="The similarity to the item of the request, at most 1."
    )


class SimilarItems(BaseModel):
    """The response of `GET /items/{id}/similar`."""

    recommendation_id: str = Field(
        description="The id to send with events that result from this list. The service "
        "counts clicks by this id."
    )
    item: str
    model_version: str | None = Field(
        description="The version that computed `score`, the cosine similarity of the item "
        "vectors without popularity. The value is null if no model is active, or "
        "if the model does not know the item. The score is then the cosine "
        "similarity of the users of the items."
    )
    items: list[SimilarItem] = Field(
        max_length=MAX_LIST, description="The items, most similar first."
    )
    next_cursor: str | None = Field(description=NEXT_CURSOR)


class PopularItem(BaseModel):
    """A popular item."""

    id: str
    title: str | None
    rank: int
    users: int = Field(description="The number of users with a positive event on the item.")


class PopularItems(BaseModel):
    """The response of `GET /popular`."""

    window: str | None = Field(description="The window of the request, or null for all time.")
    items: list[PopularItem] = Field(description="The items, most users first.")
    next_cursor: str | None = Field(description=NEXT_CURSOR)


class TrendingItem(BaseModel):
    """A trending item."""

    id: str
    title: str | None
    rank: int
    users: int = Field(description="The number of users in the window.")
    users_before: int = Field(description="The number of users in the window before.")


class TrendingItems(BaseModel):
    """The response of `GET /trending`."""

    window: str
    items: list[TrendingItem] = Field(description="The items, most significant rise first.")
    next_cursor: str | None = Field(description=NEXT_CURSOR)


NoQuestions = Literal["seen_everything", "asked_everything", "too_few_items"]
"""The reason for an empty list of questions."""


class QuestionItem(BaseModel):
    """An item of a question."""

    id: str
    title: str | None


class Question(BaseModel):
    """A question about two items. A client sends the answer to `POST /preferences`."""

    a: QuestionItem
    b: QuestionItem
    information: float | None = Field(
        description="The information that the answer is expected to give about the taste of "
        "the user, in bits. Information from the questions before does not count. "
        "The value is null without a model."
    )


class Questions(BaseModel):
    """Questions, the most informative first."""

    user: str
    model_version: str | None
    as_of_seq: int
    source: Literal["model", "popular"]
    items: list[Question]
    reason: NoQuestions | None = Field(
        description="The reason for an empty list of questions, otherwise null."
    )
