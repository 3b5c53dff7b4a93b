"""Candidates that a worker computed: the same lists, without the search."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from safetensors.numpy import save

from app.core.settings import Settings
from app.events.schemas import NewEvent
from app.inference.loaded_model import LoadedModel, digest_of_mask
from app.inference.precomputed import FORMAT, LIST_ITEMS, PrecomputedCandidates
from app.jobs.schemas import TrainParams
from app.main import create_app
from app.recommend import service
from app.wiring import Services
from app.worker import precompute
from app.worker.worker import Worker
from ncr_core.data.synthetic import synthetic_sittings
from ncr_core.inference.retrieval import CandidateRetriever
from tests.app.conftest import (
    QUICK,
    SMALL,
    add_small_data,
    client_of,
    publish_model,
    refresh,
    thread_worker,
)
from tests.app.recommend.conftest import ask, ids
from tests.conftest import ON_SQLITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def train_and_precompute(services: Services, settings: Settings, users: int) -> str:
    """By two jobs; the version."""
    settings = settings.model_copy(update={"precompute_users": users})
    await services.jobs.submit_training(TrainParams.model_validate(QUICK | {"model": "neupr"}))
    worker = thread_worker(services, settings)
    seen: list[dict[str, Any]] = []
    assert await worker.run_once()
    assert await worker.run_once(on_progress=seen.append)
    assert not await worker.run_once()
    job = (await services.jobs.page(None, 10))[0][0]
    assert (job.kind, job.status, job.error) == ("candidates", "succeeded", None)
    assert job.metrics is not None
    assert job.metrics["users"] == min(users, 60)
    assert [p["phase"] for p in seen] == ["candidates"]
    assert 0 < seen[0]["epoch"] <= seen[0]["epochs"] == min(users, 60)
    return str(job.model_version)


def current(app: FastAPI) -> LoadedModel:
    model: LoadedModel = app.state.recommend.models.current
    return model


async def test_lists_are_those_that_would_be_found_on_demand(
    app: FastAPI, client: httpx2.AsyncClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    services: Services = app.state.services
    await add_small_data(services)
    await services.catalog.delete("film-2")
    searched: list[int] = []
    search = CandidateRetriever._search

    def counted(retriever: CandidateRetriever, vectors: torch.Tensor, *arguments: Any) -> Any:
        searched.append(len(vectors))
        return search(retriever, vectors, *arguments)

    monkeypatch.setattr(CandidateRetriever, "_search", counted)
    version = await train_and_precompute(services, settings, users=1000)
    assert sum(searched) == 60  # once for each, for candidates and list
    await refresh(app)  # with the model, before it answers
    found = current(app).engine.retriever.precomputed
    assert isinstance(found, PrecomputedCandidates)
    assert len(found) == 60
    users = [f"user-{n}" for n in range(1, 61)]
    with_them = {user: (await ask(client, user))["items"] for user in users}
    longer = {user: (await ask(client, user, n=11))["items"] for user in users}
    assert len(current(app).candidate_cache) == 0  # nothing had to be searched for
    current(app).engine.retriever.precomputed = None
    app.state.recommend.lists.cache.clear()
    assert {user: (await ask(client, user))["items"] for user in users} == with_them
    assert {user: (await ask(client, user, n=11))["items"] for user in users} == longer
    assert len(current(app).candidate_cache) == 60
    assert services.models.candidates_path(version).exists()


@ON_SQLITE
async def test_a_server_takes_them_over_when_they_come_after_the_model(
    app: FastAPI, client: httpx2.AsyncClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    services: Services = app.state.services
    await add_small_data(services)
    version = await publish_model(services)
    await refresh(app)
    assert current(app).engine.retriever.precomputed is None
    await services.jobs._repository.insert("candidates", {"version": version})
    settings = settings.model_copy(update={"precompute_users": 7})
    assert await Worker(services.database, services.models, settings).run_once()
    models, model = app.state.recommend.models, current(app)
    extended = model.extended([], torch.zeros(0, 4), "new items")
    fetch = services.models.fetch_candidates

    async def slow(version: str) -> Path | None:
        models.current = extended  # meanwhile
        return await fetch(version)

    monkeypatch.setattr(services.models, "fetch_candidates", slow)
    await refresh(app)
    assert isinstance(model.engine.retriever.precomputed, PrecomputedCandidates)
    assert current(app) is extended
    assert extended.engine.retriever.precomputed is model.engine.retriever.precomputed


@ON_SQLITE
async def test_they_are_not_used_for_another_state_of_user_or_catalogue(
    app: FastAPI, client: httpx2.AsyncClient, settings: Settings
) -> None:
    services: Services = app.state.services
    await add_small_data(services)
    await train_and_precompute(services, settings, users=1000)
    await refresh(app)
    cache = current(app).candidate_cache
    first = ids(await ask(client, "user-1"))
    assert len(cache) == 0
    await client.post("/events", json={"user": "user-1", "item": first[0]})
    assert first[0] not in ids(await ask(client, "user-1"))
    assert len(cache) == 1
    seen = await ask(client, "user-2", exclude_seen="false", n=50)
    assert len(seen["items"]) == 50
    await client.patch(f"/items/{first[1]}", json={"hidden": True})
    assert first[1] not in ids(await ask(client, "user-3", n=50))
    await client.patch(f"/items/{first[1]}", json={"hidden": False})
    assert len(ids(await ask(client, "user-3", n=50))) == 50 - 12
    assert len(cache) == 2  # as they were computed
    await client.patch(f"/items/{first[1]}", json={"hidden": True})
    await train_and_precompute(services, settings, users=1000)
    await refresh(app)
    cache = current(app).candidate_cache
    made_ahead = len(cache)
    await client.patch(f"/items/{first[1]}", json={"hidden": False})
    assert len(ids(await ask(client, "user-3", n=50))) == 50 - 12
    assert len(cache) == made_ahead + 1  # it may be among the best of each


@ON_SQLITE
async def test_lists_without_hidden_items_are_those_of_a_search_without_them(
    app: FastAPI, client: httpx2.AsyncClient, settings: Settings
) -> None:
    services: Services = app.state.services
    await add_small_data(services)
    await services.catalog.delete("film-2")
    await train_and_precompute(services, settings, users=1000)
    await refresh(app)
    model, users = current(app), [f"user-{n}" for n in range(1, 9)]
    best = ids(await ask(client, "user-1", n=30))

    async def lists() -> list[list[Any]]:
        return [(await ask(client, user, n=12, exclude="film-9"))["items"] for user in users]

    for hide in (best[:1], best[1:5], best[3:16], best[2:3], best[16:20], best[20:29]):
        for item in hide:
            hidden = not (await client.get(f"/items/{item}")).json()["hidden"]
            await client.patch(f"/items/{item}", json={"hidden": hidden})
        found = await lists()
        fresh = LoadedModel(model.row, model.trained.checkpoint, settings.candidates)
        app.state.recommend.models.current = fresh
        app.state.recommend.lists.cache.clear()
        assert await lists() == found
        app.state.recommend.models.current = model
        app.state.recommend.lists.cache.clear()


@ON_SQLITE
async def test_only_the_latest_active_are_computed_and_only_for_the_active_version(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    await services.events.add_rows([{"user": "user-7", "item": "film-1"}], 1)
    version = await train_and_precompute(services, settings, users=5)
    found = PrecomputedCandidates.load(services.models.candidates_path(version), 50)
    assert len(found) == 5
    assert "user-7" in found.rows
    await services.jobs._repository.insert("candidates", {"version": version})
    await publish_model(services)  # another takes its place before the job is done
    assert await thread_worker(services, settings).run_once()
    job = (await services.jobs.page(None, 1))[0][0]
    assert (job.status, job.metrics) == ("succeeded", {"users": 0, "seconds": 0.0})


def _file(path: Path, users: Any, seqs: Any, about: dict[str, str]) -> None:
    arrays = {
        "users": np.frombuffer(json.dumps(users).encode(), dtype=np.uint8),
        "seqs": seqs,
        "items": np.zeros((1, 4), dtype=np.int32),
        "gaps": np.zeros(1, dtype=np.int8),
        "searched": np.packbits(np.ones(9, dtype=np.bool_)),
        "list_latest": np.zeros(1, dtype=np.int64),
        "list_items": np.zeros((1, LIST_ITEMS), dtype=np.int32),
        "list_scores": np.zeros((1, LIST_ITEMS)),
        "list_ahead": np.zeros((1, LIST_ITEMS)),
    }
    path.write_bytes(save(arrays, about))


def test_a_file_that_is_not_what_it_should_be_is_a_value_error(tmp_path: Path) -> None:
    digest = digest_of_mask(np.ones(9, dtype=np.bool_))
    path, about = tmp_path / "c", {"format": FORMAT, "visible": digest}
    one = np.zeros(1, dtype=np.int64)
    _file(path, ["u"], one, about)
    assert len(PrecomputedCandidates.load(path, 9)) == 1
    for users, seqs, said in (
        (5, one, about),
        ([["u"]], one, about),
        (["u"], one[None], about),
        (["u"], one.astype(np.float64), about),
        (["u", "v"], one, about),
        (["u"], one, about | {"format": "ncr-candidates-1"}),
        (["u"], one, about | {"visible": "other"}),
        ({"u": 1}, one, about),
    ):
        _file(path, users, seqs, said)
        with pytest.raises(ValueError, match="fit"):
            PrecomputedCandidates.load(path, 9)


@ON_SQLITE
async def test_fewer_candidates_than_are_wanted_are_not_used(
    app: FastAPI, client: httpx2.AsyncClient, settings: Settings
) -> None:
    services: Services = app.state.services
    await add_small_data(services)
    few = settings.model_copy(update={"candidates": 1})
    await train_and_precompute(services, few, users=1000)
    found = PrecomputedCandidates.load(
        services.models.candidates_path(str((await services.models.activation()).version)), 50
    )
    assert len(found) == 60
    found._items = found._items[:, :20].copy()  # as a worker with fewer candidates leaves them
    current_model = await _loaded(app)
    current_model.engine.retriever.precomputed = found
    assert len((await ask(client, "user-1"))["items"]) == 10
    assert len(current_model.candidate_cache) == 1


async def _loaded(app: FastAPI) -> LoadedModel:
    await refresh(app)
    return current(app)


@pytest.mark.parametrize("damage", ["cut", "other model", "other lists", "not a file of ours"])
@ON_SQLITE
async def test_a_damaged_file_is_not_used(
    app: FastAPI, client: httpx2.AsyncClient, settings: Settings, damage: str
) -> None:
    services: Services = app.state.services
    await add_small_data(services)
    version = await train_and_precompute(services, settings, users=1000)
    path = services.models.candidates_path(version)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "other model":
        found = PrecomputedCandidates.load(path, 50)
        found._items[3, 0] = 50
        found.save(path)
    elif damage == "other lists":
        found = PrecomputedCandidates.load(path, 50)
        assert found.lists is not None
        found.lists.items[59, 9] = 50
        found.save(path)
    else:
        path.write_text("{}")
    await refresh(app)
    assert current(app).engine.retriever.precomputed is None
    assert len((await ask(client, "user-1"))["items"]) == 10


@pytest.fixture
async def elsewhere(app: FastAPI, settings: Settings) -> AsyncIterator[Services]:
    """Another server's services, with the small data and all lists there are."""
    services: Services = app.state.services
    await add_small_data(services)
    await train_and_precompute(services, settings, users=1000)
    await refresh(app)
    other = create_app(settings)
    async with other.router.lifespan_context(other):
        yield other.state.services


