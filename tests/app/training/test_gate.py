"""The gate and warm starts with real trainings."""

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
from app.jobs.schemas import JobRow, TrainParams
from app.jobs.service import JobService
from app.registry.checkpoint_store import MARK
from app.wiring import Services
from app.worker.worker import Worker
from ncr_core.checkpoint import load_evaluation_snapshot
from ncr_core.data.synthetic import synthetic_catalogue
from ncr_core.recipes import recipe
from ncr_core.training import selection
from tests.app.conftest import (
    QUICK,
    LateWorker,
    add_small_data,
    children,
    publish_model,
    run_job_here,
    thread_worker,
)
from tests.conftest import ON_SQLITE

# Each trains: jobs on PostgreSQL have tests of their own.
pytestmark = [pytest.mark.anyio, pytest.mark.slow, ON_SQLITE]

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


def job_service(services: Services, settings: Settings, **changes: Any) -> JobService:
    """The jobs of a service with other settings."""
    changed = settings.model_copy(update=changes)
    return JobService(services.database, changed, services.models.serving)


def gate_of(job: JobRow) -> dict[str, Any]:
    gate: dict[str, Any] = (job.metrics or {})["gate"]
    return gate


async def test_a_worse_model_is_rejected_and_its_files_are_kept(
    services: Services, settings: Settings
) -> None:
    await add_enough_data(services)
    first = await run_job_here(services, settings, **GOOD)
    gate = gate_of(first)
    assert (gate["decision"], gate["finding"], gate["incumbent"]) == ("published", "first", None)
    sampled = (first.metrics or {})["sampled"], (first.metrics or {})["popularity_sampled"]
    over = gate["over_popularity"]["sampled"]
    assert over == pytest.approx(sampled[0]["ndcg@10"] - sampled[1]["ndcg@10"], abs=2e-5)

    settings = settings.model_copy(update={"precompute_users": 10})
    second = await run_job_here(services, settings, **BAD)
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
    rows = (await services.jobs.page(None, 10))[0]
    assert {job.kind for job in rows} == {"train"}  # no candidates are computed for it


