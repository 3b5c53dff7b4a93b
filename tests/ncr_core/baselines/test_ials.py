"""iALS: that the library's loss, in its own terms, is the one of the paper."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from ncr_core.data import Interactions
from ncr_core.errors import ConfigError, DataError
from ncr_core.models.baselines.ials import IALS, IALSConfig, fit_ials
from tests.ncr_core.baselines.small import dense, small_matrix

SMALL = IALSConfig(factors=4, alpha0=0.3, l2=0.01, iterations=5)


@pytest.fixture
def _library() -> None:
    pytest.importorskip("implicit", reason="implicit is not installed: extra 'research'")


@pytest.mark.usefixtures("_library")
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


@pytest.mark.usefixtures("_library")
def test_a_seed_and_not_the_threads_says_what_comes_out() -> None:
    train = small_matrix()
    one = fit_ials(train, SMALL)
    two = fit_ials(train, IALSConfig(factors=4, alpha0=0.3, l2=0.01, iterations=5, threads=2))
    other = fit_ials(train, IALSConfig(factors=4, alpha0=0.3, l2=0.01, iterations=5, seed=1))
    np.testing.assert_allclose(one.item_factors, two.item_factors, atol=1e-6)
    assert not np.allclose(one.item_factors, other.item_factors, atol=1e-3)


@pytest.mark.usefixtures("_library")
def test_training_ends_when_the_caller_says_so() -> None:
    kept: list[IALS] = []

    def at_the_second(model: IALS, iteration: int) -> bool:
        kept.append(model)
        return iteration == 2

    model = fit_ials(small_matrix(), SMALL, at_the_second)
    assert len(kept) == 2
    assert model is kept[1]
    assert not np.allclose(kept[0].item_factors, kept[1].item_factors)


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "implicit.als", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[research\]"):
        fit_ials(small_matrix(), SMALL)


@pytest.mark.usefixtures("_library")
def test_nothing_to_learn_from() -> None:
    none = np.array([], dtype=np.int64)
    empty = Interactions.from_arrays(none, none, user_ids=["u"], item_ids=["x"])
    with pytest.raises(DataError, match="no interactions"):
        fit_ials(empty, SMALL)


@pytest.mark.parametrize(
    "wrong",
    [{"factors": 0}, {"alpha0": 0.0}, {"l2": -1.0}, {"nu": -1.0}, {"threads": -1}],
)
def test_a_configuration_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        IALSConfig(**wrong)
