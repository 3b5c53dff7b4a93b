"""Feedback resolution, by itself and in the profiles of both databases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.events.profile import latest_preferences, resolve_feedback
from app.wiring import Services
from tests.app.events.support import DAY, add, event, item_names, prefer

pytestmark = pytest.mark.anyio


def test_the_latest_weight_decides_and_the_highest_weight_counts() -> None:
    items = np.array([1, 2, 3, 1, 2, 4, 1, 3, 5, 5, 5])
    weights = np.array([3, 1, -2, 1, -1, 0, 0, 2, 1, -1, 0], dtype=np.float32)
    feedback = resolve_feedback(items, weights)
    # 1: bought, clicked, then only seen. 2: clicked, then disliked. 3: disliked, then liked.
    assert feedback.liked.tolist() == [3, 7]
    assert feedback.liked_weights.tolist() == [3, 2]
    assert feedback.disliked.tolist() == [4, 9]
    assert feedback.disliked_weights.tolist() == [1, 1]
    assert feedback.only_seen.tolist() == [5]
    empty = resolve_feedback(items[:0], weights[:0])
    assert len(empty.liked) == len(empty.disliked) == len(empty.only_seen) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([2.0, 1.0, 0.0, -1.0, -3.0]))))
def test_resolved_feedback_equals_a_loop_over_events(events: list[tuple[int, float]]) -> None:
    items = np.array([item for item, _ in events], dtype=np.int64)
    weights = np.array([weight for _, weight in events], dtype=np.float32)
    feedback = resolve_feedback(items, weights)
    positive, negative, seen = {}, {}, {}
    for position, (item, weight) in enumerate(events):
        seen[item] = position
        if weight > 0:
            positive[item] = position
        if weight < 0:
            negative[item] = position
    liked = sorted(p for item, p in positive.items() if p > negative.get(item, -1))
    assert feedback.liked.tolist() == liked
    assert feedback.liked_weights.tolist() == [
        max(weight for item, weight in events if item == items[position]) for position in liked
    ]
    disliked = sorted(p for item, p in negative.items() if p > positive.get(item, -1))
    assert feedback.disliked.tolist() == disliked
    assert feedback.disliked_weights.tolist() == [-weights[position] for position in disliked]
    only_seen = sorted(p for item, p in seen.items() if item not in positive.keys() | negative)
    assert feedback.only_seen.tolist() == only_seen


def test_the_latest_preference_about_the_same_items_wins() -> None:
    pairs = np.array([[1, 2], [2, 3], [2, 1], [3, 1], [2, 3]])
    assert latest_preferences(pairs).tolist() == [2, 3, 4]  # 2 > 1, 3 > 1, 2 > 3
    of_users = np.array([[7, 1, 2], [8, 2, 1], [7, 2, 1]])
    assert latest_preferences(of_users).tolist() == [1, 2]
    assert latest_preferences(pairs[:0]).tolist() == []


async def test_a_profile_has_likes_and_dislikes_with_decayed_weights(weighted: Services) -> None:
    await add(
        weighted,
        event("u", "late", "purchase", day=20),  # the newest, though it came first
        event("u", "old", "click", day=0),
        event("u", "old", "view", day=15),
        event("u", "turned", "purchase", day=1),
        event("u", "turned", "dislike", day=2),
        event("u", "back", "rating", 1.0, day=3),
        event("u", "back", "rating", 4.5, day=10),
        event("u", "back", "rating", 3.0, day=19),
        event("u", "shrug", "rating", 3.5, day=4),
        event("u", "shrug", "view", day=5),
        event("u", "bad", "rating", 2.0, day=6),
    )
    profile = await weighted.events.profiles.get("u")
    assert await item_names(weighted, profile.positives) == ["old", "back", "late"]
    assert profile.positive_weights.tolist() == [0.25, 0.5, 3.0]
    assert await item_names(weighted, profile.disliked) == ["turned", "bad"]
    assert profile.disliked_weights == pytest.approx([2 * 2**-1.8, 2**-1.4])
    assert len(profile.seen) == 11
    assert profile.weights.tolist() == [3, 1, 0, 3, -2, -1, 1, 0, 0, 0, -1]
    assert profile.timestamps.tolist()[:2] == [20 * DAY, 0]


async def test_by_default_all_events_have_the_same_weight(services: Services) -> None:
    events = [event("u", i, "anything", 1.0, day) for day, i in enumerate("abca")]
    await add(services, *events)
    profile = await services.events.profiles.get("u")
    assert await item_names(services, profile.positives) == ["b", "c", "a"]
    assert profile.positive_weights.tolist() == [1, 1, 1]
    assert len(profile.disliked) == 0


async def test_the_latest_preference_in_a_profile_is_by_time_not_by_seq(services: Services) -> None:
    await add(services, *(event("x", item) for item in "abc"))
    await prefer(services, "ab", at=20)
    await prefer(services, "bc", "ca", "ac", at=10)
    await prefer(services, "ba", at=0)  # said before the first, though it came last
    profile = await services.events.profiles.get("u")
    assert await item_names(services, profile.pairs) == ["b", "c", "a", "c", "a", "b"]
    assert not profile.is_newcomer
    assert (profile.first_seq, profile.latest_seq, len(profile.seen)) == (4, 8, 0)


async def test_resolved_feedback_is_reused_while_the_user_does_not_change(
    services: Services,
) -> None:
    await add(services, event("u", "a"))
    first = await services.events.profiles.get("u")
    positives = first.positives
    await add(services, event("v", "a"))
    later = await services.events.profiles.get("u")
    assert (first.event_seq, later.event_seq) == (1, 2)
    assert later.positives is positives
    unknown = await services.events.profiles.get("nobody")
    assert (unknown.is_newcomer, unknown.first_seq, unknown.latest_seq) == (True, 0, 0)
    assert len(unknown.positives) == len(unknown.pairs) == len(unknown.disliked) == 0
