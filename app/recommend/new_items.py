"""Items that came after the training: a vector each, fitted once a few users took them up."""

from __future__ import annotations

import asyncio
import hashlib
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from app.catalog.service import CatalogService
from app.catalog.view import Catalogue
from app.core.logging import get_logger
from app.events.service import EventService
from app.events.takers import Taking
from app.recommend.serving import ServingModel
from app.recommend.trained import Trained

log = get_logger(__name__)

MANY = 50_000  # events read at a time
MOST_MET = 100_000  # items that are counted
MOST_ASKED, ASKED_AT_ONCE = 1_000, 20  # items whose users are asked for in one look, in a query
MOST_TAKERS = 1_024  # of an item are asked for, the latest: some may not be the model's,
MOST_USERS = 256  # and so many of those that are count
MOST_ITEMS = 1_000  # are added to a model, those with the most users
MOST_AT_ONCE = 100  # are fitted in one look: tens of milliseconds each
GROWN = 1.5  # times as many users as it was fitted to, and an item is fitted anew
LARGEST = 300_000  # items of a model that is still extended: beyond, its search is built too slowly


@dataclass(slots=True)
class _Met:
    """What happened to an item since its users were last asked for."""

    events: int = 0
    """Positive ones, of users whom the service knew before the training."""
    enough: int = 1
    """Fewer cannot make a difference. One that is met first may have users of long ago."""


@dataclass(slots=True)
class _Fitted:
    users: int
    vector: torch.Tensor


@dataclass(slots=True)
class _Takers:
    """An item's users as the model has them, the latest last."""

    rows: list[int]
    weights: torch.Tensor


@dataclass(slots=True)
class _Found:
    """What was read of the events since a version was trained."""

    base: weakref.ref[Trained]
    seq: int
    met: dict[int, _Met] = field(default_factory=dict)
    """By item; who was met last comes last."""
    fitted: dict[int, _Fitted] = field(default_factory=dict)


class NewItems:
    """Extends the model that serves. One task at a time may call it."""

    def __init__(self, events: EventService, catalog: CatalogService, least_users: int) -> None:
        self._events = events
        self._catalog = catalog
        self._least = least_users
        self._found: _Found | None = None

    async def extend(self, model: ServingModel) -> ServingModel | None:
        """The model with the items that have enough users by now; None if it has them already."""
        base = model.base
        # Loaded anew, the same version begins without what it had.
        if self._found is None or self._found.base() is not base:
            self._found = _Found(weakref.ref(base), base.trained_seq)
        if base.n_items > LARGEST:
            return None
        found = self._found
        await self._read(found, model)
        await self._fit(found, model)
        return await self._extended(found, model)

    async def _read(self, found: _Found, model: ServingModel) -> None:
        """Counts what happened to items that training has not seen."""
        base = model.base
        while rows := await self._events.met(found.seq, base.trained_seq, MANY):
            items, known, seqs = np.array(rows, dtype=np.int64).T
            own = model.rows(await self._catalog.catalogue()).at(items)
            new = ((own < 0) | (own >= base.n_items)) & (known > 0)
            for item, events in zip(items[new].tolist(), known[new].tolist(), strict=True):
                met = found.met.pop(item, _Met())
                met.events += events
                found.met[item] = met
            found.seq = int(seqs.max())
        while len(found.met) > MOST_MET:  # the next event about it makes it be asked about anew
            del found.met[next(iter(found.met))]

    async def _fit(self, found: _Found, model: ServingModel) -> None:
        """Fits the items whose users are enough, or many more than they were."""
        changed: dict[int, _Takers] = {}
        asked = self._to_ask(found, await self._catalog.catalogue())
        for start in range(0, len(asked), ASKED_AT_ONCE):
            part = asked[start : start + ASKED_AT_ONCE]
            for item, takers in (await self._takers(part, model)).items():
                n = len(takers.rows)
                if n < self._least:
                    found.fitted.pop(item, None)
                before = found.fitted[item].users if item in found.fitted else 0
                wanted = max(self._least, math.ceil(GROWN * before))
                if n >= wanted:
                    changed[item] = takers
                else:
                    found.met[item] = _Met(enough=wanted - n)
            if len(changed) >= MOST_AT_ONCE:
                break
        if not changed:
            return
        users = [model.vectors_of_rows(takers.rows) for takers in changed.values()]
        weights = [takers.weights for takers in changed.values()]
        vectors = await asyncio.to_thread(lambda: model.base.item_fold_in(users, weights))
        for (item, takers), vector in zip(changed.items(), vectors, strict=True):
            n = len(takers.rows)
            found.fitted[item] = _Fitted(n, vector)
            found.met[item] = _Met(enough=max(1, math.ceil(GROWN * n) - n))
        for item in _best(found)[MOST_ITEMS:]:
            del found.fitted[item]

    def _to_ask(self, found: _Found, catalogue: Catalogue) -> list[int]:
        """The items whose users may have become enough, those first to which most happened."""
        due = [
            item
            for item, met in found.met.items()
            if met.events >= met.enough and item not in catalogue.deleted
        ]
        return sorted(due, key=lambda item: (-found.met[item].events, item))[:MOST_ASKED]

    async def _takers(self, items: Sequence[int], model: ServingModel) -> dict[int, _Takers]:
        """Of each item those who took it up, and whose vector the model has."""
        taken = await self._events.takers(items, model.base.trained_seq, MOST_TAKERS)
        by_item: dict[int, list[Taking]] = {item: [] for item in items}
        for taking in taken:
            by_item[taking.item].append(taking)
        return {item: self._counted(own, model) for item, own in by_item.items()}

    def _counted(self, taken: Sequence[Taking], model: ServingModel) -> _Takers:
        latest = max((taking.timestamp for taking in taken), default=0)
        times = np.array([taking.timestamp for taking in taken], dtype=np.int64)
        decay = self._events.feedback.decay(times, latest).tolist()
        strongest: dict[int, float] = {}
        for taking, left in zip(taken, decay, strict=True):
            row = model.user_rows.get(taking.user)
            if row is not None:
                strongest[row] = max(strongest.get(row, 0.0), taking.weight * left)
        rows = list(strongest)[-MOST_USERS:]
        return _Takers(rows, torch.tensor([strongest[row] for row in rows]))

    async def _extended(self, found: _Found, model: ServingModel) -> ServingModel | None:
        catalogue = await self._catalog.catalogue()
        best = _best(found)
        names = [catalogue.external_ids[item] for item in best]
        vectors = torch.empty((0, 0))
        revision = ""
        if best:
            vectors = torch.stack([found.fitted[item].vector for item in best])
            content = vectors.numpy().tobytes() + "\0".join(names).encode()
            revision = hashlib.blake2b(content, digest_size=8).hexdigest()
        # Not only what has just been fitted: the model may have been loaded anew meanwhile, or
        # building the last one went wrong.
        if revision == model.revision:
            return None

        def build() -> ServingModel:
            larger = model.extended(names, vectors, revision)
            larger.rows(catalogue)
            larger.warm_up()
            return larger

        larger = await asyncio.to_thread(build)
        log.info("new items", version=model.version, items=len(names))
        return larger


def _best(found: _Found) -> list[int]:
    """The fitted items, those with the most users first."""
    return sorted(found.fitted, key=lambda item: (-found.fitted[item].users, item))
