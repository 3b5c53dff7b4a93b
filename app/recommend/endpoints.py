"""`/recommend`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from cachetools import LRUCache
from fastapi import APIRouter, Query, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.core.errors import (
    REQUEST_ID_KEY,
    Unavailable,
    Unprocessable,
    problem_of,
    problem_responses,
)
from app.core.http import Id, PathId, decode_id, text_problem
from app.core.overload import RELEASE_KEY
from app.recommend.bodies import (
    CATEGORY,
    DIVERSITY,
    EXCLUDE,
    EXCLUDE_SEEN,
    EXPLAIN,
    MAX_CATEGORIES,
    MAX_LIST,
    MIN_SEQ,
    MODEL,
    Explain,
    filters_of,
)
from app.recommend.feature import Recommending
from app.recommend.filters import Filters
from app.recommend.schemas import Recommendation

QUERIES_KEPT = 1024
QUERY_BYTES = 256


class KnownQueries(APIRoute):
    """Checks a query once: the next request with the same one goes straight to the service.

    Reading and checking nine parameters takes longer than all the rest of a cached answer.
    """

    known: LRUCache[bytes, Filters]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        checked = super().get_route_handler()
        known = self.known = LRUCache(QUERIES_KEPT)

        async def handle(request: Request) -> Response:
            response = await checked(request)
            query: bytes = request.scope["query_string"]
            if len(query) <= QUERY_BYTES:
                known[query] = request.state.filters
            return response

        return handle

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        filters = self.known.get(scope["query_string"])
        if filters is None or scope["method"] != "GET":
            await super().handle(scope, receive, send)
            return
        request = Request(scope, receive)
        response = await answer(request, decode_id(scope["path_params"]["user"]), filters)
        await response(scope, receive, send)


router = APIRouter(tags=["recommend"], route_class=KnownQueries)


@router.get(
    "/recommend/{user}",
    summary="What this user would like next",
    response_model=None,
    responses={200: {"model": Recommendation}, **problem_responses(404, 409, 422, 503)},
)
async def recommend(
    request: Request,
    user: PathId,
    n: Annotated[int, Query(ge=1, le=MAX_LIST, description="How many.")] = 10,
    exclude_seen: Annotated[bool, Query(description=EXCLUDE_SEEN)] = True,
    category: Annotated[
        list[str] | None,
        Query(description=f"May repeat. {CATEGORY}", max_length=MAX_CATEGORIES),
    ] = None,
    exclude: Annotated[
        list[Id] | None, Query(description=f"May repeat. {EXCLUDE}", max_length=MAX_LIST)
    ] = None,
    explain: Annotated[Explain, Query(description=EXPLAIN)] = "none",
    min_seq: Annotated[int | None, Query(ge=0, lt=2**63, description=MIN_SEQ)] = None,
    model: Annotated[str | None, Query(max_length=256, description=MODEL)] = None,
    diversity: Annotated[float, Query(ge=0, le=1, description=DIVERSITY)] = 0.0,
) -> Response:
    """An unknown user gets 200 too: `source` says what a list was made from."""
    for item in exclude or ():
        if problem := text_problem(item):
            raise Unprocessable(f"exclude: an id {problem}", code="invalid_id")
    filters = filters_of(
        n, exclude_seen, category or [], exclude or [], explain, min_seq, model, diversity
    )
    request.state.filters = filters
    return await answer(request, user, filters)


async def answer(request: Request, user: str, filters: Filters) -> Response:
    """The response to a request whose parameters have been checked."""
    recommending: Recommending = request.app.state.recommend
    try:
        release = request.scope.get(RELEASE_KEY)
        body = await recommending.service.recommend(user, filters, request.is_disconnected, release)
    except Unavailable as error:
        # Said here and not by the handler: under overload this is what has to be quick.
        return problem_of(error, request.scope.get(REQUEST_ID_KEY))
    return Response(body, media_type="application/json")
