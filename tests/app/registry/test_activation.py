"""Activation: history, rollback, pinning, and versions that the gate has rejected."""

from __future__ import annotations

import asyncio
import itertools

import httpx2
import pytest
from fastapi import FastAPI

from app.core.access import Role
from app.core.errors import Conflict
from app.registry.activation import undo_stack
from app.registry.repository import ModelRepository
from app.registry.schemas import Activation, ActivationChange, Reason
from app.registry.service import ModelRegistry, open_checkpoint_store
from app.wiring import Services
from tests.app.conftest import publish_model
from tests.app.registry.conftest import copies

pytestmark = pytest.mark.anyio


async def active(services: Services) -> str | None:
    return (await services.models.activation()).version


@pytest.mark.slow
async def test_rollback_goes_back_step_by_step(services: Services) -> None:
    a, b, c = await copies(services, 3)
    registry = services.models
    assert (await registry.activation()).previous == b
    assert (await registry.rollback()).version == b
    after = await registry.rollback()
    assert (after.version, after.previous) == (a, None)  # and not to and fro
    with pytest.raises(Conflict) as caught:
        await registry.rollback()
    assert caught.value.code == "no_previous_model"
    await registry.activate(c)
    assert (await registry.rollback()).version == a  # what was gone back from is off the way
    changes, following = await registry.history()
    assert following is None
    assert [(x.version, x.previous, x.reason) for x in changes] == [
        (a, c, "rolled_back"), (c, a, "activated"), (a, b, "rolled_back"), (b, c, "rolled_back"),
        (c, b, "published"), (b, a, "published"), (a, None, "published"),
    ]  # fmt: skip
    assert [x.generation for x in changes] == list(range(7, 0, -1))


async def test_rollback_skips_versions_with_deleted_files(services: Services) -> None:
    a, b, _ = await copies(services, 3)
    async with services.database.write() as conn:
        await ModelRepository(services.database).mark_deleted(conn, [b])
    assert (await services.models.rollback()).version == a


async def test_an_automatic_return_is_undone_like_a_rollback(services: Services) -> None:
    a, b, c = await copies(services, 3)
    after = await services.models.activate(b, "returned", {"p": 0.001}, if_active=c)
    assert (after.version, after.previous) == (b, a)
    change = (await services.models.history(n=1))[0][0]
    assert (change.reason, change.detail) == ("returned", {"p": 0.001})
    with pytest.raises(Conflict) as caught:
        await services.models.activate(a, "returned", if_active=c)
    assert caught.value.code == "model_changed"
    assert await active(services) == b


async def test_rollback_without_a_history_uses_the_previous_version(services: Services) -> None:
    a, b = await copies(services, 2)
    async with services.database.write() as conn:
        await conn.exec_driver_sql("DELETE FROM activations")
    assert (await services.models.rollback()).version == a
    await services.models.activate(b)
    assert (await services.models.rollback()).version == a


async def test_concurrent_activations_leave_one_consistent_history(services: Services) -> None:
    a, b, c, d = await copies(services, 4)
    results = await asyncio.gather(
        *(services.models.activate(version) for version in (a, b, c)),
        services.models.rollback(),
        return_exceptions=True,
    )
    unexpected = [r for r in results if not isinstance(r, Activation | Conflict)]
    assert not unexpected
    changes, _ = await services.models.history()
    by_generation = sorted(changes)
    for before, after in itertools.pairwise(by_generation):
        assert after.generation == before.generation + 1
        assert after.previous == before.version
    assert by_generation[-1].version == await active(services)
    assert d in {change.previous for change in changes}


async def test_every_activation_is_announced_after_its_commit(services: Services) -> None:
    a, b = await copies(services, 2)
    announced: list[bool] = []
    registry = ModelRegistry(
        services.database,
        open_checkpoint_store(services.settings),
        announce=lambda: announced.append(True),
    )
    await registry.activate(a, "returned", if_active=b)
    await registry.activate(b)
    await registry.rollback()
    assert len(announced) == 3
    with pytest.raises(Conflict):
        await registry.rollback()
    assert len(announced) == 3


async def test_a_pinned_version_stays_active_after_a_training(
    app: FastAPI, client: httpx2.AsyncClient, services_of_app: Services
) -> None:
    services = services_of_app
    a, b = await copies(services, 2)
    response = await client.post(f"/admin/models/{a}/pin")
    assert response.status_code == 200
    assert (response.json()["active"], response.json()["pinned"]) == (True, True)
    again = await client.post(f"/admin/models/{a}/pin")  # nothing to do
    assert again.json()["pinned"] is True

    third = await publish_model(services, seed=3)
    assert await active(services) == a
    published = (await client.get(f"/admin/models/{third}")).json()
    assert (published["status"], published["active"], published["activations"]) == (
        "published", False, [],
    )  # fmt: skip
    with pytest.raises(Conflict) as caught:
        await services.models.activate(b, "returned")
    assert caught.value.code == "pinned"

    # By hand it can be changed, and is pinned then as well.
    response = await client.post(f"/admin/models/{third}/activate")
    assert (response.json()["active"], response.json()["pinned"]) == (True, True)
    assert (await client.post("/admin/models/rollback")).json()["version"] == a
    for _ in range(2):
        response = await client.delete("/admin/models/pin")
        assert response.json() == {"version": a, "previous": b, "pinned": False}
    fourth = await publish_model(services, seed=4)
    assert await active(services) == fourth
    details = [
        (x["version"], x["detail"])
        for x in (await client.get("/admin/activations")).json()["items"]
    ]
    assert details[:6] == [
        (fourth, None), (a, {"pinned": False}), (a, None), (third, None), (a, {"pinned": True}),
        (b, None),
    ]  # fmt: skip


