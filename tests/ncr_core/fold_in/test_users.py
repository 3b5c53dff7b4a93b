"""Users whom training has not seen: what their vectors depend on, and that they serve.

The compiled fit has the gradients of autograd and the vectors of torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from ncr_core.data import Interactions, leave_latest_out
from ncr_core.errors import ConfigError, DataError
from ncr_core.evaluation.protocols import CandidateSet, evaluate_sampled, sampled_candidates
from ncr_core.fold_in import Evidence, FoldIn, FoldInConfig, numba_kernel
from ncr_core.fold_in import users as users_module
from ncr_core.fold_in.evidence import PairSampler, WeightedPairs
from ncr_core.fold_in.users import FitArrays, fit_arrays, fit_kernel
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.ranking import ExactRanker
from ncr_core.ranking.backends import dense_kernel
from ncr_core.reproduction.baselines.scoring import Popularity
from ncr_core.training import TrainConfig, train_model
from tests.ncr_core.conftest import CONFIGS, config_name, wild_model

N = 150
FREE = [
    ModelConfig(kind="nbpr", factors=4, item_bias=True),
    ModelConfig(kind="dncr", factors=4, layers=4, activation="relu"),
    ModelConfig(kind="neupr", factors=3, layers=3),
    ModelConfig(kind="neupr", factors=3, layers=2, shared_embeddings=True),
    ModelConfig(kind="twotower", factors=4, layers=3),
]
COMPILED = [c for c in FREE if c.kind != "twotower" and not c.shared_embeddings]
HISTORY = ModelConfig(kind="neupr", factors=3, layers=3, users="history", windows=(2, 0))
HISTORIES = [
    ModelConfig(kind="nbpr", factors=4, users="history", windows=(1, 3, 0), item_bias=True),
    ModelConfig(kind="dncr", factors=2, layers=3, users="history"),
    HISTORY,
]
each_model = pytest.mark.parametrize("config", [*FREE, HISTORY], ids=lambda c: c.kind + c.users)
each_free = pytest.mark.parametrize("config", FREE, ids=lambda c: c.kind)
EXACT = FoldInConfig(tolerance=1e-9, steps=60)


def rows(*items: int) -> np.ndarray:
    return np.array(items, dtype=np.int64)


def some_users() -> list[Evidence]:
    rng = np.random.default_rng(0)
    long = rng.permutation(N)[:90]
    return [
        Evidence(rows(3, 77, 12)),
        Evidence(long, rng.uniform(0.5, 3.0, size=90)),
        Evidence(),
        Evidence(rows(5), disliked=rows(9, 8), pairs=np.array([[1, 2]])),
        Evidence(disliked=rows(4)),
    ]


def half_margin(model: PairwiseRanker, vector: torch.Tensor, i: int, j: int) -> float:
    user, a, b = vector.unsqueeze(0), torch.tensor([i]), torch.tensor([j])
    return float(model.logits(user, a, b) - model.logits(user, b, a)) / 2


@each_model
def test_a_vector_depends_on_the_user_alone(config: ModelConfig) -> None:
    fold_in = FoldIn(wild_model(config, 20, N))
    users = some_users()
    together = fold_in(users)
    assert together.dtype == torch.float32
    assert fold_in(users).equal(together)
    for at, user in enumerate(users):
        assert fold_in([user]).equal(together[at : at + 1])
    assert fold_in(users[::-1]).equal(together.flip(0))
    assert together[2].equal(fold_in.newcomer)
    assert fold_in([]).shape == (0, together.shape[1])


@each_model
def test_in_inference_mode_and_without_it(config: ModelConfig) -> None:
    fold_in = FoldIn(wild_model(config, 20, N))
    with torch.inference_mode():
        inside = fold_in(some_users())
    assert inside.equal(fold_in(some_users()))


@pytest.mark.parametrize("config", COMPILED, ids=lambda c: c.kind)
def test_compiled_code_gives_what_torch_gives(config: ModelConfig) -> None:
    assert users_module.fit_kernel() is not None
    model = wild_model(config, 20, N)
    with torch.no_grad():  # milder: where preferences are wild the loss has many minima
        for part in model.user_parts():
            part.weight.mul_(0.3)
    compiled = FoldIn(model, EXACT)(some_users())
    in_torch = FoldIn(model, EXACT, compiled=False)(some_users())
    torch.testing.assert_close(compiled, in_torch, atol=2e-3, rtol=2e-3)


def test_without_numba_it_is_done_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wild_model(FREE[2], 20, N)
    monkeypatch.setattr(users_module, "fit_kernel", lambda: None)
    without = FoldIn(model)(some_users())
    assert without.equal(FoldIn(model, compiled=False)(some_users()))


@pytest.mark.slow
@each_free
def test_what_is_known_moves_a_vector_its_way(config: ModelConfig) -> None:
    model = wild_model(config, 20, N)
    fold_in = FoldIn(model, EXACT)
    new = fold_in.newcomer
    winner, loser = 17, 60
    if half_margin(model, new, winner, loser) > 0:
        winner, loser = loser, winner
    before = half_margin(model, new, winner, loser)
    stated = fold_in([Evidence(pairs=np.array([[winner, loser]]))])[0]
    assert half_margin(model, stated, winner, loser) > before + 0.01

    others = [j for j in range(0, N, 7) if j not in (17, 60)]

    def standing(vector: torch.Tensor, item: int) -> float:
        """By the loss against other items, which is what moves."""
        m = torch.tensor([half_margin(model, vector, item, j) for j in others])
        return -float(torch.nn.functional.softplus(-m).mean())

    liked = fold_in([Evidence(rows(winner))])[0]
    more = fold_in([Evidence(rows(winner), np.array([20.0]))])[0]
    assert standing(new, winner) < standing(liked, winner) < standing(more, winner)
    disliked = fold_in([Evidence(disliked=rows(winner))])[0]
    m = torch.tensor([half_margin(model, disliked, winner, j) for j in others])
    m0 = torch.tensor([half_margin(model, new, winner, j) for j in others])
    assert torch.sigmoid(m).mean() < torch.sigmoid(m0).mean()


@each_free
def test_known_users_are_held_to_the_vectors_they_have(config: ModelConfig) -> None:
    model = wild_model(config, 20, N)
    known = model.user_vectors(torch.tensor([3, 11]))
    fold_in = FoldIn(model, FoldInConfig(strength=1e-4))
    torch.testing.assert_close(fold_in([Evidence()] * 2, known), known)
    barely = fold_in([Evidence(rows(1, 2))] * 2, known)
    assert (barely - known).abs().max() < 0.05
    moved = FoldIn(model)([Evidence(rows(1, 2))] * 2, known)
    assert (moved - known).norm(dim=1).min() > 10 * (barely - known).norm(dim=1).max()


@pytest.mark.parametrize("config", HISTORIES, ids=lambda c: c.kind)
def test_a_pooled_vector_is_that_of_the_items_in_their_order(config: ModelConfig) -> None:
    model = wild_model(config, 20, N)
    fold_in = FoldIn(model)
    items = [rows(3, 1, 8), rows(2), np.arange(100)]
    pooled = fold_in([Evidence(own) for own in items])
    # Not bit by bit: a pool with weights is a sum in another order.
    own_vectors = model.pooled_vectors([torch.from_numpy(own) for own in items])
    torch.testing.assert_close(pooled, own_vectors, atol=2e-6, rtol=0)
    turned = fold_in([Evidence(rows(8, 1, 3))])
    # All items alike, or the latest of them for themselves.
    assert ((turned[0] - pooled[0]).abs().max() > 1e-3) == any(config.windows)
    same = fold_in([Evidence(items[0], np.full(3, 7.0))])
    torch.testing.assert_close(same[0], pooled[0])
    weighted = fold_in([Evidence(items[0], np.array([1.0, 1.0, 9.0]))])
    assert (weighted[0] - pooled[0]).abs().max() > 1e-3


def test_dislikes_and_stated_pairs_move_a_pooled_vector() -> None:
    model = wild_model(HISTORY, 20, N)
    fold_in = FoldIn(model, EXACT)
    pooled = fold_in([Evidence(rows(3, 1, 8))])[0]
    winner, loser = (5, 6) if half_margin(model, pooled, 5, 6) < 0 else (6, 5)
    stated = fold_in([Evidence(rows(3, 1, 8), pairs=np.array([[winner, loser]]))])[0]
    before = half_margin(model, pooled, winner, loser)
    assert half_margin(model, stated, winner, loser) > before + 0.01
    disliked = fold_in([Evidence(rows(3, 1, 8), disliked=rows(winner))])[0]
    ahead = [
        np.mean([1 / (1 + np.exp(-half_margin(model, v, winner, j))) for j in range(0, N, 5)])
        for v in (pooled, disliked)
    ]
    assert ahead[1] < ahead[0]


@pytest.mark.parametrize("config", [FREE[2], HISTORY], ids=lambda c: c.users)
def test_evidence_that_does_not_fit_is_refused(config: ModelConfig) -> None:
    fold_in = FoldIn(wild_model(config, 20, N))
    with pytest.raises(IndexError, match="no item has the row 150"):
        fold_in([Evidence(rows(1)), Evidence(rows(150))])
    with pytest.raises(DataError, match="itself"):
        fold_in([Evidence(pairs=np.array([[2, 2]]))])


def test_a_model_of_one_user_or_of_equal_users() -> None:
    model = wild_model(FREE[2], 1, N)
    own = model.user_vectors(torch.tensor([0]))[0]
    torch.testing.assert_close(FoldIn(model)([Evidence(rows(1, 2, 3))])[0], own)
    twins = wild_model(FREE[2], 5, N)
    with torch.no_grad():
        for part in twins.user_parts():
            part.weight[:] = part.weight[0]
    vector = FoldIn(twins)([Evidence(rows(1, 2, 3))])[0]
    torch.testing.assert_close(vector, twins.user_vectors(torch.tensor([0]))[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nbpr", "neupr"])
@pytest.mark.parametrize("users", ["free", "history"])
def test_users_whom_training_never_saw_get_lists_of_their_own(
    synthetic: Interactions, kind: str, users: str
) -> None:
    """By their items alone they beat the popularity list."""
    old = synthetic.select(synthetic.users < 240)
    split = leave_latest_out(old)
    quick = TrainConfig(epochs=12, fine_tune_epochs=3, batch_size=256, patience=12, device="cpu")
    shape = ModelConfig.from_dict({"kind": kind, "factors": 8, "users": users})
    model = train_model(shape, quick, split).model.requires_grad_(False)
    whole = leave_latest_out(synthetic)
    test = sampled_candidates(whole, whole.test, seed=1, negatives=50)
    new = test.users >= 240
    vectors = FoldIn(model)([Evidence(whole.train.items_of(u)) for u in test.users[new]])

    class Folded:
        def rank(self, users: np.ndarray, candidates: np.ndarray, k: int) -> np.ndarray:
            own = vectors[torch.from_numpy(users - 240)]
            return ExactRanker(model).rank(own, torch.from_numpy(candidates), k).numpy()

    chosen = CandidateSet(test.users[new], test.held_out[new], test.candidates[new])
    folded = evaluate_sampled(Folded(), chosen)
    popular = evaluate_sampled(Popularity(split.train), chosen)
    assert folded.ndcg > 1.5 * popular.ndcg


N_OF_PAIRS = 200
EVEN = FoldInConfig(half_life=0.0, strength=2.0)


def as_set(pairs: WeightedPairs) -> set[tuple[int, int, float]]:
    triples = zip(pairs.winners, pairs.losers, pairs.weights, strict=True)
    return {(int(i), int(j), round(float(w), 12)) for i, j, w in triples}


def total_of(pairs: WeightedPairs, *, winner: int | None = None, loser: int | None = None) -> float:
    of = pairs.winners == winner if winner is not None else pairs.losers == loser
    return float(pairs.weights[of].sum())


def test_each_event_beats_items_that_the_user_does_not_know() -> None:
    pairs = PairSampler(N_OF_PAIRS, EVEN).sample(Evidence(rows(5, 9, 3), np.array([1.0, 3.0, 0.5])))
    assert set(pairs.winners.tolist()) == {5, 9, 3}
    assert not {5, 9, 3} & set(pairs.losers.tolist())
    assert (pairs.weights > 0).all()
    for item, weight in ((5, 1.0), (9, 3.0), (3, 0.5)):
        assert total_of(pairs, winner=item) == pytest.approx(2.0 * weight)
        assert len(np.unique(pairs.losers[pairs.winners == item])) > 50


def test_order_counts_by_age_alone() -> None:
    maker = PairSampler(N_OF_PAIRS, EVEN)
    assert as_set(maker.sample(Evidence(rows(5, 9, 3)))) == as_set(
        maker.sample(Evidence(rows(3, 5, 9)))
    )
    aged = PairSampler(N_OF_PAIRS, FoldInConfig(half_life=2.0, strength=1.0))
    pairs = aged.sample(Evidence(rows(7, 8, 9)))
    for item, share in ((7, 0.5), (8, 0.5**0.5), (9, 1.0)):
        assert total_of(pairs, winner=item) == pytest.approx(share)


def test_what_is_long_ago_or_beyond_the_limit_is_left_out() -> None:
    aged = PairSampler(N_OF_PAIRS, FoldInConfig(half_life=1.0))
    assert set(aged.sample(Evidence(np.arange(100))).winners.tolist()) == set(range(93, 100))
    limited = PairSampler(N_OF_PAIRS, FoldInConfig(half_life=0.0, events=3))
    assert set(limited.sample(Evidence(np.arange(100))).winners.tolist()) == {97, 98, 99}


@pytest.mark.parametrize("events", [1, 7, 200, 5_000])
def test_pairs_are_bounded_whatever_the_number_of_events(events: int) -> None:
    config = FoldInConfig(half_life=0.0, events=10_000)
    pairs = PairSampler(20_000, config).sample(Evidence(np.arange(events)))
    assert 0 < len(pairs.weights) <= max(config.pairs, events)


def test_a_disliked_item_loses_every_pair_and_more_than_a_liked_one_wins() -> None:
    evidence = Evidence(rows(5, 9, 3), disliked=rows(9, 40), disliked_weights=np.array([1.0, 2.0]))
    pairs = PairSampler(N_OF_PAIRS, EVEN).sample(evidence)
    assert not {9, 40} & set(pairs.winners.tolist())
    assert {(5, 40), (3, 40), (5, 9)} <= set(
        zip(pairs.winners.tolist(), pairs.losers.tolist(), strict=True)
    )
    assert total_of(pairs, loser=9) == pytest.approx(2.0 * EVEN.dislike)
    assert total_of(pairs, loser=40) == pytest.approx(4.0 * EVEN.dislike)
    assert total_of(pairs, winner=5) > total_of(
        PairSampler(N_OF_PAIRS, EVEN).sample(Evidence(rows(5))), winner=5
    )
    alone = PairSampler(N_OF_PAIRS, EVEN).sample(Evidence(disliked=rows(40)))
    assert set(alone.losers.tolist()) == {40}
    assert 40 not in alone.winners


def test_stated_pairs_are_pairs_of_their_own() -> None:
    stated = np.array([[1, 2], [2, 3], [3, 1]])  # a cycle is fine
    pairs = PairSampler(N_OF_PAIRS, EVEN).sample(Evidence(pairs=stated))
    assert as_set(pairs) == {(1, 2, 2.0), (2, 3, 2.0), (3, 1, 2.0)}
    both = PairSampler(N_OF_PAIRS, EVEN).sample(Evidence(rows(1), pairs=stated), likes=False)
    assert as_set(both) == as_set(pairs)


def test_nothing_known_and_everything_known() -> None:
    maker = PairSampler(4, EVEN)
    assert len(maker.sample(Evidence()).weights) == 0
    assert len(maker.sample(Evidence(np.arange(4))).weights) == 0  # nothing to compare with
    assert set(maker.sample(Evidence(rows(0, 1, 2))).losers.tolist()) == {3}
    # All that there is to lose to is disliked as well.
    assert len(maker.sample(Evidence(disliked=np.arange(4))).weights) == 0


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"items": rows(1, 200)}, IndexError),
        ({"items": rows(-1)}, IndexError),
        ({"disliked": rows(200)}, IndexError),
        ({"pairs": np.array([[0, 200]])}, IndexError),
        ({"pairs": np.array([[3, 3]])}, DataError),
        ({"pairs": np.array([3, 4])}, DataError),
        ({"items": rows(1), "weights": np.array([0.0])}, DataError),
        ({"items": rows(1), "weights": np.array([np.nan])}, DataError),
        ({"items": rows(1), "weights": np.array([1.0, 2.0])}, DataError),
        ({"disliked": rows(1), "disliked_weights": np.array([-1.0])}, DataError),
    ],
)
def test_evidence_that_does_not_fit(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Evidence(**wrong).check(N_OF_PAIRS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"strength": 0.0},
        {"half_life": -1.0},
        {"shown": 1.0},
        {"steps": 0},
        {"pairs": 0},
        {"tolerance": np.inf},
    ],
)
def test_settings_that_do_not_fit(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FoldInConfig(**wrong)


COMPILED_CONFIGS = [c for c in CONFIGS if c.kind != "twotower" and not c.shared_embeddings]
N_ITEMS = 37


def test_it_is_used_where_tests_are_run() -> None:
    assert fit_kernel() is numba_kernel


def arrays_of(model: PairwiseRanker, dtype: torch.dtype) -> FitArrays:
    size = model.user_vectors(torch.tensor([0])).shape[1]
    found = fit_arrays(model.tables().to(dtype), size, dtype)
    assert found is not None
    return found


def loss_and_slopes(
    model: PairwiseRanker, vector: Tensor, pairs: tuple[np.ndarray, ...], dtype: torch.dtype
) -> tuple[float, np.ndarray, np.ndarray]:
    """By the kernel: the loss, its gradient and its curvature in the user's vector."""
    arrays = arrays_of(model, dtype)
    t = (arrays.to_tables @ vector.numpy() + arrays.offset).astype(arrays.tables[0].dtype)
    n, widths = len(t), arrays.tower[0]
    kind = dense_kernel.RELU
    if model.config.activation == "tanh":
        kind = dense_kernel.EXACT_TANH if dtype == torch.float64 else dense_kernel.TANH
    shape = (len(widths), max(1, widths.max()), dense_kernel.BOTH)
    work = (
        np.empty(shape, t.dtype),
        np.empty(shape, t.dtype),
        np.empty((dense_kernel.LANES, n), t.dtype),
        np.empty(dense_kernel.LANES, t.dtype),
        np.zeros(shape[1], t.dtype),
    )
    gradient, curvature = np.empty(n), np.empty((n, n), t.dtype)
    loss = numba_kernel.loss_of_pairs(
        pairs, t, arrays.tables, arrays.tower, kind, work, gradient, curvature
    )
    to_tables = arrays.to_tables
    return loss, to_tables.T @ gradient, to_tables.T @ curvature @ to_tables


