"""Public interface of the catalogue: items, and an immutable catalogue in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.ext.asyncio import AsyncConnection

from app.catalog.attributes import Attributes
from app.catalog.filters import AttributeFilter
from app.catalog.masks import FilterMask, FilterMasks
from app.catalog.repository import CatalogRepository
from app.catalog.schemas import Item, ItemProblem, other_length, parse_item
from app.catalog.snapshot import Catalogue
from app.core.database import Database
from app.core.errors import Conflict, NotFound, Unavailable, Unprocessable
from app.core.requests import MAX_ROWS_AT_ONCE, ROWS_A_STEP, Steps, at_once, in_turn
from app.core.tables import CATALOG_SEQ, current_value, next_values, now_us

# Beyond either a thread takes a change in, so that it holds up no other request. A change of one
# item that lists depend on costs a copy of the catalogue: 0.7 ms with 20,000 items, 11 ms with
# 200,000.
MAX_INLINE_ROWS = 1_000
MAX_INLINE_ITEMS = 20_000
LOADED_ROWS = 20_000  # whose attributes are in memory as JSON
LOAD_SECONDS = 10.0  # that a request waits for attributes
MAX_INLINE_NAMES = 100  # of attributes: each is looked at with every change

ITEM_COUNT = "SELECT count(*) FROM items"
AVAILABLE_ITEMS = "SELECT id, external_id FROM items WHERE NOT deleted"
"""Queries for the training snapshot, which bypasses SQLAlchemy."""


def _parsed(
    rows: Sequence[object],
) -> Steps[tuple[list[tuple[int, Item]], list[tuple[int, ItemProblem]]]]:
    """The valid rows and the problems of the others, each with its index."""
    valid: list[tuple[int, Item]] = []
    rejected: list[tuple[int, ItemProblem]] = []
    for index, row in enumerate(rows):
        item = parse_item(row)
        if isinstance(item, Item):
            valid.append((index, item))
        else:
            rejected.append((index, item))
        if index % ROWS_A_STEP == ROWS_A_STEP - 1:
            yield
    return valid, rejected


class CatalogService:
    """Stores items, and holds a catalogue in memory that follows every change."""

    def __init__(self, database: Database, mask_bytes: int = 2**26) -> None:
        self._database = database
        self._masks = FilterMasks(mask_bytes)
        self._repository = CatalogRepository(database)
        self._catalogue = Catalogue(attributes=Attributes.nothing())
        self._refresh_lock = asyncio.Lock()
        self._asked: set[str] = set()  # attributes that are to be loaded
        self._loading: asyncio.Task[None] | None = None

    # For other features

    async def catalogue(self, min_seq: int | None = None) -> Catalogue:
        """Return the catalogue in memory, brought up to date.

        Args:
            min_seq: the catalogue's number, if the caller has read it, as in a `Profile`; None: the
                call reads the number.
        """
        if min_seq is None:
            min_seq = await self.catalog_seq()
        catalogue = self._catalogue
        if catalogue.seq < min_seq or catalogue.next_change <= now_us():
            async with self._refresh_lock:
                # Another request may have refreshed it while this one waited.
                if self._catalogue.seq < min_seq:
                    await self._refresh(min_seq)
                await self._follow_time()
        return self._catalogue

    async def _follow_time(self) -> None:
        """Take in the items that became available or unavailable by their times."""
        catalogue, now = self._catalogue, now_us()
        if len(catalogue.availability.ids) > MAX_INLINE_ITEMS:
            self._catalogue = await asyncio.to_thread(catalogue.at, now)
        else:
            self._catalogue = catalogue.at(now)

    async def _refresh(self, min_seq: int) -> None:
        is_loaded = self._catalogue.attributes.known is not None
        rows = await self._repository.changed_since(self._catalogue.seq, attributes=is_loaded)
        if (
            len(rows) > MAX_INLINE_ROWS
            or len(self._catalogue.attributes.by_name) > MAX_INLINE_NAMES
            or (self._catalogue.size > MAX_INLINE_ITEMS and self._catalogue.shown_rows(rows))
        ):
            changed = await asyncio.to_thread(self._catalogue.updated, rows)
        else:
            changed = self._catalogue.updated(rows)
        # At least `min_seq`: a number may have been taken for a change that changed nothing.
        self._catalogue = replace(changed, seq=max(changed.seq, min_seq))

    async def with_attributes(self, catalogue: Catalogue, names: Collection[str]) -> Catalogue:
        """Return the catalogue with these attributes, which may be of a later state.

        The first request that names an attribute loads it. An attribute of a million items takes
        seconds to read, and filters never name most attributes.

        Raises:
            Unavailable: the attributes are still being read.
        """
        attributes = catalogue.attributes
        while missing := attributes.missing(names):
            self._asked |= missing
            if self._loading is None or self._loading.done():
                self._loading = asyncio.create_task(self._load_asked())
            try:
                await asyncio.wait_for(asyncio.shield(self._loading), LOAD_SECONDS)
            except TimeoutError:
                raise Unavailable(
                    "the server still reads the attributes of the filter; try again",
                    code="attributes_loading",
                ) from None
            attributes = self._catalogue.attributes
        if attributes is catalogue.attributes:
            return catalogue
        return replace(catalogue, attributes=attributes)

    async def _load_asked(self) -> None:
        while self._asked:
            names, self._asked = self._asked, set()
            await self._load(self._catalogue.attributes.missing(names))

    async def _load(self, names: set[str]) -> None:
        """Read attributes by their names, while other requests use the loaded attributes."""
        if not names:
            return
        since, after = self._catalogue.seq, 0
        loaded = Attributes.nothing(names)
        while rows := await self._repository.attributes_in_order(after, LOADED_ROWS):
            loaded = await asyncio.to_thread(loaded.updated, rows)
            after = rows[-1][0]
        async with self._refresh_lock:
            # Some rows were read before they changed, and some after.
            changed = await self._repository.changed_since(since, attributes=True)
            current = [(row.id, row.seq, row.attributes) for row in changed]
            newer = [row for row in changed if row.seq > self._catalogue.seq]

            def join() -> Catalogue:
                catalogue = self._catalogue.updated(newer) if newer else self._catalogue
                brought_up = loaded.updated(current) if current else loaded
                return replace(catalogue, attributes=catalogue.attributes.joined(brought_up))

            self._catalogue = await asyncio.to_thread(join)
            await self._follow_time()

    async def mask(self, wanted: AttributeFilter, catalogue: Catalogue) -> FilterMask:
        """Return the items that fit a filter in a state of the catalogue `with_attributes`.

        Raises:
            Unprocessable: the filter compares values of a kind that no item has.
        """
        return await self._masks.get(wanted, catalogue)

    async def catalog_seq(self) -> int:
        """Return the catalogue's number, which grows with every change."""
        rows = await self._database.fetch(sa.select(current_value(CATALOG_SEQ)))
        return int(rows[0][0])

    async def ensure_items(
        self, conn: AsyncConnection, external_ids: Collection[str]
    ) -> dict[str, int]:
        """Return the items' internal ids, creating missing items in the caller's transaction."""
        item_ids = await self._repository.ids_of(external_ids, conn)
        missing = [item for item in external_ids if item not in item_ids]
        if missing:
            # Locked before the second look: another transaction may be creating the same items.
            seq = await next_values(conn, CATALOG_SEQ)
            item_ids.update(await self._repository.ids_of(missing, conn))
            missing = [item for item in missing if item not in item_ids]
            await self._repository.create_bare(conn, missing, seq)
            item_ids.update(await self._repository.ids_of(missing, conn))
        return item_ids

    async def ids_of(
        self, external_ids: Collection[str], conn: AsyncConnection | None = None
    ) -> dict[str, int]:
        """Return the internal ids of the items that exist, deleted ones included."""
        return await self._repository.ids_of(external_ids, conn)

    async def described(self, ids: Collection[int]) -> dict[int, Item]:
        """Return these items by internal id, without deleted ones."""
        return dict(await self._repository.by_ids(list(ids)))

    async def ids_changed_since(self, seq: int, limit: int) -> list[int]:
        """Return at most ``limit`` ids of items that changed after a number of the catalogue."""
        return await self._repository.ids_changed_since(seq, limit)

    async def by_external_ids(self, external_ids: Collection[str]) -> dict[str, Item]:
        """Return the items that exist by the clients' ids, without deleted ones."""
        return {item.id: item for item in await self._repository.by_external_ids(external_ids)}

    async def external_ids_of(self, ids: Collection[int]) -> dict[int, str]:
        """Return the clients' ids by internal id, deleted items included."""
        return await self._repository.external_ids_of(ids)

    async def iter_items(self, chunk_size: int = 1_000) -> AsyncIterator[list[Item]]:
        """Yield all items in chunks, oldest first, without deleted ones."""
        after = 0
        while rows := await self._repository.in_order(after, chunk_size):
            yield [item for _, item in rows]
            after = rows[-1][0]

    # For the endpoints

    async def get(self, external_id: str) -> Item:
        """Return an item.

        Raises:
            NotFound: the item is unknown or deleted.
        """
        return _existing(await self._repository.get(external_id))

    async def bare_items(self, n: int) -> list[str]:
        """Return at most ``n`` ids of items that only events have named, the newest first."""
        return await self._repository.bare(n)

    async def search(self, text: str, n: int) -> list[Item]:
        """Return at most ``n`` items whose title contains a text, first the item with that id."""
        exact = await self._repository.get(text)
        found = await self._repository.search(text, n)
        rest = [item for item in found if exact is None or item.id != exact.id]
        return [*([exact] if exact else []), *rest][:n]

    async def put(self, external_id: str, row: object) -> tuple[Item, bool]:
        """Create or replace an item; return the item, and whether the item is new.

        Raises:
            AppError: the item is invalid.
        """
        item = _valid(parse_item(row, item_id=external_id))
        async with self._database.write() as conn:
            seq = await next_values(conn, CATALOG_SEQ)
            is_new = await self._repository.get(external_id, conn) is None
            await self._check_embedding(conn, item)
            await self._repository.upsert(conn, [item], seq)
        return item, is_new

    async def patch(self, external_id: str, row: object) -> Item:
        """Change the fields of an item that ``row`` has; see `parse_item`.

        Raises:
            AppError: the change is invalid, or the item is unknown or deleted.
        """
        async with self._database.write() as conn:
            seq = await next_values(conn, CATALOG_SEQ)
            base = _existing(await self._repository.get(external_id, conn))
            item = _valid(parse_item(row, item_id=external_id, base=base))
            await self._check_embedding(conn, item)
            await self._repository.upsert(conn, [item], seq)
        return item

    async def _check_embedding(self, conn: AsyncConnection, item: Item) -> None:
        """Refuse an embedding with another length than the others. Raises Unprocessable."""
        _, refused = await self._of_one_length(conn, [item])
        for problem in refused.values():
            raise Unprocessable(problem.detail, code=problem.code)

    async def _of_one_length(
        self, conn: AsyncConnection, rows: Collection[Item]
    ) -> tuple[list[Item], dict[str, ItemProblem]]:
        """Return the items that may be written, and the problems of the others by their ids.

        All embeddings of the catalogue have as many numbers as the first. The caller holds the lock
        of the catalogue's counter.
        """
        if all(item.embedding is None for item in rows):
            return list(rows), {}
        length = await self._repository.embedding_length(conn, [item.id for item in rows])
        kept: list[Item] = []
        refused: dict[str, ItemProblem] = {}
        for item in rows:
            length = length or item.embedding_length
            if item.embedding_length in (0, length):
                kept.append(item)
            else:
                refused[item.id] = other_length(item, length)
        return kept, refused

    async def delete(self, external_id: str) -> None:
        """Delete an item. The row stays without a description: events and models refer to it.

        Raises:
            NotFound: the item is unknown or deleted.
        """
        async with self._database.write() as conn:
            seq = await next_values(conn, CATALOG_SEQ)
            _existing(await self._repository.get(external_id, conn))
            await self._repository.delete(conn, external_id, seq)

    async def upsert_rows(
        self, rows: Sequence[object]
    ) -> tuple[int, list[tuple[int, ItemProblem]]]:
        """Create or replace the valid items; return their number, and problems of the others."""
        work = _parsed(rows)
        is_long = len(rows) > MAX_ROWS_AT_ONCE
        valid, rejected = await in_turn(work) if is_long else at_once(work)
        # Of several with the same id, the last one wins.
        last = {item.id: (index, item) for index, item in valid}
        if last:
            async with self._database.write() as conn:
                seq = await next_values(conn, CATALOG_SEQ)
                kept, refused = await self._of_one_length(conn, [item for _, item in last.values()])
                await self._repository.upsert(conn, kept, seq)
            rejected += [(last[name][0], problem) for name, problem in refused.items()]
        return len(rows) - len(rejected), sorted(rejected, key=lambda row: row[0])

    async def describe_items(
        self,
        items: Iterable[Item],
        on_refused: Callable[[str, ItemProblem], None] = lambda item, problem: None,
    ) -> int:
        """Store the items that are neither described nor deleted yet; return their number.

        Later changes survive a second import of a file. ``on_refused`` gets the ids of items
        whose embedding has another length than the others, and the problems.
        """
        distinct = {item.id: item for item in items}
        if not distinct:
            return 0
        async with self._database.bulk_write() as conn:
            unchanged = await self._repository.described_or_deleted(conn, distinct)
            new = [item for item in distinct.values() if item.id not in unchanged]
            new, refused = await self._of_one_length(conn, new)
            if new:
                seq = await next_values(conn, CATALOG_SEQ)
                await self._repository.upsert(conn, new, seq)
        for name, problem in refused.items():
            on_refused(name, problem)
        return len(new)

    async def page(
        self, below: int | None, n: int, categories: Sequence[str], prefix: str | None = None
    ) -> tuple[list[Item], int | None]:
        """Return a page of items, newest first, without deleted ones.

        Args:
            below: only items below this internal id.
            n: the size of the page.
            categories: only items in any of these categories; empty: all items.
            prefix: only items whose id begins with this.

        Returns:
            The items, and ``below`` of the next page; None after the last page.
        """
        if categories:
            catalogue = await self.catalogue()
            ids = np.flatnonzero(catalogue.mask(categories))
            ids = (ids if below is None else ids[ids < below])[::-1]
            if prefix is not None:
                # A category may have all items of a large catalogue.
                ids = await asyncio.to_thread(_begin_with, prefix, ids, catalogue, n + 1)
            rows = await self._repository.by_ids(ids[: n + 1].tolist())
        else:
            rows = await self._repository.page(below, n + 1, prefix)
        next_below = rows[n - 1][0] if len(rows) > n else None
        return [item for _, item in rows[:n]], next_below


def _begin_with(
    prefix: str, ids: NDArray[np.int64], catalogue: Catalogue, n: int
) -> NDArray[np.int64]:
    """Return the first ``n`` of the items whose client's ids begin with the prefix."""
    names = catalogue.external_ids
    found = (item for item in ids.tolist() if names[item].startswith(prefix))
    return np.fromiter(islice(found, n), np.int64)


def _existing(item: Item | None) -> Item:
    if item is None:
        raise NotFound("the item does not exist", code="unknown_item")
    return item


def _valid(item: Item | ItemProblem) -> Item:
    if isinstance(item, ItemProblem):
        kind = Conflict if item.code == "id_mismatch" else Unprocessable
        raise kind(item.detail, code=item.code)
    return item
