"""What came of the last imports of files, for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import sqlalchemy as sa

from app.core.database import Database
from app.core.logging import get_logger
from app.core.tables import now_us
from app.events.tables import imports

log = get_logger(__name__)

Origin = Literal["command", "page"]
KEPT_IMPORTS = 200
MAX_REASONS = 20
"""Reasons that an import counts by name; the others are one."""
MAX_TEXT = 200
OTHERS = "(others)"
BROKE_OFF = "it broke off"
# What a message quotes of a row, and numbers in it: rows of one reason count together, and nothing
# of what they hold is stored.
_QUOTED = re.compile(r"'(?:\\.|[^'\\])*'?|\"(?:\\.|[^\"\\])*\"?|\d[\d.,]*")


class ImportRow(NamedTuple):
    """An import. Times are microseconds since 1970, UTC."""

    id: int
    origin: Origin
    name: str
    """The name of the file or folder; empty where a page does not know it."""
    by: str | None
    """The id of an API key, or an account of the machine."""
    started_at: int
    ended_at: int | None
    """None while it runs, and of one that was killed."""
    accepted: int
    duplicates: int
    rejected: dict[str, int]
    """Rows by the reason for which they were rejected."""
    problem: str | None
    """Why it ended before the end of its file."""


@dataclass
class ImportCounts:
    """What an import that runs counts. It is written when the import ends."""

    accepted: int = 0
    duplicates: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    problem: str | None = None

    def reject(self, reason: str, rows: int = 1) -> None:
        """Count rejected rows by their reason, without what it quotes of them."""
        name = _QUOTED.sub("…", reason.partition("\n")[0])[:MAX_TEXT]
        if name not in self.rejected and len(self.rejected) >= MAX_REASONS:
            name = OTHERS
        self.rejected[name] += rows


class ImportLog:
    """The last imports of all servers and commands."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @asynccontextmanager
    async def record(
        self, origin: Origin, name: str, by: str | None
    ) -> AsyncIterator[ImportCounts]:
        """Record an import from its beginning; its counts are written at the end.

        Only the newest imports are kept.
        """
        newest = sa.select(imports.c.id).order_by(imports.c.id.desc()).limit(KEPT_IMPORTS - 1)
        # A name of the file system need not be UTF-8.
        name = name.encode("utf-8", "replace").decode()
        async with self._database.write() as conn:
            await conn.execute(imports.delete().where(imports.c.id.not_in(newest)))
            number = await conn.scalar(
                imports.insert()
                .values(origin=origin, name=name[:MAX_TEXT], by=by, started_at=now_us())
                .returning(imports.c.id)
            )
        counts = ImportCounts()
        try:
            yield counts
        except BaseException:
            counts.problem = counts.problem or BROKE_OFF
            raise
        finally:
            try:
                async with self._database.write() as conn:
                    await conn.execute(
                        imports.update()
                        .where(imports.c.id == number)
                        .values(
                            ended_at=now_us(),
                            accepted=counts.accepted,
                            duplicates=counts.duplicates,
                            rejected=dict(counts.rejected),
                            problem=counts.problem,
                        )
                    )
            except Exception as error:  # the import itself is done, whatever comes of its record
                reason = str(error).partition("\n")[0]
                log.warning("the end of an import was not recorded", error=reason)

    async def last(self, n: int) -> list[ImportRow]:
        """The last imports, newest first."""
        columns = [imports.c[name] for name in ImportRow._fields]
        query = sa.select(*columns).order_by(imports.c.id.desc()).limit(n)
        return [ImportRow(*row) for row in await self._database.fetch(query)]