@pytest.mark.parametrize("config", COMPILED_CONFIGS, ids=config_name)
@pytest.mark.parametrize("count", [1, 16, 53])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 1e-4),
        pytest.param(torch.float64, 1e-10, marks=pytest.mark.slow),  # compiled for tests alone
    ],
)
def test_gradients_are_autograds(
    config: ModelConfig, count: int, dtype: torch.dtype, tolerance: float
) -> None:
    model = wild_model(config, 3, N_ITEMS).double()
    rng = np.random.default_rng(count)
    i = rng.integers(N_ITEMS, size=count)
    j = (i + rng.integers(1, N_ITEMS, size=count)) % N_ITEMS
    weights = rng.uniform(0.1, 2.0, size=count)
    vector = model.user_vectors(torch.tensor([1]))[0]

    users = vector.expand(count, -1).clone().requires_grad_(True)
    first, second = torch.from_numpy(i), torch.from_numpy(j)
    m = (model.logits(users, first, second) - model.logits(users, second, first)) / 2
    w = torch.from_numpy(weights)
    expected = float((w * softplus(-m)).sum().detach())
    (q,) = torch.autograd.grad(m.sum(), users)
    m = m.detach()
    gradient = -(q * (w * torch.sigmoid(-m)).unsqueeze(1)).sum(0)
    curvature = (q * (w * torch.sigmoid(m) * torch.sigmoid(-m)).unsqueeze(1)).T @ q

    found = loss_and_slopes(model, vector, (i, j, weights), dtype)
    size = max(1.0, expected)
    assert found[0] == pytest.approx(expected, abs=tolerance * size)
    np.testing.assert_allclose(found[1], gradient, atol=tolerance * 10 * size)
    np.testing.assert_allclose(found[2], curvature, atol=tolerance * 100 * size)


