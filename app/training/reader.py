"""Reads what a child process needs of the database and the checkpoint store."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from app.catalog.service import CatalogService
from app.core.database import Database
from app.core.settings import Settings
from app.events.service import EventService
from app.registry.checkpoint_store import CheckpointStore
from app.registry.service import ModelRegistry
from app.training.dataset import TrainingEvents
from app.training.gate import ServingModel, ServingModelReadError
from ncr_core.errors import CheckpointError, CheckpointReadError
from ncr_core.training import resolve_device

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

    def write(self, folder: Path, work: Callable[[], object]) -> None:
        """Does work that writes into a folder of checkpoints.

        Raises:
            CheckpointError: The folder could not be written all this time.
        """
        try:
            self(work, OSError)
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

    def sizes(self) -> tuple[int, int, int]:
        """Counts the events, users and items."""
        return self.read(_sizes)

    def training_events(self) -> TrainingEvents:
        """Reads all events and stated preferences."""
        return self.read(_training_events)

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
    catalogue = await features.catalog.catalogue()  # newer: it has all of the snapshot's items
    available = snapshot.items() - catalogue.deleted
    return TrainingEvents(snapshot, user_ids, {i: catalogue.external_ids[i] for i in available})
