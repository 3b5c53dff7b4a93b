"""Makes candidates and lists of the latest active users with a published model, for servers."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.core.tables import now_us
from app.inference.loaded_model import LoadedModel
from app.inference.precomputed import ActiveUser, compute
from app.training.progress import Report, throttled
from app.training.reader import Features, TrainingReader
from ncr_core.train_config import resolve_device

Visible = NDArray[np.bool_]
USERS_AT_ONCE = 100  # whose events are read: some 300 B each
KEPT_BYTES = 2**24  # of candidates, between their search and the lists that are made of them


def precompute(version: str, reader: TrainingReader, report: Report) -> dict[str, Any]:
    """Writes the candidates file of a version, and returns a summary for the job's metrics.

    If another version is active by now, no server would use the file, and the call writes none.
    """
    started = time.perf_counter()
    inputs = reader.read(lambda features: _read_inputs(version, reader, features))
    if inputs is None:
        return {"users": 0, "seconds": 0.0}
    model, users, visible, path = inputs
    computed = compute(model.engine, users, visible, partial(throttled(report), "candidates"))
    reader.retry.write(path.parent, lambda: computed.save(path))
    return {"users": len(computed), "seconds": round(time.perf_counter() - started, 1)}


async def _read_inputs(
    version: str, reader: TrainingReader, features: Features
) -> tuple[LoadedModel, list[ActiveUser], Visible, Path] | None:
    """The model, its active users, the mask of visible items, and the path of the file.

    None if another version is active.
    """
    models = features.models
    if (await models.activation()).version != version:
        return None
    row = await models.get(version)
    checkpoint = await models.load(row, str(resolve_device(reader.device)))
    model = LoadedModel(row, checkpoint, reader.settings.candidates, KEPT_BYTES)
    users = await _active_users(reader, features, model)
    visible = model.items(await features.catalog.catalogue()).visible
    return model, users, visible, models.candidates_path(version)


async def _active_users(
    reader: TrainingReader, features: Features, model: LoadedModel
) -> list[ActiveUser]:
    """The latest active users that the model knows and that did not change since its training.

    The function reads users first and events later. A user who is active in between has another
    seq, for which servers do not use these candidates.
    """
    catalogue = await features.catalog.catalogue()
    items, now = model.items(catalogue), now_us()
    known = [
        (user_id, external_id, row, seq)
        for user_id, external_id, seq in await features.events.active_users(
            reader.settings.precompute_users
        )
        # Others are searched on demand, by what they did since the training.
        if (row := model.user_rows.get(external_id)) is not None and seq <= model.trained_seq
    ]
    users: list[ActiveUser] = []
    for start in range(0, len(known), USERS_AT_ONCE):
        part = known[start : start + USERS_AT_ONCE]
        events = await features.events.times_by_item([user_id for user_id, *_ in part])
        for user_id, external_id, row, seq in part:
            first, last = np.searchsorted(events[:, 0], [user_id, user_id + 1])
            seen, times = items.rows(events[first:last, 1]), events[first:last, 2]
            gap_class, latest = model.gap_class(times, now), int(times.max(initial=0))
            seen = np.unique(seen[seen >= 0])
            users.append(ActiveUser(external_id, row, seq, seen, latest, gap_class))
    return users
