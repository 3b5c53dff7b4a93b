"""Settings tests: a share of the users get lists by other settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from app.ab_tests.schemas import RunningABTest
from app.ab_tests.settings_trials import SettingsTrials, TrialArm
from app.core.ids import new_recommendation_id
from app.inference.loaded_model import LoadedModel
from app.inference.model_manager import ModelManager
from app.recommend.basket import NOBODY
from app.recommend.context import NEWCOMER, RecommendationContext
from app.recommend.list_builder import ListBuilder
from app.recommend.response import RankedList
from app.recommend.schemas import RecommendationQuery

FOR_NEWCOMERS = frozenset({"exploration"})
"""The settings that shape newcomers' lists. All other settings shape the lists of users whom a
model knows."""


class ArmList(NamedTuple):
    """A list of an arm."""

    arm: TrialArm
    context: RecommendationContext
    """The request with the settings of the arm."""
    model: LoadedModel
    ranked: RankedList


def arm_query(query: RecommendationQuery, settings: Mapping[str, Any]) -> RecommendationQuery:
    """The query with an arm's settings; the request's own parameters take precedence."""
    changed = {name: value for name, value in settings.items() if name not in query.given}
    return replace(query, **changed) if changed else query


class SettingsTester:
    """Answers the users of both arms of the running trial, and counts their lists."""

    def __init__(self, tests: SettingsTrials, models: ModelManager, lists: ListBuilder) -> None:
        self._tests = tests
        self._models = models
        self._lists = lists

    @property
    def changes_known(self) -> bool:
        """Whether a trial runs that changes the lists of users whom the model knows."""
        test = self._tests.running
        return test is not None and (
            test.version_a != test.version_b or bool((test.settings or {}).keys() - FOR_NEWCOMERS)
        )

    async def build(self, context: RecommendationContext, model: LoadedModel) -> ArmList | None:
        """The list of the user's arm.

        None for a request that takes no part. Such a request names its version or all settings of
        the trial, or the settings do not shape the user's list. Before this server has loaded the
        second version, no request of either arm takes part.
        """
        test = self._tests.running
        if test is None or not _concerns(test, context, model):
            return None
        same = test.version_b == test.version_a
        other = model if same else self._models.at_hand(test.version_b)
        if other is None:
            return None
        arm = self._tests.arm_of(test, context.user)
        chosen = other if arm.arm == "b" else model
        query = arm_query(context.query, arm.settings)
        context = context if query is context.query else replace(context, query=query)
        ranked = await self._lists.build(context, chosen)
        self._tests.record(arm, context.user)
        return ArmList(arm, context, chosen, ranked)

    async def find_arm(self, source: str) -> TrialArm | None:
        """The arm that a cursor names; None where the cursor names a version."""
        return await self._tests.find_arm(source)

    def record_page(self, arm: TrialArm, user: str, version: str) -> str | None:
        """Counts a next page of an arm's list, and returns a new recommendation id.

        None, without a count, where the trial has ended, another version ranked, or the list has
        no user.
        """
        if not self._tests.is_running(arm) or version != arm.version or user == NOBODY:
            return None
        self._tests.record(arm, user)
        return new_recommendation_id(arm.source)


def _concerns(test: RunningABTest, context: RecommendationContext, model: LoadedModel) -> bool:
    """Whether a trial shapes the list of a request."""
    query = context.query
    if query.model is not None or model.version != test.version_a or context.user == NOBODY:
        return False
    is_newcomer = context.user_key is NEWCOMER
    if not is_newcomer and test.version_b != test.version_a:
        return True
    return any(
        (name in FOR_NEWCOMERS) == is_newcomer and name not in query.given
        for name in test.settings or {}
    )
