"""The batcher: one pass for what has collected, and nobody pays for another's fault."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from app.core.errors import Unavailable
from app.inference import batcher as module
from app.inference.batcher import Batcher, ClientGone, IsGone
from ncr_core.fold_in import Evidence
from ncr_core.inference.engine import RankedItem
from ncr_core.inference.retrieval import ItemFilter, RankRequest, UserState
from tests.app.conftest import until

pytestmark = pytest.mark.anyio


class FakeEngine:
    """Answers each request with its own n; waits while ``go`` is not set."""

    def __init__(self, name: str = "a") -> None:
        self.name = name
        self.batches: list[list[int]] = []
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.retriever = self

    def rank(self, requests: Sequence[RankRequest]) -> list[list[RankedItem]]:
        self.entered.set()
        self.go.wait(10)
        self.batches.append([r.n for r in requests])
        if any(r.n == 13 for r in requests):
            raise ZeroDivisionError("13")
        return [[RankedItem(r.n, 0.5, None)] for r in requests]

    def is_ready(self, request: RankRequest) -> bool:
        return request.key == 0

    def pairs_to_rank(self, request: RankRequest) -> int:
        return 100 * request.n


@pytest.fixture
async def batcher() -> AsyncIterator[Batcher]:
    batcher = Batcher(threads=1)
    yield batcher
    await batcher.close()


def ask(
    batcher: Batcher, model: FakeEngine, n: int, seq: int = 0, gone: IsGone | None = None
) -> asyncio.Task[list[RankedItem]]:
    """With a ``seq``, for a user whose candidates are in no cache."""
    request = RankRequest(UserState(0), n, ItemFilter(np.ones(1, dtype=np.bool_)), key=seq)
    ready = model.retriever.is_ready(request)
    return asyncio.create_task(batcher.rank(cast(Any, model), request, gone, ready=ready))


async def begin(
    batcher: Batcher, model: FakeEngine, gone: IsGone | None = None, n: int = 1
) -> asyncio.Task[list[RankedItem]]:
    """A request whose pass lasts until ``go`` is set: what comes now collects."""
    model.go.clear()
    first = ask(batcher, model, n, gone=gone)
    await until(model.entered.is_set)
    return first


async def test_what_collects_while_the_thread_is_busy_is_one_batch(batcher: Batcher) -> None:
    model = FakeEngine()
    first = await begin(batcher, model)
    rest = [ask(batcher, model, n) for n in range(2, 7)]
    await asyncio.sleep(0)
    model.go.set()
    answers = await asyncio.gather(first, *rest)
    assert [a[0].row for a in answers] == [1, 2, 3, 4, 5, 6]
    assert model.batches == [[1], [2, 3, 4, 5, 6]]


async def test_an_exception_fails_its_own_request_only(batcher: Batcher) -> None:
    model = FakeEngine()
    answers = await asyncio.gather(
        *(ask(batcher, model, n) for n in (12, 13, 14)), return_exceptions=True
    )
    assert isinstance(answers[1], ZeroDivisionError)
    assert [cast(Any, a)[0].row for a in (answers[0], answers[2])] == [12, 14]


async def test_requests_that_have_gone_away_are_not_ranked(batcher: Batcher) -> None:
    model = FakeEngine()
    first = await begin(batcher, model)
    gone, stays = ask(batcher, model, 2), ask(batcher, model, 3)
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    model.go.set()
    await asyncio.gather(first, stays)
    assert model.batches == [[1], [3]]


async def test_clients_that_hung_up_are_not_ranked_for(
    batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone() -> bool:
        return True

    async def still_there() -> bool:
        return False

    model = FakeEngine()
    monkeypatch.setattr(module, "GONE_CHECK_SECONDS", 5.0)
    first = await begin(batcher, model, gone)  # at once, without being asked
    monkeypatch.setattr(module, "GONE_CHECK_SECONDS", 0.0)
    hung_up, waits = ask(batcher, model, 2, gone=gone), ask(batcher, model, 3, gone=still_there)
    await asyncio.sleep(0)
    model.go.set()
    await asyncio.gather(first, waits)
    assert model.batches == [[1], [3]]
    with pytest.raises(ClientGone) as refused:
        await hung_up
    assert (refused.value.status, refused.value.code) == (503, "client_gone")


async def test_a_batch_holds_requests_of_one_model(batcher: Batcher) -> None:
    a, b = FakeEngine("a"), FakeEngine("b")
    tasks = [await begin(batcher, a)]
    tasks += [ask(batcher, a, 2), ask(batcher, b, 3), ask(batcher, b, 4), ask(batcher, a, 5)]
    await asyncio.sleep(0)
    a.go.set()
    await asyncio.gather(*tasks)
    assert a.batches == [[1], [2, 5]]
    assert b.batches == [[3, 4]]


async def test_no_model_waits_while_requests_of_another_keep_coming(batcher: Batcher) -> None:
    passes: list[str] = []
    a, b = FakeEngine("a"), FakeEngine("b")
    for engine in (a, b):
        engine.rank = partial(_noted, passes, engine.name, engine.rank)  # type: ignore[method-assign]
    batcher._quick.max_batch = 2
    tasks = [await begin(batcher, a)]
    tasks += [ask(batcher, b if n == 3 else a, n) for n in range(2, 8)]
    await asyncio.sleep(0)
    a.go.set()
    await asyncio.gather(*tasks)
    assert passes == ["a", "a", "b", "a", "a"]


def _noted(
    passes: list[str],
    name: str,
    rank: Callable[[Sequence[RankRequest]], list[list[RankedItem]]],
    requests: Sequence[RankRequest],
) -> list[list[RankedItem]]:
    passes.append(name)
    return rank(requests)


async def test_too_many_waiting_is_503(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    batcher._quick.max_batch = 2
    batcher._quick.max_wait = 60.0  # they are refused for their number, not for their time
    model = FakeEngine()
    tasks = [await begin(batcher, model)]
    tasks += [ask(batcher, model, n) for n in (2, 3)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable) as refused:
        await ask(batcher, model, 4)
    assert refused.value.headers["Retry-After"] == "1"
    model.go.set()
    await asyncio.gather(*tasks)


async def test_long_lists_do_not_hold_up_short_ones(batcher: Batcher) -> None:
    busy, free = FakeEngine("busy"), FakeEngine("free")
    long = await begin(batcher, busy, n=1000)
    waiting = [ask(batcher, busy, 1000), ask(batcher, busy, 3, seq=1)]
    assert (await asyncio.wait_for(ask(batcher, free, 2), 10))[0].row == 2
    assert not busy.batches
    busy.go.set()
    await asyncio.gather(long, *waiting)


async def test_a_pass_holds_as_many_long_lists_as_its_pairs_allow(batcher: Batcher) -> None:
    model = FakeEngine()  # 60 items are 6,000 pairs, of the 20,000 that a pass may compare
    tasks = [await begin(batcher, model, n=1000)]
    tasks += [ask(batcher, model, n) for n in (60, 61, 62, 63)]
    await asyncio.sleep(0)
    model.go.set()
    await asyncio.gather(*tasks)
    assert model.batches == [[1000], [60, 61, 62], [63]]


async def test_lists_that_are_explained_go_one_by_one(batcher: Batcher) -> None:
    model = FakeEngine()
    tasks = [await begin(batcher, model, n=1000)]
    for n in (2, 3):
        everything = ItemFilter(np.ones(1, dtype=np.bool_))
        request = RankRequest(UserState(0), n, everything, explain_by=Evidence(), key=0)
        tasks.append(asyncio.create_task(batcher.rank(cast(Any, model), request, ready=True)))
    await asyncio.sleep(0)
    model.go.set()
    await asyncio.gather(*tasks)
    assert model.batches == [[1000], [2], [3]]


async def test_users_without_candidates_take_turns_with_long_lists(batcher: Batcher) -> None:
    model = FakeEngine()
    tasks = [await begin(batcher, model, n=1000)]
    tasks += [ask(batcher, model, 1000) for _ in range(2)]
    tasks += [ask(batcher, model, n, seq=1) for n in range(20, 32)]
    await asyncio.sleep(0)
    model.go.set()
    await asyncio.gather(*tasks)
    assert model.batches == [[1000], [*range(20, 28)], [1000], [*range(28, 32)], [1000]]


async def test_a_queue_that_would_take_too_long_is_refused(batcher: Batcher) -> None:
    model = FakeEngine()
    batcher._quick.max_batch = 3
    batcher._quick.max_wait = 0.01
    tasks = [await begin(batcher, model)]
    tasks += [ask(batcher, model, n) for n in (2, 3)]
    await asyncio.sleep(0.02)
    tasks.append(ask(batcher, model, 4))  # there is room for it in the next pass
    await asyncio.sleep(0)
    with pytest.raises(Unavailable) as refused:  # the first has waited twice as long as may be
        await ask(batcher, model, 5)
    assert refused.value.code == "overloaded"
    assert refused.value.headers["Retry-After"] == "1"
    assert batcher._metrics.refused._value.get() == 1
    slow = ask(batcher, model, 6, seq=1)  # has a queue of its own
    await asyncio.sleep(0)
    model.go.set()
    await asyncio.gather(*tasks, slow)


async def test_what_a_pass_took_is_measured(batcher: Batcher) -> None:
    model = FakeEngine()
    clock = asyncio.get_running_loop().time
    began = clock()
    tasks = [await begin(batcher, model)]
    tasks += [ask(batcher, model, n) for n in (2, 3)]
    await asyncio.sleep(0)
    collected = clock()
    await asyncio.sleep(0.02)
    held = clock() - collected
    model.go.set()
    await asyncio.gather(*tasks)
    took = clock() - began
    metrics = batcher._metrics
    assert metrics.batch_size._sum.get() == 3
    # One pass and two requests in the queue lasted at least as long as the pass was held up.
    assert held <= metrics.compute_seconds._sum.get() <= took
    assert 2 * held <= metrics.queue_seconds._sum.get() <= 3 * took


async def test_a_request_that_waited_too_long_is_503(
    batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeEngine()
    first = await begin(batcher, model)
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0.01)
    late = ask(batcher, model, 2)
    await asyncio.sleep(0.02)
    model.go.set()
    with pytest.raises(Unavailable):
        await late
    assert (await first)[0].row == 1
    assert model.batches == [[1]]


async def test_closing_answers_what_waits(batcher: Batcher) -> None:
    model = FakeEngine()
    first = await begin(batcher, model)
    waiting = ask(batcher, model, 2)
    await asyncio.sleep(0)
    closing = asyncio.create_task(batcher.close())
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable) as refused:  # the thread still has its last pass
        await ask(batcher, model, 3)
    assert refused.value.code == "stopping"
    model.go.set()
    await closing
    assert (await first)[0].row == 1
    with pytest.raises(Unavailable) as refused:
        await ask(batcher, model, 4)
    assert refused.value.code == "stopping"


async def test_what_a_connection_says_does_not_stop_the_others(
    batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> bool:
        raise OSError("reset")

    async def still_there() -> bool:
        return False

    model = FakeEngine()
    first = await begin(batcher, model)
    monkeypatch.setattr(module, "GONE_CHECK_SECONDS", 0.0)
    tasks = [ask(batcher, model, n, gone=g) for n, g in ((2, still_there), (3, broken), (4, None))]
    await asyncio.sleep(0)
    model.go.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[1], OSError)
    assert [cast(Any, a)[0].row for a in (await first, answers[0], answers[2])[1:]] == [2, 4]


async def test_slow_requests_are_told_that_they_are(batcher: Batcher) -> None:
    told: list[tuple[int, int]] = []
    engine = cast(Any, FakeEngine())
    for n, seq in ((10, 0), (10, 1), (1000, 0)):
        request = RankRequest(UserState(0), n, ItemFilter(np.ones(1, dtype=np.bool_)), key=seq)
        ready = engine.retriever.is_ready(request)
        on_slow = lambda n=n, seq=seq: told.append((n, seq))  # noqa: E731
        await batcher.rank(engine, request, None, on_slow, ready=ready)
    assert told == [(10, 1), (1000, 0)]
