"""Metrics by hand, and protocols that ask for what they say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import pytrec_eval
import torch
from hypothesis import given
from hypothesis import strategies as st

from ncr_core.data import (
    Interactions,
    Split,
    build_interactions,
    leave_latest_out,
    min_interactions,
)
from ncr_core.data.interactions import IntArray
from ncr_core.data.readers import open_source
from ncr_core.data.splits import ItemSetSplit
from ncr_core.errors import TrainingError
from ncr_core.evaluation import protocols
from ncr_core.evaluation.metrics import (
    held_out_ranks,
    hit_of_each,
    hit_ratio,
    hits_of_each,
    ndcg,
    ndcg_of_each,
    overlap,
    rank_biased_overlap,
    recall_of_each,
    set_ndcg_of_each,
)
from ncr_core.evaluation.protocols import (
    CandidateSet,
    Metrics,
    ModelRanks,
    evaluate_full,
    evaluate_sampled,
    full_candidates,
    full_lists,
    full_ranks,
    of_random_users,
    ranks_of,
    sampled_candidates,
)
from ncr_core.models import ModelConfig
from ncr_core.ranking import PAD
from ncr_core.reproduction.baselines.scoring import Popularity, ScoreModel
from tests.ncr_core.conftest import wild_model


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(1, 10))
def test_metrics_agree_with_trec_eval(seed: int, items: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    ranked = np.array([rng.permutation(items) for _ in range(5)])
    held_out = rng.integers(items, size=5)
    relevant = {str(user): {str(item): 1} for user, item in enumerate(held_out.tolist())}
    scores = {
        str(user): {str(item): float(-place) for place, item in enumerate(items_of)}
        for user, items_of in enumerate(ranked.tolist())
    }
    measures = {f"success_{k}", f"ndcg_cut_{k}"}
    theirs = pytrec_eval.RelevanceEvaluator(relevant, {f"success.{k}", f"ndcg_cut.{k}"})
    by_user = theirs.evaluate(scores)
    assert all(set(figures) == measures for figures in by_user.values())
    ranks = held_out_ranks(ranked, held_out)
    for user in range(5):
        assert hit_of_each(ranks, k)[user] == by_user[str(user)][f"success_{k}"]
        assert ndcg_of_each(ranks, k)[user] == pytest.approx(by_user[str(user)][f"ndcg_cut_{k}"])


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(1, 20))
def test_metrics_of_item_sets_agree_with_trec_eval(seed: int, items: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    k = min(k, items)
    ranked = np.array([rng.permutation(items) for _ in range(5)])
    held_out = [rng.permutation(items)[: rng.integers(1, items + 1)] for _ in range(5)]
    relevant = {str(u): dict.fromkeys(map(str, own.tolist()), 1) for u, own in enumerate(held_out)}
    scores = {
        str(user): {str(item): float(-place) for place, item in enumerate(items_of)}
        for user, items_of in enumerate(ranked.tolist())
    }
    theirs = pytrec_eval.RelevanceEvaluator(relevant, {f"recall.{k}", f"ndcg_cut.{k}"})
    by_user = theirs.evaluate(scores)
    sizes = np.array([len(own) for own in held_out])
    indptr = np.concatenate([[0], np.cumsum(sizes)])
    hits = hits_of_each(ranked[:, :k], np.concatenate(held_out), indptr)
    recall, ndcg_of_sets = recall_of_each(hits, sizes), set_ndcg_of_each(hits, sizes)
    for user in range(5):
        assert recall[user] == pytest.approx(by_user[str(user)][f"recall_{k}"])
        assert ndcg_of_sets[user] == pytest.approx(by_user[str(user)][f"ndcg_cut_{k}"])


def test_metrics_by_hand() -> None:
    ranked = np.array([[7, 3, 9], [4, 5, 6], [8, 2, -1]])
    ranks = held_out_ranks(ranked, np.array([9, 4, 5]))
    assert ranks.tolist() == [2, 0, -1]
    assert hit_ratio(ranks, 3) == pytest.approx(2 / 3)
    assert hit_ratio(ranks, 1) == pytest.approx(1 / 3)
    assert ndcg(ranks, 3) == pytest.approx((1 / math.log2(4) + 1) / 3)


def test_sampled_candidates(split: Split) -> None:
    chosen = sampled_candidates(split, split.test, seed=1, negatives=20)
    assert len(chosen.users) == split.train.n_users
    seen = split.all_seen
    places = []
    for user, held_out, row in zip(chosen.users, chosen.held_out, chosen.candidates, strict=True):
        assert len(set(row.tolist())) == 21
        assert held_out == split.test[user]
        places.append(row.tolist().index(held_out))
        others = row[row != held_out]
        assert not np.isin(others, seen.items_of(user)).any()
        # the validation item is neither trained on nor a candidate
        assert split.validation[user] not in row
    assert 7 < np.mean(places) < 13  # the held-out item's place is random
    again = sampled_candidates(split, split.test, seed=1, negatives=20)
    assert (again.candidates == chosen.candidates).all()


def test_the_seen_items_of_a_user_are_those_of_all_users_together() -> None:
    """Also if a held-out item was trained on, and without the test items of a set."""
    train = Interactions.from_arrays(
        np.array([0, 0, 1, 2, 2, 2]),
        np.array([3, 1, 2, 0, 4, 3]),
        user_ids=["a", "b", "c", "d"],
        item_ids=["0", "1", "2", "3", "4"],
    )
    validation, test = np.array([2, -1, 4, 1]), np.array([1, -1, 2, -1])
    for split in (
        Split(train, validation, test),
        ItemSetSplit(train, validation, test, train),
    ):
        for user in range(4):
            expected = sorted(set(split.all_seen.items_of(user).tolist()))
            assert sorted(split.seen_items(user).tolist()) == expected
            assert sorted(split.seen_items(np.int64(user)).tolist()) == expected


def test_users_with_few_unseen_items_get_all_of_them() -> None:
    rows = [("u", f"i{n}", float(n)) for n in range(6)] + [("v", "i7", 0.0), ("v", "i8", 1.0)]
    split = leave_latest_out(build_interactions(rows))
    row = sampled_candidates(split, split.test, seed=0).candidates[0]
    assert sorted(row[row != PAD].tolist()) == [5, 6, 7]


def test_full_candidates_are_every_unseen_item_in_one_order(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocols, "MAX_BLOCK_USERS", 64)
    seen = split.all_seen
    total = 0
    for block in full_candidates(split, split.test, seed=0):
        for user, held_out, row in zip(block.users, block.held_out, block.candidates, strict=True):
            expected = set(range(seen.n_items)) - set(seen.items_of(user).tolist()) | {held_out}
            own = [i for i in row.tolist() if i != PAD]
            assert set(own) == expected
            assert len(own) == len(expected)
            total += 1
    assert total == len(split.test)


@pytest.mark.parametrize("kind", ["nbpr", "neupr"])
def test_full_lists_are_the_best_of_the_full_candidates(
    split: Split, kind: Literal["nbpr", "neupr"]
) -> None:
    size = split.train.n_users, split.train.n_items
    ranks = ModelRanks(wild_model(ModelConfig(kind=kind, factors=4, layers=2), *size))
    found = list(full_lists(ranks, split, split.test, 5, 7))
    blocks = list(full_candidates(split, split.test, seed=5))
    assert len(found) == len(blocks)
    for (users, lists), block in zip(found, blocks, strict=True):
        assert users.tolist() == block.users.tolist()
        assert lists.tolist() == ranks.rank(block.users, block.candidates, 7).tolist()


@pytest.mark.parametrize("values", [3, 1000], ids=["many ties", "few ties"])
def test_ranks_by_scores_are_those_of_sorted_candidates(split: Split, values: int) -> None:
    generator = np.random.default_rng(values)
    scores = generator.integers(values, size=(split.train.n_users, split.train.n_items)) / 7.0

    class Fixed(ScoreModel):
        def scores(self, users: IntArray) -> np.ndarray:
            return scores[users]

    class Sorted:
        def rank(self, users: IntArray, candidates: IntArray, k: int) -> IntArray:
            return Fixed().rank(users, candidates, k)

    for k in (1, 10, 10_000):
        found = full_ranks(Fixed(), split, split.test, seed=3, k=k)
        expected = full_ranks(Sorted(), split, split.test, seed=3, k=k)
        assert found[0].tolist() == expected[0].tolist()
        assert found[1] == expected[1]
    scores[0] = np.nan
    with pytest.raises(TrainingError, match="finite"):
        full_ranks(Fixed(), split, split.test, seed=3)


def test_popularity_by_hand() -> None:
    model = Popularity(build_interactions([("a", "x", 0), ("b", "x", 0), ("a", "y", 0)]))
    ranked = model.rank(np.array([0, 1]), np.array([[1, 0, -1], [1, -1, -1]]), 2)
    assert ranked.tolist() == [[0, 1], [1, -1]]


def candidates_of(n_users: int, n_items: int, lengths: list[int]) -> CandidateSet:
    """Rows of different lengths in random order, a held-out item at a random place in each."""
    rng = np.random.default_rng(0)
    users = rng.integers(n_users, size=len(lengths))
    rows = np.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = rng.permutation(n_items)[:length]
    held_out = np.array(
        [row[rng.integers(length)] for row, length in zip(rows, lengths, strict=True)]
    )
    return CandidateSet(users, held_out, rows)


def test_places_are_the_ranks_of_an_additive_model(config: ModelConfig) -> None:
    """Among them twins, which tie: the order of the candidates decides."""
    model = wild_model(config, 9, 24)
    if not model.tables().additive:
        pytest.skip("its preferences may be intransitive")
    with torch.no_grad():
        for name, table in model.named_parameters():
            if name.startswith(("items", "bias")):
                table[6:12] = table[0].clone()
                table[12:15] = table[1].clone()
    chosen = candidates_of(9, 24, [24, 20, 1, 7, 24, 13] * 60)
    ranks = ModelRanks(model)
    places = ranks.places(chosen.users, chosen.held_out, chosen.candidates)
    for k in (1, 10, 24):
        expected = ranks_of(ranks, chosen, k)
        assert np.where(places < k, places, -1).tolist() == expected.tolist()
    assert set(places.tolist()) >= set(range(15))


def test_padding_takes_no_place() -> None:
    model = wild_model(ModelConfig(kind="nbpr", factors=2, item_bias=True), 3, 8)
    with torch.no_grad():
        model.get_parameter("bias")[0] = 100.0  # padding is looked up as item 0
    chosen = candidates_of(3, 8, [8, 5, 3, 1])
    rows = np.where(chosen.candidates == 0, PAD, chosen.candidates)
    rows = np.stack([np.append(row[row != PAD], row[row == PAD]) for row in rows])
    held_out = rows[:, 0]
    ranks = ModelRanks(model)
    places = ranks.places(chosen.users, held_out, rows)
    wider = np.concatenate([rows, np.full((4, 9), PAD)], axis=1)
    assert places.tolist() == ranks.places(chosen.users, held_out, wider).tolist()
    assert (
        places.tolist() == ranks_of(ranks, CandidateSet(chosen.users, held_out, rows), 8).tolist()
    )
    alone = ranks.places(chosen.users, held_out, np.array([[0, i] for i in held_out]))
    assert alone.tolist() == [1, 1, 1, 1]


def test_places_of_a_tower_are_the_candidates_that_beat_the_held_out_item() -> None:
    model = wild_model(ModelConfig(kind="dncr", factors=2, layers=3), 4, 10)
    chosen = candidates_of(4, 10, [10, 6, 4, 1])
    places = ModelRanks(model).places(chosen.users, chosen.held_out, chosen.candidates)
    vectors = model.user_vectors(torch.from_numpy(chosen.users))
    for at, own in enumerate(chosen.held_out):
        others = torch.tensor([i for i in chosen.candidates[at] if i not in (own, PAD)])
        z_uij, z_uji = model.pair_logits(
            vectors[at : at + 1], torch.tensor([own]), others.unsqueeze(0).long()
        )
        assert places[at] == int((z_uij < z_uji).sum())


def test_a_plain_line() -> None:
    assert (
        Metrics(0.59012, 0.333, 6040, 101).line("sampled")
        == "sampled HR@10 0.5901 NDCG@10 0.3330 (6,040 users, 101 items)"
    )


@pytest.fixture(scope="module")
def ml_1m_matrix(ml_1m: Path) -> Interactions:
    rows = (
        (row.user, row.item, float(row.position or 0))
        for chunk in open_source(ml_1m).interactions(on_bad=lambda bad: pytest.fail(str(bad)))
        for row in chunk
    )
    return build_interactions(rows)


@pytest.mark.slow
def test_the_papers_counts_and_popularity_on_movielens_1m(ml_1m_matrix: Interactions) -> None:
    """Table 2's counts, and ItemPop as measured by others on this protocol: .426/.233."""
    assert (ml_1m_matrix.n_users, ml_1m_matrix.n_items, ml_1m_matrix.nnz) == (6040, 3706, 1000209)
    matrix = min_interactions(ml_1m_matrix, 10)
    assert (matrix.n_users, matrix.n_items, matrix.nnz) == (6040, 3260, 998539)
    split = leave_latest_out(matrix)
    model = Popularity(split.train)
    sampled = evaluate_sampled(model, sampled_candidates(split, split.test, seed=0))
    assert sampled.hr == pytest.approx(0.426, abs=0.01)
    assert sampled.ndcg == pytest.approx(0.233, abs=0.01)
    full = evaluate_full(model, split, split.test, seed=0)
    assert full.users == 6040
    assert full.hr < 0.1


