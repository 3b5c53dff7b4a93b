"""Items that came after the training are the model's own once a few of its users took them up."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from fastapi import FastAPI

from app.events.service import EventService
from app.inference import new_items as module
from app.inference.new_items import NewItems
from app.wiring import Services
from ncr_core.fold_in import Evidence, FoldIn
from ncr_core.inference.engine import InferenceEngine
from ncr_core.inference.retrieval import CandidateGenerator
from ncr_core.ranking.similarity import ItemSpace
from tests.app.conftest import publish_model, until
from tests.app.recommend.conftest import GENRES, USERS, ask, ids, post, seen_by, serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MIN_USERS = 5


@pytest.fixture
def new_items(filled: Services) -> NewItems:
    return NewItems(filled.events, filled.catalog, MIN_USERS)


async def took(client: httpx2.AsyncClient, item: str, users: list[str], type_: str = "") -> None:
    kind = {"type": type_} if type_ else {}
    body = [{"user": user, "item": item, **kind} for user in users]
    assert (await client.post("/events", json=body)).json()["accepted"] == len(users)


async def source_in_list(client: httpx2.AsyncClient, user: str, item: str) -> str | None:
    """What a place of this item is made from, in a list of everything; None: it has none."""
    answer = await ask(client, user, n=100, exclude_seen=False)
    return next((place["source"] for place in answer["items"] if place["id"] == item), None)


async def test_enough_users_make_an_item_the_models_own(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, new_items: NewItems
) -> None:
    host, users = app.state.recommend.models, USERS[:MIN_USERS]
    before = await ask(client, "user-50")
    await took(client, "brand-new", users[:-1])
    await host.add_new_items(new_items)
    assert serving(app).engine.n_items == len(serving(app).item_ids)
    assert "brand-new" not in serving(app).item_ids
    assert await source_in_list(client, "user-50", "brand-new") == "popular"

    await took(client, "brand-new", users[-1:])
    await host.add_new_items(new_items)
    assert serving(app).item_ids[-1] == "brand-new"
    assert await source_in_list(client, "user-50", "brand-new") == "model"
    after = await ask(client, "user-50")
    assert after["model_version"] == before["model_version"] == trained
    others = [item for item in ids(after) if item != "brand-new"]
    assert others == ids(before)[: len(others)]  # all else is where it was

    compared = await post(client, "/compare", user="user-50", items=["brand-new", *ids(before)[:2]])
    assert len(compared["items"]) == 3
    reranked = await post(client, "/rerank", user="user-50", items=["brand-new", ids(before)[0]])
    assert {place["source"] for place in reranked["items"]} == {"model"}
    like = (await client.get("/items/brand-new/similar")).json()
    assert like["model_version"] == trained


async def test_users_keep_their_vectors_and_candidates_when_new_items_come(
    app: FastAPI,
    client: httpx2.AsyncClient,
    trained: str,
    new_items: NewItems,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise every list is searched and every vector fitted again, once a minute."""
    host, folded = app.state.recommend.models, "user-49"
    await took(client, "film-1", [folded])  # no item of theirs is new, but their vector is fitted
    for user in ("user-50", folded):
        await ask(client, user)
    for name in ("brand-new", "newer"):
        await took(client, name, USERS[:MIN_USERS])
        await host.add_new_items(new_items)
        with monkeypatch.context() as watched:
            watched.setattr(CandidateGenerator, "search", None)
            watched.setattr(FoldIn, "__call__", None)
            kept = [await ask(client, user, n=20) for user in ("user-50", folded)]
        assert kept[1]["items"][0]["source"] == "fold_in"
        serving(app).candidate_cache.clear()
        serving(app).vector_cache.clear()
        app.state.recommend.lists.cache.clear()
        for answer, user in zip(kept, ("user-50", folded), strict=True):
            assert ids(await ask(client, user, n=20)) == ids(answer)
        assert await source_in_list(client, "user-50", name) == "model"


