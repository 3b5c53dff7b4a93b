"""Small trained models for tests of the service."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from app.core.metadata import now_us
from app.events.schemas import NewEvent
from app.jobs.schemas import TrainParams
from app.jobs.training import interactions_of, train_and_evaluate
from app.models.schemas import ModelRow
from app.services import Services
from ncr_core.data import Interactions
from ncr_core.data.synthetic import SyntheticData, synthetic_catalogue
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
