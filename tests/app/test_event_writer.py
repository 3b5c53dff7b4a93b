"""The group commit by itself: who is told what, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from sqlalchemy.exc import OperationalError

from app.core.errors import Unavailable
from app.events.schemas import AppendResult, NewEvent
from app.events.writer import EventWriter
from app.services import Services

pytestmark = pytest.mark.anyio


def _rows(n: int, user: str = "u") -> list[NewEvent]:
    return [NewEvent(f"{user}-{i}", user, "i") for i in range(n)]


class Recorder:
    """A database that commits when it is told to, and refuses what it is told to."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.refused: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def commit(self, batches: Sequence[Sequence[NewEvent]]) -> list[AppendResult]:
        await self.gate.wait()
        if any(event.user in self.refused for batch in batches for event in batch):
            raise ValueError("refused")
        self.groups.append([len(batch) for batch in batches])
        return [AppendResult(accepted=len(batch)) for batch in batches]


def _writer(recorder: Recorder, buffer_rows: int = 100, group_ms: float = 1) -> EventWriter:
    writer = EventWriter(recorder.commit, group_rows=10, group_ms=group_ms, buffer_rows=buffer_rows)
    writer.start()
    return writer


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)


async def test_acknowledged_only_after_the_commit() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    writer = _writer(recorder)
    task = asyncio.create_task(writer.submit(_rows(1)))
    await _settle()
    assert not task.done()
    recorder.gate.set()
    assert (await task).accepted == 1
    await writer.drain()


async def test_requests_share_a_commit_and_are_never_split() -> None:
    recorder = Recorder()
    writer = _writer(recorder, group_ms=50)
    results = await asyncio.gather(*(writer.submit(_rows(n)) for n in (4, 4, 4, 25, 1)))
    assert [result.accepted for result in results] == [4, 4, 4, 25, 1]
    assert recorder.groups == [[4, 4], [4], [25], [1]]
    await writer.drain()


async def test_lists_that_wait_share_a_commit_beyond_what_starts_one() -> None:
    recorder = Recorder()
    writer = EventWriter(
        recorder.commit, group_rows=10, group_ms=1, buffer_rows=1_000, most_rows=50
    )
    writer.start()
    sizes = [20, 20, 20, *[1] * 12]
    await asyncio.gather(*(writer.submit(_rows(n)) for n in sizes))
    # By rows, then by requests: at most ten of those have to be tried one by one.
    assert recorder.groups == [[20, 20], [20, *[1] * 9], [1] * 3]
    await writer.drain()


async def test_one_bad_request_fails_alone() -> None:
    recorder = Recorder()
    recorder.refused.add("bad")
    writer = _writer(recorder)
    answers = await asyncio.gather(
        *(writer.submit(_rows(1, user)) for user in ("a", "bad", "b")), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [AppendResult, ValueError, AppendResult]
    assert (await writer.submit(_rows(1))).accepted == 1
    await writer.drain()


async def test_a_full_buffer_is_503_and_a_stream_waits() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    writer = _writer(recorder, buffer_rows=20)
    first = asyncio.create_task(writer.submit(_rows(15)))
    await _settle()
    with pytest.raises(Unavailable) as caught:
        await writer.submit(_rows(6))
    assert caught.value.code == "backpressure"
    assert caught.value.headers["Retry-After"]
    stream = asyncio.create_task(writer.submit(_rows(6), wait=True))
    await _settle()
    assert not stream.done()
    recorder.gate.set()
    assert (await first).accepted == 15
    assert (await stream).accepted == 6
    # A request larger than the buffer could never be taken otherwise.
    assert (await writer.submit(_rows(50))).accepted == 50
    await writer.drain()


async def test_a_client_that_hangs_up_loses_nothing() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    writer = _writer(recorder)
    task = asyncio.create_task(writer.submit(_rows(3)))
    other = asyncio.create_task(writer.submit(_rows(2)))
    await _settle()
    task.cancel()
    recorder.gate.set()
    assert (await other).accepted == 2
    await writer.drain()
    assert sum(sum(group) for group in recorder.groups) == 5


async def test_draining_writes_what_waits_and_takes_no_more() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    writer = _writer(recorder)
    tasks = [asyncio.create_task(writer.submit(_rows(6))) for _ in range(4)]
    await _settle()
    drain = asyncio.create_task(writer.drain())
    await _settle()
    with pytest.raises(Unavailable) as caught:
        await writer.submit(_rows(1))
    assert caught.value.code == "shutting_down"
    recorder.gate.set()
    await drain
    assert [(await task).accepted for task in tasks] == [6] * 4


async def test_when_draining_takes_too_long_nobody_waits_for_ever() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    writer = _writer(recorder)
    tasks = [asyncio.create_task(writer.submit(_rows(6))) for _ in range(3)]
    await _settle()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await writer.drain()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, Unavailable) for answer in answers)


async def test_a_database_that_is_away_is_503() -> None:
    async def commit(_: Sequence[Sequence[NewEvent]]) -> list[AppendResult]:
        raise OperationalError("INSERT", {}, Exception("disk full"))

    writer = EventWriter(commit, group_rows=1, group_ms=0, buffer_rows=10)
    writer.start()
    with pytest.raises(Unavailable) as caught:
        await writer.submit(_rows(1))
    assert caught.value.code == "storage_unavailable"
    await writer.drain()


async def test_imports_add_nothing_the_second_time(services: Services) -> None:
    rows = [NewEvent(f"r{k}", f"u{k % 50}", f"i{k % 70}", "rating", 4.0, k) for k in range(3000)]
    first = await services.events.import_rows(rows)
    assert (first.accepted, first.duplicates, first.conflicts) == (3000, 0, 0)
    before = await services.events.last_seq()
    changed = [*rows[:-1], rows[-1]._replace(item="other")]
    second = await services.events.import_rows(changed)
    assert (second.accepted, second.duplicates, second.conflicts) == (0, 2999, 1)
    assert await services.events.last_seq() == before == 3000
