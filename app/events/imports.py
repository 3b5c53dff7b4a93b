"""Records of the last imports of files, for operators."""

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
"""The number of reasons that an import counts by name. All others share one name."""
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
    """The name of the file or folder; empty where the page does not know the name."""
    by: str | None
    """The id of an API key, or an account of the machine."""
    started_at: int
    ended_at: int | None
    """None for a running import and for a killed one."""
    accepted: int
    duplicates: int
    rejected: dict[str, int]
    """The number of rejected rows by reason."""
    problem: str | None
    """Why the import ended before the end of its file."""


@dataclass
class ImportCounts:
    """The counts of a running import, which `ImportLog.record` writes at the end."""

    accepted: int = 0
    duplicates: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    problem: str | None = None

    def reject(self, reason: str, rows: int = 1) -> None:
        """Count rejected rows by reason, with ``…`` for quotations and numbers of the rows."""
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
        """Record the start of an import, and the counts at its end.

        The table keeps the newest ``KEPT_IMPORTS`` imports.
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
        """The last ``n`` imports, newest first."""
        columns = [imports.c[name] for name in ImportRow._fields]
        query = sa.select(*columns).order_by(imports.c.id.desc()).limit(n)
        return [ImportRow(*row) for row in await self._database.fetch(query)]
