"""Embeddings of items: vectors of the client's own, all of one length within a catalogue."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

pytestmark = pytest.mark.anyio


async def _embedding(client: httpx2.AsyncClient, item: str) -> list[float] | None:
    embedding: list[float] | None = (await client.get(f"/items/{item}")).json()["embedding"]
    return embedding


def _refused(response: httpx2.Response) -> str:
    assert (response.status_code, response.json()["code"]) == (422, "embedding_length")
    assert response.headers["content-type"] == "application/problem+json"
    return str(response.json()["detail"])


async def test_an_embedding_is_kept_with_single_precision(client: httpx2.AsyncClient) -> None:
    given = [0.1, -2, 0, 1e-3, 3.4e38]
    created = await client.put("/items/a", json={"embedding": given})
    assert created.status_code == 201
    assert created.json()["embedding"] == given
    assert await _embedding(client, "a") == given
    assert (await client.get("/items")).json()["items"][0]["embedding"] == given
    patched = await client.patch("/items/a", json={"title": "A"})
    assert patched.json()["embedding"] == given
    assert (await client.patch("/items/a", json={"embedding": None})).json()["embedding"] is None
    await client.patch("/items/a", json={"embedding": [1 / 3] * 1_024})
    kept = await _embedding(client, "a")
    assert kept is not None
    assert kept == pytest.approx([1 / 3] * 1_024, rel=1e-7)
    await client.put("/items/a", json={})
    assert await _embedding(client, "a") is None


async def test_all_embeddings_have_the_length_of_the_first(client: httpx2.AsyncClient) -> None:
    assert (await client.put("/items/a", json={"embedding": [1, 2, 3]})).status_code == 201
    wrong: dict[str, Any] = {"embedding": [1, 2]}
    detail = _refused(await client.put("/items/b", json=wrong))
    assert "2 numbers" in detail
    assert "have 3" in detail
    assert (await client.get("/items/b")).status_code == 404
    await client.put("/items/b", json={})
    _refused(await client.patch("/items/b", json=wrong))
    # The only item that has one may have another; and a deleted item counts no more.
    assert (await client.put("/items/a", json=wrong)).status_code == 200
    assert (await client.patch("/items/b", json=wrong)).status_code == 200
    _refused(await client.put("/items/a", json={"embedding": [1]}))
    await client.delete("/items/a")
    assert (await client.patch("/items/b", json={"embedding": [1]})).status_code == 200


async def test_rows_of_another_length_do_not_affect_others(client: httpx2.AsyncClient) -> None:
    rows = [
        {"id": "a", "embedding": [1, 2]},
        {"id": "b", "embedding": [1]},
        {"id": "c"},
        {"id": "d", "embedding": [3, 4]},
        {"id": "a", "embedding": [5, 6]},
    ]
    answer = (await client.post("/items", json=rows)).json()
    assert answer["accepted"] == 4
    assert [(row["index"], row["code"]) for row in answer["rejected"]] == [(1, "embedding_length")]
    assert await _embedding(client, "a") == [5, 6]
    assert (await client.get("/items/b")).status_code == 404
    # A request that replaces all of them may change the length.
    longer = [{"id": item, "embedding": [1, 2, 3]} for item in ("a", "d")]
    assert (await client.post("/items", json=longer)).json()["rejected"] == []
    assert await _embedding(client, "d") == [1, 2, 3]
