"""Ranking by scores, by hand, and eALS against Algorithm 1 of its paper as it is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ncr_core.data import Interactions, Split, build_interactions
from ncr_core.data.interactions import IntArray
from ncr_core.errors import ConfigError, DataError, TrainingError
from ncr_core.evaluation.protocols import evaluate_sampled, sampled_candidates
from ncr_core.ranking import PAD
from ncr_core.reproduction.baselines import scoring
from ncr_core.reproduction.baselines.als import (
    EALSConfig,
    IALSConfig,
    fit_eals,
    fit_ials,
    missing_weights,
)
from ncr_core.reproduction.baselines.scoring import (
    MAX_ITEMS,
    FactorModel,
    GraphFilter,
    Markov,
    Popularity,
    ScoreModel,
    Scores,
    fit_cornac_bpr,
    fit_ease,
    fit_linear_next_item,
    fit_pure_svd,
)
from ncr_core.training.next_item import next_item_weights
from tests.ncr_core.reproduction.conftest import dense, small_matrix


class Fixed(ScoreModel):
    """Every user's scores are those given."""

    def __init__(self, *scores: float) -> None:
        self._scores = np.array(scores)

    def scores(self, users: IntArray) -> Scores:
        return np.tile(self._scores, (len(users), 1))


def ranked(model: ScoreModel, candidates: list[list[int]], k: int) -> list[list[int]]:
    result: list[list[int]] = model.rank(
        np.arange(len(candidates)), np.array(candidates), k
    ).tolist()
    return result


def test_the_highest_come_first_and_padding_last() -> None:
    model = Fixed(0.5, -2.0, 3.0)
    assert ranked(model, [[0, 1, 2], [1, 0, -1], [-1, 1, -1]], 3) == [
        [2, 0, 1],
        [0, 1, -1],
        [1, -1, -1],
    ]


def test_ties_keep_the_candidates_order() -> None:
    assert ranked(Fixed(1.0, 1.0, 1.0, 2.0), [[2, 0, 3, 1], [1, 2, 0, 3]], 4) == [
        [3, 2, 0, 1],
        [3, 1, 2, 0],
    ]


