"""Users' profiles, kept in memory as long as nothing happened to the user."""

from __future__ import annotations

import time

from app.core.cache import ByteCache, SingleFlight
from app.core.database import Database
from app.events.profile import Profile
from app.events.repository import EventRepository

FRESH_SECONDS = 0.05
HINTED_SECONDS = 0.005  # between two looks, however many hints there are
MANY = 5_000  # events since the last look, beyond which it is not asked whose they are
PROFILE_BYTES = 800  # beside its arrays


class Profiles:
    """Answers with what was committed before the question, or at most ``FRESH_SECONDS`` before it
    where another process committed it.

    What this process commits is looked for at once: the database counts its own transactions. What
    others commit shows in the counters, which are read at most every ``FRESH_SECONDS``, or sooner
    after a hint, and only when somebody asks. A look finds the users that something happened to and
    forgets only those.
    """

    def __init__(self, database: Database, repository: EventRepository, max_bytes: int) -> None:
        self._database = database
        self._repository = repository
        self._kept: ByteCache[str, Profile] = ByteCache(max_bytes)
        self._reads: SingleFlight[str, Profile] = SingleFlight()
        self._looks: SingleFlight[None, None] = SingleFlight()
        self._event_seq = self._catalog_seq = -1
        self._looked_at = -float("inf")
        self._commits_seen = -1
        self._hinted_at = -float("inf")

    def hint(self) -> None:
        """Somebody says that there is something new: the next question has a look."""
        self._hinted_at = time.monotonic()

    @property
    def cache(self) -> ByteCache[str, Profile]:
        return self._kept

    async def get(self, user: str, min_seq: int | None = None) -> Profile:
        """The user's profile. ``event_seq`` is less than ``min_seq`` only if no such seq is."""
        now = time.monotonic()
        since = now - FRESH_SECONDS
        if self._hinted_at > since and now - self._looked_at > HINTED_SECONDS:
            since = self._hinted_at
        await self._catch_up(since)
        if min_seq is not None and self._event_seq < min_seq:
            await self._catch_up(time.monotonic())
        event_seq, catalog_seq = self._event_seq, self._catalog_seq
        profile = self._kept.get(user)
        if profile is None:
            # It may have begun for somebody else, before those numbers; had something happened to
            # the user in between, it would have been forgotten.
            found = await self._reads.run(user, lambda: self._read(user))
            return found.at(event_seq, catalog_seq)
        if profile.event_seq < self._event_seq or profile.catalog_seq < self._catalog_seq:
            # Nothing happened to the user up to here.
            profile = profile.at(self._event_seq, self._catalog_seq)
            self._keep(user, profile)
        return profile

    async def _catch_up(self, since: float) -> None:
        """Returns when there was a look that began after ``since`` and after our own commits."""
        commits = self._database.commits
        while self._commits_seen < commits or self._looked_at < since:
            await self._looks.run(None, self._look)

    async def _look(self) -> None:
        commits, began = self._database.commits, time.monotonic()
        event_seq, catalog_seq = await self._repository.counters()
        if event_seq - self._event_seq > MANY or await self._repository.unaccounted(
            self._event_seq, event_seq
        ):
            self._kept.clear()
            self._reads.forget_all()
        elif event_seq > self._event_seq:
            for user in await self._repository.users_since(self._event_seq):
                self._kept.pop(user)
                self._reads.forget(user)
            gone = set(await self._repository.retracted_since(self._event_seq))
            if gone:
                self._reads.forget_all()
                for user in [u for u, p in self._kept.items() if p.user_id in gone]:
                    self._kept.pop(user)
        self._event_seq, self._catalog_seq = event_seq, catalog_seq
        self._commits_seen, self._looked_at = commits, began

    async def _read(self, user: str) -> Profile:
        profile = await self._repository.profile(user)
        # Forgotten: something happened to the user since this began, and it may not be in there.
        if self._reads.is_current(user):
            self._keep(user, profile)
        return profile

    def _keep(self, user: str, profile: Profile) -> None:
        self._kept.put(user, profile, PROFILE_BYTES + profile.nbytes)
