"""From a snapshot to what is learned from: positives, what is only seen, dislikes, statements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from app.events.snapshot import EventSnapshot
from app.jobs.training import interactions_of
from ncr_core.data import Interactions
from ncr_core.errors import DataError

Row = tuple[int, int, float]
"""User, item and weight."""


def snapshot_of(events: Sequence[Row], pairs: Sequence[tuple[int, int, int]] = ()) -> EventSnapshot:
    """Each user's events and statements oldest first, a microsecond apart."""
    order = sorted(range(len(events)), key=lambda at: (events[at][0], at))
    rows = [events[at] for at in order]
    stated = sorted(
        ((user, win, lose, at, at) for at, (user, win, lose) in enumerate(pairs)),
        key=lambda row: (row[0], row[3]),
    )
    return EventSnapshot(
        user_id=np.array([row[0] for row in rows], dtype=np.int64),
        item_id=np.array([row[1] for row in rows], dtype=np.int64),
        timestamp=np.array(order, dtype=np.int64),
        weight=np.array([row[2] for row in rows], dtype=np.float32),
        seq=np.array(order, dtype=np.int64),
        preferences=np.array(stated, dtype=np.int64).reshape(-1, 5),
        preference_weight=np.array([0.5 + row[3] for row in stated], dtype=np.float32),
        max_seq=len(events) + len(pairs),
    )


USERS = {user: f"u{user}" for user in range(20)}
ITEMS = {item: f"i{item}" for item in range(1, 20)}


def learned(events: Sequence[Row], pairs: Sequence[tuple[int, int, int]] = ()) -> Interactions:
    return interactions_of(snapshot_of(events, pairs), USERS, ITEMS)


def named(matrix: Interactions, rows: np.ndarray) -> list[tuple[str, ...]]:
    """Users and items by their ids."""
    return [
        (matrix.user_ids[row[0]], *(matrix.item_ids[item] for item in row[1:]))
        for row in rows.tolist()
    ]


def test_where_every_event_says_the_same_nothing_is_weighed() -> None:
    for weight in (1, 3):
        matrix = learned([(2, 5, weight), (1, 4, weight), (1, 5, weight), (1, 4, weight)])
        assert list(matrix.user_ids) == ["u1", "u2"]
        assert list(matrix.item_ids) == ["i4", "i5"]
        assert [matrix.item_ids[i] for i in matrix.items_of(0)] == ["i5", "i4"]
        assert (matrix.weights, matrix.stated) == (None, None)


def test_the_last_word_on_each_item_counts() -> None:
    matrix = learned(
        [
            (1, 1, 3),  # bought,
            (1, 2, 1),
            (1, 1, 1),  # clicked,
            (1, 1, 0),  # seen: liked with weight 3, latest at its click
            (1, 3, 1),
            (1, 3, -2),  # liked, then disliked
            (1, 4, -1),
            (1, 4, 1),  # disliked, then liked
            (1, 5, 0),  # only seen, and nobody says more of it
            (1, 6, 0),
            (2, 6, 1),
            (3, 2, -1),  # of this user there is nothing positive to learn
            (4, 6, 0),
        ]
    )
    assert list(matrix.user_ids) == ["u1", "u2"]
    assert list(matrix.item_ids) == ["i1", "i2", "i3", "i4", "i6"]
    assert [matrix.item_ids[i] for i in matrix.items_of(0)] == ["i2", "i1", "i4"]
    assert matrix.weights is not None
    assert matrix.weights.tolist() == [1, 3, 1, 1]
    assert matrix.stated is not None
    assert named(matrix, matrix.stated.disliked) == [("u1", "i3")]
    assert matrix.stated.disliked_weights.tolist() == [2]
    assert named(matrix, matrix.stated.seen) == [("u1", "i6")]
    assert len(matrix.stated.pairs) == 0


def test_statements_bring_users_and_items_with_them() -> None:
    matrix = learned(
        [(1, 1, 1), (2, 1, 1)],
        [(7, 2, 3), (1, 1, 9), (7, 3, 4), (7, 3, 2), (7, 4, 2)],  # 7: 2>3 is taken back, a cycle
    )
    assert list(matrix.user_ids) == ["u1", "u2", "u7"]
    assert list(matrix.item_ids) == ["i1", "i2", "i3", "i4", "i9"]
    assert np.diff(matrix.indptr).tolist() == [1, 1, 0]
    assert matrix.stated is not None
    assert named(matrix, matrix.stated.pairs) == [
        ("u1", "i1", "i9"),
        ("u7", "i3", "i4"),
        ("u7", "i3", "i2"),
        ("u7", "i4", "i2"),
    ]
    assert matrix.stated.pair_weights.tolist() == [1.5, 2.5, 3.5, 4.5]


def test_what_may_not_be_recommended_is_left_out_everywhere() -> None:
    events = [(1, 1, 1.0), (1, 99, 1.0), (1, 98, -1.0), (1, 97, 0.0)]
    matrix = learned(events, [(1, 1, 99), (1, 99, 1)])
    assert list(matrix.item_ids) == ["i1"]
    assert matrix.stated is None


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "there are no events"),
        ([(1, 99, 1.0)], "may be recommended"),
        ([(1, 1, 0.0), (1, 2, -1.0), (2, 1, 1.0), (2, 1, -1.0)], "no event is positive"),
    ],
)
def test_nothing_to_learn_from(events: Sequence[Row], said: str) -> None:
    with pytest.raises(DataError, match=said):
        learned(events, [(1, 1, 2)])


def test_it_is_what_a_loop_makes_of_it() -> None:
    rng = np.random.default_rng(7)
    for _ in range(50):
        n = int(rng.integers(1, 60))
        events = [
            (int(u), int(i), float(w))
            for u, i, w in zip(
                rng.integers(1, 5, n),
                rng.integers(1, 8, n),
                rng.choice([1.0, 2.0, 0.0, -1.0], n),
                strict=True,
            )
        ]
        last: dict[tuple[int, int], float] = {}
        best: dict[tuple[int, int], float] = {}
        for user, item, weight in events:
            if weight:
                last[user, item] = weight
            best[user, item] = max(best.get((user, item), 0), weight)
        liked = {pair: best[pair] for pair, weight in last.items() if weight > 0}
        if not liked:
            continue
        matrix = learned(events)
        keys = zip(matrix.users.tolist(), matrix.items.tolist(), strict=True)
        found = [(matrix.user_ids[u], matrix.item_ids[i]) for u, i in keys]
        assert sorted(found) == sorted((f"u{u}", f"i{i}") for u, i in liked)
        if matrix.weights is not None:
            weights = dict(zip(found, matrix.weights.tolist(), strict=True))
            assert weights == {(f"u{u}", f"i{i}"): w for (u, i), w in liked.items()}
        else:
            assert len(set(liked.values())) == 1
        known = {u for u, _ in liked}
        against = {(f"u{u}", f"i{i}") for (u, i), w in last.items() if w < 0 and u in known}
        stated = [] if matrix.stated is None else named(matrix, matrix.stated.disliked)
        assert set(stated) == against
