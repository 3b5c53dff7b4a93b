"""Small trained models for tests of the service."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from app.core.metadata import now_us
from app.core.settings import Settings
from app.events.schemas import NewEvent
from app.jobs import child
from app.jobs.outcomes import TrainingFailed
from app.jobs.repository import Claim
from app.jobs.schemas import JobRow, TrainParams
from app.jobs.training import interactions_of, train_and_evaluate
from app.jobs.worker import OnProgress, Worker
from app.models.schemas import ModelRow
from app.services import Services
from ncr_core.data import Interactions
from ncr_core.data.synthetic import SyntheticData, synthetic_catalogue
from ncr_core.errors import NcrError
from ncr_core.models import ModelConfig

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
    summary = _trained(
        interactions_of(snapshot, users, items), wanted, services.models.folder(version)
    )
    row = ModelRow(
        version=version,
        status="published",
        kind=str(wanted.model),
        factors=int(wanted.factors or 0),
        path=services.models.path_of(version),
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


class WorkerHere(Worker):
    """Does a job's work in a thread of this process: one of its own takes seconds to start.

    For tests of what comes of jobs. What belongs to the process has its tests in test_worker and
    test_checkpoint_servers, on both databases.
    """

    async def _run(
        self, claim: Claim, version: str, stop: asyncio.Event, on_progress: OnProgress | None
    ) -> None:
        training = claim.kind == "train"
        work = child._train if training else child._candidates
        # By way of JSON, as through the pipe.
        order = json.loads(self._order(claim, version, await self._expected(claim)))
        try:
            done = await asyncio.to_thread(work, order, _Answers(on_progress))
        except NcrError as error:
            raise TrainingFailed(str(error)) from None
        summary = json.loads(json.dumps(done))
        end = self._results.model if training else self._results.candidates
        await self._with_patience(lambda: end(claim, version, summary))


class _Answers(io.StringIO):
    """Gives progress on as it is written: in the thread that works, which goes on afterwards."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        super().__init__()
        self._on_progress = on_progress

    def write(self, line: str) -> int:
        if self._on_progress is not None:
            self._on_progress(json.loads(line)["progress"])
        return len(line)


async def run_job_here(services: Services, settings: Settings, **params: Any) -> JobRow:
    """A quick training from its order to its end, by a `WorkerHere`."""
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK | params))
    assert await WorkerHere(services.database, services.models, settings).run_once()
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
    if interactions.stated is not None or name not in _SUMMARIES:
        summary = train_and_evaluate(
            interactions,
            params,
            ModelConfig.from_dict({"kind": params.model, "factors": params.factors}),
            "cpu",
            folder,
            lambda progress: None,
        )
        if interactions.stated is not None:
            return summary
        shutil.copytree(folder, kept)
        _SUMMARIES[name] = summary
    elif not folder.exists():
        shutil.copytree(kept, folder)
    return copy.deepcopy(_SUMMARIES[name])
