"""What the rest of the service asks of the catalogue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from app.catalog.repository import CatalogRepository
from app.catalog.schemas import Item, ItemProblem, parse_item
from app.catalog.view import Catalogue
from app.core.database import Database
from app.core.errors import Conflict, NotFound, Unprocessable
from app.core.metadata import CATALOG_SEQ, current_value, next_values


class CatalogService:
    """Items, and a view of them all in memory that follows every change."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._repository = CatalogRepository(database)
        self._view = Catalogue()
        self._refreshing = asyncio.Lock()

    # For other features

    async def catalogue(self, at_least: int | None = None) -> Catalogue:
        """The catalogue in memory, brought up to date.

        `at_least` is a number of the catalogue that the caller has read anyway, as in a
        `Profile`; without it the number is read here.
        """
        if at_least is None:
            at_least = await self.catalog_seq()
        if self._view.seq < at_least:
            async with self._refreshing:
                # Who waited finds it done.
                if self._view.seq < at_least:
                    rows = await self._repository.changed_since(self._view.seq)
                    if len(rows) > 1000:
                        view = await asyncio.to_thread(self._view.updated, rows)
                    else:
                        view = self._view.updated(rows)
                    # A number may have been taken for a change that turned out to be none.
                    self._view = replace(view, seq=max(view.seq, at_least))
        return self._view

    async def catalog_seq(self) -> int:
        """The catalogue's number: it grows with every change."""
        rows = await self._database.fetch(sa.select(current_value(CATALOG_SEQ)))
        return int(rows[0][0])

    async def ensure_items(
        self, conn: AsyncConnection, external_ids: Collection[str]
    ) -> dict[str, int]:
        """The internal ids of all of these, created where needed, in the caller's transaction."""
        found = await self._repository.ids_of(external_ids, conn)
        missing = [item for item in external_ids if item not in found]
        if missing:
            # The lock before the look: another transaction may just be creating the same ones.
            seq = await next_values(conn, CATALOG_SEQ)
            found.update(await self._repository.ids_of(missing, conn))
            missing = [item for item in missing if item not in found]
            await self._repository.create_bare(conn, missing, seq)
            found.update(await self._repository.ids_of(missing, conn))
        return found

    async def ids_of(
        self, external_ids: Collection[str], conn: AsyncConnection | None = None
    ) -> dict[str, int]:
        """The internal ids of those that exist, deleted ones included."""
        return await self._repository.ids_of(external_ids, conn)

    async def external_ids_of(self, ids: Collection[int]) -> dict[int, str]:
        """The clients' ids of items, deleted ones included."""
        return await self._repository.external_ids_of(ids)

    async def every(self, chunk: int = 5_000) -> AsyncIterator[list[Item]]:
        """All items that are not deleted, oldest first, a chunk at a time."""
        after = 0
        while found := await self._repository.in_order(after, chunk):
            yield [item for _, item in found]
            after = found[-1][0]

    # For the endpoints

    async def get(self, external_id: str) -> Item:
        """An item; 404 if there is none."""
        item = await self._repository.get(external_id)
        if item is None:
            raise _unknown()
        return item

    async def put(self, external_id: str, row: object) -> tuple[Item, bool]:
        """Create or replace an item; whether it is new."""
        item = _valid(parse_item(row, item_id=external_id))
        async with self._database.write() as conn:
            seq = await next_values(conn, CATALOG_SEQ)
            created = await self._repository.get(external_id, conn) is None
            await self._repository.upsert(conn, [item], seq)
        return item, created

    async def patch(self, external_id: str, row: object) -> Item:
        """Change what is named of an item."""
        async with self._database.write() as conn:
            seq = await next_values(conn, CATALOG_SEQ)
            base = await self._repository.get(external_id, conn)
            if base is None:
                raise _unknown()
            item = _valid(parse_item(row, item_id=external_id, base=base))
            await self._repository.upsert(conn, [item], seq)
        return item

    async def delete(self, external_id: str) -> None:
        """Delete an item: it is not found any more and never recommended again.

        Its row stays, because events and models refer to it; what described it goes.
        """
        async with self._database.write() as conn:
            seq = await next_values(conn, CATALOG_SEQ)
            if await self._repository.get(external_id, conn) is None:
                raise _unknown()
            await self._repository.delete(conn, external_id, seq)

    async def upsert_rows(self, rows: Sequence[object]) -> tuple[int, list[tuple[int, str, str]]]:
        """Create or replace many items: how many were taken, and `(index, code, detail)`."""
        valid: list[Item] = []
        rejected: list[tuple[int, str, str]] = []
        for index, row in enumerate(rows):
            item = parse_item(row)
            if isinstance(item, Item):
                valid.append(item)
            else:
                rejected.append((index, *item))
        await self.upsert_items(valid)
        return len(valid), rejected

    async def upsert_items(self, items: Iterable[Item]) -> None:
        """Create or replace items that are valid; of several with one id the last counts."""
        distinct = {item.id: item for item in items}
        if distinct:
            async with self._database.write() as conn:
                seq = await next_values(conn, CATALOG_SEQ)
                await self._repository.upsert(conn, distinct.values(), seq)

    async def describe_items(self, items: Iterable[Item]) -> int:
        """Describe those items that nobody has described or deleted; how many that were.

        For imports: what an operator has set since is not undone by importing a file again.
        """
        distinct = {item.id: item for item in items}
        if not distinct:
            return 0
        async with self._database.write() as conn:
            settled = await self._repository.settled(conn, distinct)
            new = [item for item in distinct.values() if item.id not in settled]
            if new:
                seq = await next_values(conn, CATALOG_SEQ)
                await self._repository.upsert(conn, new, seq)
        return len(new)

    async def page(
        self, below: int | None, n: int, categories: Sequence[str]
    ) -> tuple[list[Item], int | None]:
        """A page of items, newest first, of any of the categories, and where it goes on."""
        if categories:
            view = await self.catalogue()
            ids = np.flatnonzero(view.mask(categories))
            ids = (ids if below is None else ids[ids < below])[::-1][: n + 1]
            found = await self._repository.by_ids(ids.tolist())
        else:
            found = await self._repository.page(below, n + 1)
        following = found[n - 1][0] if len(found) > n else None
        return [item for _, item in found[:n]], following


def _unknown() -> NotFound:
    return NotFound("there is no such item", code="unknown_item")


def _valid(item: Item | ItemProblem) -> Item:
    if isinstance(item, ItemProblem):
        kind = Conflict if item.code == "id_mismatch" else Unprocessable
        raise kind(item.detail, code=item.code)
    return item
