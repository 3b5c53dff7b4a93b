"""Routes of `/admin/models` and `/admin/activations`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ValidationError

from app.core.access import Role, access
from app.core.errors import problem_responses
from app.core.requests import (
    PageCursor,
    PageSize,
    PathId,
    PlaceCursor,
    StrictQuery,
    decode_cursor,
    decode_place,
    encode_place,
    invalid_body,
    next_cursor,
    read_json,
)
from app.core.security import CallerId
from app.registry.schemas import (
    Activation,
    ActivationOut,
    ActivationPage,
    ForceBody,
    ModelDetail,
    ModelOut,
    ModelPage,
    PinOut,
)
from app.registry.service import ModelRegistry

router = APIRouter(tags=["models"], prefix="/admin", route_class=StrictQuery)


async def _registry(request: Request) -> ModelRegistry:
    registry: ModelRegistry = request.app.state.services.models
    return registry


async def _force(
    request: Request,
    force: Annotated[bool, Query(description="Accept a version that the gate rejected.")] = False,
) -> bool:
    """Whether the query or the optional body asks for force."""
    if not await request.body():
        return force
    try:
        return ForceBody.model_validate(await read_json(request)).force or force
    except ValidationError as error:
        raise invalid_body(error) from None


Registry = Annotated[ModelRegistry, Depends(_registry)]
Force = Annotated[bool, Depends(_force)]
FORCE_BODY: dict[str, Any] = {
    "requestBody": {
        "required": False,
        "content": {"application/json": {"schema": ForceBody.model_json_schema()}},
    }
}


@router.get(
    "/models", summary="List model versions, newest first", responses=problem_responses(422)
)
@access(Role.ADMIN)
async def list_models(
    registry: Registry, n: PageSize = 100, cursor: PlaceCursor = None
) -> ModelPage:
    """Lists every version that the gate published or rejected."""
    rows, following = await registry.page(decode_place(cursor), n)
    activation = await registry.activation()
    items = [ModelOut.from_row(row, activation) for row in rows]
    return ModelPage(items=items, next_cursor=encode_place(following))


@router.get(
    "/activations",
    summary="List activations, newest first",
    responses=problem_responses(422),
)
@access(Role.ADMIN)
async def list_activations(
    registry: Registry, n: PageSize = 100, cursor: PageCursor = None
) -> ActivationPage:
    """Lists all activations, newest first.

    The `reason` is `published` after a training, and `activated` or `rolled_back` after a request.
    The `reason` is `returned` after an automatic rollback because of a lower click-through.
    """
    changes, following = await registry.history(None, decode_cursor(cursor), n)
    items = [ActivationOut.from_change(change) for change in changes]
    return ActivationPage(items=items, next_cursor=next_cursor(following))


@router.post(
    "/models/rollback",
    summary="Roll back to the version before",
    responses=problem_responses(404, 409),
)
@access(Role.ADMIN)
async def rollback(registry: Registry, by: CallerId) -> ModelOut:
    """Activates the version that was active before, like an undo.

    A second call goes back one version further. A pin moves to the new active version. Servers
    switch within seconds. Requests in progress finish with the version that they started with.
    """
    activation = await registry.rollback(by=by)
    return await _model(registry, str(activation.version), activation)


@router.delete("/models/pin", summary="Remove the pin")
@access(Role.ADMIN)
async def unpin(registry: Registry, by: CallerId) -> PinOut:
    """Removes the pin. Without a pin, nothing changes.

    The active version remains active until the next training is published.
    """
    activation = await registry.unpin(by=by)
    return PinOut(
        version=activation.version, previous=activation.previous, pinned=activation.pinned
    )


@router.get("/models/{version}", summary="Get a model version", responses=problem_responses(404))
@access(Role.ADMIN)
async def get_model(registry: Registry, version: PathId) -> ModelDetail:
    """Returns a version with its metrics, activations and click-through.

    The metrics on held-out users also include those of the popularity list, and of the version that
    was active during the training.
    """
    row = await registry.get(version)
    changes, _ = await registry.history(version)
    return ModelDetail.from_row(
        row,
        await registry.activation(),
        activations=[ActivationOut.from_change(change) for change in changes],
        click_through=await registry.click_through(version),
    )


@router.post(
    "/models/{version}/activate",
    summary="Activate a version",
    responses=problem_responses(400, 404, 409, 415, 422),
    openapi_extra=FORCE_BODY,
)
@access(Role.ADMIN)
async def activate(registry: Registry, version: PathId, force: Force, by: CallerId) -> ModelOut:
    """Verifies the checkpoint and activates the version.

    If the checkpoint is damaged, the response is 409. If the store is unavailable, the response is
    503. In both cases the active version remains active.

    A version that the gate rejected gets 409 `not_published` without `force`. The history records
    the force. If the active version is pinned, the pin moves to the new version.
    """
    activation = await registry.activate(version, force=force, by=by)
    return await _model(registry, version, activation)


@router.post(
    "/models/{version}/pin",
    summary="Activate and pin a version",
    responses=problem_responses(400, 404, 409, 415, 422),
    openapi_extra=FORCE_BODY,
)
@access(Role.ADMIN)
async def pin(registry: Registry, version: PathId, force: Force, by: CallerId) -> ModelOut:
    """Activates the version and pins it.

    The service then publishes newly trained versions without activating them, until `DELETE
    /admin/models/pin`.
    """
    activation = await registry.activate(version, force=force, pin=True, by=by)
    return await _model(registry, version, activation)


async def _model(registry: ModelRegistry, version: str, activation: Activation) -> ModelOut:
    return ModelOut.from_row(await registry.get(version), activation)