async def test_a_first_model_worse_than_the_popularity_list_is_rejected(
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


async def test_force_publishes_a_model_that_the_gate_would_reject(
    app: FastAPI, client: httpx2.AsyncClient, settings: Settings
) -> None:
    services: Services = app.state.services
    await add_enough_data(services)
    await publish_model(services, **GOOD)
    body = QUICK | BAD | {"force": True}
    job_id = (await client.post("/admin/train", json=body)).json()["job_id"]
    assert await thread_worker(services, settings).run_once()
    job = (await client.get(f"/admin/jobs/{job_id}")).json()
    assert job["status"] == "succeeded"
    gate = job["metrics"]["gate"]
    assert (gate["decision"], gate["finding"], gate["passed"], gate["forced"]) == (
        "published", "worse", False, True,
    )  # fmt: skip
    model = (await client.get(f"/admin/models/{job['model_version']}")).json()
    assert (model["active"], model["params"]["force"]) == (True, True)
    assert model["activations"][0]["detail"] == {"job_id": job_id, "forced": True}


async def test_a_margin_of_one_lets_every_model_pass(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    await publish_model(services, **GOOD)
    lenient = settings.model_copy(update={"gate_margin": 1.0})
    job = await run_job_here(services, lenient, **BAD)
    assert (job.status, gate_of(job)["finding"]) == ("succeeded", "not_worse")


async def test_a_model_trained_while_another_is_pinned_is_published_but_not_served(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    first = await publish_model(services)
    await services.models.activate(first, pin=True)
    second = await run_job_here(services, settings, seed=1)
    assert second.status == "succeeded"
    assert (await services.models.get(str(second.model_version))).status == "published"
    assert (await services.models.activation()).version == first


async def test_users_and_items_unknown_to_the_incumbent_are_left_out_or_folded_in(
    services: Services, settings: Settings
) -> None:
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
    evaluated = load_evaluation_snapshot(services.models.folder(str(second.model_version)))
    assert evaluated is not None
    assert len(evaluated.rows) == 72


async def test_a_warm_start_continues_from_the_served_model(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    first = (await run_job_here(services, settings, epochs=10)).model_version
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
        "learn the held-out items", "learn from attributes",
        "write checkpoint",
    ]  # fmt: skip
    assert all(p["eta_s"] is not None and p["eta_s"] >= 0 for p in seen)
    assert set((job.metrics or {})["seconds"]) == {"train", *list(phases)[2:]}


async def test_auto_is_recorded_and_continued_by_a_warm_start(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [
        recipe("next-item").with_(factors=4),
        recipe("next-item-nbpr").with_(factors=4, epochs=2, shared_negatives=8),
    ]
    monkeypatch.setattr(selection, "auto_recipes", lambda *_: few)
    await add_small_data(services)
    worker = thread_worker(services, settings)
    job_id = await services.jobs.submit_training(TrainParams(force=True))
    assert await worker.run_once()
    job = await services.jobs.get(job_id)
    assert (job.status, job.params["recipe"]) == ("succeeded", "auto")
    metrics = job.metrics or {}
    assert [tried["recipe"] for tried in metrics["tried"]] == ["next-item", "next-item-nbpr"]
    assert [tried["recipe"] for tried in metrics["tried"] if tried["chosen"]] == [metrics["recipe"]]
    row = await services.models.get(str(job.model_version))
    assert (row.kind, row.factors, row.params["users"]) == ("nbpr", 4, "history")
    assert row.metrics["tried"] == metrics["tried"]
    assert (metrics["recipe"], metrics["start_factors"]) == ("next-item-nbpr", 32)
    assert metrics["baselines"].keys() == {"als", "next-item"}
    for figures in metrics["baselines"].values():  # on the same users, among the same items
        assert {k: figures[k] for k in ("users", "items")} == {
            k: metrics["full"][k] for k in ("users", "items")
        }
        assert 0 < figures["ndcg@10"] < figures["hr@10"]
    assert metrics["gate"]["decision"] == "published"
    for body in ({}, {"recipe": "auto"}):
        wanted = TrainParams.model_validate(body | {"start": "warm", "force": True})
        job_id = await services.jobs.submit_training(wanted)
        assert await worker.run_once()
        warm = await services.jobs.get(job_id)
        assert warm.status == "succeeded"
        start = (warm.metrics or {})["start"]
        assert (start["from"], start["version"]) == ("warm", row.version)
        assert (warm.metrics or {})["start_factors"] == 32
        row = await services.models.get(str(warm.model_version))
        assert (row.kind, row.factors, row.params["users"]) == ("nbpr", 4, "history")


@pytest.mark.parametrize(
    ("rows", "kind", "error"),
    [
        ([(n, n % 7) for n in range(30)], "view", "no user has 3 items"),
        (
            [(n, item) for n in range(20) for item in range(6)],
            "view",
            "every user has interacted with every item",
        ),
        ([(n, (n + k) % 10) for n in range(50) for k in range(5)], "view", None),
        ([(n, n % 10) for n in range(20)], "dislike", "no event is positive"),
    ],
    ids=["one event each", "everybody the same", "50 users of 10 items", "only dislikes"],
)
async def test_auto_ends_with_a_model_or_says_why_lists_stay_popular(
    app: FastAPI,
    client: httpx2.AsyncClient,
    settings: Settings,
    rows: list[tuple[int, int]],
    kind: str,
    error: str | None,
) -> None:
    services: Services = app.state.services
    await services.events.import_rows(
        [
            NewEvent(f"{order}", f"u{user}", f"i{item}", kind, timestamp=order * 1_000_000)
            for order, (user, item) in enumerate(rows)
        ]
    )
    job_id = await services.jobs.submit_training(TrainParams(force=True))
    assert await thread_worker(services, settings).run_once()
    job = await services.jobs.get(job_id)
    assert job.status == ("failed" if error else "succeeded")
    assert (job.error or "").startswith(error or "")
    await app.state.recommend.models.refresh()
    places = (await client.get("/recommend/new", params={"n": 3})).json()["items"]
    assert len(places) == 3
    assert {place["source"] for place in places} == {"popular"}  # of somebody unknown
    known = (await client.get("/recommend/u1", params={"n": 3})).json()["items"]
    assert {place["source"] for place in known} <= {"popular" if error else "model"}


async def test_an_impossible_warm_start_is_422(app: FastAPI, client: httpx2.AsyncClient) -> None:
    services: Services = app.state.services
    await add_small_data(services)
    response = await client.post("/admin/train", json={"start": "warm"})
    assert (response.status_code, response.json()["code"]) == (422, "cannot_start_warm")
    assert "a warm start needs a served model" in response.json()["detail"]
    await publish_model(services)
    for body, reason in (
        ({"model": "neupr"}, "has model nbpr, not neupr"),
        ({"factors": 8}, "has factors 4, not 8"),
        ({"layers": 2, "factors": 5}, "has factors 4, not 5; layers 4, not 2"),
        ({"recipe": "next-item-nbpr"}, "has factors 4, not 128; users free, not history"),
    ):
        response = await client.post("/admin/train", json={"start": "warm", **body})
        assert (response.status_code, response.json()["code"]) == (422, "cannot_start_warm")
        assert reason in response.json()["detail"]
    assert (await client.post("/admin/train", json={"start": "tepid"})).status_code == 422


async def test_a_warm_start_by_default_falls_back_to_scratch_when_it_is_impossible(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    services.jobs = job_service(services, settings, train_start="warm")
    first = await run_job_here(services, settings)
    assert (first.params["start"], (first.metrics or {})["start"]) == (
        "warm", {"from": "scratch", "because": "no model is served"},
    )  # fmt: skip
    second = await run_job_here(services, settings)
    assert (second.metrics or {})["start"]["from"] == "warm"
    # Another one may be served by the time that the training begins.
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    other = await publish_model(services, factors=6)
    assert await thread_worker(services, settings).run_once()
    job = await services.jobs.get(job_id)
    start = (job.metrics or {})["start"]
    assert start["from"] == "scratch"
    assert f"{other} has factors 6, not 4" in start["because"]


async def test_a_warm_start_by_default_does_not_take_over_the_served_architecture(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    await publish_model(services, factors=6)
    services.jobs = job_service(
        services, settings, train_start="warm", default_model="nbpr", default_factors=4
    )
    order = (await services.jobs.training_order("schedule")) | {"epochs": 1}
    assert (order["model"], order["factors"], order["layers"]) == ("nbpr", 4, 4)
    async with services.database.write() as conn:
        job_id = await services.jobs.enqueue(order, conn)
    assert await thread_worker(services, settings).run_once()
    job = await services.jobs.get(job_id)
    assert "has factors 6, not 4" in (job.metrics or {})["start"]["because"]
    assert (await services.models.get(str(job.model_version))).factors == 4
    # A client that requests a warm start means the served model.
    await publish_model(services, factors=6)
    requested = await services.jobs.submit_training(TrainParams(start="warm"))
    assert (await services.jobs.get(requested)).params["factors"] == 6


async def test_a_job_cancelled_during_the_comparison_leaves_no_files(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    first = await publish_model(services)
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    cancelling: set[asyncio.Task[Any]] = set()

    def on_progress(progress: dict[str, Any]) -> None:
        if progress["phase"] == "compare with what is served" and not cancelling:
            cancelling.add(asyncio.ensure_future(services.jobs.cancel(job_id)))

    # The process may be done before the cancellation is written.
    worker = LateWorker(services, settings, lambda: asyncio.gather(*cancelling))
    assert await worker.run_once(on_progress=on_progress)
    assert cancelling
    job = await services.jobs.get(job_id)
    assert (job.status, job.model_version) == ("cancelled", None)
    assert (await services.models.activation()).version == first
    assert not children()
    assert sorted(path.name for path in (settings.data_dir / "models").iterdir()) == [
        first,
        MARK,
    ]


async def test_an_unreadable_incumbent_is_replaced_without_comparison(
    services: Services, settings: Settings
) -> None:
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


async def test_an_incumbent_without_readable_evaluation_snapshot_is_compared_on_new_events(
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


async def test_the_report_shows_the_share_of_deleted_users_and_items(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    first = await publish_model(services)
    items = (await services.models.get(first)).items
    await services.catalog.delete("film-1")
    await services.events.delete_user("user-1")
    gate = gate_of(await run_job_here(services, settings))
    assert gate["lacking"] == {
        "items": pytest.approx(1 / items, abs=1e-5), "users": pytest.approx(1 / 60, abs=1e-5)
    }  # fmt: skip
