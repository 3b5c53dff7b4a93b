"""The attributes of items and users in a training, and the maps that a training learns from them.

Memory is bounded for any number of stored attributes: the regression takes the items and users with
the most interactions. These rows tell more of the effect of attributes than the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from app.training.reader import Features, TrainingReader
from ncr_core.content import ContentMaps, ContentPlacement, map_items, map_users
from ncr_core.data import Interactions
from ncr_core.data.interactions import IntArray
from ncr_core.models import PairwiseRanker

MAX_DESCRIBED = 50_000  # items, and users, that are read
MAX_DESCRIBED_BYTES = 2**26  # of their attributes as JSON; in memory it is some five times as much
CHUNK_ROWS = 1_000

Described = Mapping[str, Mapping[str, Any]]
"""Attributes by the client's id."""
ReadDescribed = Callable[[str, Sequence[str]], Described]
"""Reads the attributes of ``items`` or ``users`` with these ids, as far as there are any."""


class Descriptions:
    """Reads attributes, and learns the placements of a model's items and users.

    Args:
        read: reads the attributes.
        names: the attributes to use; None: the attributes that reduce the error on items left out.
    """

    def __init__(self, read: ReadDescribed, names: Sequence[str] | None = None) -> None:
        self._read = read
        self._names = names

    @classmethod
    def of(cls, reader: TrainingReader, names: Sequence[str] | None) -> Descriptions:
        """The descriptions in the database."""

        def read(what: str, ids: Sequence[str]) -> Described:
            async def query(features: Features) -> Described:
                if what == "users":
                    return await features.users.attributes_of(ids)
                found = await features.catalog.by_external_ids(ids)
                return {name: item.content() for name, item in found.items()}

            return reader.read(query)

        return cls(read, names)

    def maps(self, model: PairwiseRanker, interactions: Interactions) -> ContentMaps:
        """The maps for a trained model and the interactions of its training."""
        user_ids = interactions.user_ids[: model.n_users]
        user_counts = np.diff(interactions.indptr[: model.n_users + 1])
        of_items = self._objects("items", interactions.item_ids, interactions.item_counts())
        of_users = self._objects("users", user_ids, user_counts)
        items = users = None
        if of_items is not None:
            items = map_items(model, *of_items, self._names)
        if of_users is not None:
            users = map_users(model, *of_users, self._names)
        return ContentMaps(items, users)

    def _objects(
        self, what: str, ids: Sequence[str], counts: IntArray
    ) -> tuple[list[Mapping[str, Any]], IntArray] | None:
        """The attributes and the weight of each row; None where no row has attributes.

        Rows beyond the limits have weight 0.
        """
        objects: list[Mapping[str, Any]] = [{}] * len(ids)
        weights = np.zeros_like(counts)
        order = np.argsort(-counts, kind="stable")[:MAX_DESCRIBED]
        size = 0
        for start in range(0, len(order), CHUNK_ROWS):
            rows = order[start : start + CHUNK_ROWS].tolist()
            found = self._read(what, [ids[row] for row in rows])
            for row in rows:
                objects[row] = found.get(ids[row], {})
                weights[row] = counts[row]
            size += len(orjson.dumps(list(found.values())))
            if size > MAX_DESCRIBED_BYTES:
                break
        return (objects, weights) if any(objects) else None


def report_of(maps: ContentMaps) -> dict[str, Any]:
    """The metrics of a model's maps: attributes, and the share of variance that they explain."""

    def of(placement: ContentPlacement) -> dict[str, Any]:
        return {"attributes": placement.encoder.names, "explained": round(placement.explained, 4)}

    parts = {"items": maps.items, "users": maps.users}
    return {name: of(part) for name, part in parts.items() if part is not None}
