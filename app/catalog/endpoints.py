"""`/items`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from app.catalog.schemas import ItemIn, ItemOut, ItemPage, ItemsAnswer
from app.catalog.service import CatalogService
from app.core.errors import PayloadTooLarge, Unprocessable, problem_responses
from app.core.http import (
    PageCursor,
    PageSize,
    PathId,
    decode_cursor,
    json_response,
    page_response,
    read_json,
)

router = APIRouter(tags=["catalog"])


async def _service(request: Request) -> CatalogService:
    service: CatalogService = request.app.state.services.catalog
    return service


Service = Annotated[CatalogService, Depends(_service)]


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_ITEM_SCHEMA = ItemIn.model_json_schema()


@router.get(
    "/items",
    summary="List items, newest first",
    response_model=None,
    responses={200: {"model": ItemPage}, **problem_responses(422)},
)
async def list_items(
    service: Service,
    n: PageSize = 100,
    cursor: PageCursor = None,
    category: Annotated[
        list[str] | None, Query(description="May repeat: items in any of them.", max_length=64)
    ] = None,
) -> Response:
    """Hidden items are listed, deleted ones are not."""
    items, following = await service.page(decode_cursor(cursor), n, category or [])
    return page_response([item.as_json() for item in items], following)


@router.post(
    "/items",
    summary="Create or replace many items",
    response_model=None,
    responses={200: {"model": ItemsAnswer}, **problem_responses(400, 413, 415, 422)},
    openapi_extra=_body({"type": "array", "items": _ITEM_SCHEMA, "maxItems": 10_000}),
)
async def post_items(request: Request, service: Service) -> Response:
    """An item that is rejected harms no other. Of several with one id the last counts."""
    rows = await read_json(request)
    if not isinstance(rows, list):
        raise Unprocessable("the body must be a list of items")
    limit = request.app.state.services.settings.max_events
    if len(rows) > limit:
        raise PayloadTooLarge(
            f"a list has at most {limit} items, this one {len(rows)}", code="too_many_items"
        )
    accepted, rejected = await service.upsert_rows(rows)
    return json_response(
        {
            "accepted": accepted,
            "rejected": [
                {"index": index, "code": code, "detail": detail} for index, code, detail in rejected
            ],
        }
    )


@router.get(
    "/items/{item}",
    summary="An item",
    response_model=None,
    responses={200: {"model": ItemOut}, **problem_responses(404, 422)},
)
async def get_item(item: PathId, service: Service) -> Response:
    """Items that only events have named have no title."""
    return json_response((await service.get(item)).as_json())


@router.put(
    "/items/{item}",
    summary="Create or replace an item",
    response_model=None,
    responses={
        200: {"model": ItemOut},
        201: {"model": ItemOut},
        **problem_responses(400, 409, 413, 415, 422),
    },
    openapi_extra=_body(_ITEM_SCHEMA),
)
async def put_item(item: PathId, request: Request, service: Service) -> Response:
    """What is not named gets its default. A deleted item comes back."""
    written, created = await service.put(item, await read_json(request))
    return json_response(written.as_json(), 201 if created else 200)


@router.patch(
    "/items/{item}",
    summary="Change an item",
    response_model=None,
    responses={200: {"model": ItemOut}, **problem_responses(400, 404, 409, 413, 415, 422)},
    openapi_extra=_body(_ITEM_SCHEMA),
)
async def patch_item(item: PathId, request: Request, service: Service) -> Response:
    """What is not named stays; an attribute set to null goes."""
    return json_response((await service.patch(item, await read_json(request))).as_json())


@router.delete(
    "/items/{item}",
    status_code=204,
    summary="Delete an item",
    response_class=Response,
    responses=problem_responses(404, 422),
)
async def delete_item(item: PathId, service: Service) -> Response:
    """It is never recommended again. Its events stay."""
    await service.delete(item)
    return Response(status_code=204)
