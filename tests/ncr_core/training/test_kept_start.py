"""A start beside trained factors: the scores of both add up, and the training leaves it alone."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from ncr_core import recipes
from ncr_core.data import Split
from ncr_core.errors import ConfigError, DataError
from ncr_core.models import NBPR, ModelConfig, build_model
from ncr_core.recipes import (
    RECIPES,
    Recipe,
    affordable_start_factors,
    auto_recipes,
    recipe,
)
from ncr_core.training import TrainConfig, train_model
from ncr_core.training.initializers import next_item_start
from ncr_core.training.kept_start import silence, start_factors_of, with_start, without_start
from ncr_core.training.pretraining import learn_everything, refit_config, start_model
from ncr_core.training.trainer import remember
from ncr_core.training.validation import validation_figures
from ncr_core.training.warm_start import StartingPoint, train_warm
from tests.ncr_core.conftest import config_name

ALONE = ModelConfig(kind="nbpr", factors=4, users="history", windows=(1, 3, 0))
CONFIGS = [
    ALONE,
    replace(ALONE, by_length=True, by_gap=True, item_bias=True),
    replace(ALONE, by_length=True, attention_layers=1),
    replace(ALONE, learn_weights=False),
    replace(ALONE, window_matrices=False),
]
KEPT = replace(ALONE, by_length=True, start_factors=10)
FEW = TrainConfig(
    start="next-item",
    epochs=2,
    learning_rate=1e-3,
    loss="listwise",
    shared_negatives=30,
    batch_size=256,
    validation="full",
    device="cpu",
)


def wild(config: ModelConfig, split: Split) -> NBPR:
    """An NBPR all of whose parameters are random and large."""
    torch.manual_seed(1)
    model = cast(NBPR, build_model(config, split.train.n_users, split.train.n_items))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "gap_" in name:
                buffer.add_(torch.rand_like(buffer))
    remember(model, split.train)
    return model.requires_grad_(False).eval()


def scores(model: NBPR, vectors: Tensor) -> Tensor:
    """(B, n_items) scores whose differences are half the margins."""
    d = model.config.width
    weight = (model.weight[:d] + model.weight[d:]) / 2
    bias = 0.0 if model.bias is None else model.bias
    return (vectors * weight) @ model.items.weight.T + bias


@pytest.mark.parametrize("config", CONFIGS, ids=config_name)
def test_the_scores_are_those_of_both(config: ModelConfig, split: Split) -> None:
    trained = wild(config, split)
    model = with_start(trained, 9, split.train, seed=0)
    start = cast(NBPR, build_model(
        replace(ALONE, factors=9, by_length=config.by_length, window_matrices=False),
        split.train.n_users,
        split.train.n_items,
    ))  # fmt: skip
    next_item_start(start, split.train, 0)
    remember(start, split.train)
    users = torch.arange(split.train.n_users)
    found = scores(model, model.user_vectors(users))
    expected = scores(trained, trained.user_vectors(users))
    expected += scores(start, start.user_vectors(users))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    # Any list of items, and one user alone, give the same vectors as the training set.
    items = [torch.from_numpy(split.train.items_of(user)) for user in range(5)]
    torch.testing.assert_close(model.pooled_vectors(items), model.user_vectors(users[:5]))
    torch.testing.assert_close(model.pooled_vector(items[0]), model.user_vectors(users[:1])[0])


@pytest.mark.parametrize("config", CONFIGS, ids=config_name)
def test_the_trained_factors_come_back(config: ModelConfig, split: Split) -> None:
    trained = wild(config, split)
    back = without_start(with_start(trained, 5, split.train, seed=0))
    assert back.config == config
    for name, value in trained.state_dict().items():
        if name == "users.weight":
            torch.testing.assert_close(back.state_dict()[name], value)
        else:
            assert back.state_dict()[name].equal(value), name


def test_a_training_leaves_the_start_alone(split: Split) -> None:
    result = train_model(KEPT, FEW, split, shrink=False)
    model = result.model
    alone = train_model(replace(KEPT, start_factors=0), FEW, split, shrink=False)
    assert model.config == KEPT
    expected = with_start(cast(NBPR, alone.model), 10, split.train, FEW.seed)
    for name, value in expected.state_dict().items():
        assert model.state_dict()[name].equal(value), name
    (history,), (before,) = result.history, alone.history
    assert history.best_epoch == before.best_epoch
    assert history.best == validation_figures(model, split, FEW)
    assert before.best != history.best
    assert start_model(KEPT, FEW, split).config.start_factors == 0


def test_small_data_keep_fewer_factors_or_none(split: Split) -> None:
    n = split.train.n_items
    few = replace(KEPT, factors=20, start_factors=500)
    assert train_model(few, FEW, split).model.config.start_factors == n
    wide = replace(KEPT, factors=n // 2 + 1, start_factors=500)
    model = train_model(wide, FEW, split).model
    assert model.config == replace(wide, start_factors=0)
    assert start_factors_of(wide, FEW, split.train) == 0
    small = replace(KEPT, factors=2, start_factors=500)
    assert train_model(small, FEW, split).model.config.start_factors == 16
    other = replace(FEW, start="random")
    assert train_model(KEPT, other, split).model.config.start_factors == 0


@pytest.mark.parametrize(
    ("users", "items", "interactions", "kept", "closed_form"),
    [
        (943, 1_682, 100_000, 1_024, 1_024),
        (6_040, 3_706, 1_000_209, 1_024, 1_024),
        (60_000, 8_000, 20_000_000, 430, 430),  # a table has 2²⁵ numbers for 60,000 users
        (100_000, 5_000, 5_000_000, 0, 256),  # 335 factors, of which 128 are trained
        (50_000, 20_000, 1_000_000, 0, 80),  # more would take over a minute
    ],
)
def test_the_data_afford_so_many_factors(
    users: int, items: int, interactions: int, kept: int, closed_form: int
) -> None:
    by_name = recipe("next-item-nbpr").model
    assert by_name.start_factors == 1_024
    assert affordable_start_factors(by_name, users, items, interactions) == kept
    assert affordable_start_factors(recipe("next-item").model, users, items, interactions) == 0
    first = auto_recipes(users, items, interactions)[0]
    assert (first.name, first.model.factors) == ("next-item", closed_form)


def test_only_one_recipe_keeps_its_start() -> None:
    keep = [name for name, each in RECIPES.items() if each.model.start_factors]
    assert keep == ["next-item-nbpr"]
    recent = RECIPES["next-item-nbpr"]
    assert recent.with_(kind="neupr").model.start_factors == 0
    assert recent.with_(users="free", start="random").model.start_factors == 0


@pytest.mark.parametrize(
    "changes", [{"kind": "neupr"}, {"users": "free", "windows": (0,)}, {"windows": (0,)}]
)
def test_which_models_have_a_start_beside_them(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="start_factors are for nbpr with windows"):
        replace(ALONE, start_factors=2, **changes)
    with pytest.raises(ConfigError, match="start_factors must be 0 to"):
        replace(ALONE, start_factors=-1)


def test_a_refit_makes_the_start_anew(split: Split) -> None:
    chosen = Recipe("kept", KEPT, FEW)
    result = train_model(KEPT, FEW, split)
    model = learn_everything(chosen, result, split, split.all_seen)
    again = refit_config(KEPT, FEW, result.history)
    nothing = np.full(split.train.n_users, -1, dtype=np.int64)
    expected = train_model(KEPT, again, Split(split.all_seen, nothing, nothing)).model
    assert model.config == KEPT
    for name, value in expected.state_dict().items():
        assert model.state_dict()[name].equal(value), name


def test_a_training_that_goes_on_makes_the_start_anew(split: Split) -> None:
    config = replace(FEW, epochs=1)
    base = wild(KEPT, split)
    point = StartingPoint(base, split.train.user_ids, split.train.item_ids)
    warm = train_warm(point, config, split)
    kept = 8 * KEPT.factors
    assert warm.model.config == replace(KEPT, start_factors=kept)
    start = with_start(without_start(base), kept, split.train, config.seed)
    d = KEPT.factors
    assert warm.model.state_dict()["items.weight"][:, d:].equal(start.items.weight[:, d:])
    alone = train_warm(replace(point, model=without_start(base)), config, split).model
    assert warm.model.state_dict()["items.weight"][:, :d].equal(alone.state_dict()["items.weight"])
    learned = learn_everything(Recipe("kept", KEPT, config), warm, split, split.all_seen, warm=True)
    of_everything = with_start(without_start(base), kept, split.all_seen, config.seed)
    found = learned.state_dict()["items.weight"][:, d:]
    assert found.equal(of_everything.items.weight[:, d:])


def test_a_start_that_no_epoch_improves_stays_alone(split: Split) -> None:
    model = train_model(KEPT, replace(FEW, epochs=0), split).model
    assert model.config == KEPT
    start = train_model(
        replace(KEPT, factors=10, start_factors=0, window_matrices=False),
        replace(FEW, epochs=0),
        split,
    ).model
    users = torch.arange(split.train.n_users)
    found, expected = (
        scores(each, each.user_vectors(users)) for each in (cast(NBPR, model), cast(NBPR, start))
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    biased = wild(CONFIGS[1], split)
    silence(biased)
    assert not scores(biased, biased.user_vectors(users)).any()


@pytest.mark.slow
def test_the_last_fit_keeps_as_many_factors_as_were_measured(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the held-out items make so many interactions that fewer would be affordable."""
    monkeypatch.setattr(recipes, "MAX_DENSE_ITEMS", 10)
    monkeypatch.setattr(recipes, "SMALL_DATA", split.train.nnz)
    monkeypatch.setattr(recipes, "MIN_SPARSE_FACTORS", 9)
    monkeypatch.setattr(recipes, "MAX_SPARSE_CELLS", 0)
    assert start_factors_of(KEPT, FEW, split.train) == 10
    assert start_factors_of(KEPT, FEW, split.all_seen) == 8
    chosen, result = Recipe("kept", KEPT, FEW), train_model(KEPT, FEW, split)
    for warm in (False, True):
        model = learn_everything(chosen, result, split, split.all_seen, warm=warm)
        assert model.config == result.model.config == KEPT


