"""Options of a list: `diversity=` chooses another from the exact one, `explain=` adds reasons."""

from __future__ import annotations

from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from fastapi import FastAPI

from app.wiring import Services
from ncr_core.fold_in import Evidence
from ncr_core.ranking.similarity import diversified
from tests.app.conftest import publish_model
from tests.app.recommend.conftest import USERS, ask, ids, post, seen_by, serving
from tests.conftest import ON_SQLITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow, ON_SQLITE]


async def test_none_is_the_exact_list(client: httpx2.AsyncClient, trained: str) -> None:
    exact = await ask(client, "user-1")
    for value in ("0", "0.0", "-0.0"):
        assert (await ask(client, "user-1", diversity=value))["items"] == exact["items"]


@pytest.mark.parametrize("n", [2, 5, 12])
@pytest.mark.parametrize("diversity", [0.2, 0.7, 1.0])
async def test_the_list_is_chosen_from_the_exact_one(
    app: FastAPI, client: httpx2.AsyncClient, trained: str, n: int, diversity: float
) -> None:
    model = serving(app)
    depth = max(50, 5 * n)
    for user in USERS[:6]:
        exact = [i for i in (await ask(client, user, n=depth))["items"] if i["source"] == "model"]
        rows = [model.item_ids.index(item["id"]) for item in exact]
        expected = diversified(model.engine.item_space.vectors[rows], n, diversity)
        answer = await ask(client, user, n=n, diversity=diversity)
        assert ids(answer) == [exact[at]["id"] for at in expected]
        assert ids(answer)[0] == exact[0]["id"]
        assert [item["rank"] for item in answer["items"]] == list(range(1, n + 1))
        assert [item["score"] for item in answer["items"]] == pytest.approx(
            [exact[at]["score"] for at in expected], abs=2e-6
        )
        # The next one is another now, and may well be preferred.
        compared = (await post(client, "/compare", user=user, items=ids(answer)))["probability"]
        for at, item in enumerate(answer["items"][:-1]):
            assert item["preferred_over_next"] == pytest.approx(compared[at][at + 1], abs=2e-6)
        assert answer["items"][-1]["preferred_over_next"] is None


