"""The HTTP route of tokens: `POST /tokens`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import ValidationError

from app.core.access import Role, access
from app.core.errors import Unprocessable, problem_responses
from app.core.requests import StrictQuery, datetime_of, invalid_body, read_json, text_problem
from app.core.security import caller_of
from app.keys.schemas import TokenBody, TokenOut
from app.keys.service import KeyService

router = APIRouter(tags=["keys"], route_class=StrictQuery)


@router.post(
    "/tokens",
    summary="Sign a token for a user",
    responses=problem_responses(400, 409, 413, 415, 422),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": TokenBody.model_json_schema()}},
        }
    },
)
@access(Role.TOKENS)
async def sign_token(request: Request) -> TokenOut:
    """Returns a token for a browser, to send as `Authorization: Bearer`.

    The token permits `GET /recommend/{user}`, `POST /recommend` and `POST /events` for this user,
    and no other route. The token ends at its expiry, or when an operator revokes the key that
    requested it.
    """
    try:
        body = TokenBody.model_validate(await read_json(request))
    except ValidationError as error:
        raise invalid_body(error) from None
    if problem := text_problem(body.user):
        raise Unprocessable(f"user: {problem}", code="invalid_id")
    keys: KeyService = request.app.state.services.keys
    token, expires_at = await keys.sign_token(caller_of(request), body.user, body.ttl_s, body.roles)
    return TokenOut(token=token, expires_at=datetime_of(expires_at * 1_000_000))
