"""From a snapshot of events to the interaction matrix, and to what an incumbent knew of it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.events.event_weights import DAY_MICROSECONDS, EventWeights
from app.events.resolved_events import resolve_events
from app.events.training_snapshot import TrainingSnapshot
from app.training.gate import known_at
from ncr_core.checkpoint import EvaluationSnapshot
from ncr_core.comparison import Incumbent, fair_hold_out, leaked_users
from ncr_core.data import Interactions, leave_latest_out
from ncr_core.data.interactions import BoolArray, compact
from ncr_core.errors import DataError
from ncr_core.models import ModelConfig
from tests.app.events.given_rows import GivenRows
from tests.app.events.test_training_snapshot import assert_same
from tests.ncr_core.conftest import wild_model

Row = tuple[int, int, float]
"""User, item and weight."""
USERS = {user: f"u{user}" for user in range(20)}
ITEMS = {item: f"i{item}" for item in range(1, 20)}
MICROSECOND = 1 / DAY_MICROSECONDS


def rows_of(events: Sequence[Row], pairs: Sequence[tuple[int, int, int]] = ()) -> GivenRows:
    """The events and statements of each user oldest first, a microsecond apart."""
    rows = [(user, item, at, weight, at) for at, (user, item, weight) in enumerate(events)]
    stated = [(user, win, lose, at, at) for at, (user, win, lose) in enumerate(pairs)]
    return GivenRows(rows, sorted(stated, key=lambda row: (row[0], row[3])), USERS, ITEMS)


def matrix_of(
    events: Sequence[Row],
    pairs: Sequence[tuple[int, int, int]] = (),
    half_life_days: float | None = None,
) -> Interactions:
    with (
        tempfile.TemporaryDirectory() as folder,
        rows_of(events, pairs).snapshot(Path(folder), 1, half_life_days) as snapshot,
    ):
        return snapshot.interactions()


def named(matrix: Interactions, rows: np.ndarray) -> list[tuple[str, ...]]:
    """Users and items by their ids."""
    return [
        (matrix.user_ids[row[0]], *(matrix.item_ids[item] for item in row[1:]))
        for row in rows.tolist()
    ]


def test_equal_weights_give_an_unweighted_matrix() -> None:
    for weight in (1, 3):
        matrix = matrix_of([(2, 5, weight), (1, 4, weight), (1, 5, weight), (1, 4, weight)])
        assert list(matrix.user_ids) == ["u1", "u2"]
        assert list(matrix.item_ids) == ["i4", "i5"]
        assert [matrix.item_ids[i] for i in matrix.items_of(0)] == ["i5", "i4"]
        assert (matrix.weights, matrix.feedback) == (None, None)


def test_times_are_those_of_the_events_in_seconds() -> None:
    matrix = matrix_of([(1, 2, 1.0), (2, 2, 1.0), (1, 3, 1.0), (1, 2, 2.0), (1, 4, -1.0)])
    assert named(matrix, np.stack([matrix.users, matrix.items], axis=1)) == [
        ("u1", "i3"),
        ("u1", "i2"),
        ("u2", "i2"),
    ]
    assert matrix.times is not None
    assert matrix.times.tolist() == [2e-6, 3e-6, 1e-6]


def test_the_latest_feedback_on_each_item_counts() -> None:
    matrix = matrix_of(
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
    assert matrix.feedback is not None
    assert named(matrix, matrix.feedback.disliked) == [("u1", "i3")]
    assert matrix.feedback.disliked_weights.tolist() == [2]
    assert named(matrix, matrix.feedback.seen) == [("u1", "i6")]
    assert len(matrix.feedback.pairs) == 0


def test_stated_preferences_add_users_and_items() -> None:
    matrix = matrix_of(
        [(1, 1, 1), (2, 1, 1)],
        [(7, 2, 3), (1, 1, 9), (7, 3, 4), (7, 3, 2), (7, 4, 2)],  # 7: 2>3 is taken back, a cycle
        MICROSECOND,
    )
    assert list(matrix.user_ids) == ["u1", "u2", "u7"]
    assert list(matrix.item_ids) == ["i1", "i2", "i3", "i4", "i9"]
    assert np.diff(matrix.indptr).tolist() == [1, 1, 0]
    assert matrix.feedback is not None
    assert named(matrix, matrix.feedback.pairs) == [
        ("u1", "i1", "i9"),
        ("u7", "i3", "i4"),
        ("u7", "i3", "i2"),
        ("u7", "i4", "i2"),
    ]
    assert matrix.feedback.pair_weights.tolist() == [0.125, 0.25, 0.5, 1]


def test_items_that_may_not_be_recommended_are_left_out_everywhere() -> None:
    events = [(1, 1, 1.0), (1, 99, 1.0), (1, 98, -1.0), (1, 97, 0.0)]
    matrix = matrix_of(events, [(1, 1, 99), (1, 99, 1)])
    assert list(matrix.item_ids) == ["i1"]
    assert matrix.feedback is None


def test_users_who_were_erased_since_the_snapshot_are_left_out_everywhere() -> None:
    events = [(1, 1, 1.0), (99, 1, 1.0), (99, 2, -1.0), (99, 3, 0.0), (2, 2, 1.0)]
    matrix = matrix_of(events, [(99, 1, 2), (2, 1, 2)])
    assert list(matrix.user_ids) == ["u1", "u2"]
    assert matrix.feedback is not None
    assert named(matrix, matrix.feedback.pairs) == [("u2", "i1", "i2")]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "training needs events"),
        ([(1, 99, 1.0)], "may be recommended"),
        ([(1, 1, 0.0), (1, 2, -1.0), (2, 1, 1.0), (2, 1, -1.0)], "no event is positive"),
    ],
)
def test_events_without_anything_to_learn_from_are_an_error(
    events: Sequence[Row], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        matrix_of(events, [(1, 1, 2)])


def test_the_matrix_equals_that_of_a_plain_loop() -> None:
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
        matrix = matrix_of(events)
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
        stated = [] if matrix.feedback is None else named(matrix, matrix.feedback.disliked)
        assert set(stated) == against


PEOPLE = {1: "ann", 2: "ben", 3: "cem", 4: "dan"}
THINGS = {n: f"i{n}" for n in range(1, 9)}
# Ann said something about an item before the model was trained and did something with it later;
# ben said it later; cem preferred the other one; dan said nothing.
EVENTS = [(user, item, at) for at, (user, item) in enumerate(
    [(u, i) for u in PEOPLE for i in (1, 2, 3)] + [(u, 4) for u in PEOPLE], 1
)]  # fmt: skip
TRAINED_SEQ = 100
PREFERENCES = [(1, 4, 5, 0, 50), (2, 4, 5, 0, 150), (3, 5, 4, 0, 60), (4, 7, 8, 0, 70)]


@pytest.fixture
def snapshot(tmp_path: Path) -> Iterator[TrainingSnapshot]:
    rows = [(user, item, at, 1.0, at + 100 * (item == 4)) for user, item, at in EVENTS]
    with GivenRows(rows, PREFERENCES, PEOPLE, THINGS).snapshot(tmp_path, parts=3) as made:
        yield made


def pairs(matrix: Interactions) -> set[tuple[str, str]]:
    rows = zip(matrix.users.tolist(), matrix.items.tolist(), strict=True)
    return {(matrix.user_ids[user], matrix.item_ids[item]) for user, item in rows}


def everyone(matrix: Interactions) -> BoolArray:
    return np.ones(matrix.n_users, dtype=np.bool_)


def test_known_at_tells_events_and_stated_preferences_up_to_a_seq(
    snapshot: TrainingSnapshot,
) -> None:
    interactions = snapshot.interactions()
    named = snapshot.named_items(interactions, everyone(interactions))
    done, stated = known_at(named, interactions, everyone(interactions), TRAINED_SEQ)
    assert pairs(done) == {(user, f"i{n}") for user in PEOPLE.values() for n in (1, 2, 3)}
    assert pairs(stated) == {("ann", "i4"), ("cem", "i4")}
    done, stated = known_at(named, interactions, everyone(interactions), 200)
    assert pairs(done) == pairs(interactions)
    assert pairs(stated) == {("ann", "i4"), ("ben", "i4"), ("cem", "i4")}
    cem = np.array([user == "cem" for user in interactions.user_ids])
    done, stated = known_at(named, interactions, cem, 200)
    assert {user for user, _ in pairs(done) | pairs(stated)} == {"cem"}


@pytest.mark.parametrize("kept", [["ann"], ["cem", "ben"], []])
def test_what_some_users_named_tells_the_same_about_them(
    snapshot: TrainingSnapshot, kept: list[str]
) -> None:
    interactions = snapshot.interactions()
    users = np.isin(list(interactions.user_ids), kept)
    of_all = snapshot.named_items(interactions, everyone(interactions))
    of_some = snapshot.named_items(interactions, users)
    assert len(of_some.events) == 4 * len(kept)
    for seq in (3, TRAINED_SEQ, 200):
        assert [pairs(x) for x in known_at(of_some, interactions, users, seq)] == [
            pairs(x) for x in known_at(of_all, interactions, users, seq)
        ]


def test_what_users_named_is_of_the_matrix_that_a_training_has_left(
    snapshot: TrainingSnapshot,
) -> None:
    """The training may drop rare items, and number all others anew."""
    whole = snapshot.interactions()
    fewer = compact(whole.select(whole.items != whole.item_ids.index("i1")))
    assert list(fewer.item_ids) == ["i2", "i3", "i4"]
    named = snapshot.named_items(fewer, everyone(fewer))
    done, stated = known_at(named, fewer, everyone(fewer), TRAINED_SEQ)
    assert pairs(done) == {(user, f"i{n}") for user in PEOPLE.values() for n in (2, 3)}
    assert pairs(stated) == {("ann", "i4"), ("cem", "i4")}


@pytest.mark.parametrize("name", ["events-0", "users-0", "items", "resolved-0.npz"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_files_that_disappeared_are_an_error_and_not_a_smaller_matrix(
    tmp_path: Path, name: str, is_cut: bool
) -> None:
    given = rows_of([(user, item, 1.0) for user in (1, 2, 3) for item in (1, 2)])
    with TrainingSnapshot(tmp_path, 1) as snapshot:
        snapshot.fill(given, len(given.rows))
        if name.startswith("resolved"):
            snapshot.resolve(EventWeights({}, 1.0))
        (file,) = tmp_path.glob(f".ncr-events-*/{name}")
        content = file.read_bytes()
        file.unlink()
        if is_cut:
            file.write_bytes(content[:-40])

        def resolve() -> None:
            snapshot.resolve(EventWeights({}, 1.0))

        with pytest.raises(OSError, match=re.escape(name)):
            (snapshot.interactions if name.startswith("resolved") else resolve)()


def test_a_closed_snapshot_names_no_items(tmp_path: Path) -> None:
    with rows_of([(1, 1, 1.0), (1, 2, 1.0)]).snapshot(tmp_path) as snapshot:
        matrix = snapshot.interactions()
        snapshot.close()
        with pytest.raises(FileNotFoundError):
            snapshot.named_items(matrix, everyone(matrix))


def test_a_stated_preference_about_a_held_out_item_counts_as_learned(
    snapshot: TrainingSnapshot,
) -> None:
    interactions = snapshot.interactions()
    model = wild_model(
        ModelConfig(kind="nbpr", factors=3), interactions.n_users, interactions.n_items
    )
    held_out = np.full((interactions.n_users, 2), -1)
    for user in range(interactions.n_users):  # as it was held out then: the items 3 and 2
        held_out[user] = [interactions.item_ids.index("i3"), interactions.item_ids.index("i2")]
    evaluated = EvaluationSnapshot(model, np.arange(interactions.n_users), held_out)
    named = snapshot.named_items(interactions, everyone(interactions))
    done, stated = known_at(named, interactions, everyone(interactions), TRAINED_SEQ)
    incumbent = Incumbent(evaluated, interactions.user_ids, interactions.item_ids, done, stated)
    split = leave_latest_out(interactions)
    found = fair_hold_out(split, incumbent)
    assert {interactions.user_ids[user] for user in found.users} == {"ben", "dan"}
    assert found.excluded["held-out item learned by the incumbent"] == 2
    learned = leaked_users(split, incumbent)  # and so a training that goes on from it
    assert {interactions.user_ids[user] for user in np.flatnonzero(learned)} == {"ann", "cem"}

    # What was held out then was in nothing that the copy was trained on: not in what was said.
    held_out[:, 1] = interactions.item_ids.index("i4")
    assert not leaked_users(split, incumbent).any()


def test_a_stated_preference_does_not_count_as_an_event(snapshot: TrainingSnapshot) -> None:
    """A user who did something with an item since is behind, whatever was said about it before."""
    interactions = snapshot.interactions()
    model = wild_model(
        ModelConfig(kind="nbpr", factors=3), interactions.n_users, interactions.n_items
    )
    evaluated = EvaluationSnapshot(
        model, np.arange(interactions.n_users), np.full((interactions.n_users, 2), -1)
    )
    none = interactions.select(np.zeros(interactions.nnz, dtype=np.bool_))
    split = leave_latest_out(interactions)
    stated = interactions.select(~np.isin(interactions.items, [split.test[0], split.validation[0]]))
    incumbent = Incumbent(evaluated, interactions.user_ids, interactions.item_ids, none, stated)
    assert fair_hold_out(split, incumbent).has_new_items.all()


def all_at_once(given: GivenRows, half_life_days: float | None) -> Interactions | None:
    """The matrix by the events of all users in one piece; None without a like."""
    rows = sorted(given.rows, key=lambda row: (row[0], row[2], row[4]))
    rows = [row for row in rows if row[0] in given.user_ids and row[1] in given.item_ids]
    stated = [
        row
        for row in given.stated
        if row[0] in given.user_ids and {row[1], row[2]} <= given.item_ids.keys()
    ]
    latest = max([row[2] for row in given.rows] + [row[3] for row in given.stated], default=0)
    decay = EventWeights({}, 1.0, half_life_days).decay
    columns = np.array([row[:3] for row in rows], dtype=np.int64).reshape(-1, 3)
    said = np.array(stated, dtype=np.int64).reshape(-1, 5)
    weights = np.array([row[3] for row in rows], dtype=np.float32)
    if half_life_days is not None:
        weights *= decay(columns[:, 2], latest)
    resolved = resolve_events(
        columns[:, :2], weights, columns[:, 2], said[:, :3], decay(said[:, 3], latest)
    )
    if len(resolved.liked) == 0:
        return None
    return resolved.interactions(
        resolved.users,
        resolved.items,
        [given.user_ids[user] for user in resolved.users.tolist()],
        [given.item_ids[item] for item in resolved.items.tolist()],
        weighted=bool(np.ptp(resolved.liked_weights) > 0),
    )


WEIGHTS = (-1.0, -0.25, 0.0, 0.5, 1.0, 1.0, 2.0)
ROWS = st.tuples(st.integers(0, 9), st.integers(0, 8), st.sampled_from(WEIGHTS))
STATED = st.tuples(st.integers(0, 9), st.integers(0, 8), st.integers(0, 8))


@pytest.mark.slow
@given(
    events=st.lists(ROWS, max_size=40),
    stated=st.lists(STATED, max_size=10),
    equal=st.booleans(),
    parts=st.integers(1, 6),
    half_life=st.sampled_from([None, 8 * MICROSECOND]),
)
@settings(max_examples=150, deadline=None)
def test_parts_give_the_matrix_of_all_users_at_once(
    events: list[Row],
    stated: list[tuple[int, int, int]],
    equal: bool,
    parts: int,
    half_life: float | None,
) -> None:
    """Also for users of preferences alone, and with throw-away users and deleted items (0)."""
    if equal:
        events = [(user, item, 1.0) for user, item, _ in events]
    rows = rows_of(events, [row for row in stated if row[1] != row[2]])
    rows = replace(rows, user_ids={user: name for user, name in USERS.items() if user})
    expected = all_at_once(rows, half_life)
    with tempfile.TemporaryDirectory() as folder:
        try:
            with rows.snapshot(Path(folder), parts, half_life) as snapshot:
                found = snapshot.interactions()
        except DataError:
            assert expected is None
            return
        finally:
            assert list(Path(folder).iterdir()) == []
    assert expected is not None
    assert_same(found, expected)
    if parts == 1:
        assert list(found.user_ids) == list(expected.user_ids)