async def test_who_took_it_up_is_told_nothing_again_and_their_like_more(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services, new_items: NewItems
) -> None:
    """An item that only lovers of one genre took up, and one that those of another did: users see
    that of their own genre first."""
    await publish_model(filled, epochs=15)
    host = app.state.recommend.models
    await host.refresh()

    def share(user: str, genre: str) -> float:
        own = seen_by(user)
        return sum(GENRES[item] == genre for item in own) / len(own)

    total = Counter(GENRES[item] for user in USERS for item in seen_by(user))
    (first, _), (second, _) = total.most_common(2)
    lovers = {
        genre: sorted(USERS, key=lambda user: share(user, other) - share(user, genre))
        for genre, other in ((first, second), (second, first))
    }
    for genre, name in ((first, "new-a"), (second, "new-b")):
        await took(client, name, lovers[genre][:MIN_USERS])
    await host.add_new_items(new_items)
    assert set(serving(app).item_ids[-2:]) == {"new-a", "new-b"}
    right = []
    for own, other, genre in (("new-a", "new-b", first), ("new-b", "new-a", second)):
        for user in lovers[genre][MIN_USERS : MIN_USERS + 5]:
            answer = await post(client, "/compare", user=user, items=[own, other])
            right.append(answer["probability"][0][1])
    assert sum(right) / len(right) > 0.55
    assert "new-a" not in ids(await ask(client, lovers[first][0], n=100))


async def test_dislikes_and_users_without_a_vector_do_not_count(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, new_items: NewItems
) -> None:
    await took(client, "unwanted", USERS[:8], "dislike")
    await took(client, "unheard", [f"newcomer-{n}" for n in range(8)])
    model = serving(app)
    await app.state.recommend.models.add_new_items(new_items)
    assert serving(app) is model


async def test_one_user_many_times_is_one(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, new_items: NewItems
) -> None:
    await took(client, "again", ["user-1"] * 20)
    model = serving(app)
    await app.state.recommend.models.add_new_items(new_items)
    assert serving(app) is model


async def test_more_users_fit_it_anew_and_a_few_do_not(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, new_items: NewItems
) -> None:
    host = app.state.recommend.models
    await took(client, "brand-new", USERS[:6])
    await host.add_new_items(new_items)
    first = serving(app)
    await took(client, "brand-new", USERS[6:8])
    await host.add_new_items(new_items)
    assert serving(app) is first
    await took(client, "brand-new", USERS[8:12])
    await host.add_new_items(new_items)
    second = serving(app)
    assert second.item_ids == first.item_ids
    assert (second.version, second.trained) == (first.version, first.trained)
    assert second.key != first.key  # no list of before is given out


async def test_what_newer_users_did_counts_for_the_new_item(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, new_items: NewItems
) -> None:
    """Somebody whose only event is about the new item gets a list of their own."""
    await took(client, "brand-new", [*USERS[:MIN_USERS], "anna"])
    assert {p["source"] for p in (await ask(client, "anna"))["items"]} == {"popular"}
    await app.state.recommend.models.add_new_items(new_items)
    assert {p["source"] for p in (await ask(client, "anna"))["items"]} == {"fold_in"}


async def test_a_new_version_begins_anew(
    app: FastAPI,
    client: httpx2.AsyncClient,
    trained: str,
    filled: Services,
    new_items: NewItems,
) -> None:
    host = app.state.recommend.models
    await took(client, "brand-new", USERS[:MIN_USERS])
    await host.add_new_items(new_items)
    await publish_model(filled)
    await host.refresh()
    model = serving(app)
    assert (model.revision, "brand-new" in model.item_ids) == ("", True)  # trained on by now
    await host.add_new_items(new_items)
    assert serving(app) is model
    await took(client, "newer", USERS[:MIN_USERS])
    await host.add_new_items(new_items)
    assert serving(app).item_ids[-1] == "newer"


async def test_a_deleted_item_is_not_shown(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, new_items: NewItems
) -> None:
    await took(client, "brand-new", USERS[:MIN_USERS])
    assert (await client.delete("/items/brand-new")).status_code in (200, 204)
    await app.state.recommend.models.add_new_items(new_items)
    assert await source_in_list(client, "user-50", "brand-new") is None


