"""The gate: who takes part, what is measured, and the decision; by cases small enough to count."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from ncr_core.checkpoint import EvaluationSnapshot
from ncr_core.comparison import (
    GateDecision,
    GateEvaluation,
    Incumbent,
    compare,
    decide,
    evaluate_both,
    fair_hold_out,
    incumbent_vectors,
    leaked_users,
)
from ncr_core.data import Interactions, leave_latest_out
from ncr_core.data.splits import Split, hashes_of, hold_out_users
from ncr_core.evaluation import vector_ranks
from ncr_core.evaluation.protocols import K, full_candidates, full_ranks, ranks_of
from ncr_core.evaluation.significance import Evaluation
from ncr_core.evaluation.vector_ranks import VectorRanks
from ncr_core.fold_in import FoldIn
from ncr_core.fold_in.evidence import user_evidence
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.training import TrainConfig, train_model
from tests.ncr_core.conftest import wild_model

ITEMS = [f"i{n}" for n in range(8)]


def interactions(of: dict[str, list[int]], items: list[str] = ITEMS) -> Interactions:
    users = list(of)
    pairs = [(users.index(user), item) for user, own in of.items() for item in own]
    rows = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Interactions.from_arrays(rows[:, 0], rows[:, 1], user_ids=users, item_ids=items)


def served(
    then: Interactions, every: Interactions, copied: list[str] | None = None
) -> tuple[Incumbent, Split]:
    """A model that was trained on ``then``, with all its held-out items in its copy."""
    split = leave_latest_out(then)
    rows = np.array(
        [at for at, user in enumerate(then.user_ids) if copied is None or user in copied],
        dtype=np.int64,
    )
    held_out = np.stack([split.test[rows], split.validation[rows]], axis=1)
    model = wild_model(ModelConfig(kind="nbpr", factors=3), max(1, len(rows)), then.n_items)
    earlier = then.reindex(every.user_ids, every.item_ids)
    return Incumbent(
        EvaluationSnapshot(model, rows, held_out), then.user_ids, then.item_ids, earlier
    ), split


def test_users_whose_held_out_items_were_learned_or_unknown_are_excluded() -> None:
    then = interactions(
        {
            "same": [0, 1, 2, 3],
            "one new": [0, 1, 2, 3],
            "many new": [0, 1, 2],
            "not copied": [0, 1, 2],
            "too little then": [4, 5],
            "went back": [0, 1, 2, 3, 4],
        },
        ITEMS[:7],
    )
    every = interactions(
        {
            "same": [0, 1, 2, 3],
            "one new": [0, 1, 2, 3, 4],
            "many new": [0, 1, 2, 3, 4, 5],
            "not copied": [0, 1, 2, 3, 4],
            "too little then": [4, 5, 6],
            "went back": [3, 4, 0, 1, 2],  # the latest are others now, which have been learned
            "newcomer": [1, 2, 3],
            "new item": [0, 1, 2, 7],
        }
    )
    copied = ["same", "one new", "many new", "too little then", "went back"]
    incumbent, _ = served(then, every, copied)
    split = leave_latest_out(every)
    found = fair_hold_out(split, incumbent)
    assert [every.user_ids[user] for user in found.users] == [
        "same", "one new", "many new", "newcomer",
    ]  # fmt: skip
    assert found.excluded == {
        "held-out item unknown to the incumbent": 1,  # new item
        # Of "too little then" the item 5 was never held out, so it has been learned.
        "held-out item learned by the incumbent": 2,
        "not held out from by the incumbent": 1,
    }
    assert found.items.tolist() == [[item, item] for item in range(7)]  # 7 is not common
    behind = dict(zip(every.user_ids, found.has_new_items.tolist(), strict=True))
    # Of "one new" what was held out then, 2, is known now, and was not learned.
    assert [user for user, is_behind in behind.items() if is_behind] == [
        "one new", "many new", "newcomer",
    ]  # fmt: skip
    learned = leaked_users(split, incumbent)
    names = [user for user, yes in zip(every.user_ids, learned, strict=True) if yes]
    assert names == ["too little then", "went back"]


def test_an_incumbent_that_names_some_of_its_users() -> None:
    """Of a user without a name the interactions tell what the incumbent has learned."""
    then = interactions({u: [0, 1, 2, 3] for u in ("named", "old", "back")} | {"few": [0, 1, 2]})
    now = interactions(
        {"named": [0, 1, 2, 3, 4, 5], "old": [0, 1, 2, 3], "back": [0, 1, 2, 3, 4, 5]}
        | {"few": [0, 1, 2], "new": [0, 1, 2]}
        | {f"more{n}": [4, 5] for n in range(3)}
    )
    incumbent, _ = served(then, now, ["named"])
    kept = replace(incumbent, user_ids=["named"], names_all_users=False)
    split = leave_latest_out(now)
    found = fair_hold_out(split, kept)
    assert [now.user_ids[row] for row in found.users] == ["named", "back", "new"]
    assert found.incumbent_rows[found.users].tolist() == [0, -1, -1]
    assert found.has_new_items[found.users].tolist() == [True, True, True]
    assert found.excluded["held-out item learned by the incumbent"] == 2  # of "old" and "few"
    assert [now.user_ids[row] for row in np.flatnonzero(leaked_users(split, kept))] == [
        "old",
        "few",
    ]


def test_an_incumbent_without_held_out_items_is_compared_on_new_items_only() -> None:
    then = interactions({"old": [0, 1, 2, 3], "new": [0, 1, 2]})
    every = interactions({"old": [0, 1, 2, 3], "new": [0, 1, 2, 3, 4]})
    model = wild_model(ModelConfig(kind="nbpr", factors=3), 2, 8)
    everything = EvaluationSnapshot(model, np.arange(2), np.full((2, 2), -1))
    incumbent = Incumbent(everything, then.user_ids, then.item_ids, then)
    found = fair_hold_out(leave_latest_out(every), incumbent)
    assert found.users.tolist() == [1]
    assert found.excluded["held-out item learned by the incumbent"] == 1


def test_items_in_another_order_and_items_that_are_gone() -> None:
    then = interactions({"a": [0, 1, 2], "b": [2, 1, 0]}, ["x", "y", "z"])
    every = interactions({"b": [2, 0, 1], "a": [1, 0, 2]}, ["y", "x", "z"])
    incumbent, _ = served(then, every)
    found = fair_hold_out(leave_latest_out(every), incumbent)
    assert found.items.tolist() == [[0, 1], [1, 0], [2, 2]]
    assert found.incumbent_rows.tolist() == [1, 0]


def test_vectors_are_those_that_would_be_served() -> None:
    then = interactions({"same": [0, 1, 2, 3], "more": [0, 1, 2, 3]})
    every = interactions(
        {"more": [0, 1, 2, 3, 4, 5], "same": [0, 1, 2, 3], "newcomer": [1, 2, 3, 4]}
    )
    incumbent, _ = served(then, every)
    model = incumbent.evaluated.model
    found = fair_hold_out(leave_latest_out(every), incumbent)
    with torch.no_grad():
        trained = model.user_vectors(torch.tensor([1, 0]))
    fold_in = FoldIn(model)
    known = user_evidence(found.split.train, [0, 2])
    assert known[0].items.tolist() == [0, 1, 2, 3]  # 4 and 5 are held out
    followed = fold_in(known, torch.stack([trained[0], fold_in.newcomer]))
    vectors = incumbent_vectors(found, incumbent, folded_in=True)
    assert vectors[1].equal(trained[1])
    assert vectors[[0, 2]].equal(followed)
    as_trained = incumbent_vectors(found, incumbent, folded_in=False)
    assert as_trained[:2].equal(trained)
    assert as_trained[2].equal(followed[1])  # a newcomer has no other


@pytest.mark.parametrize("kind", ["nbpr", "neupr"])
def test_a_model_beside_itself(split: Split, kind: str) -> None:
    """The same model under other rows gives the same figures, user by user."""
    config = ModelConfig(kind=kind, factors=4)  # type: ignore[arg-type]
    train = split.train
    model = wild_model(config, train.n_users, train.n_items)
    order = np.random.default_rng(0).permutation(train.n_items)
    other = build_model(config, train.n_users, train.n_items)
    state = model.state_dict()
    other.load_state_dict(
        {name: value[order] if "items" in name else value for name, value in state.items()}
    )
    held_out = np.stack([split.test, split.validation], axis=1)
    place = np.argsort(order)
    copy = EvaluationSnapshot(other.eval(), np.arange(train.n_users), place[held_out])
    names = [train.item_ids[item] for item in order]
    incumbent = Incumbent(copy, train.user_ids, names, split.all_seen)
    hold_out = fair_hold_out(split, incumbent)
    assert len(hold_out.users) == (split.test >= 0).sum()
    steps: list[tuple[int, int]] = []
    found = evaluate_both(hold_out, model, incumbent, draws=2, on_done=lambda *s: steps.append(s))
    assert found.challenger.ndcg.tolist() == found.incumbent.ndcg.tolist()
    assert found.full_challenger.hr.tolist() == found.full_incumbent.hr.tolist()
    assert steps == [(1, 3), (2, 3), (3, 3)]
    decision = found.decide(0.0)
    assert (decision.finding, decision.passed, decision.p) == ("not_worse", True, 1.0)


@pytest.mark.slow
def test_a_trained_model_beats_one_that_knows_nothing(split: Split) -> None:
    config = ModelConfig(kind="nbpr", factors=4)
    trained = train_model(config, TrainConfig(epochs=8, device="cpu"), split).model.eval()
    nothing = build_model(config, split.train.n_users, split.train.n_items).eval()

    def beside(challenger: PairwiseRanker, incumbent: PairwiseRanker) -> GateDecision:
        held_out = np.stack([split.test, split.validation], axis=1)
        copy = EvaluationSnapshot(incumbent, np.arange(split.train.n_users), held_out)
        rival = Incumbent(copy, split.train.user_ids, split.train.item_ids, split.all_seen)
        return compare(split, challenger, rival, 0.05).decision

    assert beside(trained, nothing).finding == "not_worse"
    refused = beside(nothing, trained)
    assert (refused.finding, refused.passed) == ("worse", False)
    assert refused.p is not None
    assert refused.p < 0.001


def test_too_few_users_that_both_models_may_rank_decide_nothing() -> None:
    then = interactions({f"u{n}": [n % 4, 4, 5] for n in range(5)})
    incumbent, split = served(then, then)
    challenger = wild_model(ModelConfig(kind="nbpr", factors=3), then.n_users, then.n_items)
    steps: list[int] = []
    compared = compare(split, challenger, incumbent, 0.05, lambda done, of: steps.append(done))
    assert len(compared.hold_out.users) == 5
    assert compared.evaluation is None
    assert (compared.decision.finding, compared.decision.passed) == ("too_few_users", True)
    assert steps == []


@pytest.mark.slow
def test_the_incumbent_counts_without_fold_in_where_new_items_are_wrong(split: Split) -> None:
    """Vectors fitted to noise would make any challenger look well: the better ones count."""
    config = ModelConfig(kind="nbpr", factors=4)
    trained = train_model(config, TrainConfig(epochs=8, device="cpu"), split).model.eval()
    train = split.train
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(train.n_users), 40)
    items = rng.integers(train.n_items, size=len(users))
    fair = (items != split.test[users]) & (items != split.validation[users])
    noisy = Interactions.from_arrays(
        np.concatenate([train.users, users[fair]]),
        np.concatenate([train.items, items[fair]]),
        user_ids=train.user_ids,
        item_ids=train.item_ids,
    )
    now = Split(noisy, split.validation, split.test)
    held_out = np.stack([split.test, split.validation], axis=1)
    copy = EvaluationSnapshot(trained, np.arange(train.n_users), held_out)
    incumbent = Incumbent(copy, train.user_ids, train.item_ids, split.all_seen)
    hold_out = fair_hold_out(now, incumbent)
    assert hold_out.has_new_items.sum() > 200
    measured = evaluate_both(hold_out, trained, incumbent)
    assert not measured.folded_in
    assert measured.incumbent.mean_ndcg == measured.challenger.mean_ndcg


def verdict_of(difference: float, spread: float, n: int, margin: float) -> GateDecision:
    """Of an incumbent at 0.4, and differences of two sizes around a mean."""
    incumbent = np.full(n, 0.4)
    away = np.where(np.arange(n) % 2, spread, -spread)
    return decide(incumbent + difference + away, incumbent, margin)


@pytest.mark.parametrize(
    ("difference", "spread", "n", "finding", "passed"),
    [
        (0.0, 0.1, 1000, "not_worse", True),
        (0.05, 0.1, 1000, "not_worse", True),
        # The margin is 5 % of 0.4: 0.02. The interval is ±1.645·0.1/√1000 = ±0.0052.
        (-0.014, 0.1, 1000, "not_worse", True),
        (-0.016, 0.1, 1000, "not_shown", False),
        (-0.019, 0.1, 1000, "not_shown", False),
        (-0.03, 0.1, 1000, "worse", False),
        # With few users, what cannot be told is let through; ±1.645·0.1/√100 = ±0.0164.
        (0.0, 0.1, 100, "not_worse", True),
        (-0.01, 0.1, 100, "not_shown", True),
        (-0.03, 0.1, 100, "worse", False),
        (-0.9, 0.0, 10, "too_few_users", True),
    ],
)
def test_verdicts(difference: float, spread: float, n: int, finding: str, passed: bool) -> None:
    decision = verdict_of(difference, spread, n, 0.05)
    assert (decision.finding, decision.passed, decision.users) == (finding, passed, n)
    assert decision.margin == pytest.approx(0.02)
    assert decision.difference == pytest.approx(difference)
    if n >= 20:
        assert decision.interval is not None
        low, high = decision.interval
        assert low < difference < high
        assert high - low == pytest.approx(2 * 1.645 * spread / np.sqrt(n), rel=0.05)


@pytest.mark.parametrize(
    ("full", "sampled", "finding", "protocol"),
    [
        (0.0, -0.03, "not_worse", "full"),
        (-0.03, 0.0, "worse", "full"),
        (-0.016, 0.0, "not_worse", "sampled"),
        (-0.016, -0.03, "worse", "sampled"),
        (-0.016, -0.016, "not_shown", "sampled"),
    ],
)
def test_the_whole_catalogue_decides_unless_it_shows_nothing(
    full: float, sampled: float, finding: str, protocol: str
) -> None:
    incumbent = Evaluation(np.ones(1000), np.full(1000, 0.4), 10, 1)
    away = np.where(np.arange(1000) % 2, 0.1, -0.1)
    by_full, by_sampled = (
        replace(incumbent, ndcg=incumbent.ndcg + mean + away) for mean in (full, sampled)
    )
    measured = GateEvaluation(by_sampled, incumbent, by_full, incumbent, folded_in=True)
    decision = measured.decide(0.05)
    assert (decision.finding, decision.protocol) == (finding, protocol)


def test_no_users_at_all() -> None:
    decision = decide(np.zeros(0), np.zeros(0), 0.05)
    assert (decision.finding, decision.passed, decision.interval) == ("too_few_users", True, None)


def test_no_margin_asks_for_better_or_the_same() -> None:
    assert decide(np.full(900, 0.3), np.full(900, 0.3), 0.0).finding == "not_worse"
    assert verdict_of(0.0, 0.1, 900, 0.0).finding == "not_shown"


def test_users_are_held_out_from_by_their_ids_alone() -> None:
    then = interactions({f"u{n}": [0, 1, 2] for n in range(40)})
    now = interactions({f"u{n}": [0, 1, 2, 3] for n in range(60, 20, -1)})
    chosen_then, _ = hold_out_users(then, 0.5, 0, 1000)
    chosen_now, below = hold_out_users(now, 0.5, 0, 1000)
    assert chosen_then.sum() == chosen_now.sum() == 20
    names = {u for u, yes in zip(then.user_ids, chosen_then, strict=True) if yes}
    names_now = {u for u, yes in zip(now.user_ids, chosen_now, strict=True) if yes}
    common = set(then.user_ids) & set(now.user_ids)
    # A bound on the hash moves a little; users do not change sides at random.
    assert len(names & common ^ names_now & common) <= 6
    assert (below >= chosen_now).all()


def test_users_with_too_few_items_are_below_the_bound_too() -> None:
    every = interactions({f"u{n}": [0, 1, 2][: 1 + n % 3] for n in range(90)})
    chosen, below = hold_out_users(every, 0.3, 0, 1000)
    lengths = np.diff(every.indptr)
    assert chosen.sum() == 9  # of the 30 with three items
    assert (lengths[chosen] == 3).all()
    hashes = hashes_of(every.user_ids)
    assert (below == (hashes <= hashes[chosen].max())).all()
    assert below[lengths < 3].any()


@pytest.mark.parametrize(
    ("share", "at_least", "at_most", "n"),
    [(0.2, 10, 100, 10), (0.5, 0, 100, 20), (0.5, 0, 5, 5), (0.2, 1000, 2000, 40)],
)
def test_how_many_are_held_out_from(share: float, at_least: int, at_most: int, n: int) -> None:
    every = interactions({f"u{n}": [0, 1, 2] for n in range(40)})
    chosen, below = hold_out_users(every, share, at_least, at_most)
    assert chosen.sum() == n
    assert below.sum() == n


def test_hashes_do_not_change() -> None:
    assert hashes_of(["ann", "böb"]).tolist() == [10176691957563388837, 747383274745773392]


@pytest.mark.parametrize("kind", ["nbpr", "neupr"])
def test_the_whole_catalogue_is_ranked_as_its_list_of_candidates(
    kind: Literal["nbpr", "neupr"], split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, rng = split.train, np.random.default_rng(0)
    rows = rng.permutation(train.n_items + 20)[: train.n_items]  # the model has more items
    model = wild_model(ModelConfig(kind=kind, factors=2), 1, train.n_items + 20)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).round_().div_(2)  # so that many items tie
    users = np.flatnonzero(split.test >= 0)
    vectors = torch.from_numpy(rng.integers(-1, 2, (len(users), 2 if kind == "nbpr" else 4)))
    ranker = VectorRanks(model, users, vectors.float(), rows)
    monkeypatch.setattr(vector_ranks, "MAX_BLOCK_CELLS", 7 * model.n_items)  # 7 users at a time
    assert ranker.ranks_catalogue is (kind == "nbpr")
    ranks, items = full_ranks(ranker, split, split.test, seed=0)
    of_candidates = [ranks_of(ranker, block, K) for block in full_candidates(split, split.test, 0)]
    assert ranks.tolist() == np.concatenate(of_candidates).tolist()
    assert (ranks >= 0).any()
    assert items <= train.n_items
