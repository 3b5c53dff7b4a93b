"""The places of a list as they are sent and kept."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from app.catalog.view import Catalogue
from app.core.attribution import recommendation_id
from app.recommend.places import RankedItem


@dataclass(frozen=True, slots=True, eq=False)
class RankedList:
    """The items of an answer, ready to be sent."""

    json: bytes
    """Objects with commas between them."""
    ids: tuple[int, ...]
    """The catalogue's ids of the items."""

    def entries(self) -> list[dict[str, Any]]:
        """The objects again."""
        found: list[dict[str, Any]] = orjson.loads(b"[" + self.json + b"]")
        return found

    def followed_by(self, other: RankedList) -> RankedList:
        """Both, one after the other; their ranks must go on."""
        if not self.ids or not other.ids:
            return self if self.ids else other
        return RankedList(self.json + b"," + other.json, self.ids + other.ids)


EMPTY = RankedList(b"", ())


def entry(item: str, title: str | None, rank: int, source: str) -> dict[str, Any]:
    """A place of a list of which no model says anything."""
    return {
        "id": item,
        "title": title,
        "rank": rank,
        "score": None,
        "source": source,
        "preferred_over_next": None,
    }


def entry_of(
    catalogue: Catalogue,
    internal_id: int,
    rank: int,
    source: str,
    place: RankedItem | None = None,
    because: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """An item of the catalogue at its place, with what the model says of it, and, unless it is
    None, what it is due to."""
    made = entry(catalogue.external_ids[internal_id], catalogue.titles[internal_id], rank, source)
    if place is not None:
        made["score"] = round(place.score, 6)
        if place.preferred_over_next is not None:
            made["preferred_over_next"] = round(place.preferred_over_next, 6)
    if because is not None:
        made["because"] = because
    return made


def listed(entries: Sequence[dict[str, Any]], ids: Sequence[int]) -> RankedList:
    """Entries as a list; ``ids`` are the catalogue's."""
    return RankedList(orjson.dumps(entries)[1:-1], tuple(ids))


def answer_of(
    user: str,
    version: str | None,
    as_of_seq: int,
    items: bytes,
    started: float,
    recommendation_id: str,
) -> bytes:
    """The body of an answer that was ``started`` at this moment of the clock for performance."""
    return orjson.dumps(
        {
            "recommendation_id": recommendation_id,
            "user": user,
            "model_version": version,
            "as_of_seq": as_of_seq,
            "took_ms": round((time.perf_counter() - started) * 1000, 2),
            "items": orjson.Fragment(b"[" + items + b"]"),
        }
    )


def new_recommendation_id(of: str | None) -> str:
    """Carries what attribution needs: the model, or the trial, the time and a random part."""
    return recommendation_id(of or "none")


def digest_of(key: Hashable) -> str:
    """A name for a key that is the same in every process."""
    return hashlib.blake2b(
        repr(key).encode("utf-8", "backslashreplace"), digest_size=16
    ).hexdigest()


def encoded(found: RankedList) -> bytes:
    """A list for other servers."""
    return orjson.dumps({"ids": found.ids, "items": orjson.Fragment(b"[" + found.json + b"]")})


def decoded(value: bytes | None, catalogue: Catalogue) -> RankedList | None:
    """A list that another server has ranked; None for what no server can have written."""
    if value is None:
        return None
    try:
        read = orjson.loads(value)
        ids, items = tuple(read["ids"]), read["items"]
        same = [catalogue.external_ids[i] for i in ids] == [item["id"] for item in items]
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    return listed(items, ids) if same else None
