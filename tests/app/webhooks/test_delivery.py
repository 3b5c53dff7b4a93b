"""Webhooks from what happens to their receiver: once, signed, retried, dropped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from app.core.errors import SettingsError
from app.core.settings import Settings, load_settings
from app.core.tables import now_us
from app.jobs.repository import JobRepository
from app.jobs.schemas import ExportParams, TrainParams
from app.webhooks import delivery
from app.webhooks.delivery import WebhookDelivery, pause_seconds
from app.webhooks.outbox import Outbox, target_of
from app.webhooks.tables import webhook_messages
from app.wiring import Services, build_services
from app.worker.worker import build_worker
from tests.app.conftest import QUICK, add_small_data, publish_model, thread_worker, until
from tests.app.webhooks.conftest import SECRET, Receiver, assert_signed
from tests.conftest import ON_SQLITE

pytestmark = pytest.mark.anyio


@pytest.fixture
def settings(settings: Settings, receiver: Receiver) -> Settings:
    values = settings.model_dump() | {
        "webhook_urls": receiver.url,
        "webhook_secret": SECRET,
        "webhook_private": True,
    }
    return load_settings(**values)


async def rows(services: Services) -> list[Any]:
    return list(await services.database.fetch(sa.select(webhook_messages)))


async def make_due(services: Services) -> None:
    async with services.database.write() as conn:
        await conn.execute(webhook_messages.update().values(next_at=0))


async def test_ended_jobs_and_changes_of_the_model_are_told_once(
    services: Services, settings: Settings, receiver: Receiver
) -> None:
    await add_small_data(services)
    one = await publish_model(services)
    two = await publish_model(services, seed=1)
    await services.models.rollback()
    await services.models.activate(two, "activated")
    await services.models.activate(one, "returned", {"why": "clicks"}, if_active=two)
    await services.models.activate(one, pin=True)  # no other version
    queued = await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    await services.jobs.cancel(queued)
    exported = await services.jobs.submit_export(ExportParams(tables=["users"]))
    assert await thread_worker(services, settings).run_once()
    stored = await rows(services)
    assert all("token" not in row.target + row.body for row in stored)
    assert receiver.received == []

    sender = WebhookDelivery(services.database, settings)
    others = [WebhookDelivery(services.database, settings) for _ in range(3)]
    taken = await asyncio.gather(*(each.deliver() for each in (sender, *others)))
    assert sum(taken) == 7
    for each in receiver.received:
        assert_signed(each)
    assert len({each.headers["webhook-id"] for each in receiver.received}) == 7
    told = [(each.message["type"], each.message["data"]) for each in receiver.received]
    unchanged = {"detail": None}
    for expected in (
        ("model.published", {"version": one, "previous": None} | unchanged),
        ("model.published", {"version": two, "previous": one} | unchanged),
        ("model.rolled_back", {"version": one, "previous": two} | unchanged),
        ("model.activated", {"version": two, "previous": one} | unchanged),
        ("model.returned", {"version": one, "previous": two, "detail": {"why": "clicks"}}),
        (
            "job.ended",
            {"job_id": queued, "kind": "train", "status": "cancelled"}
            | {"model_version": None, "error": None},
        ),
        (
            "job.ended",
            {"job_id": exported, "kind": "export", "status": "succeeded"}
            | {"model_version": None, "error": None},
        ),
    ):
        assert expected in told
    assert await rows(services) == []
    assert await sender.deliver() == 0


async def test_what_is_rolled_back_is_not_told(services: Services) -> None:
    outbox = Outbox(["https://receiver.example/"])

    async def add_and_fail() -> None:
        async with services.database.write() as conn:
            await outbox.add(conn, "job.ended", {})
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await add_and_fail()
    assert await rows(services) == []


async def test_a_job_whose_worker_disappeared_is_told_as_failed(
    services: Services, settings: Settings
) -> None:
    job_id = await services.jobs.submit_export(ExportParams())
    jobs = JobRepository(services.database, Outbox.from_settings(settings))
    assert await jobs.claim("w", 0, 1) is not None
    await asyncio.sleep(0.01)
    assert await jobs.claim("w", 0, 1) is None
    (row,) = await rows(services)
    assert f'"job_id":"{job_id}"' in row.body
    assert '"status":"failed"' in row.body


async def test_a_failed_try_is_repeated_with_the_same_id_and_a_pause(
    services: Services, settings: Settings, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    async with services.database.write() as conn:
        await Outbox.from_settings(settings).add(conn, "job.ended", {"job_id": "j"})
    receiver.answers = [b"HTTP/1.1 503 Later\r\n\r\n"]
    sender = WebhookDelivery(services.database, settings)
    assert await sender.deliver() == 0
    (row,) = await rows(services)
    assert row.attempt == 1
    assert 7e6 < row.next_at - now_us() < 13e6
    assert await sender.deliver() == 0  # not due yet
    assert len(receiver.received) == 1
    await make_due(services)
    assert await sender.deliver() == 1
    first, second = receiver.received
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.body == second.body
    out = capsys.readouterr().out
    assert "webhook not delivered" in out
    assert SECRET not in out
    assert "in-the-url" not in out


async def test_a_message_is_dropped_after_its_last_try(
    services: Services,
    settings: Settings,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(delivery, "MAX_TRIES", 2)
    async with services.database.write() as conn:
        await Outbox.from_settings(settings).add(conn, "job.ended", {})
    receiver.answers = [b"HTTP/1.1 500 No\r\n\r\n"] * 2
    sender = WebhookDelivery(services.database, settings)
    for _ in range(2):
        await make_due(services)
        await sender.deliver()
    assert await rows(services) == []
    assert len(receiver.received) == 2
    assert "webhook dropped" in capsys.readouterr().out


def test_pauses_double() -> None:
    for attempt in range(1, delivery.MAX_TRIES):
        pause = pause_seconds(attempt) / (10 * 2 ** (attempt - 1))
        assert 0.8 <= pause <= 1.2


async def test_a_message_whose_worker_was_killed_is_sent_again_after_its_lease(
    services: Services, settings: Settings, receiver: Receiver
) -> None:
    async with services.database.write() as conn:
        await Outbox.from_settings(settings).add(conn, "job.ended", {})
    killed, other = (WebhookDelivery(services.database, settings) for _ in range(2))
    assert len(await killed._claim()) == 1  # and then the process ends
    assert await other.deliver() == 0
    await make_due(services)
    assert await other.deliver() == 1
    assert len(receiver.received) == 1


async def test_messages_for_a_receiver_that_is_no_longer_set_are_deleted(
    services: Services, settings: Settings, receiver: Receiver
) -> None:
    async with services.database.write() as conn:
        await Outbox(["https://gone.example/"]).add(conn, "job.ended", {})
    sender = WebhookDelivery(services.database, settings)
    await sender.delete_old()
    assert await sender.deliver() == 0
    (row,) = await rows(services)
    assert row.target == target_of("https://gone.example/")
    async with services.database.write() as conn:
        old = now_us() - int(4 * 86_400e6)
        await conn.execute(webhook_messages.update().values(created_at=old))
    await sender.delete_old()
    assert await rows(services) == []


async def test_a_worker_delivers_beside_its_jobs(services: Services, receiver: Receiver) -> None:
    job_id = await services.jobs.submit_export(ExportParams())
    await services.jobs.cancel(job_id)
    stop = asyncio.Event()
    running = asyncio.create_task(build_worker(services).run(stop))
    await until(lambda: receiver.types() == ["job.ended"])
    stop.set()
    await running


@ON_SQLITE
async def test_without_receivers_nothing_is_written(settings: Settings) -> None:
    values = settings.model_dump() | {"webhook_urls": None}
    services = await build_services(load_settings(**values))
    await services.jobs.cancel(await services.jobs.submit_export(ExportParams()))
    assert await rows(services) == []
    await services.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("urls", "says"),
    [
        ("ftp://a.example", "https://"),
        ("a.example", "https://"),
        ("https://", "https://"),
        ("https://user:hidden@a.example", "without user"),
        ("https://a.example/#hidden", "fragment"),
        ("https://a.example/hïdden", "ASCII"),
        ("https://a.example:99999", "https://"),
        (" ".join(f"https://hidden{n}.example" for n in range(9)), "at most 8"),
    ],
)
def test_bad_receivers_are_refused_without_their_values(urls: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        load_settings(webhook_urls=urls, webhook_secret=SECRET)
    assert "hidden" not in str(caught.value)


def test_webhooks_need_a_secret_of_some_length() -> None:
    with pytest.raises(SettingsError, match="NCR_WEBHOOK_SECRET"):
        load_settings(webhook_urls="https://a.example")
    with pytest.raises(SettingsError, match="16 characters"):
        load_settings(webhook_urls="https://a.example", webhook_secret="short")
    settings = load_settings(
        webhook_urls="https://a.example, http://b.example:81/x", webhook_secret=SECRET
    )
    assert settings.webhook_targets == ["https://a.example", "http://b.example:81/x"]
    assert SECRET not in repr(settings)
    assert "a.example" not in repr(settings)