lists = st.lists(st.integers(0, 15), unique=True, max_size=12)


def test_overlap() -> None:
    assert overlap([1, 2, 3, 4], [4, 3, 9, 8]) == 0.5
    assert overlap([1, 2], [1]) == 0.5
    assert overlap([], []) == 1.0
    assert overlap([1], []) == 0.0


def test_rbo_by_hand() -> None:
    """Agreement 0, 1, 2/3 at depths 1 to 3, and 2/3 below; p = 1/2."""
    expected = 0 / 1 * 0.5 + 2 / 2 * 0.25 + 2 / 3 * 0.125 + 2 / 3 * 0.125
    assert rank_biased_overlap("abc", "bad", 0.5) == pytest.approx(expected)


def test_rbo_of_lists_of_two_lengths_by_hand() -> None:
    """Beyond the short list's end its agreement of 1/2 is taken to go on (eq. 32), p = 1/2."""
    # X = 1, 1, 1, 2; l = 4, s = 2: depths 3 and 4 get X_s (d − s)/s more.
    within = 1 / 1 * 0.5 + 1 / 2 * 0.25 + 1 / 3 * 0.125 + 2 / 4 * 0.0625
    beyond = 1 * 1 / (2 * 3) * 0.125 + 1 * 2 / (2 * 4) * 0.0625
    rest = ((2 - 1) / 4 + 1 / 2) * 0.0625
    expected = within + beyond + rest
    assert rank_biased_overlap("ab", "acdb", 0.5) == pytest.approx(expected)


