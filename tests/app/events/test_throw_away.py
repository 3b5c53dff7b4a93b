"""Throw-away users: no training learns from them, and a day later they are gone."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from app.all_tables import metadata
from app.core.settings import Settings
from app.events import service
from app.events.throw_away import is_throw_away, new_throw_away_id
from app.wiring import Services
from tests.app.conftest import add_small_data, interactions_of

pytestmark = pytest.mark.anyio


async def test_a_training_learns_nothing_from_them(services: Services, settings: Settings) -> None:
    await add_small_data(services)
    before = interactions_of(services)
    visitor = new_throw_away_id()
    assert is_throw_away(visitor)
    assert not is_throw_away(visitor[:-1])
    stated = {"winner": "film-1", "loser": "film-2"}
    await services.events.add_rows([{"user": visitor, "item": "film-1"}], 1)
    result = await services.events.add_preferences([{"user": visitor} | stated], 1)
    assert result.accepted == 1
    after = interactions_of(services)
    assert list(after.user_ids) == list(before.user_ids)
    assert after.nnz == before.nnz
    assert after.feedback is None
    # Anybody else's counts, with an id that only begins like theirs too.
    await services.events.add_rows([{"user": "ncr-visitor-alice", "item": "film-1"}], 1)
    await services.events.add_preferences([{"user": "user-1"} | stated], 1)
    learned = interactions_of(services)
    assert "ncr-visitor-alice" in learned.user_ids
    assert learned.feedback is not None
    assert len(learned.feedback.pairs) == 1


async def test_they_are_erased_after_a_day(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ERASED_AT_ONCE", 2)
    old = [new_throw_away_id() for _ in range(3)]
    aged = ["somebody", "ncr-visitor", "ncr-visitor-alice"]  # ids of an application's own
    others = [new_throw_away_id(), *aged]
    for user in (*old, *others):
        await services.events.add_rows([{"user": user, "item": "i"}], 1)
    users = metadata.tables["users"]
    async with services.database.write() as conn:
        ages = users.update().where(users.c.external_id.in_([*old, *aged]))
        await conn.execute(ages.values(created_at=1))
    for left in (1, 0, 0):
        await services.events.erase_throw_away_users()
        rows = await services.database.fetch(sa.select(users.c.external_id))
        names = {row[0] for row in rows}
        assert len(names & set(old)) == left
        assert names >= set(others)
