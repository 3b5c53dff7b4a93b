"""A child process's reads of the database and the store, and the memory check of a training.

The check refuses a training that does not fit in memory before the training begins. Otherwise the
system would kill the process in the middle of the training.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psycopg
import torch
from sqlalchemy.exc import SQLAlchemyError

from app.catalog.service import CatalogService
from app.core.database import Database
from app.core.settings import Settings
from app.events import training_snapshot
from app.events.service import EventService
from app.events.training_snapshot import TrainingSnapshot
from app.events.user_service import UserService
from app.jobs.schemas import TrainParams
from app.registry.checkpoint_store import CheckpointStore
from app.registry.service import ModelRegistry
from ncr_core.data import Interactions
from ncr_core.errors import CheckpointError, TrainingError
from ncr_core.models import build_model
from ncr_core.models.user_embeddings import PooledUsers
from ncr_core.recipes import (
    AUTO_RECIPE,
    CLOSED_FORM_FACTORS,
    SMALL_DATA,
    Recipe,
    affordable_start_factors,
    auto_recipes,
)
from ncr_core.training.batches import may_be_parted
from ncr_core.training.next_item import MAX_ROWS, OVERSAMPLED
from ncr_core.training.ranks import SHARDED_KINDS

T = TypeVar("T")

RETRY_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class Retry:
    """Retries work, for a while, that fails because a database or a store is unavailable."""

    seconds: float
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, work: Callable[[], T], *failures: type[Exception]) -> T:
        """Does the work; raises the last of these failures after ``seconds``."""
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
            CheckpointError: The folder could not be written for ``seconds``.
        """
        try:
            return self(work, OSError)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be written: {error.strerror}") from None


def database_errors() -> tuple[type[Exception], ...]:
    """The errors of database reads, with the drivers' errors, as event reads bypass SQLAlchemy."""
    return SQLAlchemyError, sqlite3.Error, psycopg.Error


@dataclass(frozen=True)
class Features:
    """The features that a child process reads from, without background tasks."""

    catalog: CatalogService
    events: EventService
    models: ModelRegistry
    users: UserService


class TrainingReader:
    """Reads events, catalogue and models, each time through a new connection.

    Every method blocks, and retries while the database is unavailable.
    """

    def __init__(
        self, settings: Settings, store: CheckpointStore, device: str, retry: Retry
    ) -> None:
        self.settings = settings
        self.device = device
        self.retry = retry
        self._store = store

    def read(self, query: Callable[[Features], Awaitable[T]], *failures: type[Exception]) -> T:
        """Runs a query; retries it on a database error and on these failures."""

        async def connect_and_query() -> T:
            database = Database(self.settings.effective_database_url)
            try:
                catalog = CatalogService(database)
                events = EventService(database, catalog, self.settings)
                models, users = ModelRegistry(database, self._store), UserService(database)
                return await query(Features(catalog, events, models, users))
            finally:
                await database.close()

        return self.retry(lambda: asyncio.run(connect_and_query()), *database_errors(), *failures)

    def read_events(self, params: TrainParams) -> tuple[Interactions, TrainingSnapshot]:
        """The interactions for a training, and their snapshot, which the caller has to close.

        Raises:
            TrainingError: The training does not fit in memory, or its files do not fit on the disk,
                cannot be written or cannot be read.
            DataError: No user likes an available item.
        """
        limit = self.settings.train_memory_bytes
        ranks = RanksHere.of(self.settings)
        folder = self.settings.trainings_folder

        def check(*sizes: int) -> None:
            of_events, of_users, of_items = sizes
            numbers = (of_events, of_users, of_items)
            check_memory(params, numbers, limit, ranks)
            of_ranks = self.settings.effective_train_folder if ranks.elsewhere else None
            check_disk(params, folder, numbers, of_ranks, sharded=ranks.sharded)

        def read() -> TrainingSnapshot:
            return training_snapshot.take_snapshot(self.settings, folder, check)

        try:
            with ExitStack() as stack:
                snapshot = stack.enter_context(self.retry(read, *database_errors()))
                interactions = snapshot.interactions(MAX_REMEMBERED)
                stack.pop_all()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else type(error).__name__
            raise TrainingError(
                f"the files of the training in {folder} cannot be written or read: {reason}"
            ) from None
        return interactions, snapshot

    def check_store(self, version: str) -> None:
        """Checks, before a long training, that the files of a version may be written.

        The disk may still be full at the end of the training.

        Raises:
            ForeignStore: The store belongs to another database, which would remove the files.
            CheckpointError: The store's folder cannot be written.
        """
        self.read(lambda features: features.models.claim_store(required=False))
        folder = self._store.folder(version).resolve().parent

        def try_to_write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")

        self.retry.write(folder, try_to_write)


