"""Trials on real lists: drafted ones, what is counted, and shadows that nobody waits for."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from app.ab_tests.schemas import ABTestParams
from app.ab_tests.tables import impressions, served_lists, trial_sums
from app.core.errors import Unavailable
from app.recommend import shadow_tests as module
from app.wiring import Services
from tests.app.conftest import publish_model, until
from tests.app.recommend.conftest import ask, ids, post

pytestmark = pytest.mark.anyio


@pytest.fixture
async def versions(app: FastAPI, filled: Services) -> tuple[str, str]:
    """The one that is served, and another."""
    other = await publish_model(filled, seed=3, epochs=3)
    active = await publish_model(filled, seed=4, epochs=3)
    await app.state.recommend.models.refresh()
    return active, other


async def begin(app: FastAPI, kind: Any, version: str, *, loaded: bool = True) -> str:
    """Begins a trial that all take part in, and waits until its version is there."""
    trial = await app.state.services.trials.begin(
        ABTestParams(kind=kind, version=version, share=1.0)
    )
    others = app.state.recommend.models.versions
    if loaded:
        await until(lambda: others.at_hand(version) is not None)
    return trial.trial_id


async def rows_of(app: FastAPI, table: sa.Table) -> list[Any]:
    await app.state.services.trials.flush()
    return list(await app.state.services.database.fetch(sa.select(table)))


async def names(app: FastAPI, internal: list[int]) -> list[str]:
    found = await app.state.services.catalog.external_ids_of(internal)
    return [found[item] for item in internal]


@pytest.mark.slow
async def test_a_list_is_drafted_from_both_versions(
    app: FastAPI, client: httpx2.AsyncClient, versions: tuple[str, str]
) -> None:
    a, b = versions
    trial_id = await begin(app, "interleaving", b)
    own = {v: (await ask(client, "user-1", model=v))["items"] for v in versions}
    at = {v: {item["id"]: item for item in own[v]} for v in versions}
    drafted = [await ask(client, "user-1") for _ in range(8)]
    rows = {row.recommendation_id: row for row in await rows_of(app, impressions)}
    assert len(rows) == 8
    assert len({tuple(ids(answer)) for answer in drafted}) > 1
    for answer in drafted:
        assert answer["model_version"] == a
        assert answer["recommendation_id"].startswith(f"{trial_id}.")
        row = rows[answer["recommendation_id"]]
        teams = {v: await names(app, row.teams[side]) for v, side in ((a, "a"), (b, "b"))}
        assert row.trial_id == trial_id
        assert row.user_id is not None
        assert sorted(teams[a] + teams[b]) == sorted(ids(answer))
        assert abs(len(teams[a]) - len(teams[b])) <= 1
        assert [item["rank"] for item in answer["items"]] == list(range(1, 11))
        for item, following in zip(answer["items"], [*answer["items"][1:], None], strict=True):
            version = a if item["id"] in teams[a] else b
            theirs = at[version][item["id"]]
            assert (item["score"], item["source"]) == (theirs["score"], theirs["source"])
            place = own[version].index(theirs)
            below = own[version][place + 1]["id"] if place + 1 < len(own[version]) else None
            kept = (
                following is not None
                and following["id"] == below
                and following["id"] in teams[version]
            )
            expected = theirs["preferred_over_next"] if kept else None
            assert item["preferred_over_next"] == expected


async def test_who_and_what_is_left_out_of_a_trial(
    app: FastAPI, client: httpx2.AsyncClient, versions: tuple[str, str]
) -> None:
    a, b = versions
    await begin(app, "interleaving", b)
    assert (await ask(client, "nobody"))["recommendation_id"].startswith(f"{a}.")
    assert (await ask(client, "user-1", model=a))["recommendation_id"].startswith(f"{a}.")
    assert (await ask(client, "user-1", model=b))["recommendation_id"].startswith(f"{b}.")
    reranked = await post(client, "/rerank", user="user-1", items=ids(await ask(client, "user-2")))
    assert reranked["recommendation_id"].startswith(f"{a}.")
    assert len(await rows_of(app, impressions)) == 1  # user-2's
    # When another version is served the trial is not about it.
    await app.state.services.models.activate(b)
    await app.state.recommend.models.refresh()
    assert (await ask(client, "user-1"))["recommendation_id"].startswith(f"{b}.")


async def test_a_batch_takes_part_too(
    app: FastAPI, client: httpx2.AsyncClient, versions: tuple[str, str]
) -> None:
    trial_id = await begin(app, "interleaving", versions[1])
    answer = await post(client, "/recommend/batch", users=["user-1", "user-2", "nobody"])
    of_trial = [r["recommendation_id"].startswith(trial_id) for r in answer["results"]]
    assert of_trial == [True, True, False]
    assert len(await rows_of(app, impressions)) == 2


async def test_where_the_other_version_cannot_answer_the_first_one_does(
    app: FastAPI,
    client: httpx2.AsyncClient,
    versions: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = versions
    alone = await ask(client, "user-1")
    await begin(app, "interleaving", b)
    lists = app.state.recommend.lists
    honest = lists.build

    async def only_a(asked: Any, model: Any) -> Any:
        if model.version == b:
            raise Unavailable("too many", code="overloaded")
        return await honest(asked, model)

    monkeypatch.setattr(lists, "build", only_a)
    answer = await ask(client, "user-1")
    assert answer["recommendation_id"].startswith(f"{a}.")
    assert answer["items"] == alone["items"]
    assert await rows_of(app, impressions) == []


async def test_a_version_that_cannot_be_loaded_takes_no_part(
    app: FastAPI, client: httpx2.AsyncClient, versions: tuple[str, str]
) -> None:
    a, b = versions
    await begin(app, "interleaving", b, loaded=False)
    (app.state.services.models.folder(b) / "ids.json").write_bytes(b"{}")
    others = app.state.recommend.models.versions
    for _ in range(3):
        assert (await ask(client, "user-1"))["recommendation_id"].startswith(f"{a}.")
    await until(lambda: b in others._failed_at)
    assert (await ask(client, "user-1"))["recommendation_id"].startswith(f"{a}.")


async def test_what_is_given_out_is_counted_by_version(
    app: FastAPI, client: httpx2.AsyncClient, versions: tuple[str, str]
) -> None:
    a, b = versions
    for user in ("user-1", "user-1", "user-2", "nobody"):
        await ask(client, user)
    await ask(client, "user-1", model=b)
    await post(client, "/rerank", user="user-1", items=["x"])
    await post(client, "/compare", user="user-1", items=ids(await ask(client, "user-3"))[:2])
    counted: dict[str, int] = {}
    for row in await rows_of(app, served_lists):
        counted[row.version] = counted.get(row.version, 0) + row.lists
    assert counted == {a: 6, b: 1}
    await begin(app, "interleaving", b)
    await ask(client, "user-1")  # the trial's, and no version's own
    assert sum(row.lists for row in await rows_of(app, served_lists)) == 7


async def sums(app: FastAPI) -> dict[str, float]:
    return {row.name: row.value for row in await rows_of(app, trial_sums)}


async def test_shadows_change_no_answer_and_tell_how_far_the_lists_agree(
    app: FastAPI, client: httpx2.AsyncClient, versions: tuple[str, str]
) -> None:
    a, b = versions
    before = {user: await ask(client, user) for user in ("user-1", "user-2")}
    other = {user: ids(await ask(client, user, model=b)) for user in before}
    await begin(app, "shadow", b)
    shadows = app.state.recommend.shadows
    for user, answer in before.items():
        again = await ask(client, user)
        assert again["items"] == answer["items"]
        assert again["recommendation_id"].startswith(f"{a}.")
        await until(lambda: not shadows.running)
    await ask(client, "nobody")
    await ask(client, "user-1", model=a)
    found = await sums(app)
    assert found["requests"] == 2
    shared = [len(set(ids(before[u])) & set(other[u])) / 10 for u in before]
    assert found["overlap"] == pytest.approx(sum(shared))
    same = [ids(before[u])[0] == other[u][0] for u in before]
    assert found["same_first"] == sum(same)


async def test_shadows_give_way(
    app: FastAPI,
    client: httpx2.AsyncClient,
    versions: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await begin(app, "shadow", versions[1])
    shadows, lists = app.state.recommend.shadows, app.state.recommend.lists
    honest, go = lists.build, asyncio.Event()

    async def slow(asked: Any, model: Any) -> Any:
        if model.version == versions[1]:
            assert asked.is_gone is None
            await go.wait()
        return await honest(asked, model)

    monkeypatch.setattr(lists, "build", slow)
    async with asyncio.timeout(10):
        for user in range(1, 9):  # none of them waits for its shadow
            assert (await ask(client, f"user-{user}"))["items"]
    assert len(shadows.running) == module.MAX_SHADOWS
    go.set()
    await until(lambda: not shadows.running)
    assert (await sums(app))["requests"] == module.MAX_SHADOWS
    # While something waits to be ranked nothing is ranked for nobody.
    monkeypatch.setattr(type(app.state.recommend.batcher), "busy", True)
    await ask(client, "user-9")
    assert not shadows.running