@given(lists, lists, st.sampled_from([0.3, 0.9]))
def test_rbo_is_symmetric_and_between_0_and_1(a: list[int], b: list[int], p: float) -> None:
    found = rank_biased_overlap(a, b, p)
    assert -1e-12 <= found <= 1 + 1e-12
    assert found == pytest.approx(rank_biased_overlap(b, a, p))
    assert rank_biased_overlap(a, a, p) == pytest.approx(1.0)
    if a and b and not set(a) & set(b):
        assert found == 0.0


@given(lists.filter(len), lists.filter(len))
def test_rbo_is_the_definition_where_lists_go_on_for_long(a: list[int], b: list[int]) -> None:
    """Eq. 4, with p so small that nothing below the lists weighs anything."""
    p, depth = 1e-3, min(len(a), len(b))
    sums = sum(len(set(a[:d]) & set(b[:d])) / d * p ** (d - 1) for d in range(1, depth + 1))
    least = max(2 * p**depth, 1e-12)
    assert rank_biased_overlap(a, b, p) == pytest.approx((1 - p) * sums, abs=least)


def test_rbo_weighs_the_top_most() -> None:
    ten = list(range(10))
    swapped_first, swapped_last = [1, 0, *ten[2:]], [*ten[:8], 9, 8]
    assert rank_biased_overlap(ten, swapped_first) < rank_biased_overlap(ten, swapped_last) < 1


@pytest.mark.parametrize("p", [0.0, 1.0, -1.0])
def test_rbo_needs_a_probability(p: float) -> None:
    with pytest.raises(ValueError):
        rank_biased_overlap([1], [1], p)


def test_random_users_of_fewer_are_among_those_of_more() -> None:
    held_out = np.where(np.arange(60) % 3, np.arange(60), -1)
    some, more, every = (of_random_users(held_out, most) for most in (7, 20, 100))
    assert [(each >= 0).sum() for each in (some, more, every)] == [7, 20, 40]
    assert set(some[some >= 0]) < set(more[more >= 0])
    assert (every == held_out).all()
    assert set(more[more >= 0]) <= set(held_out)
    assert np.flatnonzero(some >= 0).max() > 20  # not the first ones
