"""What a job for candidates does: from a published model to a file that servers take over."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.core.settings import load_settings
from app.recommend.precomputed import Report, compute
from app.recommend.serving import ServingModel
from app.services import Services, build_services
from ncr_core.training.config import resolve_device

REPORT_SECONDS = 1.0

ActiveUser = tuple[str, int, int, NDArray[np.int64]]


async def precompute(
    version: str, device: str, settings: dict[str, Any], report: Report
) -> dict[str, Any]:
    """Computes and writes the candidates; returns a summary."""
    services = await build_services(load_settings(**settings))
    try:
        if (await services.models.activation()).version != version:
            return {"users": 0, "seconds": 0.0}  # another has taken its place: nobody would ask
        started = time.perf_counter()
        row = await services.models.get(version)
        checkpoint = await services.models.load(row, str(resolve_device(device)))
        model = ServingModel(row, checkpoint, services.settings.candidates, cache_bytes=0)
        users = await _active_users(services, model)
        visible = model.rows(await services.catalog.catalogue()).visible
    finally:
        await services.close()
    said = 0.0

    def report_now_and_then(done: int, of: int) -> None:
        nonlocal said
        if time.monotonic() - said > REPORT_SECONDS:
            said = time.monotonic()
            report(done, of)

    found = compute(model.candidates, users, visible, report_now_and_then)
    found.save(services.models.candidates_path(version))
    return {"users": len(found), "seconds": round(time.perf_counter() - started, 1)}


async def _active_users(services: Services, model: ServingModel) -> list[ActiveUser]:
    """The latest active of the model's users, with the rows of the items they have seen.

    Users come first and events later: who is active in between has moved on to another seq, at
    which these candidates are not asked for.
    """
    active = await services.events.active_users(services.settings.precompute_users)
    snapshot = await services.events.snapshot_for_training()
    catalogue = await services.catalog.catalogue()
    internal = model.rows(catalogue).internal
    row_of = np.full(max(catalogue.size, int(internal.max(initial=0)) + 1), -1, dtype=np.int64)
    row_of[internal[internal >= 0]] = np.flatnonzero(internal >= 0)
    users: list[ActiveUser] = []
    for user_id, external, seq in active:
        row = model.user_rows.get(external)
        if row is None or seq > model.trained_seq:
            continue  # found when they ask, by what they did since
        first, last = np.searchsorted(snapshot.user_id, [user_id, user_id + 1])
        seen = row_of[snapshot.item_id[first:last]]
        users.append((external, row, seq, np.unique(seen[seen >= 0])))
    return users
