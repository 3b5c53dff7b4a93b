"""Attributes of users, and merges of users who are the same person."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from app.catalog.schemas import attributes_problem
from app.core.database import Database
from app.core.errors import Conflict, NotFound, Unprocessable
from app.core.requests import MAX_ROWS_AT_ONCE, ROWS_A_STEP, Steps, at_once, in_turn
from app.core.tables import EVENT_SEQ, USER_SEQ, next_values
from app.events.user_repository import UserRepository
from app.events.user_schemas import Merged, NewUser, User, UserProblem, parse_user

MAX_MERGED_ROWS = 50_000
"""The largest number of events, and of preferences, of a user who can be merged. One transaction
moves this number of rows within seconds."""

MergeUsers = Callable[[AsyncConnection, int, str, int, str], Awaitable[None]]
"""Gives another feature's data of a user, by both ids, to another user, by both ids."""


class UserService:
    """Stores the descriptions of users, and merges users. `EventService` stores the events."""

    def __init__(
        self,
        database: Database,
        *,
        announce: Callable[[], None] = lambda: None,
        on_merge: Sequence[MergeUsers] = (),
    ) -> None:
        """Build the feature.

        Args:
            database: where users are stored.
            announce: called after a change, to tell other servers.
            on_merge: called in the transaction that merges a user, for other features' data.
        """
        self._database = database
        self._announce = announce
        self._on_merge = tuple(on_merge)
        self._repository = UserRepository(database)

    async def get(self, external_id: str) -> User:
        """Return a user.

        Raises:
            NotFound: the user is unknown.
        """
        return _existing(await self._repository.get(external_id))

    async def put(self, external_id: str, row: object) -> tuple[User, bool]:
        """Create a user, or replace the attributes; return the user, and whether the user is new.

        Raises:
            AppError: the description is invalid, or the user was merged into another.
        """
        new = _valid(parse_user(row, user_id=external_id))
        async with self._database.write() as conn:
            # The lock comes first: events create users, too.
            await next_values(conn, EVENT_SEQ, 0)
            is_new = await self._repository.get(external_id, conn) is None
            if is_new and await self._repository.merged(conn, external_id) is not None:
                raise _was_merged()
            await self._upsert(conn, [new])
            user = _existing(await self._repository.get(external_id, conn))
        self._announce()
        return user, is_new

    async def patch(self, external_id: str, row: object) -> User:
        """Change the attributes that ``row`` has; see `parse_user`.

        Raises:
            AppError: the change is invalid, or the user is unknown or was merged into another.
        """
        async with self._database.write() as conn:
            await next_values(conn, EVENT_SEQ, 0)
            found = await self._repository.get(external_id, conn)
            if found is None and await self._repository.merged(conn, external_id) is not None:
                raise _was_merged()
            base = _existing(found)
            new = _valid(parse_user(row, user_id=external_id, base=base))
            await self._upsert(conn, [new])
        self._announce()
        return User(base.id, new.attributes, base.created_at)

    async def upsert_rows(
        self, rows: Sequence[object]
    ) -> tuple[int, list[tuple[int, UserProblem]]]:
        """Create or replace the valid users; return their number, and problems of the others."""
        work = _parsed(rows)
        is_long = len(rows) > MAX_ROWS_AT_ONCE
        valid, rejected = await in_turn(work) if is_long else at_once(work)
        merged = await self._describe({user.id: user for _, user in valid})
        problem = UserProblem("merged_user", _was_merged().detail)
        rejected += [(index, problem) for index, user in valid if user.id in merged]
        return len(rows) - len(rejected), sorted(rejected, key=lambda row: row[0])

    async def _upsert(self, conn: AsyncConnection, rows: Collection[NewUser]) -> None:
        """Create or replace users, and number the change."""
        await self._repository.upsert(conn, rows, await next_values(conn, USER_SEQ))

    async def _describe(self, rows: dict[str, NewUser]) -> Collection[str]:
        """Create or replace users; leave out merged users, and return their ids."""
        if not rows:
            return ()
        async with self._database.write() as conn:
            await next_values(conn, EVENT_SEQ, 0)
            merged = await self._repository.aliases_among(conn, rows)
            await self._upsert(conn, [user for user in rows.values() if user.id not in merged])
        self._announce()
        return merged

    async def merge(self, external_id: str, into: str) -> Merged:
        """Merge a user into another user, because both are the same person.

        One transaction moves the events and preferences, and deletes the user. Later events and
        preferences of the deleted user belong to the other user, who also gets missing attributes.
        A repeated merge changes nothing.

        Raises:
            NotFound: one of the users is unknown.
            Conflict: both are the same user, the user was merged into a third user, or the user has
                more than `MAX_MERGED_ROWS` events or preferences.
        """
        repository = self._repository
        async with self._database.write() as conn:
            # The lock comes first, as for events: what is read below stays true until the commit.
            first_seq = await next_values(conn, EVENT_SEQ, 0)
            target_alias = await repository.merged(conn, into)
            target = await repository.lock(
                conn, into if target_alias is None else target_alias.into, stays=True
            )
            source = await repository.lock(conn, external_id)
            if source is None:
                done = await repository.merged(conn, external_id)
                return _repeated(done, external_id, into, None if target is None else target[0])
            if target is None:
                raise NotFound("the user in `into` does not exist", code="unknown_user")
            (source_id, visitor), (target_id, survivor) = source, target
            if source_id == target_id:
                raise _same_user(external_id, into)
            counts = await repository.sizes(conn, source_id, MAX_MERGED_ROWS + 1)
            if max(counts) > MAX_MERGED_ROWS:
                raise Conflict(
                    f"the user has more than {MAX_MERGED_ROWS} events or preferences",
                    code="too_many_events",
                )
            moved = sum(counts)
            merged = Merged(target_id, survivor.id, *counts, first_seq + moved)
            await repository.move(conn, source_id, target_id, first_seq, counts[0])
            for merge in self._on_merge:
                await merge(conn, source_id, external_id, target_id, survivor.id)
            attributes = {**visitor.attributes, **survivor.attributes}
            if attributes != survivor.attributes and attributes_problem(attributes) is None:
                await self._upsert(conn, [NewUser(survivor.id, attributes)])
            await repository.replace_by_alias(conn, (source_id, external_id), merged, first_seq)
            await next_values(conn, EVENT_SEQ, moved + 1)
        self._announce()
        return merged

    async def describe_users(self, rows: Iterable[NewUser]) -> int:
        """Store the attributes of users without attributes; return the number of these users.

        Later changes survive a second import of a file.
        """
        distinct = {user.id: user for user in rows}
        async with self._database.bulk_write() as conn:
            await next_values(conn, EVENT_SEQ, 0)
            described = await self._repository.described(conn, distinct)
            described |= await self._repository.aliases_among(conn, distinct)
            new = [user for user in distinct.values() if user.id not in described]
            await self._upsert(conn, new)
        return len(new)

    async def page(
        self, below: int | None, n: int, prefix: str | None
    ) -> tuple[list[User], int | None]:
        """Return a page of users, newest first, and ``below`` of the next page, or None.

        Args:
            below: only users below this internal id.
            n: the size of the page.
            prefix: only users whose id begins with this.
        """
        rows = await self._repository.page(below, n + 1, prefix)
        next_below = rows[n - 1][0] if len(rows) > n else None
        return [user for _, user in rows[:n]], next_below

    async def attributes_of(self, external_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the attributes of the users who have any, by the client's id."""
        return await self._repository.attributes_of(external_ids)

    async def iter_described(self, chunk_size: int = 5_000) -> AsyncIterator[list[User]]:
        """Yield all users with attributes in chunks, oldest first."""
        after = 0
        while rows := await self._repository.described_in_order(after, chunk_size):
            yield [user for _, user in rows]
            after = rows[-1][0]


def _parsed(
    rows: Sequence[object],
) -> Steps[tuple[list[tuple[int, NewUser]], list[tuple[int, UserProblem]]]]:
    """The valid rows and the problems of the others, each with its index."""
    valid: list[tuple[int, NewUser]] = []
    rejected: list[tuple[int, UserProblem]] = []
    for index, row in enumerate(rows):
        user = parse_user(row)
        if isinstance(user, NewUser):
            valid.append((index, user))
        else:
            rejected.append((index, user))
        if index % ROWS_A_STEP == ROWS_A_STEP - 1:
            yield
    return valid, rejected


def _repeated(done: Merged | None, external_id: str, into: str, target_id: int | None) -> Merged:
    """Return the earlier merge of a user, if the new merge repeats the earlier one."""
    if done is None:
        raise NotFound("the user to merge does not exist", code="unknown_user")
    if external_id == into:
        raise _same_user(external_id, into)
    if done.into_id != target_id:
        raise Conflict("the user was merged into another user before", code="merged_user")
    return done


def _same_user(external_id: str, into: str) -> Conflict:
    if external_id == into:
        return Conflict("a user cannot be merged into itself", code="same_user")
    return Conflict("the user in `into` is already merged into this user", code="merge_circle")


def _was_merged() -> Conflict:
    return Conflict("this user was merged into another", code="merged_user")


def _existing(user: User | None) -> User:
    if user is None:
        raise NotFound("the user does not exist", code="unknown_user")
    return user


def _valid(user: NewUser | UserProblem) -> NewUser:
    if isinstance(user, UserProblem):
        kind = Conflict if user.code == "id_mismatch" else Unprocessable
        raise kind(user.detail, code=user.code)
    return user
