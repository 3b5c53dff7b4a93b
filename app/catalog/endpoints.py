"""HTTP routes of the catalogue: items."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, status
from starlette.responses import Response

from app.catalog.schemas import Item, ItemIn, ItemOut, ItemPage, ItemProblem, ItemsAnswer
from app.catalog.service import CatalogService
from app.core.access import Role, access
from app.core.errors import PayloadTooLarge, Unprocessable, problem_responses
from app.core.requests import (
    IdPrefix,
    PageCursor,
    PageSize,
    PathId,
    StrictQuery,
    decode_cursor,
    next_cursor,
    outcome_response,
    read_json,
)

router = APIRouter(tags=["catalog"], route_class=StrictQuery)


async def _service(request: Request) -> CatalogService:
    service: CatalogService = request.app.state.services.catalog
    return service


Service = Annotated[CatalogService, Depends(_service)]


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_ITEM_SCHEMA = ItemIn.model_json_schema()


def _item_out(item: Item) -> ItemOut:
    return ItemOut(**item.as_json())


@router.get("/items", summary="List items, newest first", responses=problem_responses(422))
@access(Role.RECOMMEND)
async def list_items(
    service: Service,
    n: PageSize = 100,
    cursor: PageCursor = None,
    category: Annotated[
        list[str] | None,
        Query(
            description="Categories. The page has only items in at least one of them. The "
            "parameter may repeat.",
            max_length=64,
        ),
    ] = None,
    prefix: IdPrefix = None,
) -> ItemPage:
    """Lists all items except deleted ones. The list includes hidden items."""
    items, next_below = await service.page(decode_cursor(cursor), n, category or [], prefix)
    return ItemPage(
        items=[_item_out(item) for item in items],
        next_cursor=next_cursor(next_below),
    )


@router.post(
    "/items",
    summary="Create or replace many items",
    response_model=ItemsAnswer,
    responses=problem_responses(400, 413, 415, 422),
    openapi_extra=_body({"type": "array", "items": _ITEM_SCHEMA, "maxItems": 10_000}),
)
@access(Role.CATALOG)
async def post_items(request: Request, service: Service) -> Response:
    """Stores many items. Rejected items do not affect the other items.

    If several items have the same id, the last one wins.
    """
    rows = await read_json(request)
    if not isinstance(rows, list):
        raise Unprocessable("the body must be a list of items")
    limit = request.app.state.services.settings.max_events
    if len(rows) > limit:
        raise PayloadTooLarge(
            f"a list has at most {limit} items, this one has {len(rows)}", code="too_many_items"
        )
    accepted, rejected = await service.upsert_rows(rows)
    outcome = {"accepted": accepted, "rejected": []}
    return await outcome_response(outcome, rows, rejected, _rejected_item)


def _rejected_item(row: tuple[int, ItemProblem]) -> dict[str, Any]:
    index, problem = row
    return {"index": index, "code": problem.code, "detail": problem.detail}


@router.get("/items/{item}", summary="Get an item", responses=problem_responses(404, 422))
@access(Role.RECOMMEND)
async def get_item(item: PathId, service: Service) -> ItemOut:
    """Returns an item. An item that an event created has no title."""
    return _item_out(await service.get(item))


@router.put(
    "/items/{item}",
    summary="Create or replace an item",
    responses={201: {"model": ItemOut}, **problem_responses(400, 409, 413, 415, 422)},
    openapi_extra=_body(_ITEM_SCHEMA),
)
@access(Role.CATALOG)
async def put_item(item: PathId, request: Request, response: Response, service: Service) -> ItemOut:
    """Stores an item. Missing fields get their defaults.

    The route also restores a deleted item.
    """
    written, created = await service.put(item, await read_json(request))
    if created:
        response.status_code = status.HTTP_201_CREATED
    return _item_out(written)


@router.patch(
    "/items/{item}",
    summary="Change an item",
    responses=problem_responses(400, 404, 409, 413, 415, 422),
    openapi_extra=_body(_ITEM_SCHEMA),
)
@access(Role.CATALOG)
async def patch_item(item: PathId, request: Request, service: Service) -> ItemOut:
    """Missing fields keep their values. A null value removes an attribute."""
    return _item_out(await service.patch(item, await read_json(request)))


@router.delete(
    "/items/{item}",
    status_code=204,
    summary="Delete an item",
    response_class=Response,
    responses=problem_responses(404, 422),
)
@access(Role.CATALOG)
async def delete_item(item: PathId, service: Service) -> Response:
    """Deletes an item. Lists never have a deleted item.

    The events of the item remain.
    """
    await service.delete(item)
    return Response(status_code=204)
