"""Records of imports: counted by reason without what rows hold, and bounded."""

from __future__ import annotations

import os

import pytest

from app.events import imports as imports_module
from app.wiring import Services

pytestmark = pytest.mark.anyio


async def test_an_import_is_recorded_from_its_beginning_to_its_end(services: Services) -> None:
    log = services.events.imports
    async with log.record("command", "events.csv", "operator") as counts:
        (running,) = await log.last(5)
        assert (running.ended_at, running.accepted, running.rejected) == (None, 0, {})
        counts.accepted, counts.duplicates = 7, 2
        counts.reject("timestamp 'of Jane Doe' is not a number")
        counts.reject("timestamp 'of another' is not a number\nsecond line", 2)
        counts.reject("missing_user")
        counts.reject("user " + repr('it\'s "Jane Doe"') + " has no events")
    (ended,) = await log.last(5)
    assert ended.ended_at is not None
    assert ended.ended_at >= ended.started_at == running.started_at
    assert (ended.origin, ended.name, ended.by) == ("command", "events.csv", "operator")
    assert (ended.accepted, ended.duplicates, ended.problem) == (7, 2, None)
    assert ended.rejected == {
        "timestamp … is not a number": 3, "missing_user": 1, "user … has no events": 1
    }  # fmt: skip


async def test_a_file_may_have_a_name_that_is_not_utf_8(services: Services) -> None:
    async with services.events.imports.record("command", os.fsdecode(b"caf\xe9.csv"), None):
        pass
    (row,) = await services.events.imports.last(5)
    assert row.name == "caf?.csv"


async def test_what_breaks_off_is_recorded_with_what_was_stored(services: Services) -> None:
    async def break_off() -> None:
        async with services.events.imports.record("page", "", "key") as counts:
            counts.accepted = 3
            raise ConnectionError

    with pytest.raises(ConnectionError):
        await break_off()
    (row,) = await services.events.imports.last(5)
    assert (row.accepted, row.problem) == (3, imports_module.BROKE_OFF)


async def test_reasons_and_records_are_bounded(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports_module, "KEPT_IMPORTS", 3)
    for n in range(5):
        async with services.events.imports.record("page", f"file {n}", None) as counts:
            for reason in range(50):
                counts.reject(f"{chr(97 + reason % 26)}{'x' * (reason // 26)}")
    rows = await services.events.imports.last(10)
    assert [row.name for row in rows] == ["file 4", "file 3", "file 2"]
    assert len(rows[0].rejected) == imports_module.MAX_REASONS + 1
    assert sum(rows[0].rejected.values()) == 50
