"""Models over HTTP: listed, activated, rolled back; and damaged checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.inference.model_manager import ModelManager
from app.registry.checkpoint_store import MARK
from app.registry.schemas import ModelDetail
from app.wiring import Services
from tests.app.conftest import add_small_data, publish_model

pytestmark = pytest.mark.anyio


@pytest.fixture
async def versions(app: FastAPI) -> list[str]:
    """Two versions, the second active and served."""
    services: Services = app.state.services
    await add_small_data(services)
    first = await publish_model(services, seed=1)
    second = await publish_model(services, model="neupr", seed=2)
    await host_of(app).refresh()
    return [first, second]


def host_of(app: FastAPI) -> ModelManager:
    host: ModelManager = app.state.recommend.models
    return host


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


async def served(client: httpx2.AsyncClient) -> str:
    response = await client.get("/recommend/user-1")
    assert response.status_code == 200
    version: str = response.json()["model_version"]
    return version


@pytest.mark.slow
async def test_models_are_listed_newest_first(
    client: httpx2.AsyncClient, versions: list[str]
) -> None:
    page = (await client.get("/admin/models", params={"n": 1})).json()
    assert [m["version"] for m in page["items"]] == [versions[1]]
    rest = (await client.get("/admin/models", params={"cursor": page["next_cursor"]})).json()
    assert [m["version"] for m in rest["items"]] == [versions[0]]
    assert rest["next_cursor"] is None
    one: dict[str, Any] = (await client.get(f"/admin/models/{versions[1]}")).json()
    assert one["active"] is True
    assert one["model"] == "neupr"
    # All that is answered is described.
    assert set(one) == set(ModelDetail.model_fields)
    ModelDetail.model_validate(one, strict=True)
    for name in ("sampled", "full", "popularity_sampled", "popularity_full"):
        assert 0 <= one["metrics"][name]["ndcg@10"] <= one["metrics"][name]["hr@10"] <= 1


async def test_activate_and_rollback_swap_the_served_model(
    app: FastAPI, client: httpx2.AsyncClient, versions: list[str]
) -> None:
    first, second = versions
    assert await served(client) == second
    response = await client.post(f"/admin/models/{first}/activate")
    assert response.status_code == 200
    assert response.json()["active"] is True
    await host_of(app).refresh()
    assert await served(client) == first
    assert (await client.post("/admin/models/rollback")).json()["version"] == second
    await host_of(app).refresh()
    assert await served(client) == second


async def test_rollback_without_an_earlier_version_is_409(client: httpx2.AsyncClient) -> None:
    response = await client.post("/admin/models/rollback")
    assert (response.status_code, response.json()["code"]) == (409, "no_previous_model")


@pytest.mark.parametrize("version", ["nope", "../../etc", "%00x", "x" * 2000])
async def test_an_unknown_version_is_404_or_422(
    shared_client: httpx2.AsyncClient, version: str
) -> None:
    path = f"/admin/models/{version.replace('/', '%2F')}"
    for response in (await shared_client.get(path), await shared_client.post(path + "/activate")):
        assert response.status_code in (404, 422)
        assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "ids.json"])
async def test_a_damaged_checkpoint_is_409_and_the_active_model_stays(
    app: FastAPI, client: httpx2.AsyncClient, versions: list[str], name: str
) -> None:
    first, second = versions
    services: Services = app.state.services
    flip(services.models.folder(first) / name)
    response = await client.post(f"/admin/models/{first}/activate")
    assert response.status_code == 409
    assert response.json()["code"] == "checkpoint_damaged"
    assert "damaged" in response.json()["detail"]
    await host_of(app).refresh()
    assert await served(client) == second


async def test_a_server_keeps_its_model_if_the_active_one_is_damaged(
    app: FastAPI, client: httpx2.AsyncClient, versions: list[str]
) -> None:
    """As when the file rots between publishing and loading."""
    services: Services = app.state.services
    third = await publish_model(services, seed=3)
    flip(services.models.folder(third) / "model.safetensors")
    await host_of(app).refresh()
    assert await served(client) == versions[1]
    assert "damaged" in str(host_of(app).refused)
    assert (await client.get("/health/ready")).status_code == 200


async def test_a_server_that_starts_with_a_damaged_model_is_not_ready(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    services: Services = app.state.services
    await add_small_data(services)
    flip(services.models.folder(await publish_model(services)) / "ids.json")
    await host_of(app).refresh()
    response = await client.get("/health/ready")
    assert response.status_code == 503
    assert "damaged" in response.json()["detail"]
    assert (await client.get("/recommend/user-1")).json()["items"][0]["source"] == "popular"


async def test_a_refused_model_is_loaded_once_its_files_are_whole(
    app: FastAPI, client: httpx2.AsyncClient, versions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint on shared storage may come a little after its row."""
    services: Services = app.state.services
    third = await publish_model(services, seed=3)
    weights = services.models.folder(third) / "model.safetensors"
    content = weights.read_bytes()
    monkeypatch.setattr("app.inference.model_manager.RETRY_SECONDS", 0.0)
    weights.write_bytes(content[:-1])
    await host_of(app).refresh()
    assert await served(client) == versions[1]
    weights.write_bytes(content)
    await host_of(app).refresh()
    assert await served(client) == third
    assert host_of(app).refused is None


async def test_sweep_removes_only_old_versions_without_a_row(
    app: FastAPI, versions: list[str]
) -> None:
    services: Services = app.state.services
    root = services.models.folder(versions[0]).parent
    await services.models.claim_store()
    old, young = "20261101-120000-00aa", "20261102-120000-00bb"
    for name in (old, f".{old}-0123456789ab", young, "not-the-services", ".hidden"):
        (root / name).mkdir()
    for folder in root.iterdir():
        if folder.name != young:
            os.utime(folder, (0, 0))
    await services.models.sweep()
    assert {folder.name for folder in root.iterdir()} == {
        *versions, young, "not-the-services", ".hidden", MARK,
    }  # fmt: skip
    await services.models.discard(versions[1])  # published after all
    assert (root / versions[1]).is_dir()
