"""The matrix, its filter and its split."""

from __future__ import annotations

import numpy as np
import pytest

from ncr_core.data import (
    Interactions,
    build_interactions,
    compact,
    leave_latest_out,
    min_interactions,
)
from ncr_core.errors import DataError

ROWS = [
    ("ann", "x", 3.0),
    ("ann", "y", 1.0),
    ("bob", "x", 1.0),
    ("ann", "z", 2.0),
    ("bob", "z", 0.0),
    ("ann", "y", 9.0),  # again, later
]


def ids_of(interactions: Interactions, user: str) -> list[str]:
    row = list(interactions.user_ids).index(user)
    return [interactions.item_ids[i] for i in interactions.items_of(row)]


def test_items_are_in_time_order_and_a_repeat_counts_once_at_its_latest() -> None:
    matrix = build_interactions(ROWS)
    assert ids_of(matrix, "ann") == ["z", "x", "y"]
    assert ids_of(matrix, "bob") == ["z", "x"]
    assert matrix.nnz == 5
    assert matrix.item_counts().tolist() == [2, 1, 2]


def test_equal_times_keep_the_order_of_the_file() -> None:
    matrix = build_interactions([("u", i, 0.0) for i in "dbca"])
    assert ids_of(matrix, "u") == ["d", "b", "c", "a"]


def test_contains() -> None:
    matrix = build_interactions(ROWS)
    users, items = np.meshgrid(np.arange(2), np.arange(3), indexing="ij")
    assert matrix.contains(users, items).tolist() == [[True, True, True], [True, False, True]]


def test_reindex_drops_what_the_new_index_does_not_know() -> None:
    matrix = build_interactions(ROWS).reindex(["new", "bob"], ["z", "x"])
    assert matrix.nnz == 2
    assert ids_of(matrix, "bob") == ["z", "x"]
    assert ids_of(matrix, "new") == []


def test_min_interactions_is_one_pass_over_items() -> None:
    # y falls; bob and ann stay although ann then has fewer items.
    matrix = min_interactions(build_interactions(ROWS), 2)
    assert list(matrix.item_ids) == ["x", "z"]
    assert ids_of(matrix, "ann") == ["z", "x"]


def test_min_interactions_drops_users_without_items_and_says_when_nothing_is_left() -> None:
    matrix = min_interactions(build_interactions([*ROWS, ("cyd", "w", 0.0)]), 2)
    assert list(matrix.user_ids) == ["ann", "bob"]
    with pytest.raises(DataError, match="no item has 3 interactions"):
        min_interactions(build_interactions(ROWS), 3)


def test_compact_keeps_ids_and_order() -> None:
    matrix = build_interactions(ROWS)
    only_bob = compact(matrix.select(matrix.users == list(matrix.user_ids).index("bob")))
    assert list(only_bob.user_ids) == ["bob"]
    assert ids_of(only_bob, "bob") == ["z", "x"]


def test_leave_latest_out() -> None:
    split = leave_latest_out(build_interactions(ROWS))
    ids = split.train.item_ids
    ann, bob = 0, 1
    assert ids[split.test[ann]] == "y"
    assert ids[split.validation[ann]] == "x"
    assert ids_of(split.train, "ann") == ["z"]
    # Two items are too few to hold two out and still learn: all of bob's are for training.
    assert split.test[bob] == split.validation[bob] == -1
    assert ids_of(split.train, "bob") == ["z", "x"]
    assert split.all_seen.nnz == 5


def test_with_validation_in_train() -> None:
    split = leave_latest_out(build_interactions(ROWS))
    refit = split.with_validation_in_train()
    assert ids_of(refit.train, "ann") == ["z", "x"]  # as the latest
    assert ids_of(refit.train, "bob") == ["z", "x"]  # had none held out
    assert refit.validation.tolist() == [-1, -1]
    assert refit.test.tolist() == split.test.tolist()
    assert refit.all_seen.nnz == split.all_seen.nnz
    # The split it is made of stays, and once more changes nothing.
    assert ids_of(split.train, "ann") == ["z"]
    again = refit.with_validation_in_train()
    assert again.train.items.tolist() == refit.train.items.tolist()


def test_no_user_with_three_items() -> None:
    with pytest.raises(DataError, match="no user has 3 items"):
        leave_latest_out(build_interactions([("a", "x", 0), ("b", "y", 0)]))


def test_no_rows() -> None:
    with pytest.raises(DataError, match="no interactions"):
        build_interactions([])
