"""The process of a job while its database is away."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from app.core.settings import Settings
from app.jobs import child
from app.jobs.schemas import TrainOrder
from app.services import Services
from ncr_core.errors import CheckpointReadError
from tests.app.models import QUICK, add_small_data, publish_model

pytestmark = pytest.mark.anyio

SECRET = "a-pass-word"


def order_for(folder: Path, url: str, kind: str = "train", **changes: Any) -> dict[str, Any]:
    params = TrainOrder.model_validate(QUICK).model_dump()
    return {
        "kind": kind,
        "params": params,
        "device": "cpu",
        "version": "20261122-000000-00aa",
        "expected_s": None,
        "gate_margin": 0.05,
        "patience_s": 60,
        "folder": str(folder / "models" / "20261122-000000-00aa"),
        "upload_patience_s": 0.0,
        "settings": {"data_dir": str(folder), "database_url": url},
    } | changes


@pytest.mark.parametrize("kind", ["train", "candidates"])
def test_a_database_that_stays_away_is_one_clear_line(tmp_path: Path, kind: str) -> None:
    url = f"postgresql://account:{SECRET}@127.0.0.1:9/ncr"
    read, write = os.pipe()  # stays open, as that of a worker that lives
    os.write(write, json.dumps(order_for(tmp_path, url, kind)).encode() + b"\n")
    with os.fdopen(read, "rb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "app.jobs.child"],
            stdin=pipe,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    os.close(write)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert answers[-1] == {
        "failed": "the database was away or refused (OperationalError): "
        "this job could not read what it needs"
    }
    assert "Traceback" not in done.stderr
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "error",
    [
        OperationalError("SELECT", None, Exception("gone")),
        sqlite3.OperationalError("database is locked"),
        psycopg.OperationalError("the connection is closed"),
    ],
)
async def test_a_hiccup_of_the_database_does_not_end_a_training(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    await add_small_data(services)
    incumbent = await publish_model(services)
    monkeypatch.setattr(child, "AGAIN_SECONDS", 0.0)
    hiccups = {"events": 2, "served": 2}

    def at_first(name: str, read: Any) -> Any:
        async def reads(order: Any) -> Any:
            if hiccups[name]:
                hiccups[name] -= 1
                raise error
            return await read(order)

        return reads

    monkeypatch.setattr(child, "_read_events", at_first("events", child._read_events))
    monkeypatch.setattr(child, "_read_served", at_first("served", child._read_served))
    url = settings.effective_database_url
    order = order_for(settings.data_dir, url, upload_patience_s=30.0)
    answers = (settings.data_dir / "answers").open("w")
    with answers:
        summary = await asyncio.to_thread(child._train, order, answers)
    assert summary["metrics"]["gate"]["incumbent"] == incumbent
    assert hiccups == {"events": 0, "served": 0}


async def test_a_disk_that_fails_once_is_no_model_that_cannot_be_read(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a model would be replaced by whatever was trained, without a comparison."""
    await add_small_data(services)
    incumbent = await publish_model(services)
    file = services.models.folder(incumbent) / "model.safetensors"
    aside = file.rename(settings.data_dir / "aside")
    file.mkdir()  # whoever reads it gets an error of the system, and not that it is not there
    url = settings.effective_database_url

    def train(order: dict[str, Any]) -> Any:
        with (settings.data_dir / "answers").open("w") as answers:
            return child._train(order, answers)

    with pytest.raises(CheckpointReadError, match=r"model\.safetensors cannot be read"):
        await asyncio.to_thread(train, order_for(settings.data_dir, url))

    def repaired(seconds: float) -> None:
        file.rmdir()
        aside.rename(file)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=repaired)
    monkeypatch.setattr(child, "time", clock)
    order = order_for(settings.data_dir, url, upload_patience_s=30.0)
    gate = (await asyncio.to_thread(train, order))["metrics"]["gate"]
    assert gate["incumbent"] == incumbent
    assert gate["finding"] != "incumbent_unreadable"
