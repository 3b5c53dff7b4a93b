"""Small trained models for tests of the service."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from app.core.settings import Settings
from app.core.tables import now_us
from app.events.schemas import NewEvent
from app.jobs.schemas import JobRow, TrainParams
from app.registry.schemas import ModelRow
from app.training.dataset import TrainingEvents
from app.training.pipeline import train_and_evaluate
from app.wiring import Services
from app.worker.child_process import Heartbeat, OnProgress, TrainingFailed, run_task
from app.worker.task import TASK, PrecomputeTask, TrainingTask
from app.worker.worker import Worker
from ncr_core.data import Interactions
from ncr_core.data.synthetic import SyntheticData, synthetic_catalogue
from ncr_core.errors import NcrError

SMALL: SyntheticData = synthetic_catalogue(60, 50, 12)
QUICK: dict[str, Any] = {"model": "nbpr", "factors": 4, "epochs": 2}


async def add_small_data(services: Services) -> None:
    """60 users and 50 items with their categories."""
    await services.catalog.upsert_rows(
        [{"id": i.id, "title": i.title, "categories": [i.genre]} for i in SMALL.items]
    )
    await services.events.import_rows(
        [
            NewEvent(f"{user} {item}", user, item, timestamp=order * 1_000_000)
            for user, item, order in SMALL.interactions
        ]
    )


async def publish_model(services: Services, **params: Any) -> str:
    """Trains on what is in the database and publishes, without a job; the new version."""
    wanted = TrainParams.model_validate(QUICK | params)
    snapshot = await services.events.snapshot_for_training()
    users = await services.events.external_users(snapshot.users())
    items = await services.catalog.external_ids_of(snapshot.items())
    version = services.models.new_version()
    interactions = TrainingEvents(snapshot, users, items).interactions()
    summary = _trained(interactions, wanted, services.models.folder(version))
    row = ModelRow(
        version=version,
        status="published",
        kind=str(wanted.model),
        factors=int(wanted.factors or 0),
        path=services.models.stored_path(version),
        checksum=summary["checksum"],
        trained_seq=snapshot.max_seq,
        users=summary["users"],
        items=summary["items"],
        interactions=summary["interactions"],
        metrics=summary["metrics"],
        params=wanted.model_dump(),
        job_id=None,
        created_at=now_us(),
        activated_at=None,
    )
    async with services.database.write() as conn:
        await services.models.publish(conn, row)
    return version


async def run_in_thread(
    task: TrainingTask | PrecomputeTask,
    heartbeat: Heartbeat,
    heartbeat_seconds: float,
    stop: asyncio.Event,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Runs a task in a thread of this process: a child process takes seconds to start.

    For tests of what comes of jobs. The child process has its tests in test_child_process and
    test_worker. ``on_progress`` is called in the thread, which then goes on.
    """
    task = TASK.validate_json(task.model_dump_json())  # as through the pipe
    try:
        summary = await asyncio.to_thread(run_task, task, on_progress or (lambda progress: None))
    except NcrError as error:
        raise TrainingFailed(str(error)) from None
    through_the_pipe: dict[str, Any] = json.loads(json.dumps(summary))
    return through_the_pipe


def thread_worker(services: Services, settings: Settings, **collaborators: Any) -> Worker:
    """A worker whose jobs run in a thread of this process."""
    return Worker(
        services.database, services.models, settings, run_task=run_in_thread, **collaborators
    )


async def run_job_here(services: Services, settings: Settings, **params: Any) -> JobRow:
    """A quick training from its request to its end, by a `thread_worker`."""
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK | params))
    assert await thread_worker(services, settings).run_once()
    return await services.jobs.get(job_id)


_KEPT = tempfile.TemporaryDirectory(prefix="ncr-test-models-")
_SUMMARIES: dict[str, dict[str, Any]] = {}


def _trained(interactions: Interactions, params: TrainParams, folder: Path) -> dict[str, Any]:
    """A training, or a copy of what the same one gave before: hundreds of tests want the same."""
    key = hashlib.sha256(json.dumps(params.model_dump(), sort_keys=True).encode())
    for ids in (interactions.user_ids, interactions.item_ids):
        key.update(json.dumps(list(ids)).encode())
    for array in (interactions.indptr, interactions.items, interactions.weights):
        key.update(b"|" if array is None else b"|" + array.tobytes())
    name = key.hexdigest()
    kept = Path(_KEPT.name) / name
    if interactions.feedback is not None or name not in _SUMMARIES:
        summary = train_and_evaluate(interactions, params, "cpu", folder, lambda progress: None)
        if interactions.feedback is not None:
            return summary
        shutil.copytree(folder, kept)
        _SUMMARIES[name] = summary
    elif not folder.exists():
        shutil.copytree(kept, folder)
    return copy.deepcopy(_SUMMARIES[name])
