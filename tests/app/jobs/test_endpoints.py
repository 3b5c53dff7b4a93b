"""The HTTP routes of trainings and jobs."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import orjson
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from pydantic import ValidationError

from app.core.access import Role
from app.jobs.repository import JobRepository
from app.jobs.schemas import JobRow, TrainOrder, TrainParams
from app.jobs.tables import jobs as jobs_table
from app.training.progress import phase_progress
from app.wiring import Services
from ncr_core.recipes import recipe

LEASE_US = 60_000_000


@pytest.mark.anyio
async def test_jobs_are_listed_newest_first_page_by_page(client: httpx2.AsyncClient) -> None:
    ids = []
    for body in ({}, {"model": "nbpr", "factors": 16, "epochs": 3}):
        response = await client.post("/admin/train", json=body)
        assert response.status_code == 202
        ids.append(response.json()["job_id"])
        assert response.headers["location"] == f"/admin/jobs/{ids[-1]}"
    page = (await client.get("/admin/jobs", params={"n": 1})).json()
    assert [job["job_id"] for job in page["items"]] == ids[1:]
    await client.post("/admin/train")  # a row that comes in between two pages moves none of them
    rest = (await client.get("/admin/jobs", params={"cursor": page["next_cursor"]})).json()
    assert [job["job_id"] for job in rest["items"]] == ids[:1]
    assert rest["next_cursor"] is None
    job = (await client.get(f"/admin/jobs/{ids[1]}")).json()
    assert set(job) == {
        "job_id", "kind", "status", "params", "progress", "attempt", "created_at", "started_at",
        "finished_at", "model_version", "metrics", "error", "by",
    }  # fmt: skip
    assert (job["status"], job["attempt"], job["params"]["factors"]) == ("queued", 0, 16)
    assert (await client.get("/admin/jobs/none")).status_code == 404


@pytest.mark.anyio
async def test_a_full_queue_takes_no_training(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.service.MAX_QUEUED_TRAININGS", 2)
    ids = [(await client.post("/admin/train")).json()["job_id"] for _ in range(2)]
    answer = await client.post("/admin/train")
    assert (answer.status_code, answer.json()["code"]) == (409, "queue_full")
    assert len((await client.get("/admin/jobs")).json()["items"]) == 2
    assert (await client.post(f"/admin/jobs/{ids[0]}/cancel")).status_code == 200
    assert (await client.post("/admin/train")).status_code == 202


@pytest.mark.anyio
async def test_a_training_that_is_sent_again_is_queued_once(client: httpx2.AsyncClient) -> None:
    key = {"Idempotency-Key": "0b0e"}
    sent = [client.post("/admin/train", json={"seed": 3}, headers=key) for _ in range(4)]
    answers = await asyncio.gather(*sent)
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["job_id"] for answer in answers}) == 1
    changed = await client.post("/admin/train", json={"seed": 4}, headers=key)
    assert (changed.status_code, changed.json()["code"]) == (409, "idempotency_key_used")
    other = await client.post("/admin/train", json={"seed": 4}, headers={"Idempotency-Key": "1"})
    assert other.status_code == 202
    assert len((await client.get("/admin/jobs")).json()["items"]) == 2
    bad = await client.post("/admin/train", headers={"Idempotency-Key": "x" * 256})
    assert bad.status_code == 422


@pytest.mark.anyio
async def test_a_job_names_the_key_that_asked_for_it(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    services: Services = app.state.services
    await client.post("/admin/train")
    row, key = await services.keys.create("trainer", [Role.ADMIN])
    client.headers["X-API-Key"] = key
    job_id = (await client.post("/admin/train")).json()["job_id"]
    await services.jobs.submit_training(TrainParams())
    jobs = (await client.get("/admin/jobs")).json()["items"]
    assert [job["by"] for job in jobs] == [None, row.key_id, "local"]
    assert (await client.get(f"/admin/jobs/{job_id}")).json()["by"] == row.key_id
    assert key not in str(jobs)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "body",
    [
        {"model": "svd"},
        {"factors": 0},
        {"factors": 5000},
        {"factors": "8"},
        {"layers": 0},
        {"epochs": 0},
        {"alpha": 1.5},
        {"learning_rate": 0},
        {"modle": "nbpr"},
        [],
        "nbpr",
    ],
)
async def test_invalid_training_params_are_422_and_queue_nothing(
    shared_client: httpx2.AsyncClient, body: Any
) -> None:
    response = await shared_client.post("/admin/train", json=body)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert (await shared_client.get("/admin/jobs")).json()["items"] == []


@pytest.mark.anyio
async def test_cancelling_a_queued_job_is_immediate_and_a_running_one_is_told(
    client: httpx2.AsyncClient, app: Any
) -> None:
    database = app.state.services.database
    jobs = JobRepository(database)
    ids = [(await client.post("/admin/train")).json()["job_id"] for _ in range(2)]
    claim = await jobs.claim("w", LEASE_US, 3)
    assert claim is not None
    waiting = (await client.post(f"/admin/jobs/{ids[1]}/cancel")).json()
    assert waiting["status"] == "cancelled"
    running = (await client.post(f"/admin/jobs/{ids[0]}/cancel")).json()
    assert running["status"] == "running"
    assert await jobs.heartbeat(claim, LEASE_US, None) is True
    async with database.write() as conn:
        assert await jobs.finish(conn, claim, "cancelled")
    again = await client.post(f"/admin/jobs/{ids[0]}/cancel")
    assert (again.status_code, again.json()["code"]) == (409, "job_ended")


TIMES = {
    "created_at": (1_732_269_990_000_000, "2024-11-22T10:06:30.000Z"),
    "started_at": (1_732_269_990_999_999, "2024-11-22T10:06:30.999Z"),
    "finished_at": (1_732_270_000_123_456, "2024-11-22T10:06:40.123Z"),
}


def as_bytes(job: JobRow, *, ordered: bool) -> bytes:
    """A job as clients have always received it: compact JSON, floats as short as they can be."""
    times = {name: text for name, (_, text) in TIMES.items()}
    hidden = ("owner", "lease_until", "cancel_requested")
    body = {k: v for k, v in (job._asdict() | times).items() if k not in hidden}
    if ordered and job.progress is not None:  # PostgreSQL keeps no order of keys
        body["progress"] = {
            name: job.progress[name] for name in (*phase_progress(""), "peak_bytes")
        }
    return orjson.dumps(body)


@pytest.mark.anyio
async def test_the_bytes_of_a_job_are_those_of_the_stored_values(
    client: httpx2.AsyncClient, app: Any
) -> None:
    body = {"learning_rate": 1e-8, "alpha": 1.0, "model": "nbpr"}
    job_id = (await client.post("/admin/train", json=body)).json()["job_id"]
    services = app.state.services
    claim = await JobRepository(services.database).claim("w", LEASE_US, 3)
    assert claim is not None
    values: dict[str, Any] = {
        "progress": phase_progress("evaluate", 12.0)
        | {"epoch": 3, "loss": 1e-5, "peak_bytes": 1 << 30},
        "metrics": {"sampled": {"p": 1.5e-07, "é": [1, 2.0, None, True]}, "big": 1e22},
        **{name: microseconds for name, (microseconds, _) in TIMES.items()},
        "error": "ein Fehler: „ü“",
    }
    async with services.database.write() as conn:
        await conn.execute(
            sa.update(jobs_table).where(jobs_table.c.job_id == job_id).values(values)
        )
    job = await services.jobs.get(job_id)
    expected = as_bytes(job, ordered=services.database.dialect == "postgresql")
    response = await client.get(f"/admin/jobs/{job_id}")
    assert response.headers["content-type"] == "application/json"
    assert response.content == expected
    page = await client.get("/admin/jobs")
    assert page.content == b'{"items":[' + expected + b'],"next_cursor":null}'


INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
NULL = {"type": "null"}

RECIPES = [
    "auto",
    "default",
    "history",
    "next-item",
    "next-item-nbpr",
    "next-item-attention",
    "als-nbpr",
    "spectral-neupr",
    "next-item-two-layer-attention",
    "next-item-neupr",
    "next-item-dncr",
]

# What clients rely on. A new hyper-parameter adds a line; none of these may change.
PROPERTIES: dict[str, dict[str, Any]] = {
    "model": {"anyOf": [{"enum": ["nbpr", "dncr", "neupr"], "type": "string"}, NULL]},
    "factors": {"anyOf": [INTEGER | {"minimum": 1, "maximum": 512}, NULL]},
    "users": {"anyOf": [{"enum": ["free", "history"], "type": "string"}, NULL]},
    "recipe": {"anyOf": [{"enum": RECIPES, "type": "string"}, NULL]},
    "start": {"anyOf": [{"enum": ["scratch", "warm"], "type": "string"}, NULL]},
    "attributes": {
        "anyOf": [
            {"const": "auto", "type": "string"},
            {
                "type": "array",
                "maxItems": 64,
                "items": {"type": "string", "minLength": 1, "maxLength": 256},
            },
            NULL,
        ]
    },
    "layers": INTEGER | {"default": 4, "minimum": 1, "maximum": 6},
    "epochs": INTEGER | {"default": 15, "minimum": 1, "maximum": 1000},
    "negatives": INTEGER | {"default": 4, "minimum": 1, "maximum": 100},
    "batch_size": INTEGER | {"default": 0, "minimum": 0, "maximum": 1_000_000},
    "min_interactions": INTEGER | {"default": 1, "minimum": 1, "exclusiveMaximum": 2**31},
    "seed": INTEGER | {"default": 0, "minimum": 0, "exclusiveMaximum": 2**31},
    "learning_rate": NUMBER | {"default": 0.01, "exclusiveMinimum": 0, "maximum": 10},
    "alpha": NUMBER | {"default": 0.5, "minimum": 0, "maximum": 1},
    "pretrain": {"type": "boolean", "default": True},
    "force": {"type": "boolean", "default": False},
}


@pytest.mark.parametrize("model", [TrainParams, TrainOrder])
def test_the_schema_of_a_request_is_the_contract(model: type[TrainParams]) -> None:
    properties = model.model_json_schema()["properties"]
    stated = {
        name: {key: value for key, value in schema.items() if key not in ("title", "description")}
        for name, schema in properties.items()
        if name != "trigger"
    }
    optional = ("model", "factors", "users", "recipe", "start", "attributes")
    expected = PROPERTIES | {name: PROPERTIES[name] | {"default": None} for name in optional}
    if model is TrainOrder:  # it is stored, and no client's: a recipe may keep its start
        expected["epochs"] = expected["epochs"] | {"minimum": 0}
    assert stated == expected


def test_a_request_without_hyperparameters_leaves_them_to_auto() -> None:
    request = TrainParams.model_validate({"seed": 3, "min_interactions": 2})
    values = request.completed("auto", model="neupr", factors=8, users="free")
    assert values == {
        "recipe": "auto", "seed": 3, "min_interactions": 2, "start": None, "force": False,
    }  # fmt: skip
    order = TrainOrder.model_validate(values)
    again = TrainOrder.model_validate_json(order.model_dump_json())  # to the training process
    assert (again.recipe, again.random_seed) == ("auto", 3)


def test_a_named_recipe_is_trained_with_the_requests_own_values() -> None:
    request = TrainParams.model_validate({"recipe": "next-item-nbpr", "factors": 32})
    values = request.completed("auto", model="neupr", factors=8, users="free")
    assert (values["recipe"], values["model"], values["users"]) == (
        "next-item-nbpr", "nbpr", "history",
    )  # fmt: skip
    order = TrainOrder.model_validate(values).configured_recipe(device="cpu")
    assert order == recipe("next-item-nbpr").with_(factors=32, device="cpu")


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "auto"])
@pytest.mark.parametrize("asked", [True, False], ids=["by request", "by setting"])
def test_every_recipe_can_be_stored_and_trained(name: str, *, asked: bool) -> None:
    request = TrainParams(recipe=name) if asked else TrainParams()
    values = request.completed(name, model="neupr", factors=8, users="free")
    stored = TrainOrder.model_validate(values).model_dump_json()
    order = TrainOrder.model_validate_json(stored).configured_recipe(device="cpu")
    assert order == recipe(name).with_(device="cpu")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"recipe": "fastest"}, "unknown recipe; the recipes are auto, default, history"),
        ({"recipe": "two-towers"}, "unknown recipe"),
    ],
)
def test_a_recipe_that_there_is_not_is_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainParams.model_validate(body)


def test_the_description_names_the_epochs_of_the_history_recipe() -> None:
    text = TrainParams.model_json_schema()["properties"]["users"]["description"]
    assert "With `history`, the default of `epochs` is 6" in text


@pytest.mark.parametrize(
    "body", [{"factors": 5.5}, {"factors": True}, {"model": "twotower"}, {"loss": "bpr"}]
)
def test_a_request_that_does_not_fit_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainParams.model_validate(body)


def test_what_a_request_leaves_open_comes_from_settings_and_recipe() -> None:
    request = TrainParams.model_validate({"users": "history", "negatives": 2, "factors": 5.0})
    values = request.completed("auto", model="dncr", factors=8, users="free")
    assert (values["model"], values["factors"], values["users"]) == ("dncr", 5, "history")
    assert (values["epochs"], values["learning_rate"], values["negatives"]) == (6, 5e-3, 2)
    order = TrainOrder.model_validate(values).configured_recipe(device="cpu")
    expected = recipe("history").with_(kind="dncr", factors=5, negatives=2, device="cpu")
    assert order == expected
