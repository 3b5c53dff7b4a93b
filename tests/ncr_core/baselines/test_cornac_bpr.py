"""BPR by cornac."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from ncr_core.data import Interactions
from ncr_core.errors import ConfigError, DataError
from ncr_core.models.baselines.cornac_bpr import fit_cornac_bpr
from tests.ncr_core.baselines.small import dense, small_matrix


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


@pytest.mark.usefixtures("_library")
def test_nothing_to_learn_from() -> None:
    none = np.array([], dtype=np.int64)
    empty = Interactions.from_arrays(none, none, user_ids=["u"], item_ids=["x"])
    with pytest.raises(DataError, match="no interactions"):
        fit_cornac_bpr(empty, 2)


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cornac.models", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[cornac\]"):
        fit_cornac_bpr(small_matrix(), 2)
