"""Trials of a second version on what is asked for: interleaved lists, and shadow requests."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from app.core.errors import AppError
from app.core.logging import get_logger
from app.recommend.asking import NEWCOMER, Asked
from app.recommend.batcher import Batcher
from app.recommend.entries import RankedList, listed, new_recommendation_id
from app.recommend.lists import Lists
from app.recommend.model_host import ModelHost
from app.recommend.serving import ServingModel
from app.trials.schemas import RunningTrial
from app.trials.service import TrialService
from ncr_core.evaluation.interleaving import Draft, team_draft

log = get_logger(__name__)

MOST_SHADOWS = 4  # that may be under way


class Trying:
    """What a request has to do with the trials that run.

    A trial is on while the version it began beside is the one that answers, for requests that leave
    the version to the service, of users that a model can know something of.
    """

    def __init__(
        self, trials: TrialService, host: ModelHost, lists: Lists, batcher: Batcher
    ) -> None:
        self._trials = trials
        self._host = host
        self._lists = lists
        self._batcher = batcher
        self._shadows: set[asyncio.Task[None]] = set()

    def interleaving_for(self, asked: Asked, model: ServingModel) -> RunningTrial | None:
        """The trial that this answer is part of; None where it is none."""
        trial = self._trials.interleaving
        if trial is None or not _on(trial, asked, model):
            return None
        return trial if self._trials.takes_part(trial, asked.user) else None

    async def interleaved(
        self, trial: RunningTrial, asked: Asked, model: ServingModel
    ) -> tuple[RankedList | None, str | None]:
        """A list drafted from those of both versions, and its recommendation id, which begins with
        the trial's. Where the second version cannot answer, the first one's list and None.
        """
        other = self._host.others.at_hand(trial.version_b)
        if other is None:
            return None, None
        a, b = await asyncio.gather(
            self._lists.of(asked, model), self._lists.of(asked, other), return_exceptions=True
        )
        if isinstance(a, BaseException):
            raise a
        if isinstance(b, BaseException):
            _log_failure(trial, b)
            return a, None
        recommendation_id = new_recommendation_id(trial.trial_id)
        coin = random.Random(recommendation_id)  # noqa: S311 - so that it can be tossed again
        draft = team_draft(a.ids, b.ids, asked.filters.n, coin)
        team_a, team_b = draft.teams
        self._trials.record(recommendation_id, trial, asked.profile.user_id, team_a, team_b)
        return merged(draft, a, b), recommendation_id

    def served(self, asked: Asked, model: ServingModel, found: RankedList) -> None:
        """A version's own list is given out: counts it, and perhaps ranks for it once more, with
        the version that is tried in the shadow.
        """
        self._trials.served(model.version)
        trial = self._trials.shadow
        if (
            trial is None
            or not _on(trial, asked, model)
            # Nobody waits for it, and nobody is to wait because of it.
            or self._batcher.busy
            or len(self._shadows) >= MOST_SHADOWS
            or not self._trials.takes_part(trial, asked.user)
        ):
            return
        other = self._host.others.at_hand(trial.version_b)
        if other is not None:
            task = asyncio.create_task(self._shadow(trial, asked, other, found))
            self._shadows.add(task)
            task.add_done_callback(self._shadows.discard)

    def counted(self, version: str) -> None:
        """Something else than a list of its own is given out by a version."""
        self._trials.served(version)

    async def stop(self) -> None:
        """Lets go of the shadows that are under way."""
        shadows = list(self._shadows)
        for task in shadows:
            task.cancel()
        if shadows:
            await asyncio.wait(shadows)

    async def _shadow(
        self, trial: RunningTrial, asked: Asked, other: ServingModel, found: RankedList
    ) -> None:
        try:
            seen = await self._lists.of(replace(asked, gone=None, on_slow=None), other)
        except Exception as error:
            _log_failure(trial, error)
        else:
            self._trials.observe_shadow(trial, found.ids, seen.ids)


def merged(draft: Draft[int], a: RankedList, b: RankedList) -> RankedList:
    """The drafted list: each item with what the version that put it there says of it.

    By how much an item is preferred to the one below is known only where that is the one below it
    in the same version's list.
    """
    of_b = set(draft.teams.b) | (set(b.ids) - set(a.ids))
    entries = [dict(zip(of.ids, of.entries(), strict=True)) for of in (a, b)]
    below = [dict(zip(of.ids, of.ids[1:], strict=False)) for of in (a, b)]
    places = [(item, int(item in of_b)) for item in draft.merged]
    made = []
    for rank, (item, side) in enumerate(places, 1):
        entry = entries[side][item] | {"rank": rank}
        if places[rank : rank + 1] != [(below[side].get(item), side)]:
            entry["preferred_over_next"] = None
        made.append(entry)
    return listed(made, draft.merged)


def _on(trial: RunningTrial, asked: Asked, model: ServingModel) -> bool:
    return (
        asked.filters.model is None
        and model.version == trial.version_a
        and asked.state is not NEWCOMER
    )


def _log_failure(trial: RunningTrial, error: BaseException) -> None:
    reason = error.code if isinstance(error, AppError) else type(error).__name__
    log.warning("the other version did not answer", trial=trial.trial_id, reason=reason)
