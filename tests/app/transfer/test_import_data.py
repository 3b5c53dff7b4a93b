"""Importing: once, and without undoing what an operator has set since."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from app.transfer import user_order
from app.transfer.import_data import ImportReport, import_source
from app.transfer.user_order import by_user
from app.wiring import Services
from ncr_core.data.readers import BadRow, open_source
from ncr_core.errors import DataError

pytestmark = pytest.mark.anyio

RATINGS = "user,item,rating,timestamp\nann,a,5,100\nann,b,3,200\nbob,a,4,150\nann,a,5,100\n"
ITEMS = "item,title,genres,year\na,First,Comedy|Drama,1999\nb,Second,Drama,2001\n"


async def run(services: Services, folder: Path) -> tuple[ImportReport, list[BadRow], int]:
    source = open_source(folder)
    bad: list[BadRow] = []
    read: list[int] = []
    report = await import_source(services, source, on_bad=bad.append, on_bytes=read.append)
    assert sum(read) == source.total_bytes
    return report, bad, await services.events.last_seq()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    (source / "ratings.csv").write_text(RATINGS)
    (source / "items.csv").write_text(ITEMS)
    return source


async def test_a_second_import_adds_nothing(services: Services, folder: Path) -> None:
    report, bad, seq = await run(services, folder)
    # Two equal rows are one event.
    assert (report.accepted, report.duplicates, report.items, bad) == (3, 1, 2, [])
    again, _, after = await run(services, folder)
    assert (again.accepted, again.duplicates, again.items) == (0, 4, 0)
    assert after == seq
    item = await services.catalog.get("a")
    assert (item.title, item.categories) == ("First", ["Comedy", "Drama"])
    assert item.attributes == {"year": "1999"}


async def test_postgresql_does_its_upkeep_at_the_end_of_an_import(
    services: Services, folder: Path
) -> None:
    """Else a list reads all users, 13 ms in place of 1 at 50,000 users, and a count all rows."""
    if services.database.dialect == "sqlite":
        pytest.skip("SQLite needs no such upkeep")
    await run(services, folder)
    rows = await services.database.fetch(
        sa.text("SELECT relname, reltuples FROM pg_class WHERE relname IN ('users', 'events')")
    )
    assert {str(name): int(number) for name, number in rows} == {"users": 2, "events": 3}
    assert (await services.database.fetch(sa.text("SHOW jit")))[0][0] == "off"


@pytest.mark.slow
async def test_a_small_import_does_not_read_a_large_table(
    services: Services, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    async def vacuum(tables: object) -> None:
        done.append(tables)

    monkeypatch.setattr(services.database, "vacuum", vacuum)
    rows = [f"user-{n},a,5,{n}\n" for n in range(30)]
    for n_rows, n_done in ((30, 1), (30, 1), (28, 1), (0, 2)):  # all, again, and two sizes of new
        new = [f"late-{n_rows}-{n},a,5,{n}\n" for n in range(30 - n_rows)]
        (folder / "ratings.csv").write_text("user,item,rating,timestamp\n" + "".join(rows + new))
        await run(services, folder)
        assert len(done) == n_done


async def test_an_import_stores_events_user_by_user_each_in_the_order_of_the_file(
    services: Services, tmp_path: Path
) -> None:
    """In any other order each commit changes pages all over the indexes, ever more as they grow."""
    path = tmp_path / "log.csv"
    rows = [(f"u{n * 7 % 5}", f"i{n}") for n in range(50)]
    path.write_text("user,item\n" + "".join(f"{user},{item}\n" for user, item in rows))
    report, _, _ = await run(services, path)
    assert report.accepted == 50
    stored = [row async for chunk in services.events.iter_events() for row in chunk]
    assert [(user, item) for _, user, item in stored] == sorted(rows, key=lambda row: row[0])
    # What says the time of an event without one stays its place in the file.
    assert [event.timestamp for event, _, item in stored if item == "i7"] == [7_000_000]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "Z", "é", "\uffff", "\U00010000", "aa", "10", "9"])),
    st.integers(1, 7),
    st.integers(1, 400),
)
def test_rows_are_merged_from_the_disk_in_the_order_of_their_users(
    users: list[str], chunk_rows: int, run_bytes: int
) -> None:
    batches = [pa.record_batch({"user": users[n : n + 3]}) for n in range(0, len(users), 3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(user_order, "RUN_BYTES", run_bytes)
        chunks = list(by_user(batches, chunk_rows, threading.Event()))
    rows = [(row["user"], row["number"]) for chunk in chunks for row in chunk.to_pylist()]
    assert rows == sorted((user, number) for number, user in enumerate(users))
    assert [chunk.num_rows for chunk in chunks[:-1]] == [chunk_rows] * (len(chunks) - 1)


async def test_without_room_for_the_sort_the_import_says_so(
    services: Services, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(user_order, "_write", full)
    with pytest.raises(DataError, match=r"cannot be sorted on disk: .*No space left"):
        await run(services, folder)


async def test_the_same_row_has_the_same_event_id_from_any_file_and_version(
    services: Services, tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("user,item,rating,timestamp,type\né,b,0.1,1.5,\n" + f"{'u' * 30},b,,,view\n")
    await run(services, path)
    stored = [event async for chunk in services.events.iter_events() for event, _, _ in chunk]
    texts = ["1:éb\0000.1\0001.5\0None", f"30:{'u' * 30}b\0None\0None\0None\0view"]
    digests = [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in texts]
    assert [event.event_id for event in stored] == [
        f"import:{'u' * 24}:{digests[1]}",
        f"import:é:{digests[0]}",
    ]
    assert [(event.type, event.value, event.timestamp) for event in stored] == [
        ("view", None, 1_000_000), ("interaction", 0.1, 1_500_000)
    ]  # fmt: skip


async def test_an_import_that_is_cancelled_stops_reading_at_once_and_can_be_repeated(
    services: Services, tmp_path: Path
) -> None:
    """Not after all rows are read and sorted, which takes minutes for a large file."""
    path = tmp_path / "log.csv"
    path.write_text("user,item\n" + "".join(f"u{n},i{n % 7}\n" for n in range(300_000)))
    source, read = open_source(path), asyncio.Event()
    loop, taken = asyncio.get_running_loop(), [0]

    def on_bytes(n: int) -> None:
        taken[0] += n
        loop.call_soon_threadsafe(read.set)

    task = asyncio.create_task(import_source(services, source, on_bad=print, on_bytes=on_bytes))
    await read.wait()
    task.cancel()
    await asyncio.wait({task})
    assert taken[0] < source.total_bytes
    small = tmp_path / "small.csv"
    small.write_text("user,item\nu1,i1\n")
    report, _, _ = await run(services, small)
    assert report.accepted == 1


async def test_an_import_of_what_is_half_known_adds_the_other_half(
    services: Services, folder: Path
) -> None:
    await run(services, folder)
    (folder / "ratings.csv").write_text(RATINGS + "cid,a,1,10\nann,c,2,20\n")
    report, _, _ = await run(services, folder)
    assert (report.accepted, report.duplicates, report.bad) == (2, 4, 0)


async def test_an_import_does_not_undo_what_an_operator_has_set(
    services: Services, folder: Path
) -> None:
    await run(services, folder)
    await services.catalog.patch("a", {"hidden": True, "title": "Renamed"})
    await services.catalog.delete("b")
    await run(services, folder)
    item = await services.catalog.get("a")
    assert (item.hidden, item.title) == (True, "Renamed")
    catalogue = await services.catalog.catalogue()
    assert catalogue.internal_ids["b"] in catalogue.deleted


async def test_an_import_describes_items_that_came_with_events(
    services: Services, folder: Path
) -> None:
    await services.events.add_rows([{"user": "x", "item": "a"}], 0)
    report, _, _ = await run(services, folder)
    assert report.items == 2
    assert (await services.catalog.get("a")).title == "First"


async def test_times_that_events_cannot_have_are_named_by_their_line(
    services: Services, tmp_path: Path
) -> None:
    path = tmp_path / "events.csv"
    path.write_text("user,item,timestamp\n\n,x,1\nann,a,95617584000\nann,b,5\nann,c,-5\n")
    report, bad, _ = await run(services, path)
    assert report.accepted == 1
    assert [(row.file, row.line) for row in bad] == [
        ("events.csv", 3), ("events.csv", 4), ("events.csv", 6)
    ]  # fmt: skip
