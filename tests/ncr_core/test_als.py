"""The ALS start solves what it says it solves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ncr_core.data import Split
from ncr_core.errors import ConfigError
from ncr_core.evaluation.protocols import ModelRanks, evaluate_sampled, sampled_candidates
from ncr_core.models import ModelConfig, build_model
from ncr_core.models.baselines.popularity import Popularity
from ncr_core.training import TrainConfig, train_model
from ncr_core.training import als as als_module
from ncr_core.training.als import L2, UNOBSERVED, _solve, als_start


@pytest.mark.parametrize("cells", [2**24, 40])  # all rows at once, and a few at a time
def test_a_half_step_solves_each_row_exactly(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(als_module, "CELLS", cells)
    rng = np.random.default_rng(0)
    entries = rng.random((7, 9)) < 0.4
    entries[3] = False  # a row without entries
    rows, columns = (torch.from_numpy(x) for x in np.nonzero(entries))
    other = torch.from_numpy(rng.normal(size=(9, 3)))
    found = _solve(other, rows, columns, 7).numpy()
    y = other.numpy()
    for row in range(7):
        own = y[entries[row]]
        ridge = L2 * (len(own) + UNOBSERVED * 9)
        left = own.T @ own + UNOBSERVED * y.T @ y + ridge * np.eye(3)
        np.testing.assert_allclose(found[row], np.linalg.solve(left, own.sum(axis=0)), atol=1e-10)


def test_the_start_alone_beats_popularity_and_repeats_itself(split: Split) -> None:
    first, second = (
        build_model(ModelConfig(kind="nbpr", factors=8), split.train.n_users, split.train.n_items)
        for _ in range(2)
    )
    for model in (first, second):
        als_start(model, split.train, seed=3)
    assert first.get_parameter("users.weight").equal(second.get_parameter("users.weight"))
    test = sampled_candidates(split, split.test, seed=1, negatives=50)
    popular = evaluate_sampled(Popularity(split.train), test)
    assert evaluate_sampled(ModelRanks(first), test).ndcg > 1.2 * popular.ndcg


def test_it_is_for_nbpr_with_free_users(split: Split) -> None:
    training = TrainConfig(start="als", epochs=1, device="cpu")
    for config in (
        ModelConfig(kind="dncr", factors=4),
        ModelConfig(kind="nbpr", factors=4, users="history"),
    ):
        with pytest.raises(ConfigError, match="an ALS start is for nbpr with free users"):
            train_model(config, training, split)
    with pytest.raises(ConfigError, match="start must be"):
        train_model(ModelConfig(kind="nbpr", factors=4, init="paper"), training, split)
