"""EASE against its definition."""

from __future__ import annotations

import numpy as np
import pytest

from ncr_core.data import Interactions, build_interactions
from ncr_core.errors import ConfigError
from ncr_core.models.baselines import ease
from ncr_core.models.baselines.ease import MAX_ITEMS, fit_ease
from tests.ncr_core.baselines.small import dense, small_matrix


@pytest.mark.parametrize("rows", [1024, 7])
def test_each_column_is_the_ridge_regression_on_the_other_items(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ease, "_ROWS", rows)
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
