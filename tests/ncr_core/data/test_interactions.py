"""The matrix, its filter and its split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ncr_core.data import (
    Interactions,
    build_interactions,
    compact,
    leave_latest_out,
    min_interactions,
)
from ncr_core.data.interactions import UserFeedback, row_indices
from ncr_core.errors import ConfigError, DataError
from ncr_core.models.base import FactoredScores
from ncr_core.training import TrainConfig
from ncr_core.training.batches import Batches, PreferenceRows, Rows, SharedRows
from ncr_core.training.losses import LOSSES, SHARED_LOSSES, bce_loss, bpr_loss, listwise_loss
from tests.ncr_core.conftest import floats, pairs_of

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


def test_times_follow_their_interactions_through_every_filter() -> None:
    rows = [("a", "y", 90.0), ("b", "x", 5.0), ("a", "x", 20.0), ("a", "x", 70.0), ("b", "z", 9.0)]
    matrix = build_interactions(rows, timed=True)
    assert matrix.times is not None
    assert matrix.times.tolist() == [70.0, 90.0, 5.0, 9.0]
    gaps = matrix.gaps()
    assert gaps is not None
    assert gaps.tolist() == [0.0, 20.0, 0.0, 4.0]

    def by_ids(part: Interactions) -> set[tuple[str, str, float]]:
        assert part.times is not None
        return {
            (part.user_ids[u], part.item_ids[i], t)
            for u, i, t in zip(part.users, part.items, part.times, strict=True)
        }

    without_y = matrix.select(matrix.items != matrix.item_ids.index("y"))
    assert by_ids(without_y) == {("a", "x", 70.0), ("b", "x", 5.0), ("b", "z", 9.0)}
    assert by_ids(compact(without_y)) == by_ids(without_y)
    assert by_ids(matrix.reindex(["b", "a"], ["z", "y"])) == {("b", "z", 9.0), ("a", "y", 90.0)}
    assert build_interactions(rows).times is None
    assert build_interactions(rows).gaps() is None


def test_contains() -> None:
    matrix = build_interactions(ROWS)
    users, items = np.meshgrid(np.arange(2), np.arange(3), indexing="ij")
    assert matrix.contains(users, items).tolist() == [[True, True, True], [True, False, True]]


def test_a_selection_by_users_has_all_entries_of_these_users() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows = rng.integers(0, 6, (rng.integers(0, 30), 2))  # with users that have no entries
        ids = [str(n) for n in range(6)]
        matrix = Interactions.from_arrays(rows[:, 0], rows[:, 1], user_ids=ids, item_ids=ids)
        users = rng.random(6) < 0.5
        entries = matrix.entries_of(users)
        assert entries.tolist() == users[matrix.users].tolist()
        part = matrix.select(entries)
        for user in range(6):
            wanted = matrix.items_of(user).tolist() if users[user] else []
            assert part.items_of(user).tolist() == wanted


def test_reindex_drops_what_the_new_index_does_not_know() -> None:
    matrix = build_interactions(ROWS).reindex(["new", "bob"], ["z", "x"])
    assert matrix.nnz == 2
    assert ids_of(matrix, "bob") == ["z", "x"]
    assert ids_of(matrix, "new") == []


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcdefgh")), st.lists(st.sampled_from("abcdefgh")))
def test_row_indices_are_places_whichever_ids_are_more(ids: list[str], every: list[str]) -> None:
    last = {key: row for row, key in enumerate(every)}
    assert row_indices(ids, every).tolist() == [last.get(key, -1) for key in ids]


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


CPU = torch.device("cpu")
MODES = pytest.mark.parametrize(
    ("shared", "histories"),
    [(0, False), (30, False), (0, True), (30, True)],
    ids=["own", "shared", "own of histories", "shared of histories"],
)


def batches_of(train: Interactions, shared: int, histories: bool) -> Batches:
    config = TrainConfig(batch_size=500, negatives=3, shared_negatives=shared, seed=1)
    return Batches(train, config, CPU, histories=histories)


def users_of(rows: Rows | SharedRows) -> Tensor:
    return rows.users[rows.row] if isinstance(rows, SharedRows) else rows.users


def stated_of(batches: Batches) -> Iterator[tuple[Rows | SharedRows, PreferenceRows]]:
    for rows in batches:
        if rows.preferences is not None:
            yield rows, rows.preferences


@MODES
def test_an_epoch_has_every_stated_pair_once_and_a_rival_for_every_positive(
    told: Interactions, shared: int, histories: bool
) -> None:
    assert told.feedback is not None
    assert told.weights is not None
    weight_of = dict(zip(told.users * told.n_items + told.items, told.weights, strict=True))
    dislikes = {
        (u, i): w
        for (u, i), w in zip(
            told.feedback.disliked.tolist(), told.feedback.disliked_weights.tolist(), strict=True
        )
    }
    wanted = sorted(
        (*pair, weight)
        for pair, weight in zip(
            told.feedback.pairs.tolist(), told.feedback.pair_weights.tolist(), strict=True
        )
    )
    batches = batches_of(told, shared, histories)
    rivals = set()
    for _ in range(3):
        stated, beaten = [], []
        for rows, said in stated_of(batches):
            each = zip(
                said.users.tolist(),
                said.winners.tolist(),
                said.losers.tolist(),
                said.weights.tolist(),
                strict=True,
            )
            own = set(zip(users_of(rows).tolist(), rows.items.tolist(), strict=True))
            for user, winner, loser, weight in each:
                if (user, loser) not in dislikes:
                    stated.append((user, winner, loser, weight))
                    continue
                assert (user, winner) in own  # a rival comes with its positive
                rivals.add((user, loser))
                beaten.append((user, winner))
                expected = dislikes[user, loser] * weight_of[user * told.n_items + winner]
                assert weight == pytest.approx(expected, rel=1e-6)
        assert [row[:3] for row in sorted(stated)] == [row[:3] for row in wanted]
        assert [row[3] for row in sorted(stated)] == [row[3] for row in wanted]
        fans = np.isin(told.users, told.feedback.disliked[:, 0])
        positives = zip(told.users[fans].tolist(), told.items[fans].tolist(), strict=True)
        assert sorted(beaten) == sorted(positives)
    assert rivals == set(dislikes)


@MODES
def test_weights_come_with_their_positives(
    told: Interactions, shared: int, histories: bool
) -> None:
    assert told.weights is not None
    weight_of = dict(zip(told.users * told.n_items + told.items, told.weights, strict=True))
    for rows in batches_of(told, shared, histories):
        assert rows.weights is not None
        keys = (users_of(rows) * told.n_items + rows.items).tolist()
        assert rows.weights.tolist() == [weight_of[key] for key in keys]


@MODES
def test_what_is_only_seen_is_no_negative(told: Interactions, shared: int, histories: bool) -> None:
    every = told.with_seen()
    assert every.nnz == told.nnz + 43 * 10
    for rows in batches_of(told, shared, histories):
        users = rows.users.unsqueeze(1)
        items = rows.negatives if isinstance(rows, Rows) else rows.negatives.unsqueeze(0)
        users, items = torch.broadcast_tensors(users, items)
        known = every.contains(users.numpy(), items.numpy())
        if isinstance(rows, Rows):
            assert not known.any()
        else:
            assert (rows.valid.numpy() == ~known).all()


@MODES
def test_what_is_stated_changes_no_other_draw(
    told: Interactions, shared: int, histories: bool
) -> None:
    assert told.feedback is not None
    plain = replace(
        told,
        feedback=replace(
            told.feedback,
            disliked=pairs_of([], 2),
            pairs=pairs_of([], 3),
            disliked_weights=floats(),
            pair_weights=floats(),
        ),
    )
    both = zip(
        batches_of(plain, shared, histories), batches_of(told, shared, histories), strict=True
    )
    for without, with_it in both:
        assert without.preferences is None or len(without.preferences.users) == 0
        assert without.items.equal(with_it.items)
        assert without.negatives.equal(with_it.negatives)


@pytest.mark.parametrize("shared", [0, 30])
def test_a_history_leaves_out_the_winner(told: Interactions, shared: int) -> None:
    found = 0
    for rows, said in stated_of(batches_of(told, shared, histories=True)):
        assert said.histories is not None
        assert rows.histories is not None
        own = said.histories
        for at in range(len(said.users)):
            user, winner = int(said.users[at]), int(said.winners[at])
            start, end = int(own.start[at]), int(own.end[at])
            assert own.items[start:end].tolist() == told.items_of(user).tolist()
            place = int(own.position[at])
            assert start <= place < end
            if winner in told.items_of(user):
                assert int(own.items[place]) == winner
            else:
                assert place == end - 1
            found += 1
    assert found > 100


def test_users_who_only_stated_learn_from_that_unless_they_are_their_items() -> None:
    rows = [("a", "x", 1.0), ("a", "y", 2.0), ("b", "z", 1.0)]
    matrix = build_interactions(rows)
    stated = UserFeedback(pairs=pairs_of([(2, 0, 1), (2, 1, 2)], 3), pair_weights=floats(1, 2))
    more = Interactions(
        np.append(matrix.indptr, 3), matrix.items, ["a", "b", "c"], matrix.item_ids, feedback=stated
    )
    config = TrainConfig(negatives=1, batch_size=2)
    free = [said for _, said in stated_of(Batches(more, config, CPU))]
    assert sum(len(said.users) for said in free) == 2
    assert not list(stated_of(Batches(more, config, CPU, histories=True)))


def test_a_user_who_has_seen_everything_has_no_negatives_but_may_state() -> None:
    rows = [("a", "x", 1.0), ("a", "y", 2.0), ("b", "z", 1.0)]
    matrix = build_interactions(rows)
    stated = UserFeedback(
        seen=pairs_of([(0, 2)], 2), pairs=pairs_of([(0, 0, 1)], 3), pair_weights=floats(1)
    )
    batches = Batches(replace(matrix, feedback=stated), TrainConfig(negatives=1), CPU)
    (rows_of_b,) = list(batches)
    assert users_of(rows_of_b).tolist() == [1]
    assert rows_of_b.preferences is not None
    assert rows_of_b.preferences.users.tolist() == [0]
    everything = replace(stated, seen=pairs_of([(0, 2), (1, 0), (1, 1)], 2))
    with pytest.raises(DataError, match="every user has interacted with every item"):
        Batches(replace(matrix, feedback=everything), TrainConfig(negatives=1), CPU)


# Losses, by hand


def test_weighted_losses_by_hand() -> None:
    z_uij = torch.tensor([[0.0, 2.0], [-1.0, 1.0]])
    z_uji = torch.tensor([[1.0, 0.0], [0.5, -3.0]])

    def softplus(x: float) -> float:
        return float(np.log1p(np.exp(x)))

    first = (softplus(0) + softplus(1) + softplus(-2) + softplus(0)) / 2
    second = (softplus(1) + softplus(0.5) + softplus(-1) + softplus(-3)) / 2
    weights = torch.tensor([3.0, 1.0])
    expected = (3 * first + second) / 4
    assert float(bce_loss(z_uij, z_uji, 0, weights)) == pytest.approx(expected, rel=1e-6)
    one_way = (3 * (softplus(0) + softplus(-2)) / 2 + (softplus(1) + softplus(-1)) / 2) / 4
    assert float(bpr_loss(z_uij, z_uji, 0, weights)) == pytest.approx(one_way, rel=1e-6)
    by_list = [
        np.log(1 + np.exp(-a) + np.exp(-b)) + np.log(1 + np.exp(c) + np.exp(d))
        for (a, b), (c, d) in zip(z_uij.tolist(), z_uji.tolist(), strict=True)
    ]
    expected = (3 * by_list[0] + by_list[1]) / 4
    assert float(listwise_loss(z_uij, z_uji, 0, weights)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_weight_is_as_many_copies(name: str) -> None:
    torch.manual_seed(0)
    z_uij, z_uji = torch.randn(5, 4), torch.randn(5, 4)
    counts = torch.tensor([1, 3, 2, 1, 4])
    copies = torch.arange(5).repeat_interleave(counts)
    weighted = LOSSES[name](z_uij, z_uji, 50, counts.float())
    torch.testing.assert_close(weighted, LOSSES[name](z_uij[copies], z_uji[copies], 50, None))
    # And only their proportions matter.
    scaled = LOSSES[name](z_uij, z_uji, 50, counts.float() * 1e-6)
    torch.testing.assert_close(scaled, weighted)

    s_i, row = torch.randn(5), torch.tensor([0, 0, 1, 2, 2])
    s_j = FactoredScores(torch.randn(3, 4), torch.randn(6, 4))
    valid = torch.rand(3, 6) < 0.7
    shared = SHARED_LOSSES[name]
    weighted = shared(s_i, s_j, valid, row, 50, counts.float())
    copied = shared(s_i[copies], s_j, valid, row[copies], 50, None)
    torch.testing.assert_close(weighted, copied)
    scaled = shared(s_i, s_j, valid, row, 50, counts.float() * 1e-6)
    torch.testing.assert_close(scaled, weighted)


# Data


def test_what_is_held_out_is_not_told_by_a_statement(told: Interactions) -> None:
    split = leave_latest_out(told)
    assert told.feedback is not None
    assert split.train.feedback is not None
    kept = {tuple(pair) for pair in split.train.feedback.pairs.tolist()}
    for user, winner, loser in told.feedback.pairs.tolist():
        own = {int(split.test[user]), int(split.validation[user])}
        assert ((user, winner, loser) in kept) == (not {winner, loser} & own)
    assert len(split.train.feedback.pair_weights) == len(kept)
    assert split.train.feedback.disliked is told.feedback.disliked
    assert split.train.weights is not None
    assert len(split.train.weights) == split.train.nnz
    again = split.with_validation_in_train()
    assert again.train.weights is not None
    assert again.train.weights.sum() == pytest.approx(split.train.weights.sum() + 300)
    assert again.train.feedback is split.train.feedback


def test_filters_carry_everything_along(told: Interactions) -> None:
    assert told.feedback is not None
    some = min_interactions(told, 45)
    assert 0 < some.n_items < told.n_items
    assert some.weights is not None
    assert some.feedback is not None
    assert told.weights is not None
    weight_of = {
        (told.user_ids[u], told.item_ids[i]): w
        for u, i, w in zip(told.users, told.items, told.weights, strict=True)
    }
    for u, i, w in zip(some.users, some.items, some.weights, strict=True):
        assert weight_of[some.user_ids[u], some.item_ids[i]] == w

    def named(matrix: Interactions, rows: np.ndarray) -> list[tuple[str, ...]]:
        return [
            (matrix.user_ids[row[0]], *(matrix.item_ids[i] for i in row[1:]))
            for row in rows.tolist()
        ]

    left_users, left_items = set(some.user_ids), set(some.item_ids)
    for name in ("seen", "disliked", "pairs"):
        before = named(told, getattr(told.feedback, name))
        after = named(some, getattr(some.feedback, name))
        assert after == [row for row in before if row[0] in left_users and {*row[1:]} <= left_items]
    assert compact(some).feedback is not None
    back = some.reindex(told.user_ids, told.item_ids)
    assert back.feedback is not None
    assert named(back, back.feedback.pairs) == named(some, some.feedback.pairs)
    assert back.weights is not None
    assert sorted(back.weights) == sorted(some.weights)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_of_statements_that_is_none(weight: float) -> None:
    with pytest.raises(ConfigError, match="stated_weight"):
        TrainConfig(stated_weight=weight)
