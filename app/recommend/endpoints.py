"""HTTP routes of lists: recommend, batch, rerank, compare, similar items and questions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from app.catalog.filters import BOOST, FILTER, read_boosts, read_filter
from app.core.access import Role, access
from app.core.errors import (
    REQUEST_ID_KEY,
    BadRequest,
    Unavailable,
    Unprocessable,
    problem_of,
    problem_responses,
)
from app.core.middleware import RELEASE_KEY
from app.core.requests import Id, KnownQueries, PathId, StrictQuery, text_problem
from app.core.security import caller_of, check_user
from app.events.seen_rule import DURATION, hidden_time_of, read_seen_rule
from app.recommend.basket import Basket
from app.recommend.cursor import QueryCursor
from app.recommend.recent_popularity import WINDOW
from app.recommend.schemas import (
    CATEGORY,
    DIVERSITY,
    EXCLUDE,
    EXCLUDE_SEEN,
    EXPLAIN,
    HIDE_SHOWN,
    INCLUDE,
    MAX_CATEGORIES,
    MAX_COMPARED,
    MAX_LIST,
    MAX_USERS,
    MIN_SEQ,
    MODEL,
    SEEN,
    SEQ_BOUND,
    BasketRecommendation,
    BatchAnswer,
    BatchBody,
    CompareBody,
    Comparison,
    Explain,
    PopularItems,
    Questions,
    Recommendation,
    RecommendationQuery,
    RecommendBody,
    RerankBody,
    SimilarItems,
    TrendingItems,
    body_of,
    body_schema,
    read_include,
)
from app.recommend.wiring import RecommendFeature

router = APIRouter(tags=["recommend"], route_class=StrictQuery)
list_router = APIRouter(tags=["recommend"], route_class=KnownQueries)
"""The route `GET /recommend/{user}`: a query string that was parsed before goes straight to
`answer`. Reading and checking 14 parameters takes longer than the rest of a cached answer."""


FilterText = Annotated[
    str | None,
    Query(
        description=f"{FILTER} The value is percent-encoded.",
        json_schema_extra={"format": "filter"},
    ),
]

BoostText = Annotated[
    str | None,
    Query(
        description=f"{BOOST} The value is percent-encoded.", json_schema_extra={"format": "boost"}
    ),
]

IncludeText = Annotated[
    str | None,
    Query(max_length=100, description=INCLUDE, json_schema_extra={"format": "include"}),
]
SeenText = Annotated[
    str | None,
    Query(
        description=f"{SEEN} The value is percent-encoded JSON.",
        json_schema_extra={"format": "seen-rule"},
    ),
]
HideShown = Annotated[
    str | None, Query(description=HIDE_SHOWN, json_schema_extra={"pattern": DURATION})
]
Category = Annotated[
    list[str] | None,
    Query(description=f"{CATEGORY} The parameter may repeat.", max_length=MAX_CATEGORIES),
]
Exclude = Annotated[
    list[Id] | None, Query(description=f"{EXCLUDE} The parameter may repeat.", max_length=MAX_LIST)
]
BODY_SECONDS = 2.0  # of a basket: meanwhile it has a place of those who ask for lists
SIMILAR_USER = (
    "A user. The list leaves out the seen and disliked items of this user, by the rules of "
    "`seen` and `hide_shown`."
)


def _check_ids(name: str, ids: Iterable[str]) -> None:
    for item in ids:
        if problem := text_problem(item):
            raise Unprocessable(f"{name}: an id {problem}", code="invalid_id")


@list_router.get(
    "/recommend/{user}",
    summary="Recommend items to a user",
    response_model=None,
    responses={200: {"model": Recommendation}, **problem_responses(404, 409, 422, 503)},
)
@access(Role.RECOMMEND, concurrency="recommend", for_tokens=True)
async def recommend(
    request: Request,
    user: PathId,
    n: Annotated[int, Query(ge=1, le=MAX_LIST, description="The maximum number of items.")] = 10,
    exclude_seen: Annotated[bool, Query(description=EXCLUDE_SEEN)] = True,
    category: Category = None,
    exclude: Exclude = None,
    explain: Annotated[Explain, Query(description=EXPLAIN)] = "none",
    min_seq: Annotated[int | None, Query(ge=0, lt=SEQ_BOUND, description=MIN_SEQ)] = None,
    model: Annotated[str | None, Query(max_length=256, description=MODEL)] = None,
    diversity: Annotated[float, Query(ge=0, le=1, description=DIVERSITY)] = 0.0,
    filter: FilterText = None,  # noqa: A002 - as a request has it
    boost: BoostText = None,
    include: IncludeText = None,
    seen: SeenText = None,
    hide_shown: HideShown = None,
    cursor: QueryCursor = None,
) -> Response:
    """An unknown user also gets a list, with status 200.

    The field `source` of each item names the data behind that place.
    """
    _check_ids("exclude", exclude or ())
    query = RecommendationQuery.canonical(
        n=n,
        exclude_seen=exclude_seen,
        category=category or (),
        exclude=exclude or (),
        min_seq=min_seq,
        model=model,
        diversity=diversity,
        explain=explain,
        filter=read_filter(filter),
        boost=read_boosts(boost),
        include=read_include(include),
        seen=read_seen_rule(seen),
        hide_shown=hidden_time_of(hide_shown),
        given=request.query_params.keys(),
    )
    response = await answer(request, user, query, cursor)
    if cursor is None:  # each is sent once
        request.state.answer = partial(answer, query=query)
    return response


async def answer(
    request: Request, user: str, query: RecommendationQuery, cursor: str | None = None
) -> Response:
    """The response to a request whose parameters have been checked."""
    check_user(caller_of(request), user)
    feature: RecommendFeature = request.app.state.recommend
    try:
        release = request.scope.get(RELEASE_KEY)
        if cursor is None:
            body = await feature.service.recommend(user, query, request.is_disconnected, release)
        else:
            body = await feature.pages.page(
                user, query, cursor, request.is_disconnected, on_slow=release
            )
    except Unavailable as error:
        # Answered here and not by the handler: under overload this is what has to be quick.
        return problem_of(error, request.scope.get(REQUEST_ID_KEY))
    return Response(body, media_type="application/json")


def _feature(request: Request) -> RecommendFeature:
    feature: RecommendFeature = request.app.state.recommend
    return feature


Feature = Annotated[RecommendFeature, Depends(_feature)]
_PROBLEMS = problem_responses(400, 404, 409, 413, 415, 422, 503)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


@router.post(
    "/recommend",
    summary="Recommend items for a basket, a session or an item",
    response_model=None,
    responses={200: {"model": BasketRecommendation}, **_PROBLEMS},
    openapi_extra=body_schema(RecommendBody),
)
@access(Role.RECOMMEND, concurrency="recommend", for_tokens=True)
async def recommend_for_basket(request: Request, feature: Feature) -> Response:
    """Returns a list for a user, given items, or both.

    The given items count as the user's latest positive events. The server does not store them. With
    `user` alone, the response is that of `GET /recommend/{user}`. Without `user`, the given items
    are the only data. The field `ignored` names the items that the service does not know. A body
    with too many items gets 413.
    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await body_of(request, RecommendBody, {"items": MAX_LIST, "exclude": MAX_LIST})
    except TimeoutError:
        raise BadRequest("the client sends the body too slowly", code="body_too_slow") from None
    check_user(caller_of(request), body.user)
    release = request.scope.get(RELEASE_KEY)
    basket, is_gone = Basket(tuple(body.items or ()), body.item), request.is_disconnected
    query = body.query()
    if body.cursor is not None:
        return _json(
            await feature.pages.page(body.user, query, body.cursor, is_gone, basket, release)
        )
    return _json(
        await feature.service.recommend_for_basket(body.user, basket, query, is_gone, release)
    )