async def is_at_hand(app: FastAPI, client: httpx2.AsyncClient, user: str, **params: Any) -> bool:
    """Whether a worker's list was served; in any case it is the one that is ranked anew."""
    feature, profiles = app.state.recommend, app.state.services.events.profiles
    feature.lists.cache.clear()
    profiles.cache.clear()
    model = current(app)

    async def content() -> tuple[int, bytes, bytes]:
        path = f"/recommend/{user}"
        answer = await client.get(path, params=params)
        answer.raise_for_status()
        body, cursor = answer.json(), b""
        if body["next_cursor"] is not None:
            # Without the second that it is made in, and the digest of all of it.
            cursor = base64.urlsafe_b64decode(body["next_cursor"] + "==")[5:-8]
        items = answer.content.partition(b'"items":')[2].partition(b',"next_cursor":')[0]
        return body["as_of_seq"], items, cursor

    first = await content()
    built = len(profiles.cache) > 0
    listed, model.listed = model.listed, {}
    feature.lists.cache.clear()
    assert await content() == first
    assert len(profiles.cache) == 1
    model.listed = listed
    return not built


async def test_a_first_list_takes_neither_a_profile_nor_a_pass(
    app: FastAPI, client: httpx2.AsyncClient, elsewhere: Services
) -> None:
    users = [f"user-{n}" for n in range(1, 61)]
    assert [user for user in users if not await is_at_hand(app, client, user)] == []
    assert await is_at_hand(app, client, "user-1", min_seq=3)
    assert not await is_at_hand(app, client, "nobody")
    others: list[dict[str, Any]] = [
        {"n": 9},
        {"exclude_seen": "false"},
        {"category": SMALL.items[0].genre},
        {"exclude": "film-1"},
        {"explain": "pairwise"},
        {"diversity": 0.5},
        {"model": current(app).version},
    ]
    for params in others:
        assert not await is_at_hand(app, client, "user-1", **params), params
    answer = await client.get("/recommend/user-1", params={"min_seq": 10**6})
    assert answer.json()["code"] == "seq_not_reached"
    # What lists say of items is of the present.
    top = ids(await ask(client, "user-1"))[0]
    await client.patch(f"/items/{top}", json={"title": "Another title"})
    assert await is_at_hand(app, client, "user-1")
    assert (await ask(client, "user-1"))["items"][0]["title"] == "Another title"


