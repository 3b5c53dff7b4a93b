"""Warm-up: the lists of the latest requests, made with a model before the model is served."""

from __future__ import annotations

import asyncio

from app.core.errors import Unavailable, Unprocessable
from app.core.logging import get_logger
from app.inference.loaded_model import LoadedModel
from app.recommend.context import NEWCOMER
from app.recommend.list_builder import ListBuilder
from app.recommend.schemas import RecommendationQuery
from app.recommend.service import ContextLoader

log = get_logger(__name__)

MAX_USERS = 2_000
MAX_SECONDS = 2.0  # by which a new model is served later
AT_ONCE = 8  # lists: as many as a pass of those whose candidates are searched for
MAX_ITEMS = 50  # of a list that is made


class WarmUp:
    """Remembers the latest requests, and makes their lists with a model before it is served."""

    def __init__(self, contexts: ContextLoader, lists: ListBuilder) -> None:
        self._contexts = contexts
        self._lists = lists
        self._asked: dict[str, RecommendationQuery] = {}

    def record(self, user: str, query: RecommendationQuery) -> None:
        """Remembers a request, in place of the user's earlier request."""
        if query.model is not None or query.exclude or query.explain or query.n > MAX_ITEMS:
            return
        if query.filter is not None or query.boost:  # each may take hundreds of KiB
            return
        self._asked.pop(user, None)
        self._asked[user] = query
        if len(self._asked) > MAX_USERS:
            del self._asked[next(iter(self._asked))]

    async def run(self, model: LoadedModel) -> None:
        """Makes the lists, the latest request first, for at most ``MAX_SECONDS``."""
        asked = reversed(list(self._asked.items()))
        made = 0

        async def make() -> None:
            nonlocal made
            for user, query in asked:
                if await self._contexts.precomputed_list(user, query, model) is not None:
                    continue
                try:
                    context = await self._contexts.load(user, query)
                except Unprocessable:
                    continue  # the attributes that the filter names have changed
                if context.user_key_by(model) is not NEWCOMER:
                    await self._lists.build(context, model)
                    made += 1

        tasks = [asyncio.create_task(make()) for _ in range(AT_ONCE)]
        try:
            async with asyncio.timeout(MAX_SECONDS):
                await asyncio.gather(*tasks)
        except (TimeoutError, Unavailable):
            pass  # that is all the time there is, or others need the inference threads
        except Exception as error:  # no reason to go on with the model before
            log.warning("warm-up failed", error=str(error).partition("\n")[0])
        finally:
            for task in tasks:
                task.cancel()
        log.info("warm-up ended", version=model.version, lists=made)