@router.post(
    "/recommend/batch",
    summary="Recommend items to many users",
    response_model=None,
    responses={200: {"model": BatchAnswer}, **_PROBLEMS},
    openapi_extra=body_schema(BatchBody),
)
@access(Role.RECOMMEND)
async def recommend_batch(request: Request, feature: Feature) -> Response:
    """Returns a result for each user, in the order of the request.

    A result is the response of `GET /recommend/{user}` together with its `status`. A body with too
    many users or items gets 413.
    """
    body = await body_of(request, BatchBody, {"users": MAX_USERS, "exclude": MAX_LIST})
    is_gone = request.is_disconnected
    return _json(await feature.batch.recommend(body.users, body.query(), is_gone))


@router.post(
    "/rerank",
    summary="Rank given items for a user",
    response_model=None,
    responses={200: {"model": Recommendation}, **_PROBLEMS},
    openapi_extra=body_schema(RerankBody),
)
@access(Role.RECOMMEND)
async def rerank(request: Request, feature: Feature) -> Response:
    """Ranks the given items by Algorithm 1.

    Algorithm 1 orders at most 200 items. If the request has more, the server takes the 200 items
    with the highest mean preference over the model's reference items. The other items follow in the
    order of that mean.

    The response has all given items that match the `filter`, including seen, disliked, hidden and
    deleted ones. Items that the model does not know come last with the source `popular`, in the
    order of the request. A user without events gets the items in the order of popularity.
    """
    body = await body_of(request, RerankBody, {"items": MAX_LIST})
    query, is_gone = body.query(), request.is_disconnected
    return _json(await feature.rerank.rerank(body.user, body.items, query, is_gone))


