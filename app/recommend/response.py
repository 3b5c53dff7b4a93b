"""Serialisation of ranked lists, for responses and the list cache."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from app.catalog.snapshot import Catalogue
from app.recommend.basket import subject_of
from app.recommend.cursor import KEPT_SECONDS, MAX_PLACES, first_cursor
from app.recommend.schemas import RecommendationQuery, Source
from ncr_core.inference.engine import RankedItem

Entry = dict[str, Any]
"""An item of a list, as answers have it; see `schemas.RecommendedItem`."""


@dataclass(frozen=True, slots=True, eq=False)
class RankedList:
    """The items of an answer, ready to be sent."""

    json: bytes
    """The JSON objects of the items, separated by commas."""
    ids: tuple[int, ...]
    """The catalogue's ids of the items."""
    kept_cursor: list[tuple[Hashable, str]] = field(default_factory=list, repr=False)
    """The last cursor with its key, which `cursor` fills in."""

    @classmethod
    def of(cls, entries: Sequence[Entry], ids: Sequence[int]) -> RankedList:
        """A list of these entries; ``ids`` are the catalogue's ids of the items."""
        return cls(orjson.dumps(entries)[1:-1], tuple(ids))

    @classmethod
    def ranked(
        cls,
        catalogue: Catalogue,
        internal: NDArray[np.int64],
        source: Source,
        items: Sequence[RankedItem],
        *,
        explain: bool,
    ) -> RankedList:
        """A model's list; ``internal`` (n_items,) are the catalogue's ids of the model's rows."""
        ids = [int(internal[item.row]) for item in items]
        entries = [
            ranked_entry(catalogue, internal_id, rank, source, item)
            for rank, (internal_id, item) in enumerate(zip(ids, items, strict=True), 1)
        ]
        if explain:
            for entry, item in zip(entries, items, strict=True):
                entry["because"] = reasons(catalogue, internal, item)
        return cls.of(entries, ids)

    @classmethod
    def from_bytes(cls, value: bytes | None, catalogue: Catalogue) -> RankedList | None:
        """The list in bytes of another server; None for missing or invalid bytes."""
        if value is None:
            return None
        try:
            parsed = orjson.loads(value)
            ids, entries = tuple(parsed["ids"]), parsed["items"]
            same = [catalogue.external_ids[i] for i in ids] == [entry["id"] for entry in entries]
        except (ValueError, TypeError, KeyError, IndexError):
            return None
        return cls.of(entries, ids) if same else None

    def to_bytes(self) -> bytes:
        """The list as bytes for other servers."""
        return orjson.dumps({"ids": self.ids, "items": orjson.Fragment(b"[" + self.json + b"]")})

    @property
    def nbytes(self) -> int:
        """The memory of the list, in bytes."""
        return len(self.json) + 8 * len(self.ids)

    def cursor(
        self,
        query: RecommendationQuery,
        user: str,
        version: str | None,
        last_seq: int,
        basket: bytes = b"",
    ) -> str | None:
        """The cursor after this list; None where no places follow.

        The list keeps the cursor for the next request that the list answers.

        Args:
            query: the parameters of the list.
            user: the user of the list.
            version: the model version or the arm of a settings test that ranked the list.
            last_seq: the user's last seq at the ranking.
            basket: the key of the basket, as in `RecommendationContext`.
        """
        if len(self.ids) < query.n or len(self.ids) >= MAX_PLACES:
            return None
        at = int(time.time())
        key = (at // KEPT_SECONDS, user, version, last_seq, basket, query.list_digest)
        if self.kept_cursor and self.kept_cursor[0][0] == key:
            return self.kept_cursor[0][1]
        subject = subject_of(user, basket)
        text = first_cursor(self.ids, at, last_seq, version, subject, query.list_digest)
        self.kept_cursor[:] = [(key, text)]
        return text

    def entries(self) -> list[Entry]:
        """The entries of the items, parsed from the JSON."""
        entries: list[Entry] = orjson.loads(b"[" + self.json + b"]")
        return entries

    def followed_by(self, other: RankedList) -> RankedList:
        """This list and ``other`` after it; the ranks of ``other`` must continue this list's."""
        if not self.ids or not other.ids:
            return self if self.ids else other
        return RankedList(self.json + b"," + other.json, self.ids + other.ids)


EMPTY_LIST = RankedList(b"", ())


def popular_entry(item: str, title: str | None, rank: int, explain: bool = False) -> Entry:
    """The entry of an item that no model ranked."""
    entry: Entry = {
        "id": item,
        "title": title,
        "rank": rank,
        "score": None,
        "source": "popular",
        "preferred_over_next": None,
    }
    if explain:
        entry["because"] = []
    return entry


def ranked_entry(
    catalogue: Catalogue, internal_id: int, rank: int, source: Source, item: RankedItem
) -> Entry:
    """The entry of an item that a model ranked, without reasons."""
    ahead = item.preferred_over_next
    return {
        "id": catalogue.external_ids[internal_id],
        "title": catalogue.titles[internal_id],
        "rank": rank,
        "score": round(item.score, 6),
        "source": source,
        "preferred_over_next": None if ahead is None else round(ahead, 6),
    }


def reasons(catalogue: Catalogue, internal: NDArray[np.int64], item: RankedItem) -> list[Entry]:
    """The user's items that explain an item's place, the largest effect first.

    ``internal`` (n_items,) are the catalogue's ids of the model's rows.
    """
    return [
        {
            "id": catalogue.external_ids[internal[row]],
            "title": catalogue.titles[internal[row]],
            "effect": round(effect, 6),
        }
        for row, effect in item.because
    ]


def response_body(
    user: str | None,
    model_version: str | None,
    as_of_seq: int,
    ranked: RankedList,
    started: float,
    recommendation_id: str,
    next_cursor: str | None,
) -> bytes:
    """The body of an answer; ``started`` is a moment of `time.perf_counter`."""
    return orjson.dumps(
        {
            "recommendation_id": recommendation_id,
            "user": user,
            "model_version": model_version,
            "as_of_seq": as_of_seq,
            "took_ms": round((time.perf_counter() - started) * 1000, 2),
            "items": orjson.Fragment(b"[" + ranked.json + b"]"),
            "next_cursor": next_cursor,
        }
    )


def with_ignored(body: bytes, ignored: list[str]) -> bytes:
    """The body of an answer, with the unknown items of the request."""
    return body[:-1] + b',"ignored":' + orjson.dumps(ignored) + b"}"


def shared_list_name(key: Hashable) -> str:
    """The name of a list in Redis: the same in every process."""
    digest = hashlib.blake2b(repr(key).encode("utf-8", "backslashreplace"), digest_size=16)
    return f"list:{digest.hexdigest()}"