def test_there_are_at_most_k_and_at_most_as_many_as_candidates() -> None:
    model = Fixed(0.0, 1.0, 2.0)
    assert ranked(model, [[0, 1, 2]], 2) == [[2, 1]]
    assert ranked(model, [[0, 1]], 10) == [[1, 0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_raises(bad: float) -> None:
    model = Fixed(0.0, bad, 1.0)
    with pytest.raises(TrainingError, match="Fixed gives scores that are not finite"):
        model.rank(np.array([0]), np.array([[0, 1]]), 2)
    # only candidates have a place in the order
    assert ranked(model, [[0, 2, -1]], 2) == [[2, 0]]


def test_factors_by_hand() -> None:
    model = FactorModel(np.array([[1.0, 2.0], [0.0, -1.0]]), np.array([[1.0, 0.0], [3.0, 1.0]]))
    assert model.scores(np.array([1, 0, 1])).tolist() == [[0, -1], [1, 5], [0, -1]]


def test_factors_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"\(5, 3\).*\(7, 4\)"):
        FactorModel(np.zeros((5, 3)), np.zeros((7, 4)))


FITS: dict[str, Callable[[Interactions], ScoreModel]] = {
    "popularity": Popularity,
    "ease": lambda train: fit_ease(train, 50.0),
    "eals": lambda train: fit_eals(train, EALSConfig(c0=20.0, l2=1.0, iterations=10)),
    "ials": lambda train: fit_ials(train, IALSConfig(factors=8, l2=0.02)),
    "cornac_bpr": lambda train: fit_cornac_bpr(train, 8, iterations=50, seed=0),
    "markov": Markov,
    "linear": lambda train: fit_linear_next_item(train, 10.0),
    "pure_svd": lambda train: fit_pure_svd(train, 8, seed=0),
    "graph_filter": lambda train: GraphFilter(train, 8, 0.3, seed=0),
}
LIBRARIES = {"ials": "implicit", "cornac_bpr": "cornac"}


@pytest.fixture(scope="module")
def train(split: Split) -> Interactions:
    """The training data with a user and an item at the end that have no interactions."""
    users = [*split.train.user_ids, "nobody"]
    return split.train.reindex(users, [*split.train.item_ids, "nothing"])


@pytest.fixture(scope="module", params=list(FITS))
def model(request: pytest.FixtureRequest, train: Interactions) -> ScoreModel:
    name: str = request.param
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    return FITS[name](train)


@pytest.fixture(scope="module")
def candidates(train: Interactions) -> np.ndarray:
    """(n_users, 30) different items, the first rows padded to lengths from 0."""
    rng = np.random.default_rng(5)
    rows = np.array([rng.permutation(train.n_items)[:30] for _ in range(train.n_users)])
    for length in range(30):
        rows[length, length:] = PAD
    return rows


def test_a_rank_is_a_permutation_of_the_candidates_padded_right(
    model: ScoreModel, train: Interactions, candidates: np.ndarray
) -> None:
    ranked = model.rank(np.arange(train.n_users), candidates, 50)
    assert ranked.shape == candidates.shape
    for before, after in zip(candidates, ranked, strict=True):
        length = (before != PAD).sum()
        assert sorted(after[:length]) == sorted(before[:length])
        assert (after[length:] == PAD).all()


def test_the_first_k_are_the_start_of_the_whole_order(
    model: ScoreModel, train: Interactions, candidates: np.ndarray
) -> None:
    users = np.arange(train.n_users)
    whole = model.rank(users, candidates, 30)
    assert (model.rank(users, candidates, 7) == whole[:, :7]).all()


def test_a_user_gets_the_same_whoever_else_is_asked_for(
    model: ScoreModel, train: Interactions, candidates: np.ndarray
) -> None:
    users = np.random.default_rng(0).permutation(train.n_users)
    together = model.scores(users)
    ranked = model.rank(users, candidates[users], 10)
    for row in range(0, len(users), 17):
        one = users[row : row + 1]
        assert (model.scores(one)[0] == together[row]).all()
        assert (model.rank(one, candidates[one], 10)[0] == ranked[row]).all()


def test_users_and_items_without_interactions_have_finite_scores(
    model: ScoreModel, train: Interactions
) -> None:
    scores = model.scores(np.array([0, train.n_users - 1]))
    assert scores.shape == (2, train.n_items)
    assert np.isfinite(scores).all()


def test_it_beats_a_random_order(model: ScoreModel, split: Split) -> None:
    if isinstance(model, Markov):
        pytest.skip("the order of these data says nothing")
    found = evaluate_sampled(model, sampled_candidates(split, split.test, seed=0))
    by_chance = 10 / found.items
    assert found.hr > 2 * by_chance


@pytest.mark.parametrize("rows", [1024, 7])
def test_each_column_is_the_ridge_regression_on_the_other_items(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_ROWS", rows)
    train, l2 = small_matrix(), 2.5
    weights = fit_ease(train, l2).weights
    x = dense(train)
    gram = x.T @ x
    assert (np.diag(weights) == 0).all()
    for item in range(train.n_items):
        rest = np.arange(train.n_items) != item
        penalised = gram[np.ix_(rest, rest)] + l2 * np.eye(train.n_items - 1)
        expected = np.linalg.solve(penalised, gram[rest, item])
        np.testing.assert_allclose(weights[rest, item], expected, atol=1e-6)


def test_scores_are_sums_over_the_users_items() -> None:
    train = small_matrix()
    model = fit_ease(train, 1.0)
    found = model.scores(np.arange(train.n_users))
    np.testing.assert_allclose(found, dense(train) @ model.weights, atol=1e-6)


def test_markov_counts_what_came_right_after_the_last_item() -> None:
    rows = [("a", 0, 1), ("a", 1, 2), ("a", 2, 3), ("b", 1, 1), ("b", 2, 2), ("c", 0, 1)]
    rows += [("d", 1, 1), ("d", 0, 2)]
    train = build_interactions((user, f"i{item}", float(time)) for user, item, time in rows)
    model = Markov(train.reindex(train.user_ids, ["i0", "i1", "i2"]))
    popularity = np.array([3, 3, 2]) / 4.0
    followers = {"a": [0, 0, 0], "b": [0, 0, 0], "c": [0, 1, 0], "d": [0, 1, 0]}
    for user, name in enumerate(train.user_ids):
        scores = model.scores(np.array([user]))[0]
        np.testing.assert_allclose(scores, popularity + followers[name])


def test_markov_finds_what_always_comes_next() -> None:
    cycle = [(f"u{user}", f"i{(user + n) % 50}", float(n)) for user in range(50) for n in range(20)]
    train = build_interactions(cycle)
    for user, last in enumerate(train.items_of(user)[-1] for user in range(train.n_users)):
        best = train.item_ids[int(Markov(train).scores(np.array([user]))[0].argmax())]
        assert int(best[1:]) == (int(train.item_ids[last][1:]) + 1) % 50


def test_pure_svd_is_the_best_approximation_of_low_rank() -> None:
    train = small_matrix()
    x = dense(train)
    left, values, right = np.linalg.svd(x, full_matrices=False)
    model = fit_pure_svd(train, 3, seed=0)
    expected = (left[:, :3] * values[:3]) @ right[:3]
    np.testing.assert_allclose(model.scores(np.arange(train.n_users)), expected, atol=1e-9)


def test_the_graph_filter_is_the_published_sum_of_two_filters() -> None:
    train = small_matrix()
    x = dense(train)
    of_users = np.diag(1 / np.sqrt(np.maximum(1.0, x.sum(axis=1))))
    of_items = np.sqrt(np.maximum(1.0, x.sum(axis=0)))
    scaled = of_users @ x / of_items
    leading = np.linalg.svd(scaled)[2][:3].T
    low_pass = (x / of_items) @ leading @ leading.T * of_items
    expected = x @ scaled.T @ scaled + 0.3 * low_pass
    model = GraphFilter(train, 3, 0.3, seed=0)
    np.testing.assert_allclose(model.scores(np.arange(train.n_users)), expected, atol=1e-5)
    # The filters stay, and the users have other items.
    half = train.select(np.arange(train.nnz) % 2 == 0)
    y = dense(half)
    expected = y @ scaled.T @ scaled + 0.3 * (y / of_items) @ leading @ leading.T * of_items
    scores = model.with_input(half).scores(np.arange(train.n_users))
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_the_linear_next_item_model_adds_up_the_latest_items() -> None:
    train = small_matrix()
    model = fit_linear_next_item(train, 2.0)
    weights = next_item_weights(train, 2.0)
    for user in range(train.n_users):
        expected = np.zeros(train.n_items)
        for age, item in enumerate(train.items_of(user)[::-1]):
            expected += 0.8**age * weights[item]
        np.testing.assert_allclose(model.scores(np.array([user]))[0], expected, atol=1e-5)
    with pytest.raises(ConfigError, match="l2"):
        fit_linear_next_item(train, 0.0)


def test_a_matrix_that_would_not_fit_is_refused() -> None:
    ids = [str(item) for item in range(MAX_ITEMS + 1)]
    one = np.zeros(1, dtype=np.int64)
    train = Interactions.from_arrays(one, one, user_ids=["u"], item_ids=ids)
    with pytest.raises(ConfigError, match=r"at most 20,000 items: for 20,001 .* 10 GB"):
        fit_ease(train, 1.0)


@pytest.mark.parametrize("l2", [0.0, -1.0, float("nan")])
def test_a_penalty_that_cannot_be(l2: float) -> None:
    with pytest.raises(ConfigError, match="l2 must be above 0"):
        fit_ease(build_interactions([("u", "x", 0)]), l2)


@pytest.fixture
def _library() -> None:
    pytest.importorskip("cornac", reason="cornac is not installed: extra 'cornac'")


@pytest.mark.usefixtures("_library")
def test_users_items_and_biases_keep_their_places() -> None:
    train = small_matrix()
    model = fit_cornac_bpr(train, 6, iterations=300, seed=0)
    assert model.user_factors.shape == (train.n_users, 7)
    assert model.item_factors.shape == (train.n_items, 7)
    assert (model.user_factors[:, -1] == 1).all()
    assert model.seconds > 0
    r, scores = dense(train)[:-1], model.scores(np.arange(train.n_users - 1))
    # what was learned is that a user's own items come first
    own = (scores * r).sum(axis=1) / r.sum(axis=1)
    others = (scores * (1 - r)).sum(axis=1) / (1 - r).sum(axis=1)
    assert (own > others).all()
    # items get rarer from the first to the last
    assert model.item_factors[0, -1] > model.item_factors[-1, -1]


@pytest.mark.usefixtures("_library")
def test_a_seed_makes_it_repeatable() -> None:
    first, again = (fit_cornac_bpr(small_matrix(), 3, iterations=5, seed=4) for _ in range(2))
    assert (first.item_factors == again.item_factors).all()


FloatArray = npt.NDArray[np.float64]
CONFIGS = [
    EALSConfig(factors=3, c0=3.0, init_std=0.3, iterations=4),
    # weights of missing data above 1, which an interaction has
    EALSConfig(factors=5, c0=60.0, alpha=1.0, l2=0.5, init_std=0.5, iterations=4, seed=1),
    EALSConfig(factors=1, c0=0.0, alpha=0.0, l2=2.0, init_std=0.1, iterations=4),
]


def algorithm_1(train: Interactions, config: EALSConfig) -> tuple[FloatArray, FloatArray]:
    """Literally: each user and item by itself, each element by its closed form (w = r = 1)."""
    rng = np.random.default_rng(config.seed)
    p = rng.normal(0.0, config.init_std, (train.n_users, config.factors))
    q = rng.normal(0.0, config.init_std, (train.n_items, config.factors))
    c = missing_weights(train, config)
    r = dense(train)
    for _ in range(config.iterations):
        s_q = sum(c[i] * np.outer(q[i], q[i]) for i in range(train.n_items))
        for u in range(train.n_users):
            for f in range(config.factors):
                top = -sum(p[u, k] * s_q[k, f] for k in range(config.factors) if k != f)
                bottom = s_q[f, f] + config.l2
                for i in np.flatnonzero(r[u]):
                    without_f = p[u] @ q[i] - p[u, f] * q[i, f]
                    top += (1 - (1 - c[i]) * without_f) * q[i, f]
                    bottom += (1 - c[i]) * q[i, f] ** 2
                p[u, f] = top / bottom
        s_p = p.T @ p
        for i in range(train.n_items):
            for f in range(config.factors):
                top = -c[i] * sum(q[i, k] * s_p[k, f] for k in range(config.factors) if k != f)
                bottom = c[i] * s_p[f, f] + config.l2
                for u in np.flatnonzero(r[:, i]):
                    without_f = p[u] @ q[i] - p[u, f] * q[i, f]
                    top += (1 - (1 - c[i]) * without_f) * p[u, f]
                    bottom += (1 - c[i]) * p[u, f] ** 2
                q[i, f] = top / bottom
    return p, q


def objective(train: Interactions, config: EALSConfig, model: FactorModel) -> float:
    """What eALS minimises, over all pairs."""
    r, p, q = dense(train), model.user_factors, model.item_factors
    weights = np.where(r > 0, 1.0, missing_weights(train, config))
    norms = (p**2).sum() + (q**2).sum()
    return float((weights * (r - p @ q.T) ** 2).sum() + config.l2 * norms)


@pytest.mark.parametrize("config", CONFIGS)
def test_it_is_algorithm_1(config: EALSConfig) -> None:
    train = small_matrix()
    model = fit_eals(train, config)
    p, q = algorithm_1(train, config)
    np.testing.assert_allclose(model.user_factors, p, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(model.item_factors, q, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_objective_never_increases(config: EALSConfig) -> None:
    train, losses = small_matrix(), list[float]()

    def note(model: FactorModel, iteration: int) -> bool:
        assert iteration == len(losses) + 1
        losses.append(objective(train, config, model))
        return False

    fit_eals(train, config, note)
    assert len(losses) == config.iterations
    assert (np.diff(losses) <= 1e-10).all()


def test_weights_of_missing_data_by_hand() -> None:
    pairs = np.array([[0, 0], [1, 0], [2, 0], [3, 0], [0, 1]])
    train = Interactions.from_arrays(
        pairs[:, 0], pairs[:, 1], user_ids=list("abcd"), item_ids=list("xyz")
    )
    weights = missing_weights(train, EALSConfig(c0=6.0, alpha=0.5))
    np.testing.assert_allclose(weights, [4.0, 2.0, 0.0])


Fit = Callable[..., FactorModel]
SMALL = IALSConfig(factors=4, alpha0=0.3, l2=0.01, iterations=5)


NEEDS_IMPLICIT = pytest.mark.skipif(
    find_spec("implicit") is None, reason="implicit is not installed: extra 'research'"
)


@NEEDS_IMPLICIT
@pytest.mark.parametrize("alpha0", [0.1, 0.5])
@pytest.mark.parametrize("nu", [0.0, 1.0])
def test_the_gradient_of_the_papers_loss_is_zero_in_the_end(alpha0: float, nu: float) -> None:
    config = IALSConfig(factors=3, alpha0=alpha0, l2=0.5 / 10**nu, nu=nu, iterations=300)
    train = small_matrix()
    model, r = fit_ials(train, config), dense(train)
    l2_user = config.l2 * (train.nnz / train.n_users + alpha0 * train.n_items) ** nu
    l2_item = config.l2 * (train.nnz / train.n_items + alpha0 * train.n_users) ** nu
    # the library's target is 1 + alpha0, and it penalises both sides alike
    balance = (l2_item / l2_user) ** 0.25
    p = model.user_factors.astype(np.float64) / np.sqrt(1 + alpha0) * balance
    q = model.item_factors.astype(np.float64) / np.sqrt(1 + alpha0) / balance
    assert np.abs(p @ q.T).max() > 0.5
    by_score = r * (p @ q.T - 1) + alpha0 * (p @ q.T)
    np.testing.assert_allclose(by_score @ q + l2_user * p, 0.0, atol=1e-3)
    np.testing.assert_allclose(by_score.T @ p + l2_item * q, 0.0, atol=1e-3)


@NEEDS_IMPLICIT
def test_a_seed_and_not_the_threads_says_what_comes_out() -> None:
    train = small_matrix()
    one = fit_ials(train, SMALL)
    two = fit_ials(train, IALSConfig(factors=4, alpha0=0.3, l2=0.01, iterations=5, threads=2))
    other = fit_ials(train, IALSConfig(factors=4, alpha0=0.3, l2=0.01, iterations=5, seed=1))
    np.testing.assert_allclose(one.item_factors, two.item_factors, atol=1e-6)
    assert not np.allclose(one.item_factors, other.item_factors, atol=1e-3)


@pytest.mark.parametrize(
    ("module", "extra", "fit", "config"),
    [
        ("implicit.als", "research", fit_ials, SMALL),
        ("cornac.models", "cornac", fit_cornac_bpr, 2),
    ],
)
def test_without_the_library_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, extra: str, fit: Fit, config: Any
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install .*\[{extra}\]"):
        fit(small_matrix(), config)


METHODS = pytest.mark.parametrize(
    ("fit", "config"),
    [
        pytest.param(fit_eals, CONFIGS[0], id="eals"),
        pytest.param(fit_ials, SMALL, id="ials", marks=NEEDS_IMPLICIT),
    ],
)


@METHODS
def test_training_ends_when_the_caller_says_so(fit: Fit, config: Any) -> None:
    models: list[FactorModel] = []

    def at_the_second(model: FactorModel, iteration: int) -> bool:
        models.append(model)
        return iteration == 2

    model = fit(small_matrix(), config, at_the_second)
    assert len(models) == 2
    assert model is models[1]
    # what the caller has is not trained further
    assert not np.allclose(models[0].item_factors, models[1].item_factors)


@pytest.mark.parametrize(
    ("fit", "config"),
    [
        (fit_eals, CONFIGS[0]),
        pytest.param(fit_ials, SMALL, marks=NEEDS_IMPLICIT),
        pytest.param(
            fit_cornac_bpr,
            2,
            marks=pytest.mark.skipif(find_spec("cornac") is None, reason="extra 'cornac'"),
        ),
    ],
)
def test_nothing_to_learn_from(fit: Fit, config: Any) -> None:
    none = np.array([], dtype=np.int64)
    empty = Interactions.from_arrays(none, none, user_ids=["u"], item_ids=["x"])
    with pytest.raises(DataError, match="no interactions"):
        fit(empty, config)


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        (EALSConfig, {"factors": 0}),
        (EALSConfig, {"iterations": 0}),
        (EALSConfig, {"c0": -1.0}),
        (EALSConfig, {"alpha": -0.1}),
        (EALSConfig, {"l2": 0.0}),
        (EALSConfig, {"init_std": float("nan")}),
        (IALSConfig, {"factors": 0}),
        (IALSConfig, {"alpha0": 0.0}),
        (IALSConfig, {"l2": -1.0}),
        (IALSConfig, {"nu": -1.0}),
        (IALSConfig, {"threads": -1}),
    ],
)
def test_a_configuration_that_cannot_be(config: Callable[..., Any], wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        config(**wrong)
