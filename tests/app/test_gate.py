"""The gate with real trainings: what is rejected, what is forced, and what is begun from."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.core.settings import Settings
from app.events.schemas import NewEvent
from app.jobs.repository import Claim
from app.jobs.results import Results
from app.jobs.schemas import JobRow, TrainParams
from app.jobs.worker import Worker
from app.services import Services
from ncr_core.data.synthetic import synthetic_catalogue
from ncr_core.evaluated import load_evaluated
from tests.app.models import QUICK, WorkerHere, add_small_data, publish_model, run_job_here
from tests.app.test_worker import children, run_job
from tests.conftest import ON_SQLITE

# Each trains: jobs on PostgreSQL have tests of their own.
pytestmark = [pytest.mark.anyio, ON_SQLITE]

GOOD: dict[str, Any] = {"epochs": 20}
BAD: dict[str, Any] = {"epochs": 1, "learning_rate": 1e-8}  # learns nothing


ENOUGH = synthetic_catalogue(300, 120, 20)
"""300 users: enough for a model that has learned nothing to show."""


async def add_enough_data(services: Services) -> None:
    events = [
        NewEvent(f"{user} {item}", user, item, timestamp=order * 1_000_000)
        for user, item, order in ENOUGH.interactions
    ]
    await services.events.import_rows(events)


def gate_of(job: JobRow) -> dict[str, Any]:
    gate: dict[str, Any] = (job.metrics or {})["gate"]
    return gate


async def test_a_worse_model_is_rejected_and_kept(services: Services, settings: Settings) -> None:
    await add_enough_data(services)
    first = await run_job_here(services, settings, **GOOD)
    gate = gate_of(first)
    assert (gate["decision"], gate["finding"], gate["incumbent"]) == ("published", "first", None)
    sampled = (first.metrics or {})["sampled"], (first.metrics or {})["popularity_sampled"]
    over = gate["over_popularity"]["sampled"]
    assert over == pytest.approx(sampled[0]["ndcg@10"] - sampled[1]["ndcg@10"], abs=2e-5)

    settings = settings.model_copy(update={"precompute_users": 10})
    second = await run_job(services, settings, **BAD)
    gate = gate_of(second)
    assert (second.status, second.error) == ("rejected", None)
    assert (gate["decision"], gate["finding"], gate["passed"]) == ("rejected", "worse", False)
    assert gate["incumbent"] == first.model_version
    figures = gate["ndcg@10"]
    # The incumbent is measured as it was before it learned these very items.
    assert figures["incumbent"] == pytest.approx(sampled[0]["ndcg@10"], abs=0.03)
    assert figures["interval"][0] < figures["difference"] < figures["interval"][1] < 0
    assert figures["margin"] == pytest.approx(0.05 * figures["incumbent"], abs=1e-5)
    assert gate["full"]["ndcg@10"]["challenger"] < gate["full"]["ndcg@10"]["incumbent"]

    assert (await services.models.activation()).version == first.model_version
    row = await services.models.get(str(second.model_version))
    assert (row.status, row.job_id, row.activated_at) == ("rejected", second.job_id, None)
    assert row.metrics == second.metrics
    await services.models.load(row, "cpu")  # its files are there, for whoever wants to look
    rows = (await services.jobs.page(0, 10))[0]
    assert {job.kind for job in rows} == {"train"}  # no candidates are computed for it


async def test_a_first_model_has_to_be_as_good_as_the_popularity_list(
    services: Services, settings: Settings
) -> None:
    await add_enough_data(services)
    job = await run_job_here(services, settings, **BAD, pretrain=False)
    gate = gate_of(job)
    assert (job.status, gate["decision"], gate["finding"]) == (
        "rejected", "rejected", "below_popularity",
    )  # fmt: skip
    assert gate["over_popularity"]["sampled"] < 0
    assert (await services.models.activation()).version is None
    forced = await run_job_here(services, settings, **BAD, pretrain=False, force=True)
    gate = gate_of(forced)
    assert (forced.status, gate["passed"], gate["forced"]) == ("succeeded", False, True)
    assert (await services.models.activation()).version == forced.model_version


async def test_force_publishes_what_the_gate_would_reject(
    app: FastAPI, client: httpx2.AsyncClient, settings: Settings
) -> None:
    services: Services = app.state.services
    await add_enough_data(services)
    await publish_model(services, **GOOD)
    body = QUICK | BAD | {"force": True}
    job_id = (await client.post("/admin/train", json=body)).json()["job_id"]
    assert await WorkerHere(services.database, services.models, settings).run_once()
    job = (await client.get(f"/admin/jobs/{job_id}")).json()
    assert job["status"] == "succeeded"
    gate = job["metrics"]["gate"]
    assert (gate["decision"], gate["finding"], gate["passed"], gate["forced"]) == (
        "published", "worse", False, True,
    )  # fmt: skip
    model = (await client.get(f"/admin/models/{job['model_version']}")).json()
    assert (model["active"], model["params"]["force"]) == (True, True)
    assert model["activations"][0]["detail"] == {"job_id": job_id, "forced": True}


async def test_a_margin_that_lets_anything_pass(services: Services, settings: Settings) -> None:
    await add_small_data(services)
    await publish_model(services, **GOOD)
    lenient = settings.model_copy(update={"gate_margin": 1.0})
    job = await run_job_here(services, lenient, **BAD)
    assert (job.status, gate_of(job)["finding"]) == ("succeeded", "not_worse")


async def test_what_is_trained_while_pinned_is_published_alone(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    first = await publish_model(services)
    await services.models.activate(first, pin=True)
    second = await run_job_here(services, settings, seed=1)
    assert second.status == "succeeded"
    assert (await services.models.get(str(second.model_version))).status == "published"
    assert (await services.models.activation()).version == first


async def test_users_and_items_that_came_since(services: Services, settings: Settings) -> None:
    await add_small_data(services)
    first = await publish_model(services, **GOOD)
    rows = [
        {"user": f"newcomer-{n}", "item": f"film-{1 + (n + at) % 40}", "timestamp": 10**9 + at}
        for n in range(12)
        for at in range(6)
    ]
    rows += [{"user": f"user-{n}", "item": "sequel", "timestamp": 2 * 10**9} for n in (1, 2, 3)]
    rows += [{"user": f"user-{n}", "item": "film-40", "timestamp": 10**9} for n in range(4, 9)]
    await services.events.add_rows(rows, 0)
    second = await run_job_here(services, settings, **GOOD)
    gate = gate_of(second)
    assert gate["incumbent"] == first
    assert gate["left_out"]["held-out item unknown to the incumbent"] == 3
    assert gate["left_out"]["held-out item learned by the incumbent"] < 9  # had seen film-40 then
    assert sum(gate["left_out"].values()) + gate["users"] == 72
    evaluated = load_evaluated(services.models.folder(str(second.model_version)))
    assert evaluated is not None
    assert len(evaluated.rows) == 72


async def test_going_on_from_what_is_served(services: Services, settings: Settings) -> None:
    await add_small_data(services)
    first = await publish_model(services, epochs=10)
    seen: list[dict[str, Any]] = []
    job_id = await services.jobs.submit_training(TrainParams(start="warm"))
    params = (await services.jobs.get(job_id)).params
    assert (params["model"], params["factors"], params["start"]) == ("nbpr", 4, "warm")
    worker = Worker(services.database, services.models, settings)
    assert await worker.run_once(on_progress=seen.append)
    job = await services.jobs.get(job_id)
    assert job.status == "succeeded"
    assert (job.metrics or {})["start"] == {"from": "warm", "version": first}
    assert {p["epochs"] for p in seen if p["phase"] == "go on with nbpr"} == {8}
    assert gate_of(job)["users"] == 60  # what was held out then is still news to it
    phases = dict.fromkeys(p["phase"] for p in seen)
    assert list(phases) == [
        "read events", "go on with nbpr", "evaluate", "compare with what is served",
        "learn the held-out items", "write checkpoint",
    ]  # fmt: skip
    assert all(p["eta_s"] is not None and p["eta_s"] >= 0 for p in seen)
    assert set((job.metrics or {})["seconds"]) == {"train", *list(phases)[2:]}


async def test_what_cannot_be_begun_from(app: FastAPI, client: httpx2.AsyncClient) -> None:
    services: Services = app.state.services
    await add_small_data(services)
    response = await client.post("/admin/train", json={"start": "warm"})
    assert (response.status_code, response.json()["code"]) == (422, "cannot_start_warm")
    assert "no model is served yet" in response.json()["detail"]
    await publish_model(services)
    for body, reason in (
        ({"model": "neupr"}, "has model nbpr, not neupr"),
        ({"factors": 8}, "has factors 4, not 8"),
        ({"layers": 2, "factors": 5}, "has factors 4, not 5; layers 4, not 2"),
    ):
        response = await client.post("/admin/train", json={"start": "warm", **body})
        assert (response.status_code, response.json()["code"]) == (422, "cannot_start_warm")
        assert reason in response.json()["detail"]
    assert (await client.post("/admin/train", json={"start": "tepid"})).status_code == 422


async def test_by_default_what_cannot_be_begun_from_is_trained_from_scratch(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    services.jobs._settings = settings.model_copy(update={"train_start": "warm"})
    first = await run_job_here(services, settings)
    assert (first.params["start"], (first.metrics or {})["start"]) == (
        "warm", {"from": "scratch", "because": "no model is served"},
    )  # fmt: skip
    second = await run_job_here(services, settings)
    assert (second.metrics or {})["start"]["from"] == "warm"
    # Another one may be served by the time that the training begins.
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    other = await publish_model(services, factors=6)
    assert await WorkerHere(services.database, services.models, settings).run_once()
    job = await services.jobs.get(job_id)
    start = (job.metrics or {})["start"]
    assert start["from"] == "scratch"
    assert f"{other}, has factors 6, not 4" in start["because"]


async def test_what_is_served_does_not_become_the_default(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    await publish_model(services, factors=6)
    services.jobs._settings = settings.model_copy(
        update={"train_start": "warm", "default_model": "nbpr", "default_factors": 4}
    )
    ordered = (await services.jobs.order("schedule")) | {"epochs": 1}
    assert (ordered["model"], ordered["factors"], ordered["layers"]) == ("nbpr", 4, 4)
    async with services.database.write() as conn:
        job_id = await services.jobs.queue(ordered, conn)
    assert await WorkerHere(services.database, services.models, settings).run_once()
    job = await services.jobs.get(job_id)
    assert "has factors 6, not 4" in (job.metrics or {})["start"]["because"]
    assert (await services.models.get(str(job.model_version))).factors == 4
    # Whoever asks for it by name means what is served.
    await publish_model(services, factors=6)
    asked = await services.jobs.submit_training(TrainParams(start="warm"))
    assert (await services.jobs.get(asked)).params["factors"] == 6


async def test_cancel_while_models_are_compared(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_small_data(services)
    first = await publish_model(services)
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    asked: set[asyncio.Task[Any]] = set()
    model = Results.model

    def on_progress(progress: dict[str, Any]) -> None:
        if progress["phase"] == "compare with what is served" and not asked:
            asked.add(asyncio.ensure_future(services.jobs.cancel(job_id)))

    async def late(self: Results, claim: Claim, version: str, summary: dict[str, Any]) -> None:
        await asyncio.gather(*asked)  # the process may be done before that is written
        await model(self, claim, version, summary)

    monkeypatch.setattr(Results, "model", late)
    worker = Worker(services.database, services.models, settings)
    assert await worker.run_once(on_progress=on_progress)
    assert asked
    await asyncio.gather(*asked)
    job = await services.jobs.get(job_id)
    assert (job.status, job.model_version) == ("cancelled", None)
    assert (await services.models.activation()).version == first
    assert not children()
    assert [path.name for path in (settings.data_dir / "models").iterdir()] == [first]


async def test_what_is_served_cannot_be_read(services: Services, settings: Settings) -> None:
    """Whatever is new is better than that."""
    await add_small_data(services)
    first = await publish_model(services)
    folder = services.models.folder(first)
    (folder / "model.safetensors").write_bytes(b"rotten")
    second = await run_job_here(services, settings)
    gate = gate_of(second)
    assert second.status == "succeeded"
    assert (gate["decision"], gate["finding"]) == ("published", "incumbent_unreadable")
    assert (gate["incumbent"], gate["served"]) == (first, True)
    assert "model.safetensors" in gate["detail"]


async def test_its_measured_copy_alone_cannot_be_read(
    services: Services, settings: Settings
) -> None:
    """What is served is compared all the same, by what came in since."""
    await add_enough_data(services)
    first = await publish_model(services, **GOOD)
    folder = services.models.folder(first)
    (folder / "evaluated.safetensors").write_bytes(b"rotten")
    await services.events.add_rows([*_more_of_the_same(200)], 0)
    second = await run_job_here(services, settings, **BAD, pretrain=False)
    gate = gate_of(second)
    assert (second.status, gate["finding"], gate["incumbent"]) == ("rejected", "worse", first)
    assert (gate["users"], gate["folded_in"]) == (200, 200)
    assert gate["left_out"]["held-out item learned by the incumbent"] == 100


def _more_of_the_same(users: int) -> Iterator[dict[str, Any]]:
    """Three events of each of so many users, with items of the genre that they have most of."""
    genres = {item.id: item.genre for item in ENOUGH.items}
    done = Counter(item for _, item, _ in ENOUGH.interactions)
    for user in [f"user-{n}" for n in range(1, users + 1)]:
        seen = [item for name, item, _ in ENOUGH.interactions if name == user]
        liked = Counter(genres[item] for item in seen)
        new = [item for item in done if item not in seen]
        new.sort(key=lambda item: (-liked[genres[item]], -done[item], item))
        for at in range(3):  # the last two are held out
            yield {"user": user, "item": new[at], "timestamp": 10**9 + at}


async def test_a_deletion_by_mistake_shows(services: Services, settings: Settings) -> None:
    await add_small_data(services)
    first = await publish_model(services)
    items = (await services.models.get(first)).items
    await services.catalog.delete("film-1")
    await services.events.delete_user("user-1")
    gate = gate_of(await run_job_here(services, settings))
    assert gate["lacking"] == {
        "items": pytest.approx(1 / items, abs=1e-5), "users": pytest.approx(1 / 60, abs=1e-5)
    }  # fmt: skip