async def test_a_list_is_not_served_to_users_who_changed_at_another_server(
    app: FastAPI, client: httpx2.AsyncClient, elsewhere: Services
) -> None:
    old = ids(await ask(client, "user-1"))
    result = await elsewhere.events.add_rows([{"user": "user-1", "item": old[0]}], 1)
    assert old[0] not in ids(await ask(client, "user-1", min_seq=result.last_seq))
    assert not await is_at_hand(app, client, "user-1")
    await elsewhere.events.add_preferences(
        [{"user": "user-2", "winner": "film-1", "loser": "film-2"}], 1
    )
    (first, *_), _ = await elsewhere.events.history("user-3", None, 1)
    await elsewhere.events.delete_event(str(first[0].event_id))
    last = await elsewhere.events.last_seq()
    await ask(client, "user-9", min_seq=last)
    assert not await is_at_hand(app, client, "user-2")
    assert not await is_at_hand(app, client, "user-3")
    assert await is_at_hand(app, client, "user-9")


async def test_the_list_of_an_erased_user_never_comes_back(
    app: FastAPI,
    client: httpx2.AsyncClient,
    elsewhere: Services,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profiles = app.state.services.events.profiles
    assert await is_at_hand(app, client, "user-1")
    await elsewhere.events.delete_user("user-1")
    last = await elsewhere.events.last_seq()
    assert {item["source"] for item in (await ask(client, "user-1", min_seq=last))["items"]} == {
        "popular"
    }
    await app.state.services.events.delete_user("user-2")
    assert not await is_at_hand(app, client, "user-2")
    # While last seqs are read, others erase users: a look may end before the rows are there.
    fetch = profiles._database.fetch

    async def late(statement: Any, parameters: Any = None) -> Any:
        rows = await fetch(statement, parameters)
        if statement is profiles._seqs:
            await elsewhere.events.delete_user("user-3")
            await elsewhere.events.add_rows([{"user": "user-4", "item": "film-1"}], 1)
            await profiles.catch_up(await elsewhere.events.last_seq())
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(profiles._database, "fetch", late)
        await profiles.follow(dict(current(app).listed))
    seqs = [profiles.last_seq(f"user-{n}") for n in range(1, 6)]
    assert [seq is not None for seq in seqs] == [False, False, False, False, True]
    assert not await is_at_hand(app, client, "user-3")


@ON_SQLITE
async def test_lists_of_users_who_have_been_away(
    app: FastAPI, client: httpx2.AsyncClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    services: Services = app.state.services
    rows = synthetic_sittings(n_users=250, n_items=100)
    events = [
        NewEvent(f"{user} {item}", user, item, timestamp=int(seconds * 1e6))
        for user, item, seconds in rows
    ]
    await services.events.import_rows(events)
    await publish_model(services, recipe="next-item", factors=32)
    last = {event.user: event.timestamp for event in events}
    now = max(last.values()) + 60_000_000

    def after(seconds: int) -> None:
        for module in (precompute, service):
            monkeypatch.setattr(module, "now_us", lambda: now + seconds * 1_000_000)

    after(0)
    version = (await services.models.activation()).version
    await services.jobs._repository.insert("candidates", {"version": version})
    settings = settings.model_copy(update={"precompute_users": 1000})
    assert await thread_worker(services, settings).run_once()
    await refresh(app)
    made = current(app).engine.retriever.precomputed
    assert isinstance(made, PrecomputedCandidates)
    assert {*made._gaps.tolist()} == {0, 2}
    gap_of = dict(zip(made.rows, made._gaps.tolist(), strict=True))
    for gap in (0, 2):
        assert await is_at_hand(app, client, next(u for u in made.rows if gap_of[u] == gap))
    after(90_000)
    for gap in (0, 2):
        one = next(u for u in made.rows if gap_of[u] == gap)
        assert await is_at_hand(app, client, one) == (gap == 2)


@pytest.mark.parametrize("candidates", [15, 5])
@ON_SQLITE
async def test_lists_while_items_are_hidden(
    app: FastAPI, client: httpx2.AsyncClient, settings: Settings, candidates: int
) -> None:
    services: Services = app.state.services
    await add_small_data(services)
    few = settings.model_copy(update={"candidates": candidates})
    await train_and_precompute(services, few, users=1000)
    await refresh(app)
    assert not await is_at_hand(app, client, "user-1")  # this server ranks more candidates
    other = create_app(few)
    async with other.router.lifespan_context(other), client_of(other) as client:
        made = current(other).engine.retriever.precomputed
        assert isinstance(made, PrecomputedCandidates)
        used = max(candidates, LIST_ITEMS)
        row = int(made._items[0, used - 1])
        item = current(other).item_ids[row]
        for hidden in (False, True, False):
            await client.patch(f"/items/{item}", json={"hidden": hidden})
            at_hand = [await is_at_hand(other, client, user) for user in made.rows]
            assert at_hand == [not hidden or row not in made._items[n, :used] for n in range(60)]
        assert 0 < sum(row in made._items[n, :used] for n in range(60)) < 60


@pytest.mark.parametrize("kind", ["shadow", "interleaving"])
@ON_SQLITE
async def test_lists_of_a_version_that_is_active_again_and_on_trial(
    app: FastAPI, client: httpx2.AsyncClient, elsewhere: Services, kind: str
) -> None:
    services: Services = app.state.services
    first, second = current(app).version, await publish_model(services)
    await refresh(app)
    assert not await is_at_hand(app, client, "user-1")  # nobody has ranked its lists yet
    (await client.post(f"/admin/models/{first}/activate")).raise_for_status()
    await refresh(app)
    lists = services.trials.impressions.lists
    before = lists[first]
    assert await is_at_hand(app, client, "user-1")
    assert lists[first] == before + 2
    trial = {"kind": kind, "version": second, "share": 1.0}
    (await client.post("/admin/trials", json=trial)).raise_for_status()
    services.events.profiles.cache.clear()
    await ask(client, "user-1")
    assert len(services.events.profiles.cache) == 1  # it is compared with another list
