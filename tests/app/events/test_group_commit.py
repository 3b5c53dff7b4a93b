"""The group commit, over a recorder in place of the database."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from sqlalchemy.exc import OperationalError

from app.core.errors import Unavailable
from app.events.group_commit import GroupCommit
from app.events.schemas import AppendResult, NewEvent

pytestmark = pytest.mark.anyio


def _rows(n: int, user: str = "u") -> list[NewEvent]:
    return [NewEvent(f"{user}-{i}", user, "i") for i in range(n)]


class Recorder:
    """A commit that waits for ``gate`` and refuses the users in ``refused``."""

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


def _writer(recorder: Recorder, buffer_rows: int = 100, group_ms: float = 1) -> GroupCommit:
    writer = GroupCommit(recorder.commit, group_rows=10, group_ms=group_ms, buffer_rows=buffer_rows)
    writer.start()
    return writer


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)


async def test_submit_returns_only_after_the_commit() -> None:
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


async def test_waiting_lists_share_a_commit_of_more_than_group_rows() -> None:
    recorder = Recorder()
    writer = GroupCommit(recorder.commit, group_rows=10, group_ms=1, buffer_rows=1_000, max_rows=50)
    writer.start()
    sizes = [20, 20, 20, *[1] * 12]
    await asyncio.gather(*(writer.submit(_rows(n)) for n in sizes))
    # By rows, then by requests: at most ten of those have to be tried one by one.
    assert recorder.groups == [[20, 20], [20, *[1] * 9], [1] * 3]
    await writer.drain()


async def test_one_failing_request_does_not_fail_its_group() -> None:
    recorder = Recorder()
    recorder.refused.add("bad")
    writer = _writer(recorder)
    answers = await asyncio.gather(
        *(writer.submit(_rows(1, user)) for user in ("a", "bad", "b")), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [AppendResult, ValueError, AppendResult]
    assert (await writer.submit(_rows(1))).accepted == 1
    await writer.drain()


async def test_a_full_queue_is_503_and_a_stream_waits() -> None:
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


async def test_rows_are_written_when_their_client_disconnects() -> None:
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


async def test_draining_writes_pending_rows_and_refuses_new_ones() -> None:
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


async def test_cancelled_draining_fails_pending_requests() -> None:
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


@pytest.mark.parametrize(
    "error", [OperationalError("INSERT", {}, Exception("disk full")), TimeoutError()]
)
async def test_an_unreachable_database_is_503(error: Exception) -> None:
    async def commit(_: Sequence[Sequence[NewEvent]]) -> list[AppendResult]:
        raise error

    writer = GroupCommit(commit, group_rows=1, group_ms=0, buffer_rows=10)
    writer.start()
    with pytest.raises(Unavailable) as caught:
        await writer.submit(_rows(1))
    assert caught.value.code == "storage_unavailable"
    await writer.drain()


async def test_an_unreachable_database_gives_each_request_an_error_of_its_own() -> None:
    async def commit(_: Sequence[Sequence[NewEvent]]) -> list[AppendResult]:
        raise OperationalError("INSERT", {}, Exception("disk full"))

    writer = GroupCommit(commit, group_rows=10, group_ms=50, buffer_rows=10)
    writer.start()
    errors = await asyncio.gather(
        *(writer.submit(_rows(1)) for _ in range(2)), return_exceptions=True
    )
    assert [type(error) for error in errors] == [Unavailable] * 2
    # A stream adds what it has stored to its error: the other client must not see it.
    assert errors[0] is not errors[1]
    await writer.drain()
