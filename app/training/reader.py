"""What a child process reads of the database and the checkpoint store: events, served model."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import psycopg
from sqlalchemy.exc import SQLAlchemyError

from app.catalog.service import CatalogService
from app.core.database import Database
from app.core.settings import Settings
from app.events.profile import FeedbackPositions, latest_preferences, resolve_feedback
from app.events.service import EventService
from app.events.training_snapshot import EventSnapshot
from app.registry.checkpoint_store import CheckpointStore
from app.registry.service import ModelRegistry
from ncr_core.checkpoint import Checkpoint, EvaluationSnapshot
from ncr_core.comparison import Incumbent
from ncr_core.data import Interactions
from ncr_core.data.interactions import BoolArray, FloatArray, IntArray, UserFeedback, row_indices
from ncr_core.errors import CheckpointError, CheckpointReadError, DataError
from ncr_core.train_config import resolve_device

T = TypeVar("T")

RETRY_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class Retry:
    """Tries again, for a while, what fails because a database or a store is away."""

    seconds: float
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, work: Callable[[], T], *failures: type[Exception]) -> T:
        """Does the work; raises the last of these failures when the time is over."""
        deadline = time.monotonic() + self.seconds
        while True:
            try:
                return work()
            except failures as error:
                if time.monotonic() > deadline:
                    raise
                # By its type alone: a driver's message may name hosts and accounts.
                reason = error.strerror if isinstance(error, OSError) else type(error).__name__
                print(f"tried again: {reason}", file=sys.stderr)
                self.sleep(RETRY_PAUSE_SECONDS)

    def write(self, folder: Path, work: Callable[[], T]) -> T:
        """Does work that writes into a folder of checkpoints.

        Raises:
            CheckpointError: The folder could not be written all this time.
        """
        try:
            return self(work, OSError)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be written: {error.strerror}") from None


def database_errors() -> tuple[type[Exception], ...]:
    """What reading the database may raise: events are read past SQLAlchemy."""
    return SQLAlchemyError, sqlite3.Error, psycopg.Error


@dataclass(frozen=True)
class Features:
    """The features that a child process reads from. Nothing is started or written."""

    catalog: CatalogService
    events: EventService
    models: ModelRegistry


@dataclass(frozen=True)
class TrainingEvents:
    """Events and stated preferences, and the clients' ids of their users and items."""

    snapshot: EventSnapshot
    user_ids: dict[int, str]
    """Clients' ids by internal ids. Users who were erased since the snapshot are missing."""
    item_ids: dict[int, str]
    """Of the items that may be recommended: all but deleted ones."""

    def interactions(self) -> Interactions:
        """Builds the matrix of positive interactions, with the users' other feedback beside it.

        Of a user's events about an item the latest that is no mere view counts, see
        `resolve_feedback`. Users and items without a client's id are left out, and so are users
        without anything to learn from.

        Raises:
            DataError: Nothing is left to learn from.
        """
        snapshot = self.snapshot
        if len(snapshot) == 0:
            raise DataError(
                "there are no events to learn from: post some to /events, or import a file"
            )
        available = np.fromiter(self.item_ids, np.int64, len(self.item_ids))
        existing = np.fromiter(self.user_ids, np.int64, len(self.user_ids))
        mask = np.isin(snapshot.item_id, available) & np.isin(snapshot.user_id, existing)
        if not mask.any():
            raise DataError("no event is about an item that may be recommended")
        events = np.stack([snapshot.user_id[mask], snapshot.item_id[mask]], axis=1)
        feedback = _resolve_feedback(events, snapshot.weight[mask])
        if len(feedback.liked) == 0:
            raise DataError("no event is positive by NCR_FEEDBACK: there is nothing to learn from")
        liked, disliked = events[feedback.liked], events[feedback.disliked]
        preferences = snapshot.preferences
        usable = np.isin(preferences[:, 1:3], available).all(axis=1)
        rows = np.flatnonzero(usable & np.isin(preferences[:, 0], existing))
        rows = rows[latest_preferences(preferences[rows, :3])]
        pairs, pair_weights = preferences[rows, :3], snapshot.preference_weight[rows]

        users = np.unique(np.concatenate([liked[:, 0], pairs[:, 0]]))
        items = np.unique(np.concatenate([liked[:, 1], disliked[:, 1], pairs[:, 1:].flatten()]))
        seen = _rows(events[feedback.only_seen], users, items)
        disliked = _rows(disliked, users, items)
        in_matrix = (disliked >= 0).all(axis=1)
        user_feedback = UserFeedback(
            seen[(seen >= 0).all(axis=1)],
            disliked[in_matrix],
            feedback.disliked_weights[in_matrix],
            _rows(pairs, users, items),
            pair_weights,
        )
        user_rows, item_rows = _rows(liked, users, items).T
        # A snapshot is ordered by user, time and seq already.
        return Interactions.from_arrays(
            user_rows,
            item_rows,
            user_ids=[self.user_ids[user] for user in users.tolist()],
            item_ids=[self.item_ids[item] for item in items.tolist()],
            weights=feedback.liked_weights if np.ptp(feedback.liked_weights) > 0 else None,
            feedback=user_feedback if len(user_feedback) else None,
            times=snapshot.timestamp[mask][feedback.liked] / 1e6,
        )

    def known_at(
        self, interactions: Interactions, users: BoolArray, seq: int
    ) -> tuple[Interactions, Interactions]:
        """The part of some users' interactions that was known when all up to ``seq`` had come in.

        Args:
            interactions: All interactions.
            users: (n_users,) mask of the users.
            seq: The seq up to which the incumbent was trained.

        Returns:
            The interactions that had an event by then, whatever its type means, and those whose
            item the user had named by then in a stated preference, taken back later or not.
        """
        snapshot, preferences = self.snapshot, self.snapshot.preferences
        named = np.concatenate([preferences[:, [0, 1, 4]], preferences[:, [0, 2, 4]]])
        return (
            self._select(
                interactions, users, snapshot.user_id, snapshot.item_id, snapshot.seq, seq
            ),
            self._select(interactions, users, named[:, 0], named[:, 1], named[:, 2], seq),
        )

    def _select(
        self,
        interactions: Interactions,
        users: BoolArray,
        user_id: IntArray,
        item_id: IntArray,
        seqs: IntArray,
        seq: int,
    ) -> Interactions:
        """Those of the users' interactions that are among these pairs of internal ids."""
        n_items = interactions.n_items
        old = seqs <= seq
        user = _rows_by_name(user_id[old], self.user_ids, interactions.user_ids)
        item = _rows_by_name(item_id[old], self.item_ids, interactions.item_ids)
        known = (user >= 0) & (item >= 0)
        known &= users[user]  # −1 is any user, and left out already
        mask = users[interactions.users]
        keys = interactions.users[mask] * n_items + interactions.items[mask]
        selected = mask.copy()
        selected[mask] = np.isin(keys, user[known] * n_items + item[known])
        return interactions.select(selected)