async def test_more_of_it_makes_lists_less_alike_within(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    model = serving(app)

    async def mean_similarity(diversity: float) -> float:
        found = []
        for user in USERS[:30]:
            shown = ids(await ask(client, user, diversity=diversity))
            own = [model.item_ids.index(item) for item in shown]
            vectors = model.engine.item_space.vectors[own]
            found.append((vectors @ vectors.T)[np.triu_indices(len(own), 1)].mean())
        return float(np.mean(found))

    similarities = [await mean_similarity(value) for value in (0.0, 0.3, 0.6, 0.9)]
    assert similarities == sorted(similarities, reverse=True)
    assert similarities[0] - similarities[-1] > 0.1


async def test_it_goes_with_filters_and_company(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    best = ids(await ask(client, "user-1", n=3))
    varied = ids(await ask(client, "user-1", diversity=0.5, exclude=best))
    assert not set(varied) & set(best)
    app.state.recommend.lists.cache.clear()
    both = await post(
        client, "/recommend/batch", users=["user-2", "user-1", "nobody"], diversity=0.5
    )
    assert ids(both["results"][1]) == ids(await ask(client, "user-1", diversity=0.5))
    assert ids(await ask(client, "user-1")) != ids(both["results"][1])
    # Newcomers' lists, and what fills others up, stay as they are.
    assert ids(both["results"][2]) == ids(await ask(client, "nobody"))
    await client.put("/items/late", json={})
    exact = ids(await ask(client, "user-1", n=1000))
    answer = ids(await ask(client, "user-1", n=1000, diversity=0.5))
    assert answer != exact
    assert sorted(answer) == sorted(exact)
    assert answer[-1] == "late"


CALIBRATED = {"temperature", "ece", "ece_before", "pairs"}


@pytest.fixture(params=["nbpr", "neupr"])
async def served(request: pytest.FixtureRequest, app: FastAPI, filled: Services) -> str:
    """A model with a tower, and one without."""
    version = await publish_model(filled, model=request.param, epochs=4, pretrain=False)
    await app.state.recommend.models.refresh()
    return version


def without_reasons(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k != "because"} for item in answer["items"]]


def reasons(answer: dict[str, Any]) -> list[list[str]]:
    return [[own["id"] for own in item["because"]] for item in answer["items"]]


async def test_each_item_comes_with_the_own_items_that_it_is_due_to_most(
    app: FastAPI, client: httpx2.AsyncClient, served: str
) -> None:
    plain = await ask(client, "user-1")
    answer = await ask(client, "user-1", explain="pairwise")
    assert all("because" not in item for item in plain["items"])
    assert without_reasons(answer) == plain["items"]  # it changes nothing else
    model, own = serving(app), seen_by("user-1")
    rows = {item: row for row, item in enumerate(model.item_ids)}
    vector = model.engine.trained_vectors([model.user_rows["user-1"]])[0]
    items, effects = model.engine.influence.effects(
        vector,
        Evidence(np.array([rows[item] for item in own])),
        np.array([rows[item] for item in ids(answer)]),
        trained=True,
    )
    for place, of_place in zip(
        answer["items"], effects / (2 * model.engine.temperature), strict=True
    ):
        best = [at for at in np.argsort(-of_place)[:3] if of_place[at] > 0]
        assert [one["id"] for one in place["because"]] == [model.item_ids[items[at]] for at in best]
        told = [one["effect"] for one in place["because"]]
        assert told == pytest.approx(of_place[best], abs=2e-6)
        assert all(one["title"] for one in place["because"])
    assert any(len(item["because"]) == 3 for item in answer["items"])


async def test_who_came_after_the_training_hears_of_what_they_took_up(
    client: httpx2.AsyncClient, served: str
) -> None:
    taken = seen_by("user-2")[:6]
    await post_events(client, "anna", taken[:5])
    first = await ask(client, "anna", explain="pairwise")
    assert {item["source"] for item in first["items"]} == {"fold_in"}
    named = {own for of_place in reasons(first) for own in of_place}
    assert named
    assert named <= set(taken[:5])
    await post_events(client, "anna", taken[5:])
    second = await ask(client, "anna", explain="pairwise")
    assert taken[5] in {own for of_place in reasons(second) for own in of_place}
    plain = await ask(client, "anna", explain="none")
    assert without_reasons(second) == plain["items"]


async def test_what_was_disliked_or_deleted_is_no_reason(
    client: httpx2.AsyncClient, served: str
) -> None:
    own = seen_by("user-3")
    everything = await ask(client, "user-3", explain="pairwise")
    named = [item for of_place in reasons(everything) for item in of_place]
    gone, disliked = list(dict.fromkeys(named))[:2]
    await post(client, "/events", user="user-3", item=disliked, type="dislike")
    assert (await client.delete(f"/items/{gone}")).status_code in (200, 204)
    after = await ask(client, "user-3", explain="pairwise")
    left = {item for of_place in reasons(after) for item in of_place}
    assert left
    assert left <= set(own) - {gone, disliked}


async def test_popular_items_need_no_reason(client: httpx2.AsyncClient, trained: str) -> None:
    unknown = await ask(client, "nobody", explain="pairwise")
    assert [item["because"] for item in unknown["items"]] == [[]] * 10
    assert all("because" not in item for item in (await ask(client, "nobody"))["items"])
    await client.put("/items/brand-new", json={"title": "Brand new"})
    filled_up = await ask(client, "user-1", n=100, explain="pairwise")
    by_source = {item["id"]: (item["source"], item["because"]) for item in filled_up["items"]}
    assert by_source["brand-new"] == ("popular", [])
    assert any(because for source, because in by_source.values() if source == "model")


async def test_nothing_is_known_of_why_without_a_model(
    client: httpx2.AsyncClient, filled: Services
) -> None:
    answer = await ask(client, "user-1", explain="pairwise")
    assert [item["because"] for item in answer["items"]] == [[]] * 10


async def test_explained_lists_are_kept_apart_from_the_others(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    explained = await ask(client, "user-4", explain="pairwise")
    model, calls = serving(app), []
    honest = model.engine.influence.effects
    model.engine.influence.effects = (  # type: ignore[method-assign]
        lambda *args, **named: calls.append(1) or honest(*args, **named)  # type: ignore[func-returns-value]
    )
    assert (await ask(client, "user-4", explain="pairwise"))["items"] == explained["items"]
    assert "because" not in (await ask(client, "user-4"))["items"][0]
    await ask(client, "user-5")
    assert calls == []  # nobody pays for what others ask
    await ask(client, "user-5", explain="pairwise")
    assert calls == [1]


async def test_batches_are_explained_too(client: httpx2.AsyncClient, trained: str) -> None:
    users = ["user-1", "nobody"]
    answer = await post(client, "/recommend/batch", users=users, n=5, explain="pairwise")
    for user, found in zip(users, answer["results"], strict=True):
        alone = await ask(client, user, n=5, explain="pairwise")
        assert found["items"] == alone["items"]


async def test_one_item_has_nothing_to_be_ahead_of(
    client: httpx2.AsyncClient, trained: str
) -> None:
    answer = await ask(client, "user-1", n=1, explain="pairwise")
    assert answer["items"][0]["because"] == []


async def test_a_way_of_explaining_that_there_is_not(client: httpx2.AsyncClient) -> None:
    response = await client.get("/recommend/user-1", params={"explain": "magic"})
    assert response.status_code == 422


async def test_a_model_tells_how_far_its_probabilities_are_off(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    about = (await client.get(f"/admin/models/{trained}")).json()["metrics"]["calibration"]
    assert about.keys() == CALIBRATED
    assert 0 <= about["ece"] < 0.5
    assert about["pairs"] > 0
    model = serving(app)
    assert model.engine.temperature == about["temperature"] != 1.0
    exposed = (await client.get("/metrics")).text
    line = next(line for line in exposed.splitlines() if 'metric="ece"' in line)
    assert 'protocol="calibration"' in line
    assert float(line.rsplit(" ", 1)[1]) == about["ece"]


async def test_probabilities_are_of_the_temperature(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    model = serving(app)
    answer = await ask(client, "user-1")
    rows = [model.item_ids.index(item) for item in ids(answer)]
    vector = model.engine.trained_vectors([model.user_rows["user-1"]])
    i, j = (torch.tensor(part).unsqueeze(0) for part in (rows[:-1], rows[1:]))
    margins = model.engine.ranker.compare(vector, i, j)[0]
    expected = torch.sigmoid(margins / (2 * model.engine.temperature)).tolist()
    told = [item["preferred_over_next"] for item in answer["items"]]
    assert told[:-1] == pytest.approx(expected, abs=2e-6)


async def post_events(client: httpx2.AsyncClient, user: str, items: list[str]) -> None:
    body = [{"user": user, "item": item} for item in items]
    assert (await client.post("/events", json=body)).json()["accepted"] == len(items)