@router.post(
    "/compare",
    summary="Pairwise preference probabilities between the given items",
    response_model=Comparison,
    responses=_PROBLEMS,
    openapi_extra=body_schema(CompareBody),
)
@access(Role.RECOMMEND)
async def compare(request: Request, feature: Feature) -> Comparison:
    """Returns P(row preferred to column) = σ(margin / 2T) for each pair of items.

    T is the calibration temperature of the version. An item that the model does not know gets 422
    `item_not_ranked`. Without a model, the response is 409 `no_model`. A user without events gets
    the probabilities of the mean user.
    """
    body = await body_of(request, CompareBody, {"items": MAX_COMPARED})
    query, is_gone = body.query(), request.is_disconnected
    return await feature.rerank.compare(body.user, body.items, query, is_gone)


@router.get(
    "/items/{item}/similar",
    summary="List items similar to an item",
    response_model=None,
    responses={200: {"model": SimilarItems}, **problem_responses(404, 422, 503)},
)
@access(Role.RECOMMEND)
async def similar(
    feature: Feature,
    item: PathId,
    n: Annotated[int, Query(ge=1, le=MAX_LIST, description="The maximum number of items.")] = 10,
    user: Annotated[Id | None, Query(description=SIMILAR_USER)] = None,
    category: Category = None,
    exclude: Exclude = None,
    filter: FilterText = None,  # noqa: A002 - as a request has it
    include: IncludeText = None,
    seen: SeenText = None,
    hide_shown: HideShown = None,
    cursor: QueryCursor = None,
) -> Response:
    """Ranks items by their similarity in the active model.

    If the model does not know the item, the service compares the sets of users of both items. The
    order depends on similarity alone. `POST /recommend` with `user` and `item` also considers the
    taste of the user.
    """
    _check_ids("exclude", exclude or ())
    _check_ids("user", () if user is None else (user,))
    query = RecommendationQuery(
        n,
        categories=tuple(sorted({*(category or ())})),
        exclude=tuple(sorted({*(exclude or ())})),
        filter=read_filter(filter),
        include=read_include(include),
        seen=read_seen_rule(seen),
        hide_shown=hidden_time_of(hide_shown),
    )
    return _json(await feature.similar.similar(item, query, user, cursor))


_HowMany = Annotated[int, Query(ge=1, le=MAX_LIST, description="The maximum number of items.")]
_WINDOW = "A window of 1h to 24h, or of 1d to 30d"


@router.get(
    "/popular",
    summary="List popular items",
    response_model=PopularItems,
    responses=problem_responses(422, 503),
)
@access(Role.RECOMMEND)
async def popular(
    feature: Feature,
    n: _HowMany = 10,
    window: Annotated[
        str | None, Query(pattern=WINDOW, description=f"{_WINDOW}. By default, all time counts.")
    ] = None,
    category: Category = None,
    filter: FilterText = None,  # noqa: A002 - as a request has it
    cursor: QueryCursor = None,
) -> PopularItems:
    """Ranks visible items by their number of users.

    The list has no items without users. The server recounts a window at most every 30 s.
    """
    return await feature.recent.popular(n, category or (), window, read_filter(filter), cursor)


@router.get(
    "/trending",
    summary="List trending items",
    response_model=TrendingItems,
    responses=problem_responses(422, 503),
)
@access(Role.RECOMMEND)
async def trending(
    feature: Feature,
    n: _HowMany = 10,
    window: Annotated[
        str,
        Query(
            pattern=WINDOW,
            description=f"{_WINDOW}. The server compares it with the window of the same length "
            "before.",
        ),
    ] = "1d",
    category: Category = None,
    filter: FilterText = None,  # noqa: A002 - as a request has it
    cursor: QueryCursor = None,
) -> TrendingItems:
    """Lists items that have more users than in the window before.

    The item with the most significant rise comes first.
    """
    return await feature.recent.trending(n, category or (), window, read_filter(filter), cursor)


@router.get(
    "/users/{user}/questions",
    summary="Choose questions for a user",
    response_model=Questions,
    responses=problem_responses(404, 422, 503),
)
@access(Role.RECOMMEND)
async def questions(
    request: Request,
    feature: Feature,
    user: PathId,
    n: Annotated[int, Query(ge=1, le=50, description="The maximum number of questions.")] = 5,
) -> Questions:
    """Returns pairs of popular items that the user has not seen.

    The service chooses the pairs on which users like this one disagree most. Unknown users also get
    questions. A user who has seen all items but one gets an empty list, and `reason` names the
    cause.
    """
    return await feature.questions.questions(user, n, request.is_disconnected)