def test_popularity_of_newcomers_survives_a_training_that_goes_on(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(KEPT, item_bias=True, start_factors=500)
    shrunk = train_model(config, FEW, split, shrink=True)
    assert shrunk.shrunk
    point = StartingPoint(shrunk.model, split.train.user_ids, split.train.item_ids)
    warm = train_warm(point, replace(FEW, epochs=0), split).model
    for name, value in shrunk.model.state_dict().items():
        torch.testing.assert_close(warm.state_dict()[name], value)


def test_a_training_that_goes_on_keeps_as_much_as_the_data_afford(split: Split) -> None:
    base = with_start(wild(replace(ALONE, by_length=True), split), 8, split.train, seed=0)
    point = StartingPoint(base, split.train.user_ids, split.train.item_ids)
    warm = train_warm(point, replace(FEW, epochs=0), split)
    assert warm.model.config.start_factors == 8 * ALONE.factors
    assert warm.history[0].best == validation_figures(warm.model, split, FEW)
    without = train_warm(replace(point, model=without_start(base)), replace(FEW, epochs=0), split)
    assert without.model.config.start_factors == 0


def test_users_with_one_item_each_have_no_start(split: Split) -> None:
    first = np.zeros(split.train.nnz, dtype=np.bool_)
    first[split.train.indptr[:-1]] = True
    lone = split.train.select(first)
    with pytest.raises(DataError, match="no user has two interactions"):
        with_start(wild(ALONE, replace(split, train=lone)), 5, lone, seed=0)