MAX_REMEMBERED = 1_000_000
"""The most users whose pooled vectors a model keeps, see ``Interactions.remembered``.

The vectors of other users are made when they ask. The memory of servers, the checkpoint and the
time of making the vectors are thus bounded for any number of users.
"""

# By the peak of benchmarks/results/faults.json, of which the estimate is some half more.
SURPLUS = 1.5
BASE_BYTES = 1_100 * 2**20  # with the libraries, and what training on next to nothing takes
# SURPLUS times what benchmarks/results/training_memory.json has, and 64 B for weights or an ALS
# start. The matrix is in files.
EVENT_BYTES = 110
JOB_EVENT_BYTES = 40  # of a job whose ranks train: its masks, and 24 B for what is only seen
ROW_BYTES = 400  # the id of a user or an item
SOLVED_ROW_BYTES = 400  # of the closed form, which sees so many positives at most
SOLVED_BLOCKS = 8  # matrices of items by factors, while the closed form is solved
RANK_BYTES = 600 * 2**20  # of a process that trains, with its libraries
RANK_EVENT_BYTES = 80  # with 8 B for the item since ranks hold it: keys, and what is drawn
TABLE_COPIES = 6  # of the parameters: their best, gradients, two moments, and what was evaluated
START_COPIES = 4  # of a start beside them: its closed form, what was evaluated, and what is served
MAX_REPEATS = 4  # events of one interaction, on average, in data that may count as small

# On the disk: 66 B of a snapshot were measured, and the matrix takes 20 B beside it. The snapshot
# is removed before there are a copy to train on, keys and the parts of ranks.
FILE_EVENT_BYTES = 90
FILE_ROW_BYTES = 80  # of a user or an item, with the id
# Sizes of the parameters, of a job with sharded tables: at most, and while its ranks train.
FILE_MODELS, FILE_MODELS_OF_RANKS = 6, 2
# Of ranks: 13 with replicated tables, 14 with sharded ones (benchmarks/results/rank_tables.json).
# Two epochs with the best parameters and two moments stay while the third is written.
RANK_FILE_MODELS = 15
FILE_TABLES = 3  # of pooled vectors: two models that are compared, and one that learns everything

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_STATM = Path("/proc/self/statm")
_LIMITS = (  # of a container, by both versions of control groups
    ("memory.max", "memory.current", "memory.stat", ("inactive_file", "active_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_inactive_file", "total_active_file"),
    ),
)


@dataclass(frozen=True)
class RanksHere:
    """The processes that train beside the job's own process, on the same machine."""

    number: int = 0
    sharded: bool = False
    """Whether the tables are sharded: those of the job's own process are files then."""
    elsewhere: bool = False
    """Whether ranks train, on this machine or on others, and not the job's own process."""

    @classmethod
    def of(cls, settings: Settings) -> RanksHere:
        """The ranks on this machine; ranks of a cluster are on other machines."""
        engine = settings.train_engine
        sharded = engine != "local" and settings.train_tables == "sharded"
        if engine == "torchrun" or (engine == "ray" and settings.ray_address is None):
            return cls(settings.train_ranks, sharded, True)
        return cls(sharded=sharded, elsewhere=engine != "local")

    def bytes(self, recipes: Sequence[Recipe], events: int, model_bytes: int) -> int:
        """The maximum memory of all ranks, in bytes.

        With sharded tables the ranks share one model, and otherwise the events if they can.
        """
        models = min(self.number, 1) if self.sharded else self.number
        # The tower of a NeuPR has no shared negatives.
        shares_events = not self.sharded and all(
            may_be_parted(each.model, each.training) and each.model.kind != "neupr"
            for each in recipes
        )
        matrices = min(self.number, 1) if shares_events else self.number
        of_events = matrices * RANK_EVENT_BYTES * events
        return self.number * RANK_BYTES + of_events + models * model_bytes


ALONE = RanksHere()


