"""Items that came after the training: a vector each, fitted once a few users took them up."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch

from app.catalog.service import CatalogService
from app.core.logging import get_logger
from app.events.service import EventService
from app.recommend.serving import ServingModel
from ncr_core.fold_in import ItemFoldIn

log = get_logger(__name__)

MANY = 50_000  # events read at a time
MOST_USERS = 256  # of an item are looked at, the first ones
MOST_ITEMS = 1_000  # are added to a model, those with the most users
MOST_AT_ONCE = 100  # are fitted in one look: tens of milliseconds each
GROWN = 1.5  # times as many users as it was fitted to, and an item is fitted anew
LARGEST = 300_000  # items of a model that is still extended: beyond, its search is built too slowly


@dataclass(slots=True)
class _Found:
    """What was read of the events since a version was trained."""

    version: str
    seq: int
    users: dict[int, dict[int, None]] = field(default_factory=dict)
    """Item → its users, internal ids, in the order in which they came."""
    fitted: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)
    """Item → how many users it was fitted to, and its vector."""


class NewItems:
    """Extends the model that serves. One task at a time may call it."""

    def __init__(self, events: EventService, catalog: CatalogService, least_users: int) -> None:
        self._events = events
        self._catalog = catalog
        self._least = least_users
        self._found: _Found | None = None
        self._fold_in: ItemFoldIn | None = None

    async def extend(self, model: ServingModel) -> ServingModel | None:
        """The model with the items that have enough users by now; None if it has them already."""
        base = model.base
        if base.n_items > LARGEST:
            return None
        if self._found is None or self._found.version != base.version:
            self._found, self._fold_in = _Found(base.version, base.trained_seq), None
        found = self._found
        await self._read(found, base)
        rows = await self._known_users(found, base)
        changed = [
            item
            for item, own in rows.items()
            if len(own) >= max(self._least, GROWN * found.fitted.get(item, (0,))[0])
        ]
        changed = sorted(changed, key=lambda item: (-len(rows[item]), item))[:MOST_AT_ONCE]
        if not changed:
            return None
        if self._fold_in is None:
            self._fold_in = await asyncio.to_thread(base.item_fold_in)
        users = [base.vectors_of_rows(rows[item]) for item in changed]
        vectors = await asyncio.to_thread(self._fold_in, users)
        for item, vector in zip(changed, vectors, strict=True):
            found.fitted[item] = (len(rows[item]), vector)
        return await self._extended(found, base)

    async def _read(self, found: _Found, base: ServingModel) -> None:
        while True:
            new = await self._events.new_events(found.seq, MANY)
            if not new:
                return
            catalogue = await self._catalog.catalogue()
            items = np.array([item for _, _, item in new], dtype=np.int64)
            unknown = base.rows(catalogue).at(items) < 0
            for at in np.flatnonzero(unknown).tolist():
                _, user, item = new[at]
                users = found.users.setdefault(item, {})
                if len(users) < MOST_USERS:
                    users[user] = None
            found.seq = new[-1][0]
            if len(new) < MANY:
                return

    async def _known_users(self, found: _Found, base: ServingModel) -> dict[int, list[int]]:
        """The model's rows of the users of each item that has enough of them."""
        enough = {item: own for item, own in found.users.items() if len(own) >= self._least}
        names = await self._events.external_users({user for own in enough.values() for user in own})
        row_of = {user: base.user_rows.get(name) for user, name in names.items()}
        return {
            item: [row for user in own if (row := row_of.get(user)) is not None]
            for item, own in enough.items()
        }

    async def _extended(self, found: _Found, base: ServingModel) -> ServingModel:
        catalogue = await self._catalog.catalogue()
        best = sorted(found.fitted, key=lambda item: (-found.fitted[item][0], item))[:MOST_ITEMS]
        names = [catalogue.external_ids[item] for item in best]
        vectors = torch.stack([found.fitted[item][1] for item in best])
        content = vectors.numpy().tobytes() + "\0".join(names).encode()
        revision = hashlib.blake2b(content, digest_size=8).hexdigest()

        def build() -> ServingModel:
            model = base.extended(names, vectors, revision)
            model.warm_up()
            return model

        model = await asyncio.to_thread(build)
        log.info("new items", version=base.version, items=len(names))
        return model
