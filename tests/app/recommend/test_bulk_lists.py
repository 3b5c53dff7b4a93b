"""Lists of many users; that they are those of the service is in tests/app/worker/test_export."""

from __future__ import annotations

from typing import Any, cast

import pytest

from app.core.errors import Unavailable
from app.recommend.bulk_lists import CONCURRENT_USERS, BulkLists
from app.recommend.list_builder import ListBuilder
from app.recommend.response import RankedList
from app.recommend.schemas import RecommendationQuery
from app.recommend.service import ContextLoader

pytestmark = pytest.mark.anyio
USERS = [str(n) for n in range(2 * CONCURRENT_USERS + 3)]
QUERY = RecommendationQuery()


class Contexts:
    """Gives the user in the place of a context."""

    async def load(self, user: str, query: RecommendationQuery) -> str:
        return user


class Lists:
    """The user's number as the only item; fails as it is told, once for each user."""

    def __init__(self, failures: dict[str, Exception]) -> None:
        self.failures = failures

    async def build(self, context: str, model: None) -> RankedList:
        if context in self.failures:
            raise self.failures.pop(context)
        return RankedList(b"", (int(context),))


def bulk(**failures: Exception) -> BulkLists:
    lists: Any = Lists({name.removeprefix("u"): error for name, error in failures.items()})
    return BulkLists(cast(ContextLoader, Contexts()), cast(ListBuilder, lists), None)


async def test_lists_come_in_the_order_of_the_users() -> None:
    ranked = await bulk().build(USERS, QUERY)
    assert [each.ids for each in ranked] == [(int(user),) for user in USERS]
    assert await bulk().build([], QUERY) == []


async def test_a_list_that_found_the_ranker_busy_is_built_again() -> None:
    busy = Unavailable("too many", code="overloaded")
    ranked = await bulk(u3=busy, u200=busy).build(USERS, QUERY)
    assert len(ranked) == len(USERS)


async def test_an_error_comes_as_it_is_so_that_the_export_can_be_tried_again() -> None:
    """The database's errors are told by their type."""
    with pytest.raises(ConnectionError):
        await bulk(u7=ConnectionError()).build(USERS, QUERY)
    with pytest.raises(Unavailable):
        await bulk(u7=Unavailable("the end", code="stopping")).build(USERS, QUERY)
