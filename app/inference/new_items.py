"""Items newer than the training: each gets a vector by its attributes and its users.

Where the model has a placement (`ncr_core.content`), an item with attributes has the predicted
vector at once, and a fit to the item's users then moves the vector. Any other item gets a vector
once enough users have a positive event on the item. The catalogue, the events and the model alone
determine these items, so that every server adds the same items.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from app.catalog.service import CatalogService
from app.catalog.snapshot import Catalogue
from app.core.logging import get_logger
from app.events.schemas import Adoption
from app.events.service import EventService
from app.inference.loaded_model import LoadedModel, TrainedModel
from ncr_core.content import ContentPlacement

log = get_logger(__name__)

READ_EVENTS = 50_000  # at a time
MAX_COUNTED = 100_000  # items whose events are counted
MAX_QUERIED, QUERY_ITEMS = 1_000, 20  # items whose users are read in one pass, in one query
MAX_ADOPTERS = 1_024  # users of an item that are read, the latest: some may not be the model's
MAX_USERS = 256  # of the model that an item is fitted to, the latest
MAX_ITEMS = 1_000  # with users that are added to a model, those with the most
MAX_PLACED = 10_000  # newest items without a row that are looked at for their attributes
PLACED_AT_ONCE = 500  # whose attributes are in memory
MAX_FITTED = 100  # in one pass: tens of milliseconds each
REFIT_FACTOR = 1.5  # times as many users as before, and an item is fitted anew
MAX_MODEL_ITEMS = 300_000  # beyond, the search of an extended model is built too slowly


@dataclass(slots=True)
class _Activity:
    """The events on an item since its users were last read."""

    events: int = 0
    """Positive events of users whom the service knew before the training."""
    threshold: int = 1
    """The number of events from which a fit is due: at first 1, as an item may have old users."""


@dataclass(slots=True)
class _FittedItem:
    users: int
    vector: torch.Tensor


@dataclass(slots=True)
class _ModelUsers:
    """An item's users whom the model knows, the latest last."""

    rows: list[int]
    weights: torch.Tensor
    number: int
    """The number of the model's users with a positive event on the item; ``rows`` has the latest.

    For an item with ``MAX_ADOPTERS`` users or more, all users of the model count.
    """


@dataclass(slots=True)
class _Progress:
    """The state of reading the events and attributes since the training of a version."""

    trained: weakref.ref[TrainedModel]
    seq: int
    activity: dict[int, _Activity] = field(default_factory=dict)
    """The activity by item; the item of the latest event comes last."""
    fitted: dict[int, _FittedItem] = field(default_factory=dict)
    catalog_seq: int = -1
    """The catalogue's number when attributes were last read."""
    placed: dict[int, torch.Tensor | None] = field(default_factory=dict)
    """The vector that attributes predict, by item, newest item first; None: no prediction."""

    def prior(self, item: int) -> torch.Tensor | None:
        """The vector that the item's attributes predict; None without a prediction."""
        return self.placed.get(item)

    def place(self, item: int, vector: torch.Tensor | None) -> None:
        """Stores a predicted vector, and makes a new fit of an item with users due."""
        self.placed[item] = vector
        if item in self.fitted:
            self.fitted[item] = _FittedItem(0, self.fitted[item].vector)
        if item in self.fitted or item in self.activity:
            events = self.activity[item].events if item in self.activity else 0
            self.activity[item] = _Activity(events, threshold=0)


