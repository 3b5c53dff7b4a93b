"""The starts: ALS solves its equations; the spectral one equals a linear filter by numpy's SVD."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from ncr_core.data import Interactions, Split
from ncr_core.errors import ConfigError
from ncr_core.evaluation.protocols import ModelRanks, evaluate_sampled, sampled_candidates
from ncr_core.models import NBPR, ModelConfig, build_model
from ncr_core.ranking import ExactRanker
from ncr_core.reproduction.baselines.scoring import Popularity
from ncr_core.training import TrainConfig, initializers, train_model
from ncr_core.training.initializers import (
    ALS_L2,
    ITEM_POWER,
    SCORE_SCALE,
    TOWER_STD,
    als_seconds,
    als_start,
    spectral_start,
    unobserved_weight,
)
from ncr_core.training.trainer import remember

FREE = ModelConfig(kind="nbpr", factors=3)
POOLED = replace(FREE, users="history", windows=(0,))
RECENT = replace(FREE, users="history", windows=(1, 0), item_bias=True)


def small_matrix() -> Interactions:
    """14 users and 9 items; the last of both have no interactions."""
    interacted = np.random.default_rng(2).random((14, 9)) < 0.4
    interacted[-1], interacted[:, -1] = False, False
    users, items = np.nonzero(interacted)
    return Interactions.from_arrays(
        users,
        items,
        user_ids=[f"u{n}" for n in range(14)],
        item_ids=[f"i{n}" for n in range(9)],
    )


def filtered(train: Interactions, d: int) -> np.ndarray:
    """SCORE_SCALE · R̃ W Wᵀ D_i^a, (n_users, n_items), with R̃ = D_u^−½ R D_i^−a."""
    matrix = np.zeros((train.n_users, train.n_items))
    matrix[train.users, train.items] = 1.0
    of_users = np.maximum(matrix.sum(axis=1, keepdims=True), 1.0)
    of_items = np.maximum(matrix.sum(axis=0, keepdims=True), 1.0) ** ITEM_POWER
    scaled = matrix / np.sqrt(of_users) / of_items
    _, values, right = np.linalg.svd(scaled)
    assert values[d - 1] > 1.05 * values[d]  # else W is not determined
    w = right[:d].T
    result: np.ndarray = SCORE_SCALE * scaled @ w @ w.T * of_items
    return result


def started(config: ModelConfig, train: Interactions, seed: int = 0) -> NBPR:
    torch.manual_seed(seed)
    model = cast(NBPR, build_model(config, train.n_users, train.n_items))
    spectral_start(model, train, seed)
    remember(model, train)
    return model.requires_grad_(False)


def scores(model: NBPR) -> torch.Tensor:
    return model.user_vectors(torch.arange(model.n_users)) @ model.items.weight.T


@pytest.mark.parametrize("config", [FREE, POOLED, RECENT], ids=["free", "pooled", "by recency"])
@pytest.mark.parametrize("d", [1, 3, 5])
def test_the_scores_are_those_of_the_linear_filter(config: ModelConfig, d: int) -> None:
    train = small_matrix()
    model = started(replace(config, factors=d), train)
    expected = torch.from_numpy(filtered(train, d))
    torch.testing.assert_close(scores(model).double(), expected, atol=1e-4, rtol=1e-4)
    assert scores(model)[-1].eq(0).all()
    users = model.user_vectors(torch.arange(14))
    i, j = torch.randint(9, (14, 20)), torch.randint(9, (14, 20))
    margins = ExactRanker(model).compare(users, i, j)
    difference = 2 * (expected.gather(1, i) - expected.gather(1, j))
    torch.testing.assert_close(margins, difference, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("windows", "whole"), [((0,), 0), ((1, 0), 1), ((0, 5), 0), ((3, 7, 1), 1)]
)
def test_only_the_widest_window_takes_part_at_first(windows: tuple[int, ...], whole: int) -> None:
    model = started(replace(POOLED, windows=windows), small_matrix())
    for at, matrix in enumerate(model.get_parameter("users.mix")):
        assert matrix.equal(torch.eye(3) if at == whole else torch.zeros(3, 3))


@pytest.mark.parametrize("config", [FREE, POOLED], ids=["free", "pooled"])
def test_dimensions_beyond_the_matrix_stay_as_they_were_initialised(config: ModelConfig) -> None:
    """All singular vectors together give the matrix back: SCORE_SCALE · D_u^−½ R."""
    train, config = small_matrix(), replace(config, factors=12)
    torch.manual_seed(0)
    untouched = build_model(config, 14, 9)
    model = started(config, train, seed=0)
    for name in (
        "items.weight",
        "users.weight" if config.users == "free" else "users.items.weight",
    ):
        beyond = model.get_parameter(name)[:, 9:]
        assert beyond.std() > 0.005
        assert beyond.equal(untouched.get_parameter(name)[:, 9:])
    expected = torch.zeros(14, 9)
    for user, item in zip(train.users, train.items, strict=True):
        expected[user, item] = SCORE_SCALE / len(train.items_of(user)) ** 0.5
    users = model.user_vectors(torch.arange(14))
    found = users[:, :9] @ model.items.weight[:, :9].T
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("users", ["free", "history"])
@pytest.mark.parametrize("kind", ["dncr", "neupr", "twotower"])
def test_a_tower_starts_from_the_same_directions_at_a_scale_of_its_own(
    kind: str, users: str
) -> None:
    train = small_matrix()
    shape = {"kind": kind, "factors": 3, "layers": 2, "users": users}
    model = build_model(ModelConfig.from_dict(shape), 14, 9)
    spectral_start(model, train, 0)
    remember(model, train)
    model.requires_grad_(False)
    vectors, of_items = model.user_vectors(torch.arange(14)), model.item_vectors(torch.arange(9))
    expected = torch.from_numpy(filtered(train, 3)).float()
    if kind == "neupr":
        of_n = vectors[:, :3] @ of_items[:, :3].T
        torch.testing.assert_close(of_n, expected, atol=1e-4, rtol=1e-4)
        vectors, of_items = vectors[:, 3:], of_items[:, 3:]
    assert vectors.std().item() == pytest.approx(TOWER_STD, rel=1e-4)
    assert of_items.std().item() == pytest.approx(TOWER_STD, rel=1e-4)
    found = vectors @ of_items.T
    torch.testing.assert_close(found / found.norm(), expected / expected.norm())


@pytest.mark.parametrize("config", [FREE, POOLED], ids=["free", "pooled"])
def test_the_same_seed_gives_the_same_start(config: ModelConfig, split: Split) -> None:
    one, two, other = (started(config, split.train, seed) for seed in (3, 3, 4))
    for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        assert a.equal(b)
    assert not one.items.weight.equal(other.items.weight)
    torch.testing.assert_close(scores(one), scores(other), atol=0.02, rtol=0)


def test_the_start_leaves_torchs_own_random_numbers_alone(split: Split) -> None:
    model = cast(NBPR, build_model(FREE, split.train.n_users, split.train.n_items))
    before = torch.get_rng_state()
    spectral_start(model, split.train, 5)
    assert torch.get_rng_state().equal(before)


@pytest.mark.slow
@pytest.mark.parametrize("config", [FREE, POOLED], ids=["free", "pooled"])
@pytest.mark.parametrize("shared", [0, 60])
def test_after_an_epoch_it_is_ahead_of_a_random_start(
    config: ModelConfig, shared: int, split: Split
) -> None:
    training = TrainConfig(epochs=1, batch_size=1024, shared_negatives=shared, device="cpu")
    spectral, random = (
        train_model(replace(config, factors=8), replace(training, start=start), split)
        for start in ("spectral", "random")
    )
    assert spectral.history[0].ndcg[0] > 1.3 * random.history[0].ndcg[0]


@pytest.mark.parametrize("cells", [2**24, 40])  # all rows at once, and a few at a time
def test_an_als_half_step_solves_each_row_exactly(
    cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initializers, "MAX_CELLS", cells)
    rng = np.random.default_rng(0)
    entries = rng.random((7, 9)) < 0.4
    entries[3] = False  # a row without entries
    rows, columns = (torch.from_numpy(x) for x in np.nonzero(entries))
    factors = torch.from_numpy(rng.normal(size=(9, 3)))
    solved = initializers._least_squares(factors, rows, columns, 7, 0.2).numpy()
    y = factors.numpy()
    for row in range(7):
        observed = y[entries[row]]
        ridge = ALS_L2 * (len(observed) + 0.2 * 9)
        left = observed.T @ observed + 0.2 * y.T @ y + ridge * np.eye(3)
        np.testing.assert_allclose(
            solved[row], np.linalg.solve(left, observed.sum(axis=0)), atol=1e-10
        )


@pytest.mark.parametrize(
    ("n_users", "n_items", "small_data", "weight"),
    # 8 of 32 cells, and of 8,000: six times 1/4 is more than a tenth, six times 1/1,000 is not.
    [(4, 8, 7, 0.1), (80, 100, 7, 0.006), (80, 100, 8, 0.024)],
)
def test_what_was_not_observed_weighs_by_the_density(
    n_users: int, n_items: int, small_data: int, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initializers, "SMALL_DATA", small_data)
    observed = np.arange(8)
    train = Interactions.from_arrays(
        observed % 4,
        observed,
        user_ids=[f"u{n}" for n in range(n_users)],
        item_ids=[f"i{n}" for n in range(n_items)],
    )
    assert unobserved_weight(train) == pytest.approx(weight)


@pytest.mark.parametrize(("small_data", "seconds"), [(29, 40.0), (30, 80.0)])
def test_the_seconds_of_als_go_by_the_rows_that_it_solves(
    small_data: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a sweep of a second for 10 users: 4 sweeps of 30 users and 70 items take 40 s."""
    solved, now = [], iter([0.0, 5.0, 5.0, 6.0, 6.0, 8.0])
    monkeypatch.setattr(initializers, "ALS_PROBE_USERS", 10)
    monkeypatch.setattr(initializers, "_least_squares", lambda *args: solved.append(args[3]))
    monkeypatch.setattr(initializers.time, "perf_counter", lambda: next(now))
    train = Interactions.from_arrays(
        np.arange(30),
        np.arange(30),
        user_ids=[f"u{n}" for n in range(30)],
        item_ids=[f"i{n}" for n in range(70)],
    )
    monkeypatch.setattr(initializers, "SMALL_DATA", small_data)
    monkeypatch.setattr(initializers, "MAX_ALS_UNOBSERVED_WEIGHT", 1.0)  # sparse: 4 sweeps
    assert als_seconds(3, train, torch.device("cpu")) == pytest.approx(seconds)
    assert solved == [10, 10, 10]


def test_an_als_start_alone_beats_popularity_and_repeats_itself(split: Split) -> None:
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


def test_an_als_start_is_only_for_nbpr_with_free_users(split: Split) -> None:
    training = TrainConfig(start="als", epochs=1, device="cpu")
    for config in (
        ModelConfig(kind="dncr", factors=4),
        ModelConfig(kind="nbpr", factors=4, users="history"),
    ):
        with pytest.raises(ConfigError, match="an ALS start is for nbpr with free users"):
            train_model(config, training, split)
    with pytest.raises(ConfigError, match="start must be"):
        train_model(ModelConfig(kind="nbpr", factors=4, init="paper"), training, split)
