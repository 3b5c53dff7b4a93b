"""`/users/{id}/questions`."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from app.core.errors import problem_responses
from app.core.http import PathId
from app.recommend.feature import Recommending

router = APIRouter(tags=["recommend"])


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
    reason: Literal["seen_everything", "asked_everything", "too_few_items"] | None = Field(
        description="Why there are no questions; null where there are."
    )


@router.get(
    "/users/{user}/questions",
    summary="What to ask a user about",
    response_model=None,
    responses={200: {"model": Questions}, **problem_responses(404, 422, 503)},
)
async def questions(
    request: Request,
    user: PathId,
    n: Annotated[int, Query(ge=1, le=50, description="How many at most.")] = 5,
) -> Response:
    """Pairs of popular items that the user has not seen, chosen so that the answers tell most: what
    users like this one would answer differently. Users who are not known yet are asked, too.

    A user who has seen all items but one gets an empty list, and `reason` says so.
    """
    service: Recommending = request.app.state.recommend
    body = await service.questions.questions(user, n, request.is_disconnected)
    return Response(body, media_type="application/json")