async def test_a_version_that_comes_back_has_its_new_items_again(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, filled: Services, new_items: NewItems
) -> None:
    host = app.state.recommend.models
    await took(client, "brand-new", USERS[:MIN_USERS])
    await host.add_new_items(new_items)
    extended = serving(app)
    await publish_model(filled, seed=1)
    await host.refresh()
    await filled.models.activate(trained)
    await host.refresh()
    assert (serving(app).version, serving(app).revision) == (trained, "")
    await host.add_new_items(new_items)
    assert serving(app).key == extended.key
    assert serving(app).item_ids[-1] == "brand-new"


async def test_a_build_that_fails_or_comes_too_late_is_made_up_for(
    app: FastAPI,
    client: httpx2.AsyncClient,
    trained: str,
    new_items: NewItems,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = app.state.recommend.models
    await took(client, "brand-new", USERS[:MIN_USERS])

    def fail(engine: InferenceEngine) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(InferenceEngine, "warm_up", fail)
        with pytest.raises(MemoryError):
            await host.add_new_items(new_items)
    too_late = await new_items.extend(serving(app))
    assert too_late is not None
    assert serving(app).revision == ""
    await host.add_new_items(new_items)
    assert serving(app).key == too_late.key
    assert await new_items.extend(serving(app)) is None


async def test_strangers_do_not_keep_others_out(
    app: FastAPI,
    client: httpx2.AsyncClient,
    trained: str,
    new_items: NewItems,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_USERS", 8)
    monkeypatch.setattr(module, "MAX_ADOPTERS", 16)
    host, model = app.state.recommend.models, serving(app)
    await took(client, "brand-new", [f"stranger-{n}" for n in range(40)])
    await took(client, "brand-new", USERS[: MIN_USERS - 1])
    await host.add_new_items(new_items)
    assert serving(app) is model
    await took(client, "brand-new", [f"stranger-{n}" for n in range(40, 80)])
    await host.add_new_items(new_items)
    assert serving(app) is model
    await took(client, "brand-new", USERS[MIN_USERS - 1 : MIN_USERS])
    await host.add_new_items(new_items)
    assert serving(app).item_ids[-1] == "brand-new"


async def test_what_was_taken_back_does_not_count(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, new_items: NewItems
) -> None:
    """Of five users one dislikes it by now, one's event is deleted, one is erased, and one was
    erased and has come back under the same name."""
    host, model = app.state.recommend.models, serving(app)
    await took(client, "brand-new", USERS[:2])
    event = {"event_id": "taken back", "user": USERS[2], "item": "brand-new"}
    assert (await client.post("/events", json=event)).status_code == 200
    await took(client, "brand-new", [USERS[3]])
    assert (await client.delete(f"/users/{USERS[4]}")).status_code == 204
    await took(client, "brand-new", [USERS[4]])

    await took(client, "brand-new", [USERS[1]], "dislike")
    assert (await client.delete("/events/taken%20back")).status_code == 204
    assert (await client.delete(f"/users/{USERS[3]}")).status_code == 204
    await host.add_new_items(new_items)
    assert serving(app) is model
    await took(client, "brand-new", USERS[10 : 10 + MIN_USERS - 2])
    await host.add_new_items(new_items)
    assert serving(app) is model
    await took(client, "brand-new", [USERS[1]])  # and liked again
    await host.add_new_items(new_items)
    assert serving(app).item_ids[-1] == "brand-new"


async def test_an_item_of_before_that_was_deleted_and_is_there_again(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services, new_items: NewItems
) -> None:
    """Its users of before the training count, though they are not told of again."""
    await took(client, "returns", USERS[: MIN_USERS - 1])
    assert (await client.delete("/items/returns")).status_code == 204
    await _publish_without(filled, "returns")
    host = app.state.recommend.models
    await host.refresh()
    assert "returns" not in serving(app).item_ids
    assert (await client.put("/items/returns", json={})).status_code in (200, 201)
    await took(client, "returns", [USERS[20]])
    await host.add_new_items(new_items)
    assert serving(app).item_ids[-1] == "returns"


async def _publish_without(services: Services, item: str) -> None:
    """As a job does, which leaves deleted items out."""
    catalogue = await services.catalog.catalogue()
    internal = catalogue.internal_ids[item]
    known = services.catalog.external_ids_of

    async def named(ids: Any) -> dict[int, str]:
        return {at: name for at, name in (await known(ids)).items() if at != internal}

    services.catalog.external_ids_of = named  # type: ignore[method-assign]
    try:
        await publish_model(services, epochs=5)
    finally:
        del services.catalog.external_ids_of


async def test_a_purchase_counts_more_than_a_click(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, filled: Services
) -> None:
    settings = filled.settings.model_copy(
        update={"feedback": '{"purchase": 3, "view": "seen"}', "feedback_half_life_days": None}
    )
    events = EventService(filled.database, filled.catalog, settings)
    await took(client, "clicked", USERS[:MIN_USERS], "click")
    await took(client, "bought", USERS[:MIN_USERS], "purchase")
    await took(client, "bought", USERS[:MIN_USERS], "click")  # what came last adds nothing
    await took(client, "bought", USERS[:MIN_USERS], "view")
    await took(client, "viewed", USERS[:MIN_USERS], "view")
    ids = (await filled.catalog.catalogue()).internal_ids
    last = serving(app).trained_seq
    taken = await events.adopters(
        [ids[name] for name in ("clicked", "bought", "viewed")], last, 100
    )
    assert Counter((taking.item, taking.weight) for taking in taken) == {
        (ids["clicked"], 1.0): MIN_USERS,
        (ids["bought"], 1.0): MIN_USERS,
        (ids["bought"], 3.0): MIN_USERS,
    }
    few = await events.adopters([ids["clicked"]], last, 2)
    assert [taking.user for taking in few] == USERS[MIN_USERS - 2 : MIN_USERS]

    model = await NewItems(events, filled.catalog, MIN_USERS).extend(serving(app))
    assert model is not None
    assert set(model.item_ids[-2:]) == {"clicked", "bought"}
    rows = [model.item_ids.index(name) for name in ("bought", "clicked")]
    vectors = model.engine.trained_vectors([model.user_rows[user] for user in USERS[:MIN_USERS]])
    margins = model.engine.ranker.bind(vectors).margins
    ahead = margins.all_margins(torch.tensor([rows] * MIN_USERS))[:, 0, 1]
    assert float(ahead.mean()) > 0


async def test_no_list_is_another_for_an_item_that_is_not_in_it(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, new_items: NewItems
) -> None:
    """What users' vectors are fitted to does not depend on how many items there are; and nothing
    stays of the models that were replaced."""
    host, before = app.state.recommend.models, serving(app)
    evidence = [Evidence(np.array([3, 1, 4]), disliked=np.array([7]))]
    vectors = before.engine.fold_in(evidence)
    await took(client, "brand-new", USERS[:MIN_USERS])
    await host.add_new_items(new_items)
    after = serving(app)
    assert after.engine.fold_in(evidence).equal(vectors)
    assert after.user_rows is before.user_rows
    replaced = weakref.ref(before)
    del before

    def gone() -> bool:
        gc.collect()
        return replaced() is None

    await until(gone)  # the thread that built the new one may not have let go of it yet


async def test_a_model_is_warm_when_it_begins_to_serve(
    app: FastAPI,
    client: httpx2.AsyncClient,
    trained: str,
    new_items: NewItems,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits in the inference thread for how alike items are to be worked out."""
    await took(client, "brand-new", USERS[:MIN_USERS])
    built: list[int] = []
    projected = ItemSpace._projected

    def counted(space: ItemSpace, parts: list[torch.Tensor], first: int, n: int) -> np.ndarray:
        built.append(n - first)
        return projected(space, parts, first, n)

    monkeypatch.setattr(ItemSpace, "_projected", counted)
    assert (await ask(client, "user-1", diversity=0.5))["model_version"] == trained
    assert built == []
    await app.state.recommend.models.add_new_items(new_items)
    assert built == [1]  # the others' similarity stays
    await ask(client, "user-1", diversity=0.5)
    assert len(built) == 1
