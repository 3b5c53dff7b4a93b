"""`/admin/models`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from app.core.errors import problem_responses
from app.core.http import (
    PageCursor,
    PageSize,
    PathId,
    decode_cursor,
    json_response,
    page_response,
)
from app.models.schemas import ModelOut, ModelPage
from app.models.service import ModelRegistry

router = APIRouter(tags=["models"], prefix="/admin/models")


async def _registry(request: Request) -> ModelRegistry:
    registry: ModelRegistry = request.app.state.services.models
    return registry


Registry = Annotated[ModelRegistry, Depends(_registry)]


@router.get(
    "",
    summary="List models, newest first",
    response_model=None,
    responses={200: {"model": ModelPage}, **problem_responses(422)},
)
async def list_models(registry: Registry, n: PageSize = 100, cursor: PageCursor = None) -> Response:
    """Every version that was ever published or rejected."""
    rows, following = await registry.page(decode_cursor(cursor) or 0, n)
    activation = await registry.activation()
    return page_response([row.as_json(activation) for row in rows], following)


@router.post(
    "/rollback",
    summary="Go back to the version before",
    response_model=None,
    responses={200: {"model": ModelOut}, **problem_responses(404, 409)},
)
async def rollback(registry: Registry) -> Response:
    """Servers swap within seconds; requests under way finish on the version they began with."""
    activation = await registry.rollback()
    row = await registry.get(str(activation.version))
    return json_response(row.as_json(activation))


@router.get(
    "/{version}",
    summary="One model",
    response_model=None,
    responses={200: {"model": ModelOut}, **problem_responses(404)},
)
async def get_model(registry: Registry, version: PathId) -> Response:
    """With its metrics on the held-out users, beside the popularity list's."""
    row = await registry.get(version)
    return json_response(row.as_json(await registry.activation()))


@router.post(
    "/{version}/activate",
    summary="Serve this version",
    response_model=None,
    responses={200: {"model": ModelOut}, **problem_responses(404, 409)},
)
async def activate(registry: Registry, version: PathId) -> Response:
    """The checkpoint is read and verified first: a damaged one is refused with 409, and with 503
    one that cannot be fetched while the store is away. The version before then stays.
    """
    activation = await registry.activate(version)
    row = await registry.get(version)
    return json_response(row.as_json(activation))
