"""A model that keeps the pooled vectors of some users alone is trained as one that keeps all."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from ncr_core.data import Interactions, Split, leave_latest_out
from ncr_core.data.interactions import compact
from ncr_core.data.splits import hold_out_users
from ncr_core.models import ModelConfig
from ncr_core.models.user_embeddings import pooled_tables
from ncr_core.recipes import Recipe, auto_recipes
from ncr_core.training import train_model
from ncr_core.training.pretraining import learn_everything, start_model
from ncr_core.training.warm_start import StartingPoint, train_warm
from tests.ncr_core.conftest import config_name
from tests.ncr_core.training.test_kept_start import FEW

REMEMBERED = 70
HISTORY = ModelConfig(kind="nbpr", factors=4, users="history", windows=(1, 3, 0), by_length=True)
CONFIGS = [
    HISTORY,
    replace(HISTORY, by_gap=True, start_factors=10, item_bias=True),
    replace(HISTORY, attention_layers=1),
    replace(HISTORY, kind="dncr", layers=2),
    replace(HISTORY, kind="neupr", layers=2),
]


@pytest.fixture(scope="module")
def splits(synthetic: Interactions) -> tuple[Split, Split]:
    """The same split for a model of all users, and of the first users."""
    few = replace(synthetic, remembered=REMEMBERED)
    held_out, _ = hold_out_users(few, at_least=40)
    every, some = leave_latest_out(synthetic, held_out), leave_latest_out(few, held_out)
    assert some.train.n_remembered == REMEMBERED
    return every, some


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=config_name)
def test_the_training_is_the_same(config: ModelConfig, splits: tuple[Split, Split]) -> None:
    training = FEW
    if config.kind != "nbpr":  # a start scales towers by the vectors of the first users alone
        training = replace(FEW, shared_negatives=0, start="random")
    recipe = Recipe("few", config, training)
    models, of_users = [], []
    for split in splits:
        result = train_model(recipe.model, recipe.training, split)
        everything = split.all_seen if split is splits[0] else replace(
            split.all_seen, remembered=REMEMBERED
        )  # fmt: skip
        served = learn_everything(recipe, result, split, everything)
        models.append(served.state_dict())
        of_users.append(served.n_users)
    assert of_users == [splits[0].train.n_users, REMEMBERED]
    pooled = pooled_tables(served)
    assert pooled
    for name, value in models[0].items():
        other = models[1][name]
        assert torch.equal(value[:REMEMBERED] if name in pooled else value, other), name


def test_a_warm_start_keeps_the_vectors_of_the_first_users(splits: tuple[Split, Split]) -> None:
    every, some = splits
    result = train_model(HISTORY, FEW, every)
    ids = (every.train.user_ids, every.train.item_ids)
    base = StartingPoint(result.model, *ids)
    states = [train_warm(base, FEW, split).model.state_dict() for split in splits]
    first = states[1]["users.weight"]
    assert len(first) == REMEMBERED
    assert torch.equal(states[0]["users.weight"][:REMEMBERED], first)
    # A base that kept the first users alone is the same start.
    smaller = StartingPoint(train_model(HISTORY, FEW, some).model, ids[0][:REMEMBERED], ids[1])
    again = train_warm(smaller, FEW, some).model.state_dict()
    assert torch.equal(again["users.weight"], first)


@pytest.mark.parametrize("start", ["spectral", "next-item"])
def test_a_start_of_a_tower_needs_the_first_users(
    start: Literal["spectral", "next-item"], splits: tuple[Split, Split]
) -> None:
    config = replace(HISTORY, kind="dncr", layers=2)
    training = replace(FEW, shared_negatives=0, start=start)
    every, some = (start_model(config, training, split).state_dict() for split in splits)
    assert len(some["users.weight"]) == REMEMBERED
    scale = every["users.items.weight"].std() / some["users.items.weight"].std()
    assert scale == pytest.approx(1.0, abs=0.2)
    torch.testing.assert_close(every["users.items.weight"], scale * some["users.items.weight"])
    assert torch.equal(every["items.weight"], some["items.weight"])


def test_rarer_users_leave_the_first_users(synthetic: Interactions) -> None:
    few = replace(synthetic, remembered=REMEMBERED)
    gone = np.isin(few.users, [3, 5, REMEMBERED - 1, REMEMBERED, REMEMBERED + 7])
    kept = compact(few.select(~gone))
    assert kept.n_users == few.n_users - 5
    assert kept.remembered == REMEMBERED - 3


def test_free_vectors_are_those_of_all_users(splits: tuple[Split, Split]) -> None:
    config = replace(FEW, start="random", shared_negatives=0, loss="bce")
    _, some = splits
    model = train_model(ModelConfig(kind="nbpr", factors=4), config, some).model
    assert model.n_users == some.train.n_users > REMEMBERED


def test_only_users_whose_vectors_a_model_keeps_are_held_out_from(synthetic: Interactions) -> None:
    every = hold_out_users(synthetic, at_least=40)
    few = replace(synthetic, remembered=REMEMBERED)
    chosen, compared = hold_out_users(few, at_least=40)
    assert chosen.sum() == 40
    assert every[0][REMEMBERED:].any()
    for mask in (chosen, compared):
        assert not mask[REMEMBERED:].any()
    assert (compared >= chosen).all()
    everyone = hold_out_users(few, at_least=1_000)
    assert [mask.sum() for mask in everyone] == [REMEMBERED, REMEMBERED]
    # More than there are users are all users.
    more = hold_out_users(replace(synthetic, remembered=10_000), at_least=40)
    assert all(np.array_equal(a, b) for a, b in zip(every, more, strict=True))


def test_the_size_of_a_model_of_pooled_users_does_not_know_the_number_of_users() -> None:
    million, many = 10**6, 10**8
    few = auto_recipes(million, 10_000, 10**9)
    bounded = auto_recipes(many, 10_000, 10**9, False, million)
    unbounded = auto_recipes(many, 10_000, 10**9)
    for small, kept, large in zip(few, bounded, unbounded, strict=True):
        assert small.name == kept.name == large.name
        if small.model.users == "history":
            assert kept.model.factors == small.model.factors > large.model.factors
        else:
            assert kept.model.factors == large.model.factors
