"""`diversity=`: another choice from the exact list, and everything said of it still true."""

from __future__ import annotations

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI

from ncr_core.ranking.similarity import diversified
from tests.app.recommend.requests import USERS, ask, ids, post, serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


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