@pytest.fixture
def services_of_app(app: FastAPI) -> Services:
    services: Services = app.state.services
    return services


async def test_a_rejected_version_is_activated_only_with_force(
    client: httpx2.AsyncClient, services_of_app: Services
) -> None:
    services = services_of_app
    a, bad = await copies(services, 2, status="rejected")
    assert await active(services) == a
    for path in (f"{bad}/activate", f"{bad}/pin", f"{bad}/activate?force=false"):
        response = await client.post(f"/admin/models/{path}")
        assert (response.status_code, response.json()["code"]) == (409, "not_published")
    response = await client.post(f"/admin/models/{bad}/activate", json={"force": True})
    assert response.status_code == 200
    model = response.json()
    assert (model["active"], model["status"]) == (True, "published")
    assert model["metrics"]["gate"]["forced"] is True
    newest = (await client.get("/admin/activations", params={"n": 1})).json()
    assert newest["items"][0]["detail"] == {"forced": True}
    assert newest["next_cursor"]
    # Its status is that of any other from then on.
    assert (await client.post(f"/admin/models/{a}/activate")).status_code == 200
    query = {"cursor": newest["next_cursor"], "n": 1}
    following = (await client.get("/admin/activations", params=query)).json()["items"][0]
    assert following["generation"] == newest["items"][0]["generation"] - 1
    assert (await client.post("/admin/models/rollback")).json()["version"] == bad


@pytest.mark.parametrize("body", ['{"force": 1}', '{"forced": true}', "[]", '"force"'])
async def test_an_invalid_body_of_an_activation_is_422(
    shared_client: httpx2.AsyncClient, body: str
) -> None:
    path, headers = "/admin/models/none/activate", {"content-type": "application/json"}
    response = await shared_client.post(path, content=body, headers=headers)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"


async def test_a_version_with_deleted_files_cannot_be_activated(
    client: httpx2.AsyncClient, services_of_app: Services
) -> None:
    a, _ = await copies(services_of_app, 2)
    async with services_of_app.database.write() as conn:
        await ModelRepository(services_of_app.database).mark_deleted(conn, [a])
    response = await client.post(f"/admin/models/{a}/activate", json={"force": True})
    assert (response.status_code, response.json()["code"]) == (409, "deleted_model")
    assert (await client.post("/admin/models/rollback")).json()["code"] == "no_previous_model"
    kept = (await client.get(f"/admin/models/{a}")).json()
    assert kept["status"] == "deleted"
    assert kept["metrics"]["sampled"]


async def test_a_model_lists_its_activations_with_their_reasons(
    client: httpx2.AsyncClient, services_of_app: Services
) -> None:
    a, b = await copies(services_of_app, 2)
    await services_of_app.models.rollback({"by": "test"})
    detail = (await client.get(f"/admin/models/{a}")).json()
    assert detail["click_through"] == {"lists": 0, "clicked": 0, "rate": None}
    assert [(x["reason"], x["previous"]) for x in detail["activations"]] == [
        ("rolled_back", b), ("published", None),
    ]  # fmt: skip
    assert detail["activations"][0]["detail"] == {"by": "test"}


async def test_an_activation_names_the_key_that_asked_for_it(
    client: httpx2.AsyncClient, services_of_app: Services
) -> None:
    services = services_of_app
    a, b = await copies(services, 2)
    row, key = await services.keys.create("operator", [Role.ADMIN])
    client.headers["X-API-Key"] = key
    for call in (f"{a}/activate", f"{b}/pin", "rollback"):
        assert (await client.post(f"/admin/models/{call}")).status_code == 200
    assert (await client.delete("/admin/models/pin")).status_code == 200
    changes = (await client.get("/admin/activations")).json()["items"]
    assert [change["by"] for change in changes] == [row.key_id] * 4 + [None] * 2
    model = (await client.get(f"/admin/models/{b}")).json()
    assert [change["by"] for change in model["activations"]] == [row.key_id, None]


def change(generation: int, version: str, previous: str | None, reason: Reason) -> ActivationChange:
    return ActivationChange(generation, version, previous, reason, None, generation)


@pytest.mark.parametrize(
    ("changes", "stack"),
    [
        ([], ""),
        ([("b", "a", "published")], "ab"),
        ([("a", None, "published"), ("b", "a", "published"), ("a", "b", "activated")], "aba"),
        ([("a", None, "published"), ("b", "a", "published"), ("a", "b", "rolled_back")], "a"),
        # Pinned and unpinned: nothing has moved.
        ([("a", None, "published"), ("a", "a", "activated"), ("a", "a", "activated")], "a"),
        # Gone back to something that was never on the way: one step on.
        ([("b", "a", "published"), ("x", "b", "returned")], "abx"),
        (
            [("b", "a", "published"), ("a", "b", "activated"), ("c", "a", "published"),
             ("a", "c", "rolled_back"), ("b", "a", "rolled_back")],
            "ab",
        ),
    ],
)  # fmt: skip
def test_undo_stack_holds_the_versions_a_rollback_leads_through(
    changes: list[tuple[str, str | None, Reason]], stack: str
) -> None:
    versions = undo_stack([change(n, *each) for n, each in enumerate(changes, 1)])
    assert "".join(versions) == stack
