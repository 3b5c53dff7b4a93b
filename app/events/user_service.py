"""Users as clients describe them: their attributes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

from app.core.database import Database
from app.core.errors import Conflict, NotFound, Unprocessable
from app.core.tables import EVENT_SEQ, next_values
from app.events.user_repository import UserRepository
from app.events.user_schemas import NewUser, User, UserProblem, parse_user


class UserService:
    """Stores what clients say of users. What users did is `EventService`'s."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._repository = UserRepository(database)

    async def get(self, external_id: str) -> User:
        """Return a user.

        Raises:
            NotFound: the user is unknown.
        """
        return _existing(await self._repository.get(external_id))

    async def put(self, external_id: str, row: object) -> tuple[User, bool]:
        """Create a user, or replace the attributes; return the user, and whether it is new.

        Raises:
            AppError: the description is invalid.
        """
        new = _valid(parse_user(row, user_id=external_id))
        async with self._database.write() as conn:
            # The lock comes first: events create users, too.
            await next_values(conn, EVENT_SEQ, 0)
            is_new = await self._repository.get(external_id, conn) is None
            await self._repository.upsert(conn, [new])
            user = _existing(await self._repository.get(external_id, conn))
        return user, is_new

    async def patch(self, external_id: str, row: object) -> User:
        """Change the attributes that ``row`` has; see `parse_user`.

        Raises:
            AppError: the change is invalid, or the user is unknown.
        """
        async with self._database.write() as conn:
            await next_values(conn, EVENT_SEQ, 0)
            base = _existing(await self._repository.get(external_id, conn))
            new = _valid(parse_user(row, user_id=external_id, base=base))
            await self._repository.upsert(conn, [new])
        return User(base.id, new.attributes, base.created_at)

    async def upsert_rows(
        self, rows: Sequence[object]
    ) -> tuple[int, list[tuple[int, UserProblem]]]:
        """Create or replace the valid users; return their number, and the others' problems."""
        valid: list[NewUser] = []
        rejected: list[tuple[int, UserProblem]] = []
        for index, row in enumerate(rows):
            user = parse_user(row)
            if isinstance(user, NewUser):
                valid.append(user)
            else:
                rejected.append((index, user))
        await self.upsert_users(valid)
        return len(valid), rejected

    async def upsert_users(self, rows: Iterable[NewUser]) -> None:
        """Create or replace valid users; of several with the same id, the last one wins."""
        distinct = {user.id: user for user in rows}
        if distinct:
            async with self._database.write() as conn:
                await next_values(conn, EVENT_SEQ, 0)
                await self._repository.upsert(conn, distinct.values())

    async def describe_users(self, rows: Iterable[NewUser]) -> int:
        """Store those of the users who have no attributes yet; return their number.

        For imports: importing a file again does not undo later changes.
        """
        distinct = {user.id: user for user in rows}
        async with self._database.bulk_write() as conn:
            await next_values(conn, EVENT_SEQ, 0)
            described = await self._repository.described(conn, distinct)
            new = [user for user in distinct.values() if user.id not in described]
            await self._repository.upsert(conn, new)
        return len(new)

    async def page(
        self, below: int | None, n: int, prefix: str | None
    ) -> tuple[list[User], int | None]:
        """Return a page of users, newest first, and ``below`` of the next; None after the last.

        Args:
            below: only users below this internal id.
            n: the size of the page.
            prefix: only users whose id begins with this.
        """
        rows = await self._repository.page(below, n + 1, prefix)
        next_below = rows[n - 1][0] if len(rows) > n else None
        return [user for _, user in rows[:n]], next_below

    async def iter_described(self, chunk_size: int = 5_000) -> AsyncIterator[list[User]]:
        """Yield all users with attributes in chunks, oldest first."""
        after = 0
        while rows := await self._repository.described_in_order(after, chunk_size):
            yield [user for _, user in rows]
            after = rows[-1][0]


def _existing(user: User | None) -> User:
    if user is None:
        raise NotFound("there is no such user", code="unknown_user")
    return user


def _valid(user: NewUser | UserProblem) -> NewUser:
    if isinstance(user, UserProblem):
        kind = Conflict if user.code == "id_mismatch" else Unprocessable
        raise kind(user.detail, code=user.code)
    return user
