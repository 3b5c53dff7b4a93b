"""`/recommend/batch`, `/rerank`, `/compare` and `/items/{item}/similar`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from app.core.errors import problem_responses
from app.core.http import PathId
from app.recommend.bodies import (
    MAX_COMPARED,
    MAX_LIST,
    MAX_USERS,
    BatchBody,
    CompareBody,
    RerankBody,
    body_of,
    documented,
)
from app.recommend.feature import Recommending
from app.recommend.schemas import BatchAnswer, Comparison, Recommendation, SimilarItems

router = APIRouter(tags=["recommend"])

WRONG = problem_responses(400, 404, 409, 413, 415, 422, 503)


def _of(request: Request) -> Recommending:
    found: Recommending = request.app.state.recommend
    return found


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


@router.post(
    "/recommend/batch",
    summary="What many users would like next",
    response_model=None,
    responses={200: {"model": BatchAnswer}, **WRONG},
    openapi_extra=documented(BatchBody),
)
async def recommend_batch(request: Request) -> Response:
    """A result for each user, in their order: the same as `GET /recommend/{user}` gives, with its
    `status`. More users or items than are taken are 413.
    """
    body = await body_of(request, BatchBody, {"users": MAX_USERS, "exclude": MAX_LIST})
    filters, gone = body.filters(), request.is_disconnected
    return _json(await _of(request).batch.recommend(body.users, filters, gone))


@router.post(
    "/rerank",
    summary="Your items in the order in which a user would like them",
    response_model=None,
    responses={200: {"model": Recommendation}, **WRONG},
    openapi_extra=documented(RerankBody),
)
async def rerank(request: Request) -> Response:
    """Algorithm 1 over exactly these items. None is left out, seen, disliked, hidden and deleted
    ones neither. What the model does not know comes last, in the order given, as `popular`; for a
    user of whom nothing is known all are, by popularity.
    """
    body = await body_of(request, RerankBody, {"items": MAX_LIST})
    filters, gone = body.filters(), request.is_disconnected
    return _json(await _of(request).given.rerank(body.user, body.items, filters, gone))


@router.post(
    "/compare",
    summary="How probably a user prefers each of some items to each",
    response_model=None,
    responses={200: {"model": Comparison}, **WRONG},
    openapi_extra=documented(CompareBody),
)
async def compare(request: Request) -> Response:
    """P(row preferred to column) = σ(margin / 2T), T being the temperature that the version was
    calibrated by. An item that the model does not know is 422 `item_not_ranked`; without a model
    the answer is 409 `no_model`. For a user of whom nothing is known it is the mean user's.
    """
    body = await body_of(request, CompareBody, {"items": MAX_COMPARED})
    filters, gone = body.filters(), request.is_disconnected
    return _json(await _of(request).given.compare(body.user, body.items, filters, gone))


@router.get(
    "/items/{item}/similar",
    summary="Items like an item",
    response_model=None,
    responses={200: {"model": SimilarItems}, **problem_responses(404, 422, 503)},
)
async def similar(
    request: Request,
    item: PathId,
    n: Annotated[int, Query(ge=1, le=1000, description="How many at most.")] = 10,
) -> Response:
    """By the active model; where it does not know the item, by the users who took both up."""
    return _json(await _of(request).similar.similar(item, n))
