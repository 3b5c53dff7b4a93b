"""The consumer on the page about Kafka, with a stand-in for Kafka's consumer and a real server."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from ncr_client import Client

from app.core.http_protocol import BoundedProtocol
from app.core.settings import load_settings
from app.main import create_app
from app.wiring import Services
from tests.app.conftest import listening

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "kafka.md"


def page_code() -> dict[str, Any]:
    """What the page's code defines."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, Any] = {"__name__": "kafka_page"}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


class Message:
    """As `confluent_kafka.Message`."""

    def __init__(
        self,
        offset: int,
        value: bytes | None,
        partition: int = 0,
        time: tuple[int, int] = (1, 5000),
    ) -> None:
        self._place = ("clicks", partition, offset)
        self._value, self._time = value, time

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return self._place[0]

    def partition(self) -> int:
        return self._place[1]

    def offset(self) -> int:
        return self._place[2]

    def value(self) -> bytes | None:
        return self._value

    def timestamp(self) -> tuple[int, int]:
        return self._time


class Consumer:
    """As `confluent_kafka.Consumer`: begins after what was committed, a few messages at a time."""

    def __init__(self, messages: list[Message], committed: int = 0) -> None:
        self._messages = messages
        self.position = self.committed = committed

    def consume(self, n: int, timeout: float) -> list[Message]:
        found = self._messages[self.position : self.position + min(n, 3)]
        self.position += len(found)
        return found

    def commit(self, asynchronous: bool) -> None:
        assert not asynchronous
        self.committed = self.position

    @property
    def is_done(self) -> bool:
        return self.position >= len(self._messages)


@pytest.fixture
def app(tmp_path: Path, database_url: str) -> FastAPI:
    return create_app(load_settings(data_dir=tmp_path, database_url=database_url))


@pytest.mark.anyio
async def test_messages_that_are_read_again_count_once(
    app: FastAPI, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [json.dumps({"user": f"u{n}", "item": "tea"}).encode() for n in range(7)]
    own_time = b'{"user": "u7", "item": "tea", "timestamp": 9, "event_id": "theirs", "type": "buy"}'
    messages = [
        *(Message(n, value, partition=n % 2) for n, value in enumerate(good)),
        Message(7, own_time),
        Message(8, b"\xff no JSON"),
        Message(9, None),  # a tombstone
        Message(10, b"[1]"),
        Message(11, b'{"user": "", "item": "tea"}'),
        Message(12, good[0], time=(0, -1)),  # without a time of its own
    ]
    code = page_code()
    async with listening(app, BoundedProtocol) as port:
        services: Services = app.state.services

        def consume(consumer: Consumer, stop_after: int | None = None) -> None:
            with Client(f"http://127.0.0.1:{port}") as ncr:
                if stop_after is not None:  # killed after a batch was posted, before its commit
                    consumer.commit = lambda asynchronous: (_ for _ in ()).throw(SystemExit)  # type: ignore[method-assign]
                code["run"](consumer, ncr, lambda: consumer.is_done)

        with pytest.raises(SystemExit):
            await asyncio.to_thread(consume, Consumer(messages), 1)
        consumer = Consumer(messages)
        await asyncio.to_thread(consume, consumer)
        assert consumer.committed == len(messages)
        stored = [
            row for chunk in [c async for c in services.events.iter_events()] for row in chunk
        ]
    ids = [event.event_id for event, _, _ in stored]
    assert ids == [*(f"clicks-{n % 2}-{n}" for n in range(7)), "clicks-0-7", "clicks-0-12"]
    assert [user for _, user, _ in stored] == [*(f"u{n}" for n in range(8)), "u0"]
    assert stored[0][0].timestamp == 5_000_000
    assert (stored[7][0].timestamp, stored[7][0].type) == (9_000_000, "buy")
    out = capsys.readouterr().out
    assert out.count("skipped") == 3
    assert "rejected: clicks-0-11 invalid_user" in out


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_service_that_is_away_ends_the_consumer_with_nothing_committed() -> None:
    consumer = Consumer([Message(0, b'{"user": "u", "item": "i"}')])
    with Client("http://127.0.0.1:9", timeout=1) as ncr, pytest.raises(Exception, match="POST"):
        await asyncio.to_thread(page_code()["run"], consumer, ncr, lambda: consumer.is_done)
    assert consumer.committed == 0