class ServingModelReadError(CheckpointError):
    """The checkpoint of the served version is damaged or gone."""

    def __init__(self, version: str, reason: str) -> None:
        super().__init__(reason)
        self.version = version


@dataclass(frozen=True)
class ServingModel:
    """The version that was active when it was loaded."""

    version: str
    trained_seq: int
    checkpoint: Checkpoint
    evaluated: EvaluationSnapshot | None
    """The model as it was evaluated; None in checkpoints written before these were kept."""


@dataclass(frozen=True)
class IncumbentComparison:
    """What a challenger is compared with: the model that is served at that moment."""

    serving_model: Callable[[], ServingModel | None]
    """Loads it; see `TrainingReader.serving_model`."""
    events: TrainingEvents
    """What the challenger's data were made of."""
    margin: float
    """By which share of the incumbent's NDCG@10 the challenger may be worse."""

    def load(
        self, interactions: Interactions, users: BoolArray
    ) -> tuple[ServingModel, Incumbent] | None:
        """The served model, and as the incumbent on these users; None if no model is served.

        Args:
            interactions: The challenger's data.
            users: (n_users,) mask of its users.

        Raises:
            ServingModelReadError: Its checkpoint is damaged or gone.
            CheckpointError: Its checkpoint could not be read, which says nothing about it.
        """
        serving = self.serving_model()
        if serving is None:
            return None
        evaluated, checkpoint = serving.evaluated, serving.checkpoint
        if evaluated is None:
            # It has learned everything that there was: only newer interactions are fair.
            rows = np.arange(len(checkpoint.user_ids))
            evaluated = EvaluationSnapshot(checkpoint.model, rows, np.full((len(rows), 2), -1))
        known = self.events.known_at(interactions, users, serving.trained_seq)
        return serving, Incumbent(evaluated, checkpoint.user_ids, checkpoint.item_ids, *known)


