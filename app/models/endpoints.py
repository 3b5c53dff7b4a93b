"""`/admin/models` and `/admin/activations`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ValidationError
from starlette.responses import Response

from app.core.errors import problem_responses
from app.core.http import (
    PageCursor,
    PageSize,
    PathId,
    decode_cursor,
    invalid_body,
    json_response,
    page_response,
    read_json,
)
from app.models.schemas import (
    ActivationPage,
    ForceBody,
    ModelDetail,
    ModelOut,
    ModelPage,
    PinOut,
)
from app.models.service import ModelRegistry

router = APIRouter(tags=["models"], prefix="/admin")


async def _registry(request: Request) -> ModelRegistry:
    registry: ModelRegistry = request.app.state.services.models
    return registry


Registry = Annotated[ModelRegistry, Depends(_registry)]
Force = Annotated[bool, Query(description="Also a version that the gate has rejected.")]
FORCE_BODY: dict[str, Any] = {
    "requestBody": {
        "required": False,
        "content": {"application/json": {"schema": ForceBody.model_json_schema()}},
    }
}


@router.get(
    "/models",
    summary="List models, newest first",
    response_model=None,
    responses={200: {"model": ModelPage}, **problem_responses(422)},
)
async def list_models(registry: Registry, n: PageSize = 100, cursor: PageCursor = None) -> Response:
    """Every version that was ever published or rejected."""
    rows, following = await registry.page(decode_cursor(cursor) or 0, n)
    activation = await registry.activation()
    return page_response([row.as_json(activation) for row in rows], following)


@router.get(
    "/activations",
    summary="What was served when, and why, newest first",
    response_model=None,
    responses={200: {"model": ActivationPage}, **problem_responses(422)},
)
async def list_activations(
    registry: Registry, n: PageSize = 100, cursor: PageCursor = None
) -> Response:
    """`reason`: `published` after training, `activated` by hand, `rolled_back` by hand, or
    `returned` because click-through fell.
    """
    rows, following = await registry.history(None, decode_cursor(cursor) or 0, n)
    return page_response([row.as_json() for row in rows], following)


@router.post(
    "/models/rollback",
    summary="Go back to the version before",
    response_model=None,
    responses={200: {"model": ModelOut}, **problem_responses(404, 409)},
)
async def rollback(registry: Registry) -> Response:
    """Servers swap within seconds; requests under way finish on the version they began with.

    Like an undo: a second call goes back one version more. What is pinned stays pinned.
    """
    activation = await registry.rollback()
    row = await registry.get(str(activation.version))
    return json_response(row.as_json(activation))


@router.delete(
    "/models/pin",
    summary="Serve newly trained models again",
    response_model=None,
    responses={200: {"model": PinOut}},
)
async def unpin(registry: Registry) -> Response:
    """What is served stays until the next training is published. Nothing pinned is no error."""
    activation = await registry.unpin()
    return json_response(
        {
            "version": activation.version,
            "previous": activation.previous,
            "pinned": activation.pinned,
        }
    )


@router.get(
    "/models/{version}",
    summary="One model",
    response_model=None,
    responses={200: {"model": ModelDetail}, **problem_responses(404)},
)
async def get_model(registry: Registry, version: PathId) -> Response:
    """With its metrics on the held-out users, beside the popularity list's and those of the version
    that was served when it was trained.
    """
    row = await registry.get(version)
    changes, _ = await registry.history(version)
    detail = row.as_json(await registry.activation()) | {
        "activations": [change.as_json() for change in changes]
    }
    for name, ask in registry.about.items():
        detail[name] = await ask(version)
    return json_response(detail)


@router.post(
    "/models/{version}/activate",
    summary="Serve this version",
    response_model=None,
    responses={200: {"model": ModelOut}, **problem_responses(400, 404, 409, 415, 422)},
    openapi_extra=FORCE_BODY,
)
async def activate(
    request: Request, registry: Registry, version: PathId, force: Force = False
) -> Response:
    """The checkpoint is read and verified first: a damaged one is refused with 409, and with 503
    one that cannot be fetched while the store is away. The version before then stays.

    One that the gate has rejected is 409 `not_published`, unless with `force`, which is recorded.
    What is pinned stays pinned: newer models are not served until it is unpinned.
    """
    forced = await _forced(request) or force
    activation = await registry.activate(version, force=forced)
    row = await registry.get(version)
    return json_response(row.as_json(activation))


@router.post(
    "/models/{version}/pin",
    summary="Serve this version, whatever is trained",
    response_model=None,
    responses={200: {"model": ModelOut}, **problem_responses(400, 404, 409, 415, 422)},
    openapi_extra=FORCE_BODY,
)
async def pin(
    request: Request, registry: Registry, version: PathId, force: Force = False
) -> Response:
    """Activates it, as above, and keeps it: what is trained is published without being served until
    `DELETE /admin/models/pin`.
    """
    forced = await _forced(request) or force
    activation = await registry.activate(version, force=forced, pin=True)
    row = await registry.get(version)
    return json_response(row.as_json(activation))


async def _forced(request: Request) -> bool:
    if not await request.body():
        return False
    try:
        return ForceBody.model_validate(await read_json(request)).force
    except ValidationError as error:
        raise invalid_body(error) from None
