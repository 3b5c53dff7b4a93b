"""HTTP routes of users. No token opens them, because pages must not see a user's attributes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, status
from pydantic import ValidationError
from starlette.responses import Response

from app.core.access import Role, access
from app.core.errors import PayloadTooLarge, Unprocessable, problem_responses
from app.core.requests import (
    IdPrefix,
    PageCursor,
    PageSize,
    PathId,
    StrictQuery,
    datetime_of,
    decode_cursor,
    invalid_body,
    next_cursor,
    outcome_response,
    read_json,
    text_problem,
)
from app.core.security import caller_of, role_missing
from app.events.user_schemas import (
    MergeIn,
    MergeOut,
    User,
    UserIn,
    UserOut,
    UserPage,
    UserProblem,
    UsersAnswer,
)
from app.events.user_service import UserService

router = APIRouter(tags=["users"], route_class=StrictQuery)


async def _service(request: Request) -> UserService:
    service: UserService = request.app.state.services.users
    return service


Service = Annotated[UserService, Depends(_service)]


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_USER_SCHEMA = UserIn.model_json_schema()


def _user_out(user: User) -> UserOut:
    return UserOut(id=user.id, attributes=user.attributes, created_at=datetime_of(user.created_at))


@router.get("/users", summary="List users, newest first", responses=problem_responses(422))
@access(Role.HISTORY)
async def list_users(
    service: Service, n: PageSize = 100, cursor: PageCursor = None, prefix: IdPrefix = None
) -> UserPage:
    """Lists the users that events, preferences or descriptions name."""
    users, next_below = await service.page(decode_cursor(cursor), n, prefix)
    return UserPage(items=[_user_out(user) for user in users], next_cursor=next_cursor(next_below))


@router.post(
    "/users",
    summary="Create or replace many users",
    response_model=UsersAnswer,
    responses=problem_responses(400, 413, 415, 422),
    openapi_extra=_body({"type": "array", "items": _USER_SCHEMA, "maxItems": 10_000}),
)
@access(Role.EVENTS)
async def post_users(request: Request, service: Service) -> Response:
    """Stores many users. Rejected users do not affect the other users.

    If several users have the same id, the last one wins.
    """
    rows = await read_json(request)
    if not isinstance(rows, list):
        raise Unprocessable("the body must be a list of users")
    limit = request.app.state.services.settings.max_events
    if len(rows) > limit:
        raise PayloadTooLarge(
            f"a list has at most {limit} users, this one has {len(rows)}", code="too_many_users"
        )
    accepted, rejected = await service.upsert_rows(rows)
    outcome = {"accepted": accepted, "rejected": []}
    return await outcome_response(outcome, rows, rejected, _rejected_user)


def _rejected_user(row: tuple[int, UserProblem]) -> dict[str, Any]:
    index, problem = row
    return {"index": index, "code": problem.code, "detail": problem.detail}


@router.get("/users/{user}", summary="Get a user", responses=problem_responses(404, 422))
@access(Role.HISTORY)
async def get_user(user: PathId, service: Service) -> UserOut:
    """Returns the attributes of a user.

    A user without a description has no attributes.
    """
    return _user_out(await service.get(user))


@router.put(
    "/users/{user}",
    summary="Create or replace a user",
    responses={201: {"model": UserOut}, **problem_responses(400, 409, 413, 415, 422)},
    openapi_extra=_body(_USER_SCHEMA),
)
@access(Role.EVENTS)
async def put_user(user: PathId, request: Request, response: Response, service: Service) -> UserOut:
    """Replaces the attributes of a user. The events of the user do not change."""
    written, created = await service.put(user, await read_json(request))
    if created:
        response.status_code = status.HTTP_201_CREATED
    return _user_out(written)


@router.patch(
    "/users/{user}",
    summary="Change a user's attributes",
    responses=problem_responses(400, 404, 409, 413, 415, 422),
    openapi_extra=_body(_USER_SCHEMA),
)
@access(Role.EVENTS)
async def patch_user(user: PathId, request: Request, service: Service) -> UserOut:
    """Missing attributes keep their values. A null value removes an attribute."""
    return _user_out(await service.patch(user, await read_json(request)))


@router.post(
    "/users/{user}/merge",
    summary="Merge a user into another",
    responses=problem_responses(400, 404, 409, 413, 415, 422),
    openapi_extra=_body(MergeIn.model_json_schema()),
)
@access(Role.DELETE)
async def merge_user(user: PathId, request: Request, service: Service) -> MergeOut:
    """Moves events and preferences to another user, then removes the merged user.

    A client calls this route when a visitor logs in. The key also needs the role `events`. A
    repeated request changes nothing and has the same response. Later events and preferences of the
    merged user belong to `into`.
    """
    if Role.EVENTS not in caller_of(request).roles:
        raise role_missing(Role.EVENTS)
    try:
        into = MergeIn.model_validate(await read_json(request), strict=True).into
    except ValidationError as error:
        raise invalid_body(error) from None
    if (problem := text_problem(into)) is not None:
        raise Unprocessable(f"into {problem}", code="invalid_id")
    merged = await service.merge(user, into)
    return MergeOut(
        id=user,
        into=merged.into,
        events=merged.events,
        preferences=merged.preferences,
        last_seq=merged.last_seq,
    )