class TrainingReader:
    """Reads events, catalogue and models, each time through a connection of its own.

    Every method blocks, and retries while the database is away.
    """

    def __init__(
        self, settings: Settings, store: CheckpointStore, device: str, retry: Retry
    ) -> None:
        self.settings = settings
        self.device = device
        self.retry = retry
        self._store = store
        self._serving_model: ServingModel | None = None

    def read(self, query: Callable[[Features], Awaitable[T]], *failures: type[Exception]) -> T:
        """Runs a query; retries it on a database error and on these failures."""

        async def connect_and_query() -> T:
            database = Database(self.settings.effective_database_url)
            try:
                catalog = CatalogService(database)
                events = EventService(database, catalog, self.settings)
                return await query(Features(catalog, events, ModelRegistry(database, self._store)))
            finally:
                await database.close()

        return self.retry(lambda: asyncio.run(connect_and_query()), *database_errors(), *failures)

    def check_store(self, version: str) -> None:
        """Checks that the files of a version may be written: before an hour of training is spent.

        The disk may still be full at its end.

        Raises:
            ForeignStore: The store belongs to another database, which would remove the files.
            CheckpointError: The store's folder cannot be written.
        """
        self.read(lambda features: features.models.check_store())
        folder = self._store.folder(version).resolve().parent

        def try_to_write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")

        self.retry.write(folder, try_to_write)

    def training_data(self) -> tuple[Interactions, TrainingEvents]:
        """Reads all events and stated preferences, and makes of them what is trained on.

        Raises:
            DataError: There is nothing to learn from.
        """
        events = self.read(_training_events)
        return events.interactions(), events

    def sizes(self) -> tuple[int, int, int]:
        """Counts the events, users and items."""
        return self.read(_sizes)

    def serving_model(self) -> ServingModel | None:
        """Loads the model that is served now, if there is one; the same one is loaded only once.

        Raises:
            ServingModelReadError: Its checkpoint is damaged or gone.
            CheckpointError: Its checkpoint could not be read, which says nothing about it.
        """
        self._serving_model = self.read(self._load_serving_model, CheckpointReadError)
        return self._serving_model

    async def _load_serving_model(self, features: Features) -> ServingModel | None:
        row = await features.models.serving()
        loaded = self._serving_model
        if row is None or (loaded is not None and loaded.version == row.version):
            return None if row is None else loaded
        device = str(resolve_device(self.device))
        try:
            checkpoint, evaluated = await features.models.load_measured(row, device)
        except CheckpointReadError:
            raise
        except CheckpointError as error:
            raise ServingModelReadError(row.version, str(error)) from None
        return ServingModel(row.version, row.trained_seq, checkpoint, evaluated)


async def _sizes(features: Features) -> tuple[int, int, int]:
    return *(await features.events.sizes()), await features.catalog.size()


async def _training_events(features: Features) -> TrainingEvents:
    snapshot = await features.events.snapshot_for_training()
    user_ids = await features.events.external_users(snapshot.users())
    item_ids = await features.catalog.external_ids_of(snapshot.items(), deleted=False)
    return TrainingEvents(snapshot, user_ids, item_ids)


def _resolve_feedback(events: IntArray, weights: FloatArray) -> FeedbackPositions:
    """What users like, dislike or have only seen, of (n, 2) users and items.

    Where all weights are the same, what is liked repeats as events do.
    """
    if weights[0] > 0 and (weights == weights[0]).all():
        none = np.zeros(0, dtype=np.int64)
        return FeedbackPositions(np.arange(len(events)), weights, none, weights[:0], none)
    items, columns = np.unique(events[:, 1], return_inverse=True)
    return resolve_feedback(events[:, 0] * len(items) + columns, weights)


def _rows(pairs: IntArray, users: IntArray, items: IntArray) -> IntArray:
    """Matrix rows of (n, 1 + k) internal ids, a user and k items; −1 for those not in it."""
    columns = [_positions(users, pairs[:, 0])]
    columns += [_positions(items, column) for column in pairs.T[1:]]
    return np.stack(columns, axis=1)


def _positions(ascending: IntArray, ids: IntArray) -> IntArray:
    """The position of each id among ascending ids; −1 for those that are not among them."""
    position = np.minimum(np.searchsorted(ascending, ids), len(ascending) - 1)
    return np.where(ascending[position] == ids, position, -1)


def _rows_by_name(ids: IntArray, names: dict[int, str], row_names: Sequence[str]) -> IntArray:
    """Matrix rows of internal ids by their clients' ids; −1 for those without a row."""
    distinct, inverse = np.unique(ids, return_inverse=True)
    rows: IntArray = row_indices([names.get(i, "") for i in distinct.tolist()], row_names)[inverse]
    return rows
