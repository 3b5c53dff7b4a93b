"""Clients for Python: retries and errors, and paths on their way to a real server."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from ncr_client import (
    AsyncClient,
    Client,
    JobFailedError,
    NotReachedError,
    ServiceError,
    with_event_ids,
)
from ncr_client import calls as calls_module

from app.core.http_protocol import BoundedProtocol
from app.core.settings import load_settings
from app.main import create_app
from tests.app.conftest import listening
from tests.conftest import ON_SQLITE

Answer = Callable[[httpx2.Request], httpx2.Response]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "MAX_WAIT_SECONDS", 0.01)


def client(*given: httpx2.Response | Exception) -> tuple[Client, list[httpx2.Request]]:
    """A client that gets these answers, one after the other."""
    sent: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        found = given[len(sent)]
        sent.append(request)
        if isinstance(found, Exception):
            raise found
        return found

    return Client(transport=httpx2.MockTransport(answer), key="a-key"), sent


LIMITED = httpx2.Response(429, headers={"Retry-After": "1"}, json={"code": "rate_limited"})
BUSY = httpx2.Response(503, headers={"Retry-After": "1"}, json={"code": "overloaded"})
VERDICT = {"accepted": 1, "duplicates": 0, "rejected": [], "last_seq": 1}


def test_events_are_sent_again_under_the_same_id() -> None:
    lost = httpx2.ReadTimeout("the answer was lost")
    ncr, sent = client(lost, BUSY, httpx2.Response(200, json=VERDICT))
    assert ncr.post_event("ann", "tea", value=4.5) == VERDICT
    bodies = [orjson.loads(request.content) for request in sent]
    assert len(bodies) == 3
    assert bodies[0] == bodies[1] == bodies[2]
    assert len(bodies[0][0]["event_id"]) == 32
    assert bodies[0][0] | {"event_id": ""} == {
        "user": "ann", "item": "tea", "value": 4.5, "event_id": ""
    }  # fmt: skip
    assert sent[0].headers["X-API-Key"] == "a-key"


def test_a_token_is_sent_in_place_of_a_key() -> None:
    sent: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request)
        return httpx2.Response(200, json={"items": []})

    with Client(token="ncrt_x", transport=httpx2.MockTransport(answer)) as ncr:
        ncr.recommend("ann")
    assert sent[0].headers["Authorization"] == "Bearer ncrt_x"
    assert "X-API-Key" not in sent[0].headers


def test_an_event_whose_id_is_none_gets_one() -> None:
    """The service would give each try an id of its own, and the event would count twice."""
    lost = httpx2.ReadTimeout("the answer was lost")
    ncr, sent = client(lost, httpx2.Response(200, json=VERDICT))
    ncr.post_events([{"user": "ann", "item": "tea", "event_id": None}])
    ids = [orjson.loads(request.content)[0]["event_id"] for request in sent]
    assert len(ids) == 2
    assert ids[0] == ids[1]
    assert len(ids[0]) == 32


def test_an_own_event_id_stays_and_lists_are_cut() -> None:
    verdict = httpx2.Response(200, json=VERDICT)
    ncr, sent = client(verdict, verdict, verdict)
    events = [{"user": "u", "item": str(n), "event_id": f"e{n}"} for n in range(2_500)]
    assert len(ncr.post_events(iter(events))) == 3
    lists = [orjson.loads(request.content) for request in sent]
    assert [row for rows in lists for row in rows] == events
    assert ncr.post_events([]) == []


def test_what_is_left_after_a_failure_keeps_its_ids() -> None:
    """Also of an iterator, which cannot be gone through again."""
    verdict, lost = httpx2.Response(200, json=VERDICT), httpx2.ReadTimeout("the answer was lost")
    ncr, sent = client(verdict, *[lost] * 4, *[BUSY] * 4, verdict, verdict)
    with pytest.raises(NotReachedError) as first:
        ncr.post_events({"user": "u", "item": str(n)} for n in range(2_500))
    with pytest.raises(ServiceError) as second:
        ncr.post_events(first.value.remaining)
    assert (first.value.stored, second.value.stored) == ([VERDICT], [])
    assert len(ncr.post_events(second.value.remaining)) == 2
    lists = [orjson.loads(request.content) for request in sent]
    assert lists[1:5] == lists[5:9] == [lists[9]] * 4
    kept = [row for rows in (lists[0], lists[9], lists[10]) for row in rows]
    assert [row["item"] for row in kept] == [str(n) for n in range(2_500)]
    assert len({row["event_id"] for row in kept}) == 2_500


def test_events_may_get_their_ids_before() -> None:
    ncr, sent = client(*[httpx2.Response(200, json=VERDICT)] * 2)
    event = {"user": "ann", "item": "tea", "timestamp": datetime(2026, 5, 1, 12, tzinfo=UTC)}
    queue = with_event_ids([event, event | {"event_id": "mine"}])
    for _ in range(2):
        ncr.post_events(queue)
    assert sent[0].content == sent[1].content
    assert [row["event_id"] for row in queue][1:] == ["mine"]
    assert "event_id" not in event


def test_what_may_have_been_done_is_not_done_twice() -> None:
    ncr, sent = client(httpx2.ReadTimeout("the answer was lost"))
    with pytest.raises(NotReachedError, match="POST /admin/train"):
        ncr.train()
    assert len(sent) == 1
    # A 503 does not tell: the database may have been lost between the commit and the answer.
    ncr, sent = client(BUSY, httpx2.Response(202, json={"job_id": "j"}))
    with pytest.raises(ServiceError, match="503 overloaded"):
        ncr.train()
    assert len(sent) == 1


def test_what_was_surely_not_done_is_tried_again() -> None:
    done = httpx2.Response(202, json={"job_id": "j"})
    for first in (
        LIMITED,
        httpx2.ConnectError("refused"),
        httpx2.ConnectTimeout("no answer to the first packet"),
        httpx2.PoolTimeout("no connection free"),
    ):
        ncr, sent = client(first, done)
        assert ncr.train(model="nbpr")["job_id"] == "j"
        assert len(sent) == 2
        ncr, sent = client(first, BUSY, done)
        with pytest.raises(ServiceError, match="503 overloaded"):
            ncr.train()
        assert len(sent) == 2


def test_what_was_deleted_by_a_lost_try_is_gone() -> None:
    lost = httpx2.ReadTimeout("the answer was lost")
    gone = httpx2.Response(404, json={"code": "unknown_user", "detail": "no such user"})
    for first in (lost, BUSY):
        ncr, sent = client(first, gone)
        ncr.delete_user("ann")
        assert len(sent) == 2
    for first in (LIMITED, httpx2.ConnectError("refused")):  # nothing was done
        ncr, _ = client(first, gone)
        with pytest.raises(ServiceError, match="404 unknown_user"):
            ncr.delete_user("ann")


def test_a_cancel_is_not_repeated() -> None:
    ncr, sent = client(httpx2.ReadTimeout("the answer was lost"))
    with pytest.raises(NotReachedError, match="POST /admin/jobs/j/cancel"):
        ncr.cancel("j")
    assert len(sent) == 1


def test_a_refusal_says_why() -> None:
    problem = {"code": "unknown_item", "detail": "there is no such item", "request_id": "r1"}
    ncr, sent = client(httpx2.Response(404, json=problem))
    with pytest.raises(ServiceError, match="404 unknown_item: there is no such item") as caught:
        ncr.get_item("a/b c")
    assert (caught.value.status, caught.value.request_id) == (404, "r1")
    assert sent[0].url.raw_path == b"/items/a%2Fb%20c"


def test_an_answer_that_is_no_problem_document_is_an_error_too() -> None:
    ncr, _ = client(httpx2.Response(502, text="<html>bad gateway</html>"))
    with pytest.raises(ServiceError, match="502 unknown: <html>bad"):
        ncr.recommend("ann")


def test_patience_has_an_end() -> None:
    ncr, sent = client(*[BUSY] * 9)
    with pytest.raises(ServiceError, match="503 overloaded"):
        ncr.recommend("ann")
    assert len(sent) == 4
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = Client(f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(NotReachedError, match="GET /recommend/ann"):
            away.recommend("ann")
        with pytest.raises(NotReachedError, match="GET /health/ready"):
            away.ready()


def test_readiness_is_asked_for_once() -> None:
    ncr, sent = client(BUSY, httpx2.Response(200))
    assert not ncr.ready()
    assert ncr.ready()
    assert len(sent) == 2


def test_what_is_not_given_is_not_sent_and_none_empties() -> None:
    item = httpx2.Response(200, json={})
    ncr, sent = client(*[item] * 3)
    ncr.put_item("tea", title="Tea", hidden=None)
    ncr.patch_item("tea", title=None, attributes={"shelf": None})
    ncr.rerank("ann", ["tea"])
    bodies = [orjson.loads(request.content) for request in sent]
    assert bodies == [
        {"title": "Tea"},
        {"title": None, "attributes": {"shelf": None}},
        {"user": "ann", "items": ["tea"]},
    ]


def test_a_time_may_be_a_datetime() -> None:
    ncr, sent = client(httpx2.Response(201, json={"seq": 1}), httpx2.Response(200, json=VERDICT))
    noon = datetime(2026, 5, 1, 12, tzinfo=UTC)
    ncr.prefer("ann", winner="tea", loser="cake", timestamp=noon)
    ncr.post_event("ann", "tea", timestamp=noon)
    said, (event,) = (orjson.loads(request.content) for request in sent)
    assert said["timestamp"] == event["timestamp"] == "2026-05-01T12:00:00+00:00"


def test_pages_are_followed_to_the_end() -> None:
    pages: list[dict[str, Any]] = [
        {"items": [{"id": "a"}, {"id": "b"}], "next_cursor": "more"},
        {"items": [{"id": "c"}], "next_cursor": None},
    ]
    ncr, sent = client(*(httpx2.Response(200, json=page) for page in pages))
    assert [item["id"] for item in ncr.items(n=2)] == ["a", "b", "c"]
    assert dict(sent[1].url.params) == {"n": "2", "cursor": "more"}


def test_a_job_is_waited_for() -> None:
    def job(status: str, error: str | None = None) -> httpx2.Response:
        return httpx2.Response(200, json={"job_id": "j", "status": status, "error": error})

    ncr, _ = client(job("queued"), job("running"), job("succeeded"))
    assert ncr.wait_for("j", poll=0.001)["status"] == "succeeded"
    ncr, _ = client(job("failed", "no events"))
    with pytest.raises(JobFailedError, match="job j failed: no events"):
        ncr.wait_for("j")
    gate: dict[str, Any] = {"finding": "below_popularity", "incumbent": None}
    rejected = {"job_id": "j", "status": "rejected", "error": None, "metrics": {"gate": gate}}
    ncr, _ = client(httpx2.Response(200, json=rejected))
    with pytest.raises(JobFailedError, match=r"job j rejected: the gate found below_popularity$"):
        ncr.wait_for("j")
    figures = {"challenger": 0.31, "incumbent": 0.4}
    gate |= {"finding": "worse", "incumbent": "v1", "ndcg@10": figures}
    ncr, _ = client(httpx2.Response(200, json=rejected))
    with pytest.raises(JobFailedError, match=r"found worse: NDCG@10 0\.31 beside 0\.4 of v1$"):
        ncr.wait_for("j")
    ncr, _ = client(*[job("running")] * 3)
    with pytest.raises(TimeoutError):
        ncr.wait_for("j", timeout=0)


@pytest.mark.anyio
async def test_the_same_for_asyncio() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json={"items": [{"id": "a"}], "next_cursor": None})

    async with AsyncClient(transport=httpx2.MockTransport(answer)) as ncr:
        assert [item["id"] async for item in ncr.items()] == ["a"]


@pytest.fixture
async def ncr(tmp_path: Path, database_url: str) -> AsyncIterator[AsyncClient]:
    app = create_app(
        load_settings(data_dir=tmp_path, database_url=database_url, precompute_users=0)
    )
    async with (
        listening(app, BoundedProtocol) as port,
        AsyncClient(f"http://127.0.0.1:{port}") as client,
    ):
        yield client


@pytest.mark.anyio
@ON_SQLITE
async def test_any_id_is_one_segment_of_the_path(ncr: AsyncClient) -> None:
    """`.` and `..` too, which are steps in a path unless they are encoded."""
    for name in (".", "..", "...", "a/..", "./a", "%2E", "{}", "é ?#"):
        assert (await ncr.put_item(name, title="t"))["id"] == name
        assert (await ncr.get_item(name))["id"] == name
        await ncr.post_event(name, name)
        assert [event["item"] async for event in ncr.events_of(name)] == [name]
        assert (await ncr.recommend(name))["user"] == name
        await ncr.delete_user(name)
        assert [item["id"] async for item in ncr.items()] == [name]
        await ncr.patch_item(name, hidden=True, attributes={"of": "a shelf"})
        patched = await ncr.patch_item(name, title=None)
        assert (patched["title"], patched["hidden"]) == (None, True)
        await ncr.delete_item(name)


class _LostAnswers(httpx2.AsyncBaseTransport):
    """Passes requests on, and loses the answers to some."""

    def __init__(self, lost: set[int]) -> None:
        self._transport = httpx2.AsyncHTTPTransport()
        self._lost, self._sent = lost, 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self._sent += 1
        answer = await self._transport.handle_async_request(request)
        if self._sent in self._lost:
            await answer.aread()
            raise httpx2.ReadTimeout("the answer was lost")
        return answer


@pytest.mark.anyio
async def test_events_posted_again_after_a_failure_count_once(tmp_path: Path) -> None:
    app = create_app(load_settings(data_dir=tmp_path, precompute_users=0))
    async with listening(app, BoundedProtocol) as port:
        transport = _LostAnswers({2, 3, 4, 5})  # the list in the middle, with all tries
        async with AsyncClient(f"http://127.0.0.1:{port}", transport=transport) as ncr:
            events = [{"user": "ann", "item": str(n)} for n in range(2_100)]
            with pytest.raises(NotReachedError) as caught:
                await ncr.post_events(events)
            again = await ncr.post_events(caught.value.remaining)
            found = [*caught.value.stored, *again]
            assert [answer["accepted"] for answer in found] == [1_000, 0, 100]
            assert found[1]["duplicates"] == 1_000
            assert len([event async for event in ncr.events_of("ann", n=1_000)]) == 2_100
