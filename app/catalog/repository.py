"""The queries on items."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import orjson
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from app.catalog.schemas import Item
from app.catalog.tables import items
from app.catalog.view import CatalogueRow
from app.core.bulk import insert_many, one_of
from app.core.database import Database
from app.core.metadata import now_us

_ITEM = (items.c.external_id, items.c.title, items.c.categories, items.c.hidden, items.c.attributes)
_VIEW = (
    items.c.id,
    items.c.external_id,
    items.c.title,
    items.c.categories,
    items.c.hidden,
    items.c.deleted,
    items.c.seq,
)
_UPSERT = """ON CONFLICT (external_id) DO UPDATE SET title = excluded.title,
 categories = excluded.categories, hidden = excluded.hidden, attributes = excluded.attributes,
 described = excluded.described, deleted = excluded.deleted, seq = excluded.seq,
 updated_at = excluded.updated_at"""


class CatalogRepository:
    """SQL for items, the same on both databases."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.dialect = database.dialect

    async def get(self, external_id: str, conn: AsyncConnection | None = None) -> Item | None:
        """An item that is not deleted."""
        query = sa.select(*_ITEM).where(items.c.external_id == external_id, ~items.c.deleted)
        if conn is None:
            rows = await self.database.fetch(query)
        else:
            rows = list(await conn.execute(query))
        return Item(*rows[0]) if rows else None

    async def upsert(self, conn: AsyncConnection, rows: Collection[Item], seq: int) -> None:
        """Create or replace items, deleted ones too. Their ids are distinct."""
        now = now_us()
        await insert_many(
            conn,
            items,
            (
                "external_id",
                "title",
                "categories",
                "hidden",
                "attributes",
                "described",
                "deleted",
                "seq",
                "created_at",
                "updated_at",
            ),
            [
                (
                    item.id,
                    item.title,
                    orjson.dumps(item.categories).decode(),
                    item.hidden,
                    orjson.dumps(item.attributes).decode(),
                    True,
                    False,
                    seq,
                    now,
                    now,
                )
                for item in rows
            ],
            on_conflict=_UPSERT,
        )

    async def create_bare(
        self, conn: AsyncConnection, external_ids: Collection[str], seq: int
    ) -> None:
        """Create items of which nothing is known but that an event names them."""
        now = now_us()
        await insert_many(
            conn,
            items,
            ("external_id", "seq", "created_at", "updated_at"),
            [(name, seq, now, now) for name in external_ids],
        )

    async def delete(self, conn: AsyncConnection, external_id: str, seq: int) -> None:
        """Mark an item as deleted and forget its description."""
        await conn.execute(
            items.update()
            .where(items.c.external_id == external_id)
            .values(
                title=None,
                categories=[],
                attributes={},
                hidden=False,
                described=False,
                deleted=True,
                seq=seq,
                updated_at=now_us(),
            )
        )

    async def settled(self, conn: AsyncConnection, external_ids: Collection[str]) -> set[str]:
        """Those of the items that are described or deleted."""
        rows = await conn.execute(
            sa.select(items.c.external_id).where(
                items.c.described | items.c.deleted,
                one_of(items.c.external_id, external_ids, self.dialect),
            )
        )
        return {row[0] for row in rows}

    async def ids_of(
        self, external_ids: Collection[str], conn: AsyncConnection | None = None
    ) -> dict[str, int]:
        """The internal ids of those that exist, deleted ones included."""
        query = sa.select(items.c.external_id, items.c.id).where(
            one_of(items.c.external_id, external_ids, self.dialect)
        )
        if conn is None:
            rows = await self.database.fetch(query)
        else:
            rows = list(await conn.execute(query))
        return {row[0]: row[1] for row in rows}

    async def external_ids_of(self, ids: Collection[int]) -> dict[int, str]:
        """The clients' ids of items, deleted ones included."""
        rows = await self.database.fetch(
            sa.select(items.c.id, items.c.external_id).where(one_of(items.c.id, ids, self.dialect))
        )
        return {row[0]: row[1] for row in rows}

    async def page(self, below: int | None, n: int) -> list[tuple[int, Item]]:
        """Items that are not deleted, below an internal id, newest first."""
        query = sa.select(items.c.id, *_ITEM).where(~items.c.deleted)
        if below is not None:
            query = query.where(items.c.id < below)
        rows = await self.database.fetch(query.order_by(items.c.id.desc()).limit(n))
        return [(row[0], Item(*row[1:])) for row in rows]

    async def in_order(self, after: int, n: int) -> list[tuple[int, Item]]:
        """At most `n` items that are not deleted, above an internal id, oldest first."""
        rows = await self.database.fetch(
            sa.select(items.c.id, *_ITEM)
            .where(~items.c.deleted, items.c.id > after)
            .order_by(items.c.id)
            .limit(n)
        )
        return [(row[0], Item(*row[1:])) for row in rows]

    async def by_ids(self, ids: Sequence[int]) -> list[tuple[int, Item]]:
        """These items that are not deleted, newest first."""
        rows = await self.database.fetch(
            sa.select(items.c.id, *_ITEM)
            .where(~items.c.deleted, one_of(items.c.id, ids, self.dialect))
            .order_by(items.c.id.desc())
        )
        return [(row[0], Item(*row[1:])) for row in rows]

    async def changed_since(self, seq: int) -> list[CatalogueRow]:
        """What changed after a number of the catalogue."""
        rows = await self.database.fetch(sa.select(*_VIEW).where(items.c.seq > seq))
        return [CatalogueRow(*row) for row in rows]
