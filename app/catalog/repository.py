"""Queries on items."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from app.catalog.schemas import Item
from app.catalog.snapshot import CatalogueRow
from app.catalog.tables import EMBEDDED, items
from app.core.bulk import begins_with, insert_many, one_of
from app.core.database import Database
from app.core.tables import now_us

SEARCH_SECONDS = 5.0
_ITEM = (
    items.c.external_id,
    items.c.title,
    items.c.categories,
    items.c.hidden,
    items.c.attributes,
    items.c.available_from,
    items.c.available_until,
    items.c.embedding,
)
# As text: parsed where it does not hold up the event loop.
_ATTRIBUTES = sa.cast(items.c.attributes, sa.Text)


def _catalogue_row(attributes: sa.ColumnElement[str]) -> tuple[sa.ColumnElement[Any], ...]:
    return (
        items.c.id,
        items.c.external_id,
        items.c.title,
        items.c.categories,
        items.c.hidden,
        items.c.deleted,
        items.c.seq,
        attributes,
        items.c.available_from,
        items.c.available_until,
    )


_CATALOGUE_ROW = _catalogue_row(_ATTRIBUTES)
_WITHOUT_ATTRIBUTES = _catalogue_row(sa.literal("{}"))
_WITH_ID = sa.select(items.c.id, *_ITEM).where(~items.c.deleted)
_UPSERT = """ON CONFLICT (external_id) DO UPDATE SET title = excluded.title,
 categories = excluded.categories, hidden = excluded.hidden, attributes = excluded.attributes,
 available_from = excluded.available_from, available_until = excluded.available_until,
 embedding = excluded.embedding, described = excluded.described, deleted = excluded.deleted,
 seq = excluded.seq,
 updated_at = excluded.updated_at"""


class CatalogRepository:
    """Reads and writes items, on both databases."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect

    async def get(self, external_id: str, conn: AsyncConnection | None = None) -> Item | None:
        """Return an item; None for a deleted or unknown one."""
        query = sa.select(*_ITEM).where(items.c.external_id == external_id, ~items.c.deleted)
        if conn is None:
            rows = await self._database.fetch(query)
        else:
            rows = list(await conn.execute(query))
        return Item(*rows[0]) if rows else None

    async def upsert(self, conn: AsyncConnection, rows: Collection[Item], seq: int) -> None:
        """Create, replace or restore items with distinct ids."""
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
                "available_from",
                "available_until",
                "embedding",
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
                    item.available_from,
                    item.available_until,
                    item.embedding,
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
        """Create items that only events have named."""
        now = now_us()
        await insert_many(
            conn,
            items,
            ("external_id", "seq", "created_at", "updated_at"),
            [(name, seq, now, now) for name in external_ids],
        )

    async def delete(self, conn: AsyncConnection, external_id: str, seq: int) -> None:
        """Mark an item as deleted and clear its description."""
        await conn.execute(
            items.update()
            .where(items.c.external_id == external_id)
            .values(
                title=None,
                categories=[],
                attributes={},
                available_from=None,
                available_until=None,
                embedding=None,
                hidden=False,
                described=False,
                deleted=True,
                seq=seq,
                updated_at=now_us(),
            )
        )

    async def embedding_length(self, conn: AsyncConnection, but: Collection[str]) -> int:
        """Return the length of the embeddings of all items except ``but``; 0 without embeddings."""
        others = ~one_of(items.c.external_id, but, self._dialect)
        bytes_ = await conn.scalar(
            sa.select(sa.func.length(items.c.embedding)).where(EMBEDDED, others).limit(1)
        )
        return (bytes_ or 0) // 4

    async def described_or_deleted(
        self, conn: AsyncConnection, external_ids: Collection[str]
    ) -> set[str]:
        """Return the clients' ids of the items that are described or deleted."""
        rows = await conn.execute(
            sa.select(items.c.external_id).where(
                items.c.described | items.c.deleted,
                one_of(items.c.external_id, external_ids, self._dialect),
            )
        )
        return {row[0] for row in rows}

    async def ids_of(
        self, external_ids: Collection[str], conn: AsyncConnection | None = None
    ) -> dict[str, int]:
        """Return the internal ids of the items that exist, deleted ones included."""
        query = sa.select(items.c.external_id, items.c.id).where(
            one_of(items.c.external_id, external_ids, self._dialect)
        )
        if conn is None:
            rows = await self._database.fetch(query)
        else:
            rows = list(await conn.execute(query))
        return {row[0]: row[1] for row in rows}

    async def external_ids_of(self, ids: Collection[int]) -> dict[int, str]:
        """Return the clients' ids by internal id, deleted items included."""
        wanted = one_of(items.c.id, ids, self._dialect)
        rows = await self._database.fetch(sa.select(items.c.id, items.c.external_id).where(wanted))
        return {row[0]: row[1] for row in rows}

    async def page(
        self, below: int | None, n: int, prefix: str | None = None
    ) -> list[tuple[int, Item]]:
        """Return at most ``n`` items below an internal id, newest first, without deleted ones."""
        query = _WITH_ID if below is None else _WITH_ID.where(items.c.id < below)
        if prefix is not None:
            query = query.where(begins_with(items.c.external_id, prefix, self._dialect))
        return await self._with_ids(query.order_by(items.c.id.desc()).limit(n))

    async def bare(self, n: int) -> list[str]:
        """Return at most ``n`` ids of items that only events have named, the newest first."""
        query = (
            sa.select(items.c.external_id)
            .where(~items.c.described, ~items.c.deleted)
            .order_by(items.c.id.desc())
            .limit(n)
        )
        return [row[0] for row in await self._database.fetch(query)]

    async def search(self, text: str, n: int) -> list[Item]:
        """Return at most ``n`` items whose title contains a text, without deleted ones."""
        query = sa.select(*_ITEM).where(
            ~items.c.deleted, items.c.title.icontains(text, autoescape=True)
        )
        rows = await self._database.fetch_heavy(query.limit(n), SEARCH_SECONDS)
        return [Item(*row) for row in rows]

    async def in_order(self, after: int, n: int) -> list[tuple[int, Item]]:
        """Return at most ``n`` items above an internal id, oldest first, without deleted ones."""
        query = _WITH_ID.where(items.c.id > after).order_by(items.c.id).limit(n)
        return await self._with_ids(query)

    async def by_ids(self, ids: Sequence[int]) -> list[tuple[int, Item]]:
        """Return these items, newest first, without deleted ones."""
        query = _WITH_ID.where(one_of(items.c.id, ids, self._dialect))
        return await self._with_ids(query.order_by(items.c.id.desc()))

    async def ids_changed_since(self, seq: int, limit: int) -> list[int]:
        """Return at most ``limit`` ids of items that changed after a number of the catalogue."""
        query = sa.select(items.c.id).where(items.c.seq > seq).limit(limit)
        return [row[0] for row in await self._database.fetch(query)]

    async def by_external_ids(self, external_ids: Collection[str]) -> list[Item]:
        """Return the items that exist, in any order, without deleted ones."""
        query = sa.select(*_ITEM).where(
            one_of(items.c.external_id, external_ids, self._dialect), ~items.c.deleted
        )
        return [Item(*row) for row in await self._database.fetch(query)]

    async def _with_ids(self, query: sa.Select[Any]) -> list[tuple[int, Item]]:
        return [(row[0], Item(*row[1:])) for row in await self._database.fetch(query)]

    async def changed_since(self, seq: int, *, attributes: bool) -> list[CatalogueRow]:
        """Return the items that changed after a number of the catalogue, deleted ones included.

        Without ``attributes``, the rows have empty attributes.
        """
        columns = _CATALOGUE_ROW if attributes else _WITHOUT_ATTRIBUTES
        rows = await self._database.fetch(sa.select(*columns).where(items.c.seq > seq))
        return [CatalogueRow(*row) for row in rows]

    async def attributes_in_order(self, after: int, n: int) -> list[tuple[int, int, str]]:
        """Return at most ``n`` items with attributes above an internal id, oldest first.

        A row has the internal id, the number of the item's last change, and the attributes as JSON.
        """
        query = (
            sa.select(items.c.id, items.c.seq, _ATTRIBUTES)
            .where(items.c.id > after, _ATTRIBUTES != "{}")
            .order_by(items.c.id)
            .limit(n)
        )
        return [(row[0], row[1], row[2]) for row in await self._database.fetch(query)]
