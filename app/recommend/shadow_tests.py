"""Shadow tests: a second version ranks requests, and no answer shows its lists."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from app.ab_tests.schemas import RunningABTest
from app.ab_tests.shadow import ShadowTrials
from app.inference.batcher import Batcher
from app.inference.loaded_model import LoadedModel
from app.inference.model_manager import ModelManager
from app.recommend.ab_tests import is_tested, log_failure
from app.recommend.context import RecommendationContext
from app.recommend.list_builder import ListBuilder
from app.recommend.response import RankedList

MAX_SHADOWS = 4  # under way at a time


class ShadowTester:
    """Ranks with the second version in the background, while the batcher is idle."""

    def __init__(
        self, tests: ShadowTrials, models: ModelManager, lists: ListBuilder, batcher: Batcher
    ) -> None:
        self._tests = tests
        self._models = models
        self._lists = lists
        self._batcher = batcher
        self.running: set[asyncio.Task[None]] = set()

    def observe(
        self, context: RecommendationContext, model: LoadedModel, ranked: RankedList
    ) -> None:
        """Starts the comparison of a served list with the second version's list."""
        test = self._tests.running
        if (
            test is None
            or not is_tested(test, context, model)
            # Nobody waits for it, and nobody is to wait because of it.
            or self._batcher.busy
            or len(self.running) >= MAX_SHADOWS
            or not self._tests.includes(test)
        ):
            return
        other = self._models.at_hand(test.version_b)
        if other is not None:
            task = asyncio.create_task(self._rank(test, context, other, ranked))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    async def stop(self) -> None:
        """Cancels the comparisons in progress."""
        running = list(self.running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _rank(
        self,
        test: RunningABTest,
        context: RecommendationContext,
        other: LoadedModel,
        ranked: RankedList,
    ) -> None:
        try:
            shadow = await self._lists.build(replace(context, is_gone=None, on_slow=None), other)
        except Exception as error:
            log_failure(test, error)
        else:
            self._tests.record(test, ranked.ids, shadow.ids)
