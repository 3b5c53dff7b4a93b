"""The linear next-item model: its factors equal the ridge regression written out row by row."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from ncr_core.data import Interactions, Split
from ncr_core.errors import ConfigError
from ncr_core.models import NBPR, ModelConfig, build_model
from ncr_core.training import TrainConfig, next_item, train_model
from ncr_core.training.decayed_histories import DecayedHistories
from ncr_core.training.initializers import TOWER_STD, next_item_start
from ncr_core.training.next_item import (
    BACKWARD,
    DECAY,
    POPULARITY_POWER,
    SPARSE_POPULARITY_POWER,
    next_item_factors,
    next_item_weights,
)
from ncr_core.training.trainer import remember

WINDOWS = (1, 2, 4, 8, 16, 64, 0)
HISTORY = ModelConfig(kind="nbpr", factors=3, users="history", windows=WINDOWS)


def sequences(lengths: list[int], n_items: int) -> Interactions:
    """Users with so many different items each, in random order."""
    rng = np.random.default_rng(4)
    items = [rng.permutation(n_items)[:length] for length in lengths]
    return Interactions.from_arrays(
        np.repeat(np.arange(len(lengths)), lengths),
        np.concatenate(items),
        user_ids=[f"u{n}" for n in range(len(lengths))],
        item_ids=[f"i{n}" for n in range(n_items)],
    )


def ridge(
    train: Interactions, backward: float = BACKWARD, l2: float = next_item.SPARSE_RIDGE
) -> np.ndarray:
    """(XᵀX + λI)⁻¹ (XᵀY + βYᵀX) with a row of X and Y for each interaction."""
    inputs, following = [], []
    for user in range(train.n_users):
        items = train.items_of(user)
        for place, item in enumerate(items):
            row, one = np.zeros(train.n_items), np.zeros(train.n_items)
            for lag, earlier in enumerate(items[:place][::-1]):
                row[earlier] = DECAY**lag
            one[item] = 1.0
            inputs.append(row)
            following.append(one)
    x, y = np.stack(inputs), np.stack(following)
    followers = x.T @ y + backward * y.T @ x
    result: np.ndarray = np.linalg.solve(x.T @ x + l2 * np.eye(train.n_items), followers)
    return result


@pytest.mark.parametrize("max_dense_items", [8_000, 0], ids=["Cholesky", "conjugate gradients"])
@pytest.mark.parametrize("lengths", [[5, 1, 9, 2, 12, 0, 7], [12] * 40, [60, 3, 55]])
def test_the_factors_are_those_of_the_ridge_regression(
    lengths: list[int], max_dense_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_item, "MAX_DENSE_ITEMS", max_dense_items)
    monkeypatch.setattr(next_item, "SPARSE_RIDGE", 2.0)
    monkeypatch.setattr(next_item, "RIDGE", 2.0)
    train = sequences(lengths, n_items=max(13, *lengths))
    expected = ridge(train, l2=2.0)
    history, ranked = next_item_factors(train, rank=train.n_items, seed=0)
    np.testing.assert_allclose(history @ ranked.T, expected, atol=2e-3 * abs(expected).max())
    forward = ridge(train, backward=0.0, l2=2.0)
    np.testing.assert_allclose(next_item_weights(train), forward, atol=2e-3 * abs(forward).max())
    monkeypatch.setattr(next_item, "SMALL_DATA", train.nnz - 1)
    monkeypatch.setattr(next_item, "SPARSE_RIDGE", 9.0)  # is not for these
    more = replace(train)  # of many interactions
    history, ranked = next_item_factors(more, rank=train.n_items, seed=0)
    np.testing.assert_allclose(history @ ranked.T, forward, atol=2e-3 * abs(forward).max())


@pytest.mark.parametrize("columns", [3, 40], ids=["one thread", "two threads"])
def test_products_by_scans_equal_those_with_the_rows_themselves(columns: int) -> None:
    train = sequences([60, 3, 0, 1, 55, 2], n_items=70)
    rows, ones = [], []
    for user in range(train.n_users):
        row = np.zeros(70)
        for item in train.items_of(user):
            rows.append(row)
            ones.append(np.eye(70)[item])
            row = DECAY * row + np.eye(70)[item]
    x, y = np.stack(rows), np.stack(ones)
    histories = DecayedHistories(train.items, train.indptr, 70, DECAY)
    block = np.random.default_rng(5).standard_normal((70, columns)).astype(np.float32)
    np.testing.assert_allclose(histories.gram(block), x.T @ x @ block, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(histories.followers(block), x.T @ y @ block, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(histories.predecessors(block), y.T @ x @ block, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(histories.gram_diagonal(), np.diag(x.T @ x), rtol=1e-5)


@pytest.mark.parametrize(
    ("sparse", "exponent", "l2"),
    [(30.0, SPARSE_POPULARITY_POWER, 100.0), (9.0, POPULARITY_POWER, 300.0)],
)
def test_fewer_factors_are_the_leading_singular_vectors(
    sparse: float, exponent: float, l2: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_item, "SPARSE_INTERACTIONS", sparse)
    monkeypatch.setattr(next_item, "OVERSAMPLED", 76)  # exact after one power iteration, too
    train = sequences([12] * 60, n_items=80)
    power = train.item_counts() ** exponent
    left, values, right = np.linalg.svd(ridge(train, l2=l2) / power)
    history, ranked = next_item_factors(train, rank=4, seed=0)
    assert history.shape == ranked.shape == (80, 4)
    expected = left[:, :4] * values[:4] @ right[:4] * power
    np.testing.assert_allclose(history @ ranked.T, expected, atol=1e-2 * abs(expected).max())


def test_factors_are_computed_once_for_a_training_set(monkeypatch: pytest.MonkeyPatch) -> None:
    train = sequences([12] * 20, n_items=30)
    more = next_item_factors(train, rank=6, seed=0)
    monkeypatch.setattr(next_item, "_factors", None)  # not called again
    fewer = next_item_factors(train, rank=4, seed=0)
    for all_of_them, some in zip(more, fewer, strict=True):
        np.testing.assert_array_equal(all_of_them[:, :4], some)


def test_many_interactions_are_drawn_by_whole_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_item, "MAX_ROWS", 20)
    train = sequences([8] * 6, n_items=13)
    parts = [train.select(np.isin(train.users, [a, b])) for a in range(6) for b in range(a)]
    history, ranked = next_item_factors(train, rank=13, seed=0)
    errors = [abs(history @ ranked.T - ridge(part)).max() for part in parts]
    assert min(errors) < 1e-5 < sorted(errors)[1]


def started(config: ModelConfig, train: Interactions) -> NBPR:
    torch.manual_seed(0)
    model = cast(NBPR, build_model(config, train.n_users, train.n_items))
    next_item_start(model, train, 0)
    remember(model, train)
    return model.requires_grad_(False)


def test_nbpr_ranks_as_the_linear_model_before_it_is_trained() -> None:
    train = sequences([64, 64, 64, 64, 70], n_items=90)
    model = started(replace(HISTORY, factors=90), train)
    scores = model.user_vectors(torch.arange(5)) @ model.items.weight.T
    weights = ridge(train)
    for user in range(5):
        latest_first = train.items_of(user)[::-1]
        expected = DECAY ** np.arange(len(latest_first)) @ weights[latest_first]
        # The windows make steps of the decay.
        agreement = np.corrcoef(scores[user].numpy(), expected)[0, 1]
        assert agreement > 0.97
    exact = started(replace(HISTORY, factors=90, windows=(1, 2, 3, 4, 5, 6, 8, 10, 13, 16)), train)
    scores = exact.user_vectors(torch.arange(5)) @ exact.items.weight.T
    latest_first = train.items_of(0)[::-1]
    expected = DECAY ** np.arange(64) @ weights[latest_first]
    assert np.corrcoef(scores[0].numpy(), expected)[0, 1] > 0.995


def test_a_tower_starts_from_the_same_factors_at_a_scale_of_its_own() -> None:
    train = sequences([20] * 30, n_items=40)
    config = ModelConfig(kind="dncr", factors=3, layers=2, users="history", windows=WINDOWS)
    torch.manual_seed(0)
    model = build_model(config, 30, 40)
    next_item_start(model, train, 0)
    items = model.item_vectors(torch.arange(40))
    assert items.std().item() == pytest.approx(TOWER_STD, rel=1e-4)


@pytest.mark.parametrize("config", [ModelConfig(kind="nbpr"), replace(HISTORY, windows=(0,))])
def test_without_order_there_is_no_next_item(config: ModelConfig) -> None:
    train = sequences([8] * 6, n_items=13)
    with pytest.raises(ConfigError, match="windows"):
        next_item_start(build_model(config, 6, 13), train, 0)


def test_no_epochs_keep_the_start(split: Split) -> None:
    training = TrainConfig(start="next-item", epochs=0, loss="listwise", device="cpu")
    trained = train_model(HISTORY, training, split)
    history = trained.history[0]
    assert history.best_epoch == 0
    assert history.loss == []
    assert history.best == tuple(history.start)
    assert history.start[0] > 0
    torch.testing.assert_close(
        cast(NBPR, trained.model).items.weight, started(HISTORY, split.train).items.weight
    )


def test_a_training_that_only_makes_the_start_worse_is_undone(split: Split) -> None:
    training = TrainConfig(
        start="next-item", epochs=1, learning_rate=5.0, schedule="constant", device="cpu"
    )
    trained = train_model(HISTORY, training, split)
    assert trained.history[0].best_epoch == 0
    torch.testing.assert_close(
        cast(NBPR, trained.model).items.weight, started(HISTORY, split.train).items.weight
    )
