"""Recipes are complete, valid, and change only as they are told to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ncr_core.errors import ConfigError
from ncr_core.model_config import ModelConfig
from ncr_core.parameters import check_parameters, parameter, parameters_of
from ncr_core.recipes import RECIPES, SIZES, TUNED, WINDOWS, recipe, tuned
from ncr_core.train_config import TrainConfig


def test_the_default_recipe_is_the_defaults_of_the_configurations() -> None:
    default = recipe("default")
    assert (default.model, default.training) == (ModelConfig(), TrainConfig())


def test_an_unknown_recipe_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match="unknown recipe 'best': default, paper, history, "):
        recipe("best")
    with pytest.raises(ConfigError, match="unknown model 'SVD': BPR, NBPR"):
        tuned("SVD")


def test_every_recipe_is_listed_by_its_own_name() -> None:
    assert {name: each.name for name, each in RECIPES.items()} == {n: n for n in RECIPES}


@pytest.mark.parametrize("method", TUNED)
def test_a_tuned_model_has_a_recipe_of_each_size(method: str) -> None:
    for factors in SIZES:
        assert tuned(method, factors).model.factors == factors
    assert tuned(method) in RECIPES.values()


def test_overrides_replace_fields_of_both_configurations() -> None:
    changed = recipe("default").with_(kind="nbpr", factors=16, epochs=2)
    assert changed.model == ModelConfig("nbpr", 16)
    assert changed.training == TrainConfig(epochs=2)
    assert recipe("default").model.factors == 8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"factor": 8}, "unknown hyper-parameters: factor"),
        ({"epochs": 1.5}, "epochs must be at least 0, not 1.5"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0 and finite, not nan"),
        ({"alpha": 2}, "alpha must be between 0 and 1, not 2"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, not 1.0"),
        ({"shared_negatives": 70_000}, "shared_negatives must be 0 to 65,536, not 70000"),
        ({"loss": "hinge"}, "loss must be one of bce, bpr, listwise, not 'hinge'"),
    ],
)
def test_overrides_that_do_not_fit_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe("default").with_(**overrides)


def test_another_kind_drops_what_it_does_not_have() -> None:
    history = recipe("history")
    assert (history.model.windows, history.training.shared_negatives) == (WINDOWS, 512)
    dncr = history.with_(kind="dncr")
    assert (dncr.model.item_bias, dncr.training.shared_negatives) == (False, 0)
    assert history.with_(pretrain=False).training.shared_negatives == 0
    assert history.with_(kind="nbpr", pretrain=False).training.shared_negatives == 512
    assert history.with_(users="free").model.windows == (0,)


def test_a_new_field_brings_its_own_bounds_and_help() -> None:
    @dataclass(frozen=True)
    class Config:
        margin: float = parameter(1.0, "Of the loss.", ge=0, request={"le": 10})

        def __post_init__(self) -> None:
            check_parameters(self)

    (margin,) = parameters_of(Config)
    assert (margin.public_name, margin.type, margin.default) == ("margin", float, 1.0)
    assert margin.parameter.help == "Of the loss."
    with pytest.raises(ConfigError, match="margin must be at least 0 and finite, not -1"):
        Config(margin=-1)
