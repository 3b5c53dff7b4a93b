"""The page "Which of the two?": a click states a preference, and the list beside it changes."""

from __future__ import annotations

import math
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from app.core.access import Role, access
from app.core.errors import AppError, NotFound, Unprocessable
from app.core.middleware import header
from app.core.tables import now_us
from app.dashboard.questions import questions_soon
from app.dashboard.rendering import (
    MAX_FORM_BYTES,
    PAGE_HEADERS,
    ROOT,
    PageRoute,
    go_to,
    lists_of,
    path_of,
    read_form,
    render,
    services_of,
)
from app.dashboard.users import categories_of, entries_of
from app.events.throw_away import KEEP_HOURS, is_throw_away, new_throw_away_id
from app.recommend.schemas import UNRULED, RecommendationQuery

router = APIRouter(route_class=PageRoute, include_in_schema=False)

LIST_ITEMS = 10
SAID = 8
WAIT_SECONDS = 3.0  # for a question
POLL_SECONDS = 0.5  # and for one that a page asks about again, every two seconds
MAX_BITS = 10_000.0


def _visitor(user: str | None) -> str:
    """The throw-away user of the page. Raises Unprocessable for other users."""
    if not user:
        return new_throw_away_id()
    if not is_throw_away(user):
        raise Unprocessable("this page is for throw-away users only", code="no_visitor")
    return user


def _bits(text: str | None) -> float:
    """The information so far, in bits, which the page sends; 0 for a text that is no number."""
    try:
        value = float(text or 0)
    except ValueError:
        return 0.0
    return min(max(value, 0.0), MAX_BITS) if math.isfinite(value) else 0.0


@router.get(f"{ROOT}/which")
@access(Role.RECOMMEND, page=True)
async def which(
    request: Request,
    user: Annotated[str | None, Query(max_length=64)] = None,
    bits: Annotated[str | None, Query(max_length=32)] = None,
) -> Response:
    """Two items and the list; 204 for a page that asks for questions before they are ready."""
    asks_again = header(request.scope, b"hx-request") is not None
    if asks_again and await questions_soon(request, _visitor(user), 1, POLL_SECONDS) is None:
        return Response(status_code=204, headers=PAGE_HEADERS)
    context = await _context(request, _visitor(user), _bits(bits), None)
    return render(request, "_which.html" if asks_again else "which.html", **context)


@router.post(f"{ROOT}/which")
@access(Role.EVENTS, page=True, max_body_bytes=MAX_FORM_BYTES)
async def answer(request: Request) -> Response:
    """Stores the preference and shows the items that moved."""
    form = await read_form(request)
    user, bits = _visitor(form.get("user")), _bits(form.get("bits"))
    winner, loser = form.get("winner", ""), form.get("loser", "")
    feature = lists_of(request)
    query = RecommendationQuery(LIST_ITEMS)
    before, _ = await feature.service.preview(user, query)
    expected = await _probability(request, user, winner, loser)
    row = {"user": user, "winner": winner, "loser": loser}
    result = await services_of(request).events.add_preferences([row], now_us())
    if result.rejected:
        raise Unprocessable(result.rejected[0].detail, code=result.rejected[0].code)
    learned = _bits(form.get("information"))
    bits += learned
    if not header(request.scope, b"hx-request"):
        return go_to(f"{path_of('which')}?user={user}&bits={bits:.4f}")
    last = {"expected": expected, "learned": learned}
    places = {entry["id"]: entry["rank"] for entry in before.entries()}
    return render(request, "_which.html", **await _context(request, user, bits, places, last))


@router.get(f"{ROOT}/which/forget")
@access(Role.ERASE, page=True)
async def confirm_forget(request: Request) -> Response:
    """Redirects to a new throw-away user."""
    return go_to(path_of("which"))


@router.post(f"{ROOT}/which/forget")
@access(Role.ERASE, page=True, max_body_bytes=MAX_FORM_BYTES)
async def forget(request: Request) -> Response:
    """Erases the throw-away user and begins anew."""
    user = _visitor((await read_form(request)).get("user"))
    try:
        await services_of(request).events.delete_user(user)
    except NotFound:
        pass  # nothing was said yet
    return go_to(path_of("which"))


async def _probability(request: Request, user: str, winner: str, loser: str) -> float | None:
    """The model's probability of the answer; None if the model does not know both items."""
    try:
        comparison = await lists_of(request).rerank.compare(
            user, [winner, loser], RecommendationQuery(2, **UNRULED)
        )
    except AppError:
        return None
    return comparison.probability[0][1] if len(comparison.items) == 2 else None


async def _context(
    request: Request,
    user: str,
    bits: float,
    before: dict[str, int] | None,
    last: dict[str, Any] | None = None,
) -> dict[str, Any]:
    services, feature = services_of(request), lists_of(request)
    catalogue = await services.catalog.catalogue()
    ranked, model = await feature.service.preview(user, RecommendationQuery(LIST_ITEMS))
    questions = await questions_soon(request, user, 1, WAIT_SECONDS)
    question = None if questions is None else next(iter(questions.items), None)
    entries = await entries_of(request, ranked.entries(), catalogue)
    if before is not None:
        entries = [
            entry | {"before": before.get(entry["id"]), "compared": True} for entry in entries
        ]
    asked = [] if question is None else [question.a.id, question.b.id]
    categories = await categories_of(request, asked, catalogue)
    profile = await services.events.profiles.get(user)
    said = [
        (catalogue.titles[a] or catalogue.external_ids[a],
         catalogue.titles[b] or catalogue.external_ids[b])
        for a, b in profile.pairs[-SAID:][::-1].tolist()
    ]  # fmt: skip
    probability = None
    if question is not None and model is not None:
        probability = await _probability(request, user, question.a.id, question.b.id)
    return {
        "user": user,
        "kept_hours": KEEP_HOURS,
        "question": question,
        "reason": "not_ready" if questions is None else questions.reason,
        "categories": categories,
        "probability": probability,
        "entries": entries,
        "bits": bits,
        "said": said,
        "answers": len(profile.pairs),
        "last": last,
        "model": model is not None,
        "moved": sum(
            1 for entry in entries if entry.get("compared") and entry["before"] != entry["rank"]
        ),
    }
