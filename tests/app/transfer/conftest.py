"""Services for backups to come from and to go to."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from app.core.settings import load_settings
from app.transfer.backup import write_backup
from app.wiring import Services, build_services
from tests.app.transfer.support import Make
from tests.conftest import new_database


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Builds a service with a migrated, empty database of the kind asked for."""
    # Migrated now: a migration runs an event loop of its own.
    request.getfixturevalue("sqlite_template")
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and "postgresql" in callspec.params.values():
        request.getfixturevalue("postgres_pool")
    with contextlib.ExitStack() as databases:

        @contextlib.asynccontextmanager
        async def build(kind: str, name: str) -> AsyncIterator[Services]:
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            url = databases.enter_context(new_database(kind, folder, request))
            services = await build_services(
                load_settings(data_dir=folder, database_url=url, event_group_ms=1)
            )
            try:
                yield services
            finally:
                await services.close()

        yield build


@pytest.fixture
async def backup(make: Make, tmp_path: Path) -> Path:
    """A small backup, of SQLite."""
    path = tmp_path / "small.zip"
    async with make("sqlite", "small") as services:
        await services.events.add_rows([{"user": f"u{n}", "item": "i"} for n in range(50)], 0)
        await write_backup(services, path)
    return path
