"""Items that a user's lists leave out: seen items by a rule, and recently shown items."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from app.core.requests import MAX_TIMESTAMP_US
from app.events.profile import Profile
from app.events.seen_rule import ALWAYS_SEEN, SeenRule
from app.events.service import EventService
from app.events.shown_lists import hidden_items
from app.recommend.basket import NOBODY
from app.recommend.schemas import RecommendationQuery

_NO_IDS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class LeftOut:
    """The items left out for one user at one moment, beside the items that the query excludes."""

    withheld: NDArray[np.int64] | None = None
    """(k,) internal ids of the seen and disliked items that stay out; None: all stay out."""
    last_seq: int = 0
    """The user's last seq that ``withheld`` includes."""
    rule_state: Hashable = None
    """The key of ``withheld`` beside the user's events; None where the events alone decide."""
    hidden: NDArray[np.int64] = field(default_factory=lambda: _NO_IDS)
    """(h,) internal ids of items that were shown and got no later event of the user."""
    remembers: bool = False
    """Whether the service records the shown items of the list."""

    @property
    def state(self) -> Hashable:
        """The key of the rules' effect on a list; None where the rules change nothing."""
        if not len(self.hidden):
            return self.rule_state
        shown = hashlib.blake2b(np.sort(self.hidden).tobytes(), digest_size=16).digest()
        return self.rule_state, shown


class LeftOutItems:
    """Applies the rules of a request, or the rules of the settings where the request has none."""

    def __init__(self, events: EventService) -> None:
        self._events = events

    def has_rules(self, query: RecommendationQuery) -> bool:
        """Whether a list depends on more than the user's events and the query."""
        return self._rule(query) is not None or self._hidden_us(query) > 0

    async def of(
        self,
        user: str,
        profile: Profile,
        query: RecommendationQuery,
        at_us: int,
        *,
        rewound: bool = False,
    ) -> LeftOut | None:
        """The items that rules leave out; None where no rule applies.

        Args:
            user: the client's id.
            profile: the user's own profile, without a basket, possibly of an earlier seq.
            query: the parameters of the list.
            at_us: the time that ages are counted from, in microseconds since 1970.
            rewound: whether ``at_us`` is in the past, so that lists shown later do not count.
        """
        rule, hidden_us = self._rule(query), self._hidden_us(query)
        if user == NOBODY or (rule is None and hidden_us == 0):
            return None
        withheld: NDArray[np.int64] | None = None
        state: Hashable = None
        if rule is not None and len(profile.seen):
            withheld, state = await self._withheld(user, profile, rule, at_us)
        hidden = _NO_IDS
        if hidden_us > 0:
            shown = await self._events.shown.of(user)
            # Another server's clock may be ahead.
            until_us = at_us if rewound else MAX_TIMESTAMP_US
            hidden = hidden_items(shown, profile, at_us - hidden_us, until_us)
        return LeftOut(withheld, profile.last_seq, state, hidden, hidden_us > 0)

    def remember(
        self, user: str, profile: Profile, left: LeftOut | None, ids: Sequence[int]
    ) -> None:
        """Records a served list where the user's next lists depend on it."""
        if left is not None and left.remembers:
            self._events.shown.add(user, profile.user_id, profile.event_seq, ids)

    def _rule(self, query: RecommendationQuery) -> SeenRule | None:
        if not query.exclude_seen:
            return None
        rule = self._events.seen_rule if query.seen is None else query.seen
        return None if rule is ALWAYS_SEEN or rule.never_ends else rule

    def _hidden_us(self, query: RecommendationQuery) -> int:
        return self._events.hidden_us if query.hide_shown is None else query.hide_shown

    async def _withheld(
        self, user: str, profile: Profile, rule: SeenRule, at_us: int
    ) -> tuple[NDArray[np.int64] | None, Hashable]:
        history = await self._events.seen_histories.get(user, profile)
        read_at = history.last_seq
        if read_at != profile.last_seq:
            history = history.until(profile.last_seq)
        times = history.return_times(rule, profile.disliked)
        returned = times.returned(at_us)
        if returned == 0:
            return None, None  # lists, and candidates found ahead, are those without a rule
        return times.items[returned:], (rule.key, returned, read_at)
