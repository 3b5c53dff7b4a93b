"""Whether a training fits in memory, said before it begins rather than by a kill in its middle."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch

from app.jobs.schemas import TrainParams
from ncr_core.errors import TrainingError
from ncr_core.models import build_model
from ncr_core.recipes import AUTO_RECIPE, Recipe, auto_recipes
from ncr_core.training.next_item import MAX_ROWS

# By the peak of benchmarks/results/faults.json, of which the estimate is some half more.
SURPLUS = 1.5
BASE_BYTES = 1_100 * 2**20  # with the libraries, and what training on next to nothing takes
READ_EVENT_BYTES = 250  # the snapshot, the matrix of it, and what is sorted to make it
EVENT_BYTES = 150  # the snapshot and the matrix, whole and split, while a model is trained
ROW_BYTES = 400  # the id of a user or an item
SOLVED_ROW_BYTES = 400  # of the closed form, which sees so many positives at most
SOLVED_BLOCKS = 8  # matrices of items by factors, while the closed form is solved
TABLE_COPIES = 6  # of the parameters: their best, gradients, two moments, and what is written

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


def training_bytes(params: TrainParams, events: int, users: int, items: int) -> int:
    """Estimates the most memory that a training takes, in bytes.

    Args:
        params: The job's parameters.
        events: The number of events.
        users: The number of users.
        items: The number of items.
    """
    auto = params.recipe == AUTO_RECIPE
    recipes = auto_recipes(users, items, events) if auto else [params.configured_recipe()]
    models = max(_model_bytes(each, events, users, items) for each in recipes)
    reading, training = READ_EVENT_BYTES * events, EVENT_BYTES * events + models
    return BASE_BYTES + ROW_BYTES * (users + items) + max(reading, training)


def _model_bytes(recipe: Recipe, events: int, users: int, items: int) -> int:
    model = recipe.model
    with torch.device("meta"):  # shapes without memory
        parameters = sum(part.numel() for part in build_model(model, users, items).parameters())
    size = TABLE_COPIES * 4 * parameters
    if recipe.training.start == "next-item":
        size += SOLVED_ROW_BYTES * min(events, MAX_ROWS)
        size += SOLVED_BLOCKS * 4 * (model.factors + 32) * items
    return size


def available_bytes() -> int | None:
    """The memory that this process may still take, in bytes; None where the system does not say.

    Of a container with a limit it is what the limit leaves. Pages of files that the system would
    give up count as free.
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
    """The memory that this process has already."""
    with suppress(OSError, ValueError, IndexError):
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    return 0


def check_memory(params: TrainParams, sizes: tuple[int, int, int], limit: int | None) -> None:
    """Refuses a training that is not going to fit.

    By a stated limit the whole estimate counts; by what is free only what trainings took.

    Args:
        params: The job's parameters.
        sizes: The numbers of events, users and items.
        limit: The most bytes that a training may take; None: what is available.

    Raises:
        TrainingError: It needs more memory than there is; the message says how much.
    """
    events, users, items = sizes
    needed = training_bytes(params, events, users, items)
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
            "worker on a larger machine, or ask for fewer factors"
        )