class NewItems:
    """Extends a loaded model by new items, for one calling task at a time."""

    def __init__(self, events: EventService, catalog: CatalogService, min_users: int) -> None:
        self._events = events
        self._catalog = catalog
        self._min_users = min_users
        self._progress: _Progress | None = None

    async def is_behind(self, model: LoadedModel) -> bool:
        """Whether the catalogue has changed since attributes were last read."""
        if model.trained.checkpoint.content.items is None:
            return False
        progress = self._progress
        if progress is None or progress.trained() is not model.trained:
            return True
        return progress.catalog_seq < await self._catalog.catalog_seq()

    async def extend(self, model: LoadedModel) -> LoadedModel | None:
        """The model with the items that have a vector by now; None if there is no change.

        None also for a model with more than ``MAX_MODEL_ITEMS`` items.
        """
        trained = model.trained
        # Loaded anew, the same version begins without what it had.
        if self._progress is None or self._progress.trained() is not trained:
            self._progress = _Progress(weakref.ref(trained), trained.trained_seq)
        if trained.n_items > MAX_MODEL_ITEMS:
            return None
        progress = self._progress
        await self._place_items(progress, model)
        await self._count_events(progress, model)
        await self._fit_items(progress, model)
        return await self._extend(progress, model)

    async def _place_items(self, progress: _Progress, model: LoadedModel) -> None:
        """Predicts vectors of the newest items without a row from their attributes."""
        placement = model.trained.checkpoint.content.items
        catalogue = await self._catalog.catalogue()
        since = progress.catalog_seq
        if placement is None or since >= catalogue.seq:
            return
        wanted = _newest_unknown(catalogue, model)
        changed = set(await self._catalog.ids_changed_since(since, MAX_PLACED + 1))
        if len(changed) > MAX_PLACED:
            changed = set(wanted)
        for gone in progress.placed.keys() - set(wanted):
            progress.place(gone, None)
            del progress.placed[gone]
        due = [item for item in wanted if item in changed or item not in progress.placed]
        for start in range(0, len(due), PLACED_AT_ONCE):
            ids = due[start : start + PLACED_AT_ONCE]
            described = await self._catalog.described(ids)
            contents = {item: described[item].content() for item in ids if item in described}
            vectors = await asyncio.to_thread(_predict, placement, contents)
            for item in ids:
                progress.place(item, vectors.get(item))
        progress.placed = {item: progress.placed[item] for item in wanted}
        progress.catalog_seq = catalogue.seq

    async def _count_events(self, progress: _Progress, model: LoadedModel) -> None:
        """Counts the events on items that training has not seen."""
        trained = model.trained
        while rows := await self._events.new_item_usage(
            progress.seq, trained.trained_seq, READ_EVENTS
        ):
            items, known, seqs = np.array(rows, dtype=np.int64).T
            model_rows = model.items(await self._catalog.catalogue()).rows(items)
            new = ((model_rows < 0) | (model_rows >= trained.n_items)) & (known > 0)
            for item, events in zip(items[new].tolist(), known[new].tolist(), strict=True):
                activity = progress.activity.pop(item, _Activity())
                activity.events += events
                progress.activity[item] = activity
            progress.seq = int(seqs.max())
        while len(progress.activity) > MAX_COUNTED:  # the next event on an item counts it anew
            del progress.activity[next(iter(progress.activity))]

    async def _fit_items(self, progress: _Progress, model: LoadedModel) -> None:
        """Fits the items that have enough users, or many more users than at the last fit."""
        changed: dict[int, _ModelUsers] = {}
        due = self._due_items(progress, await self._catalog.catalogue())
        for start in range(0, len(due), QUERY_ITEMS):
            items = due[start : start + QUERY_ITEMS]
            for item, users in (await self._model_users(items, model)).items():
                n = len(users.rows)
                least = self._min_users if progress.prior(item) is None else 1
                if n < least:
                    progress.fitted.pop(item, None)
                fitted_to = progress.fitted[item].users if item in progress.fitted else 0
                required = max(least, math.ceil(REFIT_FACTOR * fitted_to))
                if n >= required:
                    changed[item] = users
                else:
                    progress.activity[item] = _Activity(threshold=required - n)
            if len(changed) >= MAX_FITTED:
                break
        if not changed:
            return
        user_vectors = [model.engine.trained_vectors(users.rows) for users in changed.values()]
        weights = [users.weights for users in changed.values()]
        numbers = [users.number for users in changed.values()]
        known = [progress.prior(item) for item in changed]

        def fit() -> torch.Tensor:
            fold_in = model.trained.item_fold_in
            if all(prior is None for prior in known):
                return fold_in(user_vectors, weights, numbers)
            nothing = torch.full((fold_in.size,), torch.nan)
            priors = torch.stack([nothing if prior is None else prior for prior in known])
            return fold_in(user_vectors, weights, numbers, priors)

        vectors = await asyncio.to_thread(fit)
        for (item, users), vector in zip(changed.items(), vectors, strict=True):
            n = len(users.rows)
            progress.fitted[item] = _FittedItem(n, vector)
            threshold = max(1, math.ceil(REFIT_FACTOR * n) - n)
            progress.activity[item] = _Activity(threshold=threshold)
        for item in _by_users(progress)[MAX_ITEMS:]:
            del progress.fitted[item]

    def _due_items(self, progress: _Progress, catalogue: Catalogue) -> list[int]:
        """Items that may have enough users by now, most events first."""
        due = [
            item
            for item, activity in progress.activity.items()
            if activity.events >= activity.threshold and item not in catalogue.deleted
        ]
        return sorted(due, key=lambda item: (-progress.activity[item].events, item))[:MAX_QUERIED]

    async def _model_users(
        self, items: Sequence[int], model: LoadedModel
    ) -> dict[int, _ModelUsers]:
        """The users of each item, as far as the model has their vectors."""
        adoptions = await self._events.adopters(items, model.trained.trained_seq, MAX_ADOPTERS)
        by_item: dict[int, list[Adoption]] = {item: [] for item in items}
        for adoption in adoptions:
            by_item[adoption.item].append(adoption)
        return {item: self._weigh(of_item, model) for item, of_item in by_item.items()}

    def _weigh(self, adoptions: Sequence[Adoption], model: LoadedModel) -> _ModelUsers:
        """The model's users in the adoptions, each with the largest weight of the user's events."""
        latest = max((adoption.timestamp for adoption in adoptions), default=0)
        times = np.array([adoption.timestamp for adoption in adoptions], dtype=np.int64)
        decay = self._events.event_weights.decay(times, latest).tolist()
        strongest: dict[int, float] = {}
        for adoption, left in zip(adoptions, decay, strict=True):
            row = model.user_rows.get(adoption.user)
            if row is not None:
                strongest[row] = max(strongest.get(row, 0.0), adoption.weight * left)
        rows = list(strongest)[-MAX_USERS:]
        # Of an item with more than are read nobody counts them: anybody may have taken it up.
        number = len(strongest) if len(adoptions) < MAX_ADOPTERS else len(model.user_rows)
        return _ModelUsers(rows, torch.tensor([strongest[row] for row in rows]), number)

    async def _extend(self, progress: _Progress, model: LoadedModel) -> LoadedModel | None:
        catalogue = await self._catalog.catalogue()
        vectors_of = {item: progress.fitted[item].vector for item in _by_users(progress)}
        for item, placed in progress.placed.items():
            if placed is not None:
                vectors_of.setdefault(item, placed)
        items = list(vectors_of)
        names = [catalogue.external_ids[item] for item in items]
        vectors = torch.empty((0, 0))
        revision = ""
        if items:
            vectors = torch.stack(list(vectors_of.values()))
            content = vectors.numpy().tobytes() + "\0".join(names).encode()
            revision = hashlib.blake2b(content, digest_size=8).hexdigest()
        # Not only what has just been fitted: the model may have been loaded anew meanwhile, or
        # building the last one went wrong.
        if revision == model.revision:
            return None

        def build() -> LoadedModel:
            extended = model.extended(names, vectors, revision)
            extended.items(catalogue)
            extended.engine.warm_up()
            return extended

        extended = await asyncio.to_thread(build)
        log.info("new items", version=model.version, items=len(names))
        return extended


def _newest_unknown(catalogue: Catalogue, model: LoadedModel) -> list[int]:
    """The newest listed items that training has not seen, at most ``MAX_PLACED``."""
    listed = np.flatnonzero(catalogue.listed)
    rows = model.items(catalogue).rows(listed)
    unknown = listed[(rows < 0) | (rows >= model.trained.n_items)]
    newest: list[int] = unknown[::-1][:MAX_PLACED].tolist()
    return newest


def _predict(
    placement: ContentPlacement, contents: Mapping[int, Mapping[str, Any]]
) -> dict[int, torch.Tensor]:
    """The predicted vectors by item, for items with attributes that the placement knows."""
    objects = list(contents.values())
    tells = np.diff(placement.encoder.encode(objects).indptr) > 0
    told = [item for item, tells_something in zip(contents, tells, strict=True) if tells_something]
    if not told:
        return {}
    vectors = placement.predict([contents[item] for item in told])
    return dict(zip(told, vectors, strict=True))


def _by_users(progress: _Progress) -> list[int]:
    """The fitted items, most users first."""
    return sorted(progress.fitted, key=lambda item: (-progress.fitted[item].users, item))
