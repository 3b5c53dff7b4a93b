"""What a user's vector is fitted to, by what they did before a training and after it."""

from __future__ import annotations

import numpy as np

from app.events.event_weights import EventWeights
from app.events.profile import Profile
from app.inference.loaded_model import ItemIndex
from app.recommend.context import fold_in_evidence

ITEMS = ItemIndex(
    seq=1,
    internal=np.arange(10),
    visible=np.ones(10, dtype=np.bool_),
    visible_digest="e",
    row_of=np.arange(10),
)


def profile(*events: tuple[int, float]) -> Profile:
    """Of items and weights, with the seqs 1, 2, …"""
    items, weights = zip(*events, strict=True)
    seqs = np.arange(1, len(events) + 1)
    return Profile(
        user_id=1,
        last_seq=len(events),
        seen=np.array(items),
        seqs=seqs,
        weights=np.array(weights, dtype=np.float32),
        timestamps=seqs,
        preferences=np.zeros((0, 4), dtype=np.int64),
        event_seq=len(events),
        catalog_seq=1,
        event_weights=EventWeights.parse(None),
    )


def test_what_was_only_seen_again_is_no_news() -> None:
    """Of what was bought, or disliked, before the training; what came since is fitted to."""
    user = profile((3, 3.0), (4, -1.0), (3, 0.0), (4, 0.0), (5, 0.0))
    assert fold_in_evidence(user, ITEMS, after=2) is None
    news = fold_in_evidence(profile((3, 3.0), (4, -1.0), (3, 0.0), (6, 1.0)), ITEMS, after=2)
    assert news is not None
    assert (news.items.tolist(), news.disliked.tolist()) == ([6], [])
    again = fold_in_evidence(profile((3, 3.0), (4, -1.0), (3, 1.0)), ITEMS, after=2)
    assert again is not None
    assert again.items.tolist() == [3]
    every = fold_in_evidence(user, ITEMS, after=0)
    assert every is not None
    assert (every.items.tolist(), every.disliked.tolist()) == ([3], [4])