def training_bytes(
    params: TrainParams, events: int, users: int, items: int, ranks: RanksHere = ALONE
) -> int:
    """Estimates the maximum memory of a training, in bytes.

    Args:
        params: The job's parameters.
        events: The number of events.
        users: The number of users.
        items: The number of items.
        ranks: The processes that train on this machine, beside the job's own process.
    """
    recipes = _recipes(params, events, users, items, sharded=ranks.sharded)
    trained = max(_model_bytes(each.with_(start_factors=0), users, items) for each in recipes)
    of_job = max(
        _start_bytes(each, events, items, in_files=ranks.sharded)
        + (0 if ranks.sharded and _is_in_files(each) else _model_bytes(each, users, items))
        for each in recipes
    )
    # The memory of other starts was not measured with ranks.
    only_starts = ranks.elsewhere and all(
        each.training.start == "next-item" and each.training.tower_start == "random"
        for each in recipes
    )
    of_data = ROW_BYTES * (users + items)
    if only_starts:
        of_data += JOB_EVENT_BYTES * events
    else:  # with the vectors of the best epoch
        of_data += EVENT_BYTES * events
        of_data += max(_pooled_bytes(each, users, items) for each in recipes)
    return BASE_BYTES + of_data + of_job + ranks.bytes(recipes, events, trained)


def _recipes(
    params: TrainParams, events: int, users: int, items: int, *, sharded: bool
) -> Sequence[Recipe]:
    """The recipes that a training may try, with sharded tables or not."""
    recipes: Sequence[Recipe]
    if params.recipe == AUTO_RECIPE:
        recipes = auto_recipes(users, items, events, False, MAX_REMEMBERED)
        if sharded:
            recipes = [each for each in recipes if each.model.kind in SHARDED_KINDS]
    else:
        recipes = (params.configured_recipe(),)
    # Of repeated events one counts, and less data may keep more factors of the start.
    interactions = min(events, SMALL_DATA) if events <= MAX_REPEATS * SMALL_DATA else events
    remembered = min(users, MAX_REMEMBERED)
    kept = [affordable_start_factors(r.model, remembered, items, interactions) for r in recipes]
    return [each.with_(start_factors=k) for each, k in zip(recipes, kept, strict=True)]


def _pooled_bytes(recipe: Recipe, users: int, items: int) -> int:
    """The size of the vectors of users that are pooled from items, in bytes."""
    with torch.device("meta"):
        parts = build_model(recipe.model, min(users, MAX_REMEMBERED), items).user_parts()
    return sum(4 * part.weight.numel() for part in parts if isinstance(part, PooledUsers))


def _model_bytes(recipe: Recipe, users: int, items: int) -> int:
    """The size of all copies of the parameters in a training, in bytes."""
    every, trained = (
        _parameters(each, users, items) for each in (recipe, recipe.with_(start_factors=0))
    )
    return TABLE_COPIES * 4 * trained + START_COPIES * 4 * (every - trained)


def _parameters(recipe: Recipe, users: int, items: int) -> int:
    with torch.device("meta"):  # shapes without memory
        return sum(part.numel() for part in build_model(recipe.model, users, items).parameters())


def _is_in_files(recipe: Recipe) -> bool:
    """Whether sharded tables, from their start on, are files for the job's own process."""
    training = recipe.training
    return training.start != "spectral" and training.tower_start != "product"


def _start_bytes(recipe: Recipe, events: int, items: int, *, in_files: bool) -> int:
    """The memory of the start of a training, in bytes, with its tables in files or not."""
    if recipe.training.start != "next-item":
        return 0
    model, size = recipe.model, SOLVED_ROW_BYTES * min(events, MAX_ROWS)
    if not in_files:
        widest = max(model.factors, model.start_factors) + OVERSAMPLED
        size += SOLVED_BLOCKS * 4 * widest * items
    return size


def available_bytes() -> int | None:
    """The memory that this process may still take, in bytes; None where unknown.

    In a container with a limit, the rest of the limit is the maximum. Pages of files that the
    system can reclaim count as free.
    """
    left: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        left.append(1024 * int(_MEMINFO.read_text().partition("MemAvailable:")[2].split()[0]))
    for limit, usage, statistics, of_files in _LIMITS:
        with suppress(OSError, ValueError):  # "max" is no limit
            rows = (line.split() for line in (_CGROUP / statistics).read_text().splitlines())
            kept = sum(int(value) for name, value in rows if name in of_files)
            used = max(0, int((_CGROUP / usage).read_text()) - kept)
            left.append(int((_CGROUP / limit).read_text()) - used)
    return min(left, default=None)


