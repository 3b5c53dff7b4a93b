"""A/B tests on requests: lists of two versions or settings, and the records of served lists."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple, Protocol

from app.ab_tests.schemas import RunningABTest
from app.ab_tests.service import ABTestService
from app.ab_tests.settings_trials import TrialArm
from app.core.errors import AppError
from app.core.ids import new_recommendation_id
from app.core.logging import get_logger
from app.inference.loaded_model import LoadedModel
from app.inference.model_manager import ModelManager
from app.recommend.basket import NOBODY
from app.recommend.context import NEWCOMER, RecommendationContext
from app.recommend.list_builder import ListBuilder
from app.recommend.response import RankedList
from app.recommend.settings_tests import SettingsTester
from ncr_core.online import Draft, team_draft

log = get_logger(__name__)


class ListObserver(Protocol):
    """Observes served lists in the background."""

    def observe(
        self, context: RecommendationContext, model: LoadedModel, ranked: RankedList
    ) -> None:
        """Starts the observation of a version's own list, and returns at once."""

    async def stop(self) -> None:
        """Cancels the observations in progress."""


class ServedList(NamedTuple):
    """A list that was recorded as served."""

    ranked: RankedList
    recommendation_id: str
    version: str
    """The version that the answer names."""
    source: str
    """The name in the list's cursors: the version, or the arm of a settings test."""


class ABTestRouter:
    """Decides which requests take part in the running A/B tests, and records the served lists.

    A request takes part in a test of two versions if the test's first version answers, the request
    names no version, and the model knows the user. ``observer`` gets the served lists of one
    version, as `ShadowTester` does. A user in an interleaving test takes no part in a test of
    ``settings``.
    """

    def __init__(
        self,
        tests: ABTestService,
        models: ModelManager,
        lists: ListBuilder,
        observer: ListObserver | None = None,
        settings: SettingsTester | None = None,
    ) -> None:
        self._tests = tests
        self._models = models
        self._lists = lists
        self._observer = observer
        self.settings = settings

    async def build(self, context: RecommendationContext, model: LoadedModel) -> ServedList:
        """The list of a request, recorded, with its recommendation id.

        A user in an interleaving test gets a list drafted from the lists of both versions, with an
        id of the test. Where the second version cannot answer, list and id are the first version's.
        A user in a settings test gets the list of the user's arm, with an id of the arm.
        """
        test, other = self._tests.interleaving.running, None
        is_interleaved = (
            test is not None
            and is_tested(test, context, model)
            and self._tests.interleaving.includes(test, context.user)
        )
        if test is not None and is_interleaved:
            other = self._models.at_hand(test.version_b)
        elif self.settings is not None:
            found = await self.settings.build(context, model)
            if found is not None:
                arm, as_answered, chosen, ranked = found
                if self._observer is not None:
                    self._observer.observe(as_answered, chosen, ranked)
                new_id = new_recommendation_id(arm.source)
                return ServedList(ranked, new_id, chosen.version, arm.source)
        if test is None or other is None:
            ranked = await self._lists.build(context, model)
        else:
            a, b = await asyncio.gather(
                self._lists.build(context, model),
                self._lists.build(context, other),
                return_exceptions=True,
            )
            if isinstance(a, BaseException):
                raise a
            if not isinstance(b, BaseException):
                return self._drafted(test, context, a, b)
            log_failure(test, b)
            ranked = a
        self._tests.impressions.add_lists(model.version)
        if self._observer is not None:
            self._observer.observe(context, model, ranked)
        new_id = new_recommendation_id(model.version)
        return ServedList(ranked, new_id, model.version, model.version)

    def _drafted(
        self, test: RunningABTest, context: RecommendationContext, a: RankedList, b: RankedList
    ) -> ServedList:
        """The list drafted from the lists of both versions, recorded, with its id."""
        recommendation_id = new_recommendation_id(test.trial_id)
        coin = random.Random(recommendation_id)  # noqa: S311 - so that it can be tossed again
        draft = team_draft(a.ids, b.ids, context.query.n, coin)
        team_a, team_b = draft.teams
        self._tests.interleaving.record(
            recommendation_id, test, context.profile.user_id, team_a, team_b
        )
        version = test.version_a
        return ServedList(merged(draft, a, b), recommendation_id, version, version)

    @property
    def is_idle(self) -> bool:
        """Whether no running test concerns the users whom the model knows.

        Each of these users then gets the plain list.
        """
        shadow, settings = self._tests.shadow, self.settings
        return (
            self._tests.interleaving.running is None
            and (shadow is None or shadow.running is None)
            and (settings is None or not settings.changes_known)
        )

    async def find_arm(self, source: str) -> TrialArm | None:
        """The arm of a settings test that a cursor names; None where the cursor names a version."""
        return None if self.settings is None else await self.settings.find_arm(source)

    def record_page(self, arm: TrialArm | None, user: str, version: str) -> str:
        """Counts a next page for an arm while its test runs, else for a version; returns its id."""
        if arm is not None and self.settings is not None:
            recommendation_id = self.settings.record_page(arm, user, version)
            if recommendation_id is not None:
                return recommendation_id
        self.record(version)
        return new_recommendation_id(version)

    def record(self, version: str) -> None:
        """Counts an answer of a version that this router did not build."""
        self._tests.impressions.add_lists(version)

    async def stop(self) -> None:
        """Cancels the observer's tasks."""
        if self._observer is not None:
            await self._observer.stop()


def merged(draft: Draft[int], a: RankedList, b: RankedList) -> RankedList:
    """The drafted list, each item with the entry of the version that contributed the item.

    ``preferred_over_next`` stays only where the next item is from the same version and follows the
    item in that version's list, too.
    """
    from_b = set(draft.teams.b) | (set(b.ids) - set(a.ids))
    entries = [dict(zip(ranked.ids, ranked.entries(), strict=True)) for ranked in (a, b)]
    below = [dict(zip(ranked.ids, ranked.ids[1:], strict=False)) for ranked in (a, b)]
    sides = [(item, int(item in from_b)) for item in draft.merged]
    merged_entries = []
    for rank, (item, side) in enumerate(sides, 1):
        entry = entries[side][item] | {"rank": rank}
        if sides[rank : rank + 1] != [(below[side].get(item), side)]:
            entry["preferred_over_next"] = None
        merged_entries.append(entry)
    return RankedList.of(merged_entries, draft.merged)


def is_tested(test: RunningABTest, context: RecommendationContext, model: LoadedModel) -> bool:
    """Whether a test of two versions concerns a request."""
    return (
        context.query.model is None
        and model.version == test.version_a
        and context.user_key_by(model) is not NEWCOMER
        and context.user != NOBODY
    )


def log_failure(test: RunningABTest, error: BaseException) -> None:
    """Logs that the second version did not answer."""
    reason = error.code if isinstance(error, AppError) else type(error).__name__
    log.warning("the other version of a trial failed", trial=test.trial_id, reason=reason)
