"""A training in the child process: models of history, the start, the report of progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI

from app.core.settings import Settings
from app.events.training_snapshot import NamedItems, TrainingSnapshot
from app.inference.new_items import NewItems
from app.jobs.schemas import JobRow, TrainParams
from app.training import reader
from app.training.gate import IncumbentComparison, ServingModel, ServingModelReadError
from app.training.pipeline import (
    TrainingStart,
    train_and_evaluate,
    warm_recipe,
    warm_start,
)
from app.training.progress import PHASE_SHARES, ProgressReporter
from app.training.reader import TrainingReader
from app.wiring import Services
from ncr_core.checkpoint import Checkpoint, EvaluationSnapshot
from ncr_core.data import build_interactions, leave_latest_out
from ncr_core.data.interactions import IntArray
from ncr_core.data.splits import Split, hashes_of
from ncr_core.evaluation.protocols import Ranks, full_ranks
from ncr_core.evaluation.vector_ranks import VectorRanks
from ncr_core.models import ModelConfig, build_model
from ncr_core.recipes import recipe
from ncr_core.reproduction.baselines.scoring import Popularity
from ncr_core.training import History, Progress
from ncr_core.training.rank_engine import RankEngine
from ncr_core.training.torchrun import TorchrunEngine
from ncr_core.training.trainer import OnProgress, train_loop
from ncr_core.training.warm_start import StartingPoint
from tests.app.conftest import QUICK, add_small_data, publish_model, run_job_here, thread_worker
from tests.app.events.given_rows import GivenRows
from tests.app.recommend.conftest import USERS, ask, ids, post, seen_by, serving
from tests.conftest import ON_SQLITE
from tests.ncr_core.conftest import wild_model

SHORT: dict[str, Any] = {"users": "history", "factors": 4, "epochs": 4, "force": True}


@pytest.fixture
async def filled(app: FastAPI) -> Services:
    services: Services = app.state.services
    await add_small_data(services)
    return services


async def sources(client: httpx2.AsyncClient, user: str, **params: Any) -> set[str]:
    return {place["source"] for place in (await ask(client, user, **params))["items"]}


@pytest.mark.anyio
@pytest.mark.slow
@ON_SQLITE
@pytest.mark.parametrize("kind", ["nbpr", "neupr"])
async def test_lists_of_history_models_follow_new_events(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services, settings: Settings, kind: str
) -> None:
    job = await run_job_here(filled, settings, model=kind, **SHORT)
    assert (job.status, job.error) == ("succeeded", None)
    assert (job.metrics or {})["calibration"]["ece"] < 0.5
    manager = app.state.recommend.models
    await manager.refresh()
    model = serving(app)
    assert model.engine.pools_users
    assert await sources(client, "user-1") == {"model"}

    # Somebody new, item by item; what they dislike and state counts at once, too.
    lists = []
    for item in seen_by("user-2")[:4]:
        await post(client, "/events", user="anna", item=item)
        lists.append(ids(await ask(client, "anna")))
    assert await sources(client, "anna") == {"fold_in"}
    assert len({tuple(found) for found in lists}) == 4
    best = lists[-1][0]
    last = lists[-1][-1]
    body = {"user": "anna", "winner": last, "loser": best}
    assert (await client.post("/preferences", json=body)).status_code == 201
    compared = await post(client, "/compare", user="anna", items=[last, best])
    ahead = compared["probability"][0][1]
    # As someone with the same items who said nothing.
    for item in seen_by("user-2")[:4]:
        await post(client, "/events", user="otto", item=item)
    alone = await post(client, "/compare", user="otto", items=[last, best])
    assert ahead > alone["probability"][0][1]
    await post(client, "/events", user="anna", item=best, type="dislike")
    assert best not in ids(await ask(client, "anna", n=100, exclude_seen=False))

    explained = await ask(client, "user-1", explain="pairwise")
    own = {reason["id"] for place in explained["items"] for reason in place["because"]}
    assert own
    assert own <= set(seen_by("user-1"))

    before = ids(await ask(client, "user-3"))
    body = [{"user": user, "item": "brand-new"} for user in USERS[20:26]]
    assert (await client.post("/events", json=body)).json()["accepted"] == 6
    await manager.add_new_items(NewItems(filled.events, filled.catalog, 5))
    assert serving(app).item_ids[-1] == "brand-new"
    after = [item for item in ids(await ask(client, "user-3", n=11)) if item != "brand-new"]
    assert after[: len(before)] == before


@pytest.mark.anyio
@pytest.mark.slow
@ON_SQLITE
async def test_free_and_history_models_replace_each_other_through_the_gate(
    services: Services, settings: Settings
) -> None:
    """The gate compares them, and a warm start takes those of the same kind."""
    await add_small_data(services)
    first = await publish_model(services)
    second = await run_job_here(services, settings, **SHORT)
    gate = (second.metrics or {})["gate"]
    assert (gate["incumbent"], gate["served"]) == (first, True)
    assert gate["users"] > 20
    third = await run_job_here(services, settings, **SHORT | {"start": "warm"})
    assert (third.metrics or {})["start"] == {"from": "warm", "version": second.model_version}
    row = await services.models.get(str(third.model_version))
    assert row.params["users"] == "history"
    fourth = await run_job_here(services, settings, force=True, factors=4)
    assert (fourth.metrics or {})["gate"]["incumbent"] == third.model_version


@pytest.mark.anyio
@pytest.mark.slow
@ON_SQLITE
async def test_a_model_keeps_the_vectors_of_some_users_and_serves_all(
    app: FastAPI,
    client: httpx2.AsyncClient,
    filled: Services,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = app.state.recommend.models

    async def train() -> JobRow:
        """The closed form, whose lists do not depend on the order of users."""
        params = TrainParams.model_validate({"recipe": "next-item", "factors": 8, "force": True})
        job_id = await filled.jobs.submit_training(params)
        assert await thread_worker(filled, settings).run_once()
        return await filled.jobs.get(job_id)

    await train()
    await manager.refresh()
    assert len(serving(app).user_rows) == len(USERS)
    whole = {user: ids(await ask(client, user)) for user in USERS}

    monkeypatch.setattr(reader, "MAX_REMEMBERED", 25)
    job = await train()
    assert (job.status, job.error) == ("succeeded", None)
    gate = (job.metrics or {})["gate"]
    assert gate["users"] == 25  # the model before held out the same and more
    await manager.refresh()
    model = serving(app)
    assert (model.version, model.row.users) == (job.model_version, len(USERS))
    kept = list(model.user_rows)
    assert len(kept) == model.trained.checkpoint.model.n_users == 25
    hashes = dict(zip(USERS, hashes_of(USERS).tolist(), strict=True))
    assert set(kept) == set(sorted(USERS, key=hashes.__getitem__)[:25])
    for user in USERS:
        assert ids(await ask(client, user)) == whole[user]
        assert await sources(client, user) == {"model" if user in kept else "fold_in"}
    assert "0 newer than the model" in (await client.get("/dashboard/data")).text

    # The next model is compared on users of whom this one has no vector, by what they did since.
    monkeypatch.setattr(reader, "MAX_REMEMBERED", 40)
    for user in USERS:
        for item in [item for item in seen_by(USERS[3]) if item not in seen_by(user)][:2]:
            await post(client, "/events", user=user, item=item)
    job = await train()
    gate = (job.metrics or {})["gate"]
    assert gate["incumbent"] == model.version
    assert 25 < gate["users"] <= 40
    assert gate["lacking"] == {"items": 0.0, "users": 0.0}


N_USERS, N_ITEMS = 20, 12
INTERACTIONS = build_interactions(
    [(f"u{n}", f"i{(n + k) % N_ITEMS}", k) for n in range(N_USERS) for k in range(6)]
)


@pytest.mark.slow
def test_a_training_needs_the_snapshot_until_it_knows_the_compared_users(tmp_path: Path) -> None:
    users, events_each = 1_200, 4  # 1,000 of the users are compared
    rows = [
        (n // events_each, (n * 7 + n // events_each) % 40, n, 1.0, n)
        for n in range(users * events_each)
    ]
    user_ids = {user: f"u{user}" for user in range(users)}
    snapshot = GivenRows(rows, [], user_ids, {item: f"i{item}" for item in range(40)}).snapshot(
        tmp_path / "running", parts=4
    )
    interactions = snapshot.interactions()
    files: list[int] = []
    train_and_evaluate(
        interactions,
        TrainParams.model_validate(QUICK),
        "cpu",
        tmp_path / "version",
        lambda progress: files.append(len(list((tmp_path / "running").iterdir()))),
        comparison := IncumbentComparison(NO_SERVED_MODEL, snapshot, 0.05),
    )
    assert files
    assert not any(files)
    assert comparison._named is not None
    assert len(comparison._named.events) == 1_000 * events_each


class EngineOfThisProcess(RankEngine):
    """An engine that counts what it is asked for, and does all of it here."""

    def __init__(self) -> None:
        super().__init__(1, "replicated", Path("unused"))
        self.phases = 0
        self.ranked: list[type] = []

    def __call__(self, *arguments: Any, **named: Any) -> History:
        self.phases += 1
        return train_loop(*arguments, **named)

    def full_ranks(
        self, model: Ranks, split: Split, held_out: IntArray, seed: int
    ) -> tuple[IntArray, int]:
        self.ranked.append(type(model))
        return full_ranks(model, split, held_out, seed)

    def _threads(self) -> int:
        pytest.fail("no process is needed")

    def _connect(self) -> None:
        pytest.fail("no process is needed")

    def _run(self, folder: Path, on_progress: OnProgress | None) -> str | None:
        pytest.fail("no process is needed")


@pytest.mark.anyio
@pytest.mark.slow
@ON_SQLITE
async def test_an_engine_ranks_for_the_evaluation_and_the_gate(
    filled: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineOfThisProcess()
    monkeypatch.setattr("app.training.engines.rank_engine", lambda settings: engine)
    first = await run_job_here(filled, settings, force=True)
    assert engine.phases >= 1
    assert engine.ranked == [VectorRanks, Popularity]
    engine.ranked.clear()
    second = await run_job_here(filled, settings, force=True)
    assert engine.ranked == [VectorRanks, Popularity, VectorRanks, VectorRanks]
    gate = (second.metrics or {})["gate"]
    assert gate["incumbent"] == first.model_version
    assert (first.metrics or {})["full"] == (second.metrics or {})["full"]
    monkeypatch.undo()
    alone = await run_job_here(filled, settings, force=True)
    assert (alone.metrics or {})["full"] == (second.metrics or {})["full"]
    assert (alone.metrics or {})["gate"]["full"]["ndcg@10"] == gate["full"]["ndcg@10"]


NO_SERVED_MODEL = cast(TrainingReader, SimpleNamespace(read=lambda *_: None))


def start_after(
    serving_model: Callable[[], ServingModel | None],
    config: ModelConfig,
    engine: RankEngine | None = None,
) -> TrainingStart:
    """The start of a training of this configuration that is to be warm."""
    reader = cast(TrainingReader, SimpleNamespace(read=lambda *_: serving_model()))
    everyone = np.ones(INTERACTIONS.n_users, dtype=np.bool_)
    nothing = NamedItems(*[np.zeros((0, 3), dtype=np.int64)] * 2)
    snapshot = SimpleNamespace(named_items=lambda *_: nothing, close=lambda: None)
    comparison = IncumbentComparison(reader, cast(TrainingSnapshot, snapshot), 0.05)
    comparison.read_users(INTERACTIONS, everyone)
    split = leave_latest_out(INTERACTIONS, everyone)
    start = warm_start(config, INTERACTIONS, split, comparison, engine)
    assert (start.base is None) == (start.report["from"] == "scratch")
    return start


def start_report(
    config: ModelConfig, users: list[str], items: list[str], engine: RankEngine | None = None
) -> dict[str, object]:
    """The report on a start after a served model of this configuration, these users and items."""
    model = wild_model(config, len(users), len(items))
    rows = np.arange(len(users))
    evaluated = EvaluationSnapshot(model, rows, np.full((len(users), 2), -1))
    checkpoint = Checkpoint(model, users, items, np.ones(len(items), dtype=np.int64), [0], {})
    serving = ServingModel("v1", 0, checkpoint, evaluated)
    return start_after(lambda: serving, config, engine).report


@pytest.mark.parametrize("users", ["free", "history"])
def test_warm_start_falls_back_to_scratch_when_the_served_model_shares_no_users_or_items(
    users: str,
) -> None:
    config = ModelConfig.from_dict({"kind": "nbpr", "factors": 4, "users": users})
    some, others = list(INTERACTIONS.user_ids)[:15], [f"x{n}" for n in range(15)]
    items = list(INTERACTIONS.item_ids)
    assert start_report(config, some, items) == {"from": "warm", "version": "v1"}
    report = start_report(config, some, [f"y{n}" for n in range(N_ITEMS)])
    assert report == {"from": "scratch", "because": "v1 knows none of these items"}
    report = start_report(config, others, items)
    if users == "free":
        assert report == {"from": "scratch", "because": "v1 knows none of these users"}
    else:  # whose vectors are made of their items
        assert report["from"] == "warm"


def test_a_served_model_that_cannot_be_sharded_is_no_start_of_sharded_ranks(tmp_path: Path) -> None:
    users, items = list(INTERACTIONS.user_ids)[:15], list(INTERACTIONS.item_ids)
    for kind, starts in (("nbpr", True), ("neupr", False)):
        config = ModelConfig.from_dict({"kind": kind, "factors": 4})
        report = start_report(config, users, items, TorchrunEngine(2, "sharded", tmp_path))
        assert report["from"] == ("warm" if starts else "scratch")
    assert str(report["because"]).startswith("the ranks cannot train the served model: tables ")


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        (0, "next-item-nbpr"),
        (1, "next-item-attention"),
        (2, "next-item-two-layer-attention"),
        (3, "next-item-two-layer-attention"),
    ],
)
def test_a_warm_start_trains_as_the_recipe_of_the_served_model(layers: int, name: str) -> None:
    config = replace(recipe(name).model, factors=8, attention_layers=layers)
    base = StartingPoint(build_model(config, 5, 6), [], [])
    assert warm_recipe(base, seed=3).training == replace(recipe(name).training, seed=3)


def test_warm_start_falls_back_to_scratch_when_the_served_model_is_unreadable_or_missing() -> None:
    def unreadable() -> ServingModel:
        raise ServingModelReadError("v1", "it is damaged")

    config = ModelConfig.from_dict({"kind": "nbpr", "factors": 4})
    for serving_model, reason in (
        (unreadable, "the served model cannot be read: it is damaged"),
        (lambda: None, "no model is served"),
    ):
        report = start_after(serving_model, config).report
        assert report == {"from": "scratch", "because": reason}


class TimedTraining:
    """A reporter on a clock that the test moves on, and what it has reported."""

    def __init__(
        self, expected_seconds: Mapping[str, float] | None = None, choice_seconds: float = 0.0
    ) -> None:
        self.now = 100.0
        self.reports: list[dict[str, Any]] = []
        self.progress = ProgressReporter(
            self.reports.append, expected_seconds, choice_seconds, clock=lambda: self.now
        )


def test_the_time_left_includes_the_phases_to_come() -> None:
    training = TimedTraining()
    training.now += 10
    training.progress.epoch(Progress("train nbpr", 1, 5, 0.123456, 0.25, 40.0))
    # 50 seconds of epochs in all, and what usually comes after them.
    last = training.reports[-1]
    assert last["eta_s"] == pytest.approx(40 + 50 * sum(PHASE_SHARES.values()), abs=0.1)
    assert (last["loss"], last["ndcg"]) == (0.12346, 0.25)
    training.now += 40
    training.progress.phase("evaluate")
    last = training.reports[-1]
    assert last["phase"] == "evaluate"
    assert last["eta_s"] == pytest.approx(50 * sum(PHASE_SHARES.values()), abs=0.1)
    training.now += 4
    training.progress.phase("compare with what is served")
    training.now += 3
    training.progress.step(1, 6)
    rest = ("learn the held-out items", "learn from attributes", "write checkpoint")
    later = sum(PHASE_SHARES[phase] for phase in rest)
    last = training.reports[-1]
    assert (last["epoch"], last["epochs"]) == (1, 6)
    assert last["eta_s"] == pytest.approx(15 + 50 * later, abs=0.1)
    training.progress.end()
    assert training.progress.seconds == {
        "train": 50.0, "evaluate": 4.0, "compare with what is served": 3.0
    }  # fmt: skip


def test_the_time_left_uses_the_seconds_of_an_earlier_training() -> None:
    training = TimedTraining({"train": 100.0, "evaluate": 7.0, "learn the held-out items": 2.0})
    training.now += 10
    training.progress.epoch(Progress("train nbpr", 1, 2, 0.5, None, 10.0))
    rest = ("compare with what is served", "learn from attributes", "write checkpoint")
    usual = sum(PHASE_SHARES[phase] for phase in rest)
    assert training.reports[-1]["eta_s"] == pytest.approx(10 + 7 + 2 + 20 * usual, abs=0.1)


def test_the_time_left_of_a_choice_is_that_of_all_recipes() -> None:
    training = TimedTraining(dict.fromkeys(PHASE_SHARES, 0.0), choice_seconds=100.0)
    training.now += 30
    training.progress.epoch(Progress("next-item-nbpr: train nbpr", 1, 3, 0.5, None, 20.0))
    assert training.reports[-1]["eta_s"] == 70.0
    training.now += 65
    training.progress.epoch(Progress("als-nbpr: train nbpr", 1, 3, 0.5, None, 20.0))
    assert training.reports[-1]["eta_s"] == 20.0
