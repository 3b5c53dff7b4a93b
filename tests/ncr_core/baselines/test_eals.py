"""eALS against Algorithm 1 of its paper as it is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ncr_core.data import Interactions
from ncr_core.errors import ConfigError, DataError
from ncr_core.models.baselines.eals import EALS, EALSConfig, fit_eals, missing_weights
from tests.ncr_core.baselines.small import dense, small_matrix

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


def objective(train: Interactions, config: EALSConfig, model: EALS) -> float:
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

    def note(model: EALS, iteration: int) -> bool:
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


def test_training_ends_when_the_caller_says_so() -> None:
    kept: list[EALS] = []

    def at_the_second(model: EALS, iteration: int) -> bool:
        kept.append(model)
        return iteration == 2

    model = fit_eals(small_matrix(), CONFIGS[0], at_the_second)
    assert len(kept) == 2
    assert model is kept[1]
    # what was kept is not trained further
    assert not np.allclose(kept[0].item_factors, kept[1].item_factors)


@pytest.mark.parametrize(
    "wrong",
    [
        {"factors": 0},
        {"iterations": 0},
        {"c0": -1.0},
        {"alpha": -0.1},
        {"l2": 0.0},
        {"init_std": float("nan")},
    ],
)
def test_a_configuration_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EALSConfig(**wrong)


def test_nothing_to_learn_from() -> None:
    none = np.array([], dtype=np.int64)
    empty = Interactions.from_arrays(none, none, user_ids=["u"], item_ids=["x"])
    with pytest.raises(DataError, match="no interactions"):
        fit_eals(empty, EALSConfig())
