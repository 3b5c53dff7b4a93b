"""eALS against Algorithm 1 of its paper as it is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ncr_core.data import Interactions
from ncr_core.errors import ConfigError, DataError
from ncr_core.reproduction.baselines.als import (
    EALSConfig,
    IALSConfig,
    fit_eals,
    fit_ials,
    missing_weights,
)
from ncr_core.reproduction.baselines.scoring import FactorModel
from tests.ncr_core.reproduction.conftest import dense, small_matrix

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


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "implicit.als", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[research\]"):
        fit_ials(small_matrix(), SMALL)


Fit = Callable[..., FactorModel]
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


@METHODS
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
