"""`/recommend`."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from app.core.errors import Unprocessable, problem_responses
from app.core.http import PathId, json_response, text_problem
from app.recommend.schemas import Recommendation
from app.recommend.service import Filters, RecommendService

router = APIRouter(tags=["recommend"])

MAX_LIST = 1000


async def _service(request: Request) -> RecommendService:
    service: RecommendService = request.app.state.recommend
    return service


Service = Annotated[RecommendService, Depends(_service)]


@router.get(
    "/recommend/{user}",
    summary="What this user would like next",
    response_model=None,
    responses={200: {"model": Recommendation}, **problem_responses(404, 409, 422, 503)},
)
async def recommend(
    service: Service,
    user: PathId,
    n: Annotated[int, Query(ge=1, le=1000, description="How many.")] = 10,
    exclude_seen: Annotated[bool, Query(description="Leave out what the user has seen.")] = True,
    category: Annotated[
        list[str] | None, Query(description="May repeat: items in any of them.", max_length=64)
    ] = None,
    exclude: Annotated[
        list[str] | None,
        Query(description="May repeat: items to leave out.", max_length=MAX_LIST),
    ] = None,
    explain: Annotated[
        Literal["none", "pairwise"],
        Query(description="`preferred_over_next` is given in both cases."),
    ] = "none",
    min_seq: Annotated[
        int | None, Query(ge=0, lt=2**63, description="Take in every event up to this seq.")
    ] = None,
    model: Annotated[
        str | None, Query(max_length=256, description="Only the active version, for now.")
    ] = None,
    diversity: Annotated[
        float | None, Query(ge=0, le=0, description="Only 0, for now: no re-ranking.")
    ] = None,
) -> Response:
    """An unknown user gets 200 too: `source` says what a list was made from."""
    for item in exclude or ():
        if problem := text_problem(item):
            raise Unprocessable(f"exclude: an id {problem}", code="invalid_id")
    filters = Filters(n, exclude_seen, category or (), exclude or (), min_seq, model)
    return json_response(await service.recommend(user, filters))
