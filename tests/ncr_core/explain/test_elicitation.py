"""The pairs to ask about: what an answer tells, and what it tells beyond another."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from ncr_core.explain.elicitation import QuestionPool
from ncr_core.models import ModelConfig, build_model
from ncr_core.models.base import PairwiseRanker
from ncr_core.ranking import ExactRanker
from tests.ncr_core.conftest import wild_model


def model_of(utilities: Tensor) -> PairwiseRanker:
    """An additive model by which users have just these (n_users, n_items) utilities."""
    n_users, n_items = utilities.shape
    model = build_model(ModelConfig(kind="nbpr", factors=n_items), n_users, n_items)
    with torch.no_grad():
        model.get_parameter("weight").fill_(1.0)
        for name, parameter in model.named_parameters():
            if name.startswith("users"):
                parameter.copy_(utilities)
            elif name.startswith("items"):
                parameter.copy_(torch.eye(n_items))
    return model.requires_grad_(False).eval()


def pool_of(utilities: list[list[float]]) -> QuestionPool:
    model = model_of(torch.tensor(utilities))
    everyone = model.user_vectors(torch.arange(model.n_users))
    return QuestionPool(ExactRanker(model), everyone, np.arange(model.n_items))


def everything(pool: QuestionPool) -> np.ndarray:
    return np.ones(len(pool.items), dtype=np.bool_)


def bits(p: float) -> float:
    return float(-p * np.log2(p) - (1 - p) * np.log2(1 - p))


def test_information_by_hand() -> None:
    """Two tastes, two items: P = σ(z_ij − z_ji over 2) of utilities is σ(u_i − u_j)."""
    (found,) = pool_of([[2.0, 0.0], [0.0, 1.0]]).choose(1, np.ones(2, dtype=np.bool_))
    first, second = 1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(1.0))
    expected = bits((first + second) / 2) - (bits(first) + bits(second)) / 2
    assert {found.a, found.b} == {0, 1}
    assert found.information == pytest.approx(expected, abs=1e-4)


def test_what_all_agree_on_tells_nothing_and_what_splits_them_most() -> None:
    # All like 0 more than 1; they are of two minds about 2 and 3, and unsure of 4 and 5.
    tastes = [[9, 0, 4, -4, 0.1, 0], [9, 0, -4, 4, 0, 0.1]] * 4
    found = pool_of(tastes).choose(3, np.ones(6, dtype=np.bool_))
    assert {found[0].a, found[0].b} == {2, 3}
    assert found[0].information > 0.9
    (of_agreed,) = (q.information for q in found if {q.a, q.b} == {0, 1})
    assert of_agreed < 0.01


def test_a_question_that_tells_the_same_as_another_comes_last() -> None:
    # The answers about 0, 1 and about 2, 3 go together; those about 4, 5 are of their own.
    tastes = [
        [x, -x, 0.9 * x, -0.9 * x, 0.6 * y, -0.6 * y]
        for x in (-2.0, 2.0)
        for y in (-2.0, 2.0)
        for _ in range(3)
    ]
    pool = pool_of(tastes)
    first, second = pool.choose(2, everything(pool))
    assert {first.a, first.b} == {0, 1}
    assert {second.a, second.b} == {4, 5}
    # Alone, the other pair would tell more than these.
    alone = pool.choose(1, np.array([False, False, True, True, False, False]))
    assert alone[0].information > second.information


def test_no_item_twice_while_there_are_others_and_no_pair_ever() -> None:
    rng = np.random.default_rng(0)
    pool = pool_of(rng.normal(size=(30, 6)).tolist())
    found = pool.choose(100, everything(pool))
    pairs = [frozenset((q.a, q.b)) for q in found]
    assert len(pairs) == len(set(pairs)) == 15
    assert len(frozenset().union(*pairs[:3])) == 6


def test_only_allowed_items_and_no_pair_that_was_asked() -> None:
    rng = np.random.default_rng(1)
    pool = pool_of(rng.normal(size=(30, 7)).tolist())
    allowed = np.array([True, True, False, True, True, False, True])
    asked = [(0, 1), (4, 3), (6, 0), (-1, 3)]
    found = {frozenset((q.a, q.b)) for q in pool.choose(50, allowed, asked)}
    expected = {frozenset(pair) for pair in combinations([0, 1, 3, 4, 6], 2)}
    assert found == expected - {frozenset(pair) for pair in asked}
    assert pool.choose(5, np.zeros(7, dtype=np.bool_)) == []
    assert pool.choose(5, np.arange(7) == 3) == []


def test_the_same_seed_asks_the_same_and_others_nearly_as_good() -> None:
    rng = np.random.default_rng(2)
    pool = pool_of(rng.normal(size=(60, 30)).tolist())
    lists = [pool.choose(5, everything(pool), seed=seed) for seed in (1, 1, 2, 3)]
    assert lists[0] == lists[1]
    assert len({tuple(questions) for questions in lists}) == 3
    best = [questions[0].information for questions in lists]
    assert min(best) > 0.9 * max(best)


def test_what_is_known_of_the_user_decides_what_is_plausible() -> None:
    """Of two groups one disagrees about 0 and 1, the other about 2 and 3."""
    rng = np.random.default_rng(3)
    tastes = [[2 * rng.choice([-1, 1]), 0, 6, 0, 6.0] for _ in range(40)]
    tastes += [[6, 0, 2 * rng.choice([-1, 1]), 0, -6.0] for _ in range(40)]
    model = model_of(torch.tensor(tastes, dtype=torch.float32))
    everyone = model.user_vectors(torch.arange(80))
    pool = QuestionPool(ExactRanker(model), everyone, np.arange(4))
    for user, group, pair in ((0, range(40), {0, 1}), (79, range(40, 80), {2, 3})):
        plausible = pool.plausible(vector=everyone[user].numpy(), events=100)
        assert plausible.sum() == pytest.approx(1)
        assert 1 / (plausible**2).sum() == pytest.approx(24, rel=0.05)
        assert {*np.argsort(plausible)[-20:].tolist()} <= {*group}
        (found,) = pool.choose(1, np.ones(4, dtype=np.bool_), plausible=plausible)
        assert {found.a, found.b} == pair
    little = pool.plausible(vector=everyone[0].numpy(), events=1)
    assert 1 / (little**2).sum() == pytest.approx(80 / 1.2, rel=0.05)


def test_answers_make_the_tastes_that_give_them_plausible() -> None:
    """By Bayes' rule, as far as the sample of tastes goes."""
    rng = np.random.default_rng(4)
    tastes = 0.4 * rng.normal(size=(200, 5))
    pool = pool_of(tastes.tolist())

    def p(winner: int, loser: int) -> np.ndarray:
        return 1 / (1 + np.exp(-(tastes[:, winner] - tastes[:, loser])))

    told = np.array([[3, 1], [0, 4], [7, 1], [1, 3]])  # of 7 nothing is known here
    expected = p(3, 1) * p(0, 4) * p(1, 3)
    found = pool.plausible(told)
    assert found == pytest.approx(expected / expected.sum(), rel=1e-3)
    assert pool.plausible() == pytest.approx(np.full(200, 1 / 200))
    assert pool.plausible(np.zeros((0, 2), dtype=np.int64)) == pytest.approx(np.full(200, 1 / 200))
    # However much is told, some tastes are left.
    sure = pool.plausible(np.array([[0, 1]] * 500))
    assert 1 / (sure**2).sum() == pytest.approx(24, rel=0.05)
    assert sure.argmax() == (tastes[:, 0] - tastes[:, 1]).argmax()


def test_the_answers_are_those_of_the_model(config: ModelConfig) -> None:
    """For every kind of model, by the probabilities as they are defined."""
    model = wild_model(config, 40, 12)
    users = model.user_vectors(torch.arange(40))
    items = np.array([3, 7, 11, 0])
    pool = QuestionPool(ExactRanker(model), users, items, temperature=1.5)
    chosen = pool.choose(6, np.ones(4, dtype=np.bool_))
    assert len(chosen) == 6
    question = chosen[0]
    i, j = (torch.full((40,), row) for row in (question.a, question.b))
    margins = (model.logits(users, i, j) - model.logits(users, j, i)).double()
    p = torch.sigmoid(margins / 3.0).numpy()
    expected = bits(float(p.mean())) - float(np.mean([bits(x) for x in np.clip(p, 1e-7, 1 - 1e-7)]))
    assert question.information == pytest.approx(expected, abs=2e-3)