@pytest.mark.slow
def test_the_fit_is_where_the_loss_is_least() -> None:
    """For a model whose loss is convex: the slope there is none, as by differences."""
    model = wild_model(ModelConfig(kind="nbpr", factors=4, item_bias=True), 3, N_ITEMS)
    arrays = arrays_of(model, torch.float64)
    rng = np.random.default_rng(0)
    i = rng.integers(N_ITEMS, size=40)
    pairs = (
        i,
        (i + 1 + rng.integers(N_ITEMS - 1, size=40)) % N_ITEMS,
        rng.uniform(0.1, 1.0, size=40),
    )
    start, basis = arrays.offset + 0.3, np.ascontiguousarray(arrays.to_tables[:, :3])
    v = numba_kernel.fit(
        pairs, start, basis, arrays.tables, arrays.tower, dense_kernel.RELU, 50, 1e-14
    )

    def loss(at: np.ndarray) -> float:
        t = start + basis @ at
        linear, bias = arrays.tables[:2]
        half = (linear[pairs[0]] - linear[pairs[1]]) @ t + bias[pairs[0]] - bias[pairs[1]]
        return float(pairs[2] @ np.logaddexp(0.0, -half / 2) + at @ at / 2)

    for direction in np.eye(3):
        slope = (loss(v + 1e-5 * direction) - loss(v - 1e-5 * direction)) / 2e-5
        assert slope == pytest.approx(0.0, abs=1e-6)
    assert loss(v) < loss(np.zeros(3)) - 0.1


def test_what_the_kernel_is_not_made_for() -> None:
    for config in CONFIGS:
        tables = wild_model(config, 3, N_ITEMS).tables()
        other = config.kind == "twotower" or (config.shared_embeddings and config.layers > 1)
        size = 4 * config.tower_embedding
        assert (fit_arrays(tables, size, torch.float32) is None) == other
