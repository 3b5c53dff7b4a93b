"""The process that a job is done in: `python -m app.jobs.child`, started by a worker.

It reads one line of JSON from standard input, which then stays open: when it closes, or when
nothing comes through it for most of the job's lease, the worker is gone or stopped, and so is
this process: another worker may have begun the same job. It answers in lines of JSON on standard
output: ``{"progress": …}``, and at the end ``{"done": …}`` or ``{"failed": "why"}``.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from app.jobs.served import ServedModel
    from app.models.store import CheckpointStore

T = TypeVar("T")

AGAIN_SECONDS = 2.0
LEASE_OVER = 75  # the exit code of "try again"


def main() -> None:
    """Runs one job."""
    # Whatever else prints must not get between the lines of the protocol.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    order = json.loads(sys.stdin.readline())
    patience = float(order["patience_s"])
    threading.Thread(target=_die_with_the_worker, args=(patience,), daemon=True).start()
    os.nice(5)  # requests come first

    from safetensors import SafetensorError

    from ncr_core.errors import NcrError

    try:
        work = _train if order["kind"] == "train" else _candidates
        _answer(answers, {"done": work(order, answers)})
    except NcrError as error:
        _answer(answers, {"failed": str(error)})
    except MemoryError:
        _answer(answers, {"failed": "not enough memory for this job"})
    except database_errors() as error:
        # By its kind alone: what a driver says may name hosts and accounts.
        why = f"the database was away or refused ({type(error).__name__})"
        _answer(answers, {"failed": f"{why}: this job could not read what it needs"})
    except (OSError, SafetensorError) as error:
        # A full disk, above all.
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        _answer(answers, {"failed": f"the job could not read or write its files: {reason}"})


def _train(order: dict[str, Any], answers: TextIO) -> dict[str, Any]:
    from app.jobs.gate import Comparison
    from app.jobs.progress import stage
    from app.jobs.schemas import TrainOrder
    from app.jobs.served import earlier_in
    from app.jobs.training import interactions_of, model_config_of, train_and_evaluate
    from ncr_core.errors import CheckpointReadError

    def report(progress: dict[str, Any]) -> None:
        _answer(answers, {"progress": progress})

    expected = order["expected_s"]
    report(stage("read events", sum(expected.values()) if expected else None))
    params = TrainOrder.model_validate(order["params"])
    snapshot, users, items = _with_patience(
        order, lambda: asyncio.run(_read_events(order["settings"])), *database_errors()
    )
    interactions = interactions_of(snapshot, users, items)

    def served() -> ServedModel | None:
        return _with_patience(
            order,
            lambda: asyncio.run(_read_served(order)),
            CheckpointReadError,
            *database_errors(),
        )

    summary = train_and_evaluate(
        interactions,
        params,
        model_config_of(params),
        order["device"],
        Path(order["folder"]),
        report,
        Comparison(served, earlier_in(snapshot, users, items), order["gate_margin"]),
        expected,
    )
    version = order["version"]
    _upload(order, lambda store: store.publish(version), lambda: report(stage("upload")))
    return summary | {"trained_seq": snapshot.max_seq}


def _candidates(order: dict[str, Any], answers: TextIO) -> dict[str, Any]:
    from app.jobs.candidates import precompute
    from app.jobs.progress import stage

    def report(done: int, of: int) -> None:
        _answer(answers, {"progress": stage("candidates") | {"epoch": done, "epochs": of}})

    version = order["version"]
    summary = _with_patience(
        order,
        lambda: asyncio.run(precompute(version, order["device"], order["settings"], report)),
        *database_errors(),
    )
    _upload(order, lambda store: store.publish_candidates(version))
    return summary


def _upload(
    order: dict[str, Any],
    upload: Callable[[CheckpointStore], None],
    say: Callable[[], None] = lambda: None,
) -> None:
    """Brings what was written into a store that others see, with patience while it is away.

    Here and not in the worker: a worker that loses the job, or is told to stop, ends this process
    in the middle of it.
    """
    from app.core.settings import load_settings
    from app.models.store import store_of
    from ncr_core.errors import CheckpointError

    store = store_of(load_settings(**order["settings"]))
    if not store.remote:
        return
    say()
    _with_patience(order, lambda: upload(store), CheckpointError)


def _with_patience(order: dict[str, Any], work: Callable[[], T], *failures: type[Exception]) -> T:
    """Tries again while the store, or the database, is away."""
    until = time.monotonic() + order["upload_patience_s"]
    while True:
        try:
            return work()
        except failures as error:
            if time.monotonic() > until:
                raise
            print(f"tried again: {type(error).__name__}", file=sys.stderr)
            time.sleep(AGAIN_SECONDS)


def database_errors() -> tuple[type[Exception], ...]:
    """What reading the database may raise: events are read past SQLAlchemy."""
    import sqlite3

    import psycopg
    from sqlalchemy.exc import SQLAlchemyError

    return SQLAlchemyError, sqlite3.Error, psycopg.Error


async def _read_served(order: dict[str, Any]) -> ServedModel | None:
    from app.core.settings import load_settings
    from app.jobs.served import ServedModel, Unreadable
    from app.services import build_services
    from ncr_core.errors import CheckpointError, CheckpointReadError
    from ncr_core.training import resolve_device

    services = await build_services(load_settings(**order["settings"]))
    try:
        row = await services.models.serving()
        if row is None:
            return None
        device = str(resolve_device(order["device"]))
        try:
            checkpoint, evaluated = await services.models.load_measured(row, device)
        except CheckpointReadError:
            raise
        except CheckpointError as error:
            raise Unreadable(row.version, str(error)) from None
    finally:
        await services.close()
    return ServedModel(row.version, row.trained_seq, checkpoint, evaluated)


async def _read_events(settings: dict[str, Any]) -> tuple[Any, dict[int, str], dict[int, str]]:
    from app.core.settings import load_settings
    from app.services import build_services

    services = await build_services(load_settings(**settings))
    try:
        snapshot = await services.events.snapshot_for_training()
        users = await services.events.external_users(snapshot.users())
        items = await services.catalog.external_ids_of(snapshot.items())
        deleted = (await services.catalog.catalogue()).deleted
    finally:
        await services.close()
    return snapshot, users, {i: name for i, name in items.items() if i not in deleted}


def _answer(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _die_with_the_worker(patience: float) -> None:
    pipe = sys.stdin.fileno()
    while select.select([pipe], [], [], patience)[0]:
        if not os.read(pipe, 4096):
            os._exit(1)
    os._exit(LEASE_OVER)


if __name__ == "__main__":
    main()