def _taken_bytes() -> int:
    """The memory of this process, in bytes; 0 where unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    return 0


def check_memory(
    params: TrainParams,
    sizes: tuple[int, int, int],
    limit: int | None,
    ranks: RanksHere = ALONE,
) -> None:
    """Refuses a training that does not fit in memory.

    Against a given limit, the whole estimate counts. Against the free memory, the estimate counts
    divided by ``SURPLUS``, as measured trainings took.

    Args:
        params: The job's parameters.
        sizes: The numbers of events, users and items.
        limit: The maximum memory of a training, in bytes; None: the available memory.
        ranks: The processes that train on this machine, beside the job's own process.

    Raises:
        TrainingError: The training needs more memory than there is; the message has both amounts.
    """
    events, users, items = sizes
    needed = training_bytes(params, events, users, items, ranks)
    there = limit
    if limit is None:
        needed = int(needed / SURPLUS)
        free = available_bytes()
        there = None if free is None else free + _taken_bytes()
    if there is not None and needed > there:
        source = "are free" if limit is None else "are allowed by NCR_TRAIN_MEMORY_BYTES"
        raise TrainingError(
            f"this training needs about {needed / 2**30:.1f} GiB of memory ({events:,} events, "
            f"{users:,} users, {items:,} items) and {there / 2**30:.1f} GiB {source}: run the "
            "worker on a larger machine, or request fewer factors"
            + (" or fewer ranks (NCR_TRAIN_RANKS)" if ranks.number else "")
        )


def check_disk(
    params: TrainParams,
    folder: Path,
    sizes: tuple[int, int, int],
    ranks_folder: Path | None = None,
    *,
    sharded: bool = False,
) -> None:
    """Refuses a training whose files do not fit on the disk, which others may need too.

    Args:
        params: The job's parameters.
        folder: The parent of the job's files. It may not exist yet.
        sizes: The numbers of events, users and items.
        ranks_folder: The parent of the files of ranks; None: no ranks train. It may not exist yet.
        sharded: Whether the tables are sharded, with which those of the job are files too.

    Raises:
        TrainingError: A disk has too little room; the message has both amounts.
    """
    events, users, items = sizes
    recipes = _recipes(params, events, users, items, sharded=sharded)
    pooled = max(_pooled_bytes(each, users, items) for each in recipes)
    needed = FILE_EVENT_BYTES * events + FILE_ROW_BYTES * (users + items) + FILE_TABLES * pooled
    if ranks_folder is None:
        _check_room(folder, needed, sizes)
        return
    tables = 4 * max(_parameters(each, users, items) for each in recipes)
    if sharded:
        needed += _solved_file_bytes(recipes, events, users, items)
    of_ranks = RANK_FILE_MODELS * tables
    if _existing(folder).stat().st_dev == _existing(ranks_folder).stat().st_dev:
        needed += of_ranks + sharded * FILE_MODELS_OF_RANKS * tables
        _check_room(folder, needed, sizes)
    else:
        _check_room(folder, needed + sharded * FILE_MODELS * tables, sizes)
        _check_room(ranks_folder, of_ranks, sizes)


def _solved_file_bytes(recipes: Sequence[Recipe], events: int, users: int, items: int) -> int:
    """The files of a closed form, of a start or of a baseline of the evaluation, in bytes."""
    baseline = auto_recipes(users, items, events, False, MAX_REMEMBERED)[0]
    widest = max(max(each.model.factors, each.model.start_factors) for each in recipes)
    most = CLOSED_FORM_FACTORS if events > SMALL_DATA else baseline.model.factors
    widest = max(widest, min(baseline.model.factors, most)) + OVERSAMPLED
    return SOLVED_BLOCKS * 4 * widest * items


def _existing(folder: Path) -> Path:
    """The folder, or its first parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _check_room(folder: Path, needed: int, sizes: tuple[int, int, int]) -> None:
    """Raises TrainingError if the disk of a folder has less room, in bytes, than is needed.

    A file system without a size, as some of a network are, is not checked.
    """
    events, users, items = sizes
    usage = shutil.disk_usage(_existing(folder))
    free = usage.free
    if usage.total and needed > free:
        raise TrainingError(
            f"this training needs about {needed / 2**30:.1f} GiB of disk in {folder} for "
            f"{events:,} events, {users:,} users and {items:,} items, and {free / 2**30:.1f} GiB "
            "are free: make room there"
        )
