"""Merging users: everything moves once, and what comes later finds the survivor."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from app.core.access import Role
from app.core.settings import Settings
from app.core.tables import now_us
from app.events.schemas import NewEvent
from app.events.tables import user_aliases, users
from app.main import create_app
from app.recommend.popularity import PopularityRanking
from app.wiring import Services, build_services
from tests.app.conftest import client_of, publish_model, refresh

pytestmark = pytest.mark.anyio


async def post(client: httpx2.AsyncClient, user: str, *items: str, **fields: Any) -> dict[str, Any]:
    rows = [{"event_id": f"{user} {i}", "user": user, "item": i, **fields} for i in items]
    answer = await client.post("/events", json=rows)
    assert answer.status_code == 200
    outcome: dict[str, Any] = answer.json()
    return outcome


async def merge(client: httpx2.AsyncClient, user: str, into: str) -> httpx2.Response:
    return await client.post(f"/users/{user}/merge", json={"into": into})


async def history(client: httpx2.AsyncClient, user: str) -> list[dict[str, Any]]:
    answer = await client.get(f"/users/{user}/events", params={"n": 1000})
    rows: list[dict[str, Any]] = answer.json()["items"] if answer.status_code == 200 else []
    return rows


async def counts(services: Services) -> dict[str, int]:
    """Users by item, counted anew."""
    _, rows = await services.events.popularity()
    names = await services.catalog.external_ids_of([item for item, _ in rows])
    return {names[item]: n for item, n in rows}


async def test_all_that_a_visitor_did_and_said_moves(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    await post(client, "ann", "a", "b")
    await post(client, "visitor", "b", "c", timestamp=5)
    await post(client, "ben", "a")
    said = {"user": "visitor", "winner": "c", "loser": "a", "timestamp": 7}
    await client.post("/preferences", json=said)
    await client.put("/users/ann", json={"attributes": {"plan": "paid", "city": "Bern"}})
    await client.put("/users/visitor", json={"attributes": {"plan": "free", "page": "x"}})
    before = {user: (await client.get(f"/recommend/{user}")).json() for user in ("ann", "visitor")}
    assert {item["id"] for item in before["ann"]["items"]} == {"c"}

    answer = await merge(client, "visitor", "ann")
    assert answer.status_code == 200
    outcome = answer.json()
    assert (outcome["id"], outcome["into"]) == ("visitor", "ann")
    assert (outcome["events"], outcome["preferences"]) == (2, 1)

    moved = await history(client, "ann")
    assert [row["event_id"] for row in moved] == ["visitor c", "visitor b", "ann b", "ann a"]
    assert [row["timestamp"] for row in moved[:2]] == ["1970-01-01T00:00:05Z"] * 2
    assert (await client.get("/users/visitor/events")).json()["code"] == "unknown_user"
    assert (await client.get("/users/visitor")).json()["code"] == "unknown_user"
    expected = {"plan": "paid", "city": "Bern", "page": "x"}
    assert (await client.get("/users/ann")).json()["attributes"] == expected
    services: Services = app.state.services
    stated = [row async for rows in services.events.iter_preferences() for row in rows]
    assert [tuple(row) for row in stated] == [("ann", "c", "a", 7_000_000)]
    profile = await services.events.profiles.get("ann")
    assert len(profile.seen) == 4
    assert profile.last_seq == outcome["last_seq"] - 1
    params = {"min_seq": outcome["last_seq"]}
    after = (await client.get("/recommend/ann", params=params)).json()
    assert after["as_of_seq"] >= outcome["last_seq"]
    assert after["items"] == []  # everything is seen now
    # The visitor is somebody unknown again: all is new to them.
    stranger = (await client.get("/recommend/visitor")).json()
    assert {item["id"] for item in stranger["items"]} == {"a", "b", "c"}


async def test_a_merge_is_done_once_however_often_it_is_sent(client: httpx2.AsyncClient) -> None:
    await post(client, "ann", "a")
    for number in range(5):
        await post(client, f"v{number}", "a", "b")
    answers = await asyncio.gather(
        *(merge(client, f"v{number}", "ann") for number in range(5) for _ in range(4))
    )
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 5
    rows = await history(client, "ann")
    assert len({row["event_id"] for row in rows}) == len(rows) == 11
    assert [row["seq"] for row in rows] == sorted({row["seq"] for row in rows}, reverse=True)


async def test_nothing_counts_twice_after_a_merge(app: FastAPI, client: httpx2.AsyncClient) -> None:
    services: Services = app.state.services
    popularity: PopularityRanking = app.state.recommend.popularity
    await post(client, "ann", "a", "b")
    await post(client, "visitor", "b", "c")
    await popularity.ranked((await client.get("/recommend/x")).json()["as_of_seq"])
    assert await counts(services) == {"a": 1, "b": 2, "c": 1}
    await merge(client, "visitor", "ann")
    assert await counts(services) == {"a": 1, "b": 1, "c": 1}
    # What has moved is no new user of an item.
    rows = await services.events.new_adoptions(0, 100)
    assert [is_first for _, _, is_first in rows] == [True, True, False, False]
    assert await services.events.is_retracted_since(4)


async def test_what_comes_later_for_the_merged_user_is_the_survivors(
    app: FastAPI, client: httpx2.AsyncClient
) -> None:
    services: Services = app.state.services
    imported = [NewEvent(f"import:v:{n}", "visitor", f"i{n}", timestamp=n) for n in range(4)]
    await services.events.import_rows(imported)
    await post(client, "visitor", "a")
    await post(client, "ann", "b")
    await merge(client, "visitor", "ann")
    # A retry, and the same file once more, in both ways of an import.
    assert (await post(client, "visitor", "a"))["duplicates"] == 1
    assert (await services.events.import_rows(imported)).duplicates == 4
    again = await client.post("/events", json={"event_id": "visitor a", "user": "ann", "item": "a"})
    assert again.json()["duplicates"] == 1
    assert (await post(client, "visitor", "late", "later"))["accepted"] == 2
    said = {"user": "visitor", "winner": "a", "loser": "b"}
    assert (await client.post("/preferences", json=said)).status_code == 201
    assert len(await history(client, "ann")) == 8
    assert len((await services.events.profiles.get("ann")).preferences) == 1
    assert [row["id"] for row in (await client.get("/users")).json()["items"]] == ["ann"]
    # Nobody describes the visitor any more.
    for method in ("PUT", "PATCH"):
        answer = await client.request(method, "/users/visitor", json={})
        assert (answer.status_code, answer.json()["code"]) == (409, "merged_user")
    listed = (await client.post("/users", json=[{"id": "visitor"}, {"id": "ann"}])).json()
    assert (listed["accepted"], [row["code"] for row in listed["rejected"]]) == (1, ["merged_user"])
    # Erased, neither id leads anywhere.
    assert (await client.delete("/users/ann")).status_code == 204
    assert await services.database.fetch(sa.select(user_aliases)) == []
    await post(client, "visitor", "new")
    assert [row["item"] for row in await history(client, "visitor")] == ["new"]


async def test_merges_one_after_another_lead_to_the_last_survivor(
    client: httpx2.AsyncClient,
) -> None:
    for user in ("a", "b", "c"):
        await post(client, user, f"of {user}")
    first = await merge(client, "a", "b")
    assert (await merge(client, "b", "c")).json()["events"] == 2
    await post(client, "a", "late")
    assert len(await history(client, "c")) == 4
    again = await merge(client, "a", "b")  # b is c by now
    assert again.json() == first.json() | {"into": "c"}
    assert (await merge(client, "a", "c")).json() == again.json()
    await post(client, "d", "of d")
    assert (await merge(client, "d", "a")).json()["into"] == "c"  # an id that stands for c


async def test_a_merge_that_makes_no_sense_is_refused(client: httpx2.AsyncClient) -> None:
    for user in ("ann", "ben", "visitor"):
        await post(client, user, "i")
    refused = {
        ("ann", "ann"): (409, "same_user"),
        ("nobody", "ann"): (404, "unknown_user"),
        ("ann", "nobody"): (404, "unknown_user"),
        ("nobody", "nobody"): (404, "unknown_user"),
    }
    for (user, into), expected in refused.items():
        answer = await merge(client, user, into)
        assert (answer.status_code, answer.json()["code"]) == expected, (user, into)
    assert (await merge(client, "visitor", "ann")).status_code == 200
    later = {
        ("ann", "visitor"): (409, "merge_circle"),
        ("visitor", "ben"): (409, "merged_user"),
        ("visitor", "visitor"): (409, "same_user"),
        ("visitor", "nobody"): (409, "merged_user"),
    }
    for (user, into), expected in later.items():
        answer = await merge(client, user, into)
        assert (answer.status_code, answer.json()["code"]) == expected, (user, into)
    bodies: list[Any] = [{}, [], 1, {"into": 5}, {"into": "ann", "x": 1}, {"into": None}]
    bodies += [{"into": ""}, {"into": "a\0"}, {"into": "x" * 257}]
    for body in bodies:
        answer = await client.post("/users/ben/merge", json=body)
        assert answer.status_code == 422, body
        assert answer.headers["content-type"] == "application/problem+json"
    assert len(await history(client, "ann")) == 2


async def test_a_user_with_too_many_events_is_not_merged(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.events.user_service.MAX_MERGED_ROWS", 2)
    await post(client, "bot", "a", "b", "c")
    await post(client, "ann", "a", "b", "c", "d")
    answer = await merge(client, "bot", "ann")
    assert (answer.status_code, answer.json()["code"]) == (409, "too_many_events")
    assert len(await history(client, "bot")) == 3


async def test_only_the_latest_ids_stand_for_a_user(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.events.user_repository.MAX_ALIASES", 2)
    await post(client, "ann", "a")
    for number in range(3):
        await post(client, f"v{number}", "a")
        await merge(client, f"v{number}", "ann")
    for number in range(3):
        await post(client, f"v{number}", "late")
    assert [len(await history(client, f"v{number}")) for number in range(3)] == [1, 0, 0]
    assert len(await history(client, "ann")) == 6


async def test_a_model_that_knows_both_takes_in_what_moved(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services
) -> None:
    await publish_model(filled)
    await refresh(app)
    before = (await client.get("/recommend/user-1?n=50")).json()
    assert {item["source"] for item in before["items"]} == {"model"}
    seen = {row["item"] for row in await history(client, "user-2")}
    moved = await merge(client, "user-2", "user-1")
    after = (await client.get("/recommend/user-1?n=50")).json()
    assert after["as_of_seq"] >= moved.json()["last_seq"]
    assert {item["source"] for item in after["items"]} == {"fold_in"}
    assert seen.isdisjoint(item["id"] for item in after["items"])
    assert (await client.get("/recommend/user-2")).json()["items"][0]["source"] == "popular"


async def test_another_server_shows_a_merge_at_once(
    app: FastAPI, client: httpx2.AsyncClient, services: Services, settings: Settings
) -> None:
    await post(client, "ann", "a")
    await post(client, "visitor", "b")
    elsewhere = await build_services(settings)
    try:
        profiles = elsewhere.events.profiles
        assert len((await profiles.get("ann")).seen) == 1
        assert len((await profiles.get("visitor")).seen) == 1
        seq = (await merge(client, "visitor", "ann")).json()["last_seq"]
        assert len((await profiles.get("ann", seq)).seen) == 2
        assert (await profiles.get("visitor", seq)).user_id is None
        await elsewhere.events.add_rows([{"user": "visitor", "item": "c"}], now_us())
        assert len(await history(client, "ann")) == 3
    finally:
        await elsewhere.close()


async def test_an_export_loses_no_event_of_a_merge_meanwhile(services: Services) -> None:
    rows = [{"event_id": f"e{n}", "user": f"u{n % 2}", "item": "i"} for n in range(6)]
    await services.events.add_rows(rows, 0)
    found: set[str] = set()
    chunks = services.events.iter_events(chunk_size=2)
    found |= {event.event_id for event, _, _ in await anext(chunks)}
    await services.users.merge("u0", "u1")
    async for chunk in chunks:
        found |= {event.event_id for event, _, _ in chunk}
    assert found == {row["event_id"] for row in rows}


async def test_what_merges_have_moved_is_found_by_an_index(
    services: Services, client: httpx2.AsyncClient
) -> None:
    """By each of the queries that ask for every event: many users may have been merged."""
    await post(client, "ann", *(f"i{n}" for n in range(30)))
    database, aliases = services.database, 3_000
    user = (await database.fetch(sa.select(users.c.id)))[0][0]
    async with database.write() as conn:
        rows = [
            {"external_id": f"v{n}", "user_id": user, "first_seq": 100 * n + 1000, "events": 9,
             "seq": 100 * n + 1010, "preferences": 0, "created_at": n} for n in range(aliases)
        ]  # fmt: skip
        await conn.execute(user_aliases.insert(), rows)
        await conn.exec_driver_sql("ANALYZE")
    asked: list[tuple[str, Any]] = []

    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if "user_aliases" in statement:
            asked.append((statement, parameters))

    engine = database._reader.sync_engine
    sa.event.listen(engine, "before_cursor_execute", note)
    await services.events.new_adoptions(0, 100)
    await services.events.users_by_item(0, 0, 2**60)
    async for _ in services.events.iter_events():
        pass
    async for _ in services.events.iter_preferences():
        pass
    sa.event.remove(engine, "before_cursor_execute", note)
    assert len(asked) >= 4
    explain = "EXPLAIN QUERY PLAN " if database.dialect == "sqlite" else "EXPLAIN "
    async with database.read() as conn:
        for statement, parameters in asked:
            found = await conn.exec_driver_sql(explain + statement, parameters)
            plan = "\n".join(" ".join(map(str, row)) for row in found)
            assert "ix_user_aliases_seq" in plan, plan
            assert "Seq Scan on user_aliases" not in plan, plan
            assert "SCAN user_aliases" not in plan, plan


async def test_a_merge_needs_two_roles_and_no_token_may(
    services: Services, settings: Settings
) -> None:
    await services.events.add_rows([{"user": u, "item": "i"} for u in ("ann", "v")], 0)
    keys = {
        name: (await services.keys.create(name, roles))[1]
        for name, roles in {
            "events": [Role.EVENTS, Role.RECOMMEND, Role.TOKENS],
            "delete": [Role.DELETE],
            "both": [Role.EVENTS, Role.DELETE],
        }.items()
    }
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        for name, status in (("events", 403), ("delete", 403), ("both", 200)):
            headers = {"X-API-Key": keys[name]}
            if name == "events":
                body = {"user": "v"}
                signed = await client.post("/tokens", json=body, headers=headers)
                bearer = {"Authorization": f"Bearer {signed.json()['token']}"}
                answer = await client.post("/users/v/merge", json={"into": "ann"}, headers=bearer)
                assert answer.status_code == 403
            answer = await client.post("/users/v/merge", json={"into": "ann"}, headers=headers)
            assert answer.status_code == status, name
            if status == 403:
                assert answer.json()["code"] == "role_missing"
