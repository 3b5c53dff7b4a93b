"""A request for training takes its fields, bounds and defaults from the configurations."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from app.jobs.schemas import TrainOrder, TrainParams
from ncr_core.recipes import recipe

INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
NULL = {"type": "null"}

# What clients rely on. A new hyper-parameter adds a line; none of these may change.
PROPERTIES: dict[str, dict[str, Any]] = {
    "model": {"anyOf": [{"enum": ["nbpr", "dncr", "neupr"], "type": "string"}, NULL]},
    "factors": {"anyOf": [INTEGER | {"minimum": 1, "maximum": 512}, NULL]},
    "users": {"anyOf": [{"enum": ["free", "history"], "type": "string"}, NULL]},
    "start": {"anyOf": [{"enum": ["scratch", "warm"], "type": "string"}, NULL]},
    "layers": INTEGER | {"default": 4, "minimum": 1, "maximum": 6},
    "epochs": INTEGER | {"default": 15, "minimum": 1, "maximum": 1000},
    "negatives": INTEGER | {"default": 4, "minimum": 1, "maximum": 100},
    "batch_size": INTEGER | {"default": 0, "minimum": 0, "maximum": 1_000_000},
    "min_interactions": INTEGER | {"default": 1, "minimum": 1, "exclusiveMaximum": 2**31},
    "seed": INTEGER | {"default": 0, "minimum": 0, "exclusiveMaximum": 2**31},
    "learning_rate": NUMBER | {"default": 0.01, "exclusiveMinimum": 0, "maximum": 10},
    "alpha": NUMBER | {"default": 0.5, "minimum": 0, "maximum": 1},
    "pretrain": {"type": "boolean", "default": True},
    "force": {"type": "boolean", "default": False},
}


@pytest.mark.parametrize("model", [TrainParams, TrainOrder])
def test_the_schema_of_a_request_is_the_contract(model: type[TrainParams]) -> None:
    properties = model.model_json_schema()["properties"]
    stated = {
        name: {key: value for key, value in schema.items() if key not in ("title", "description")}
        for name, schema in properties.items()
        if name != "trigger"
    }
    optional = ("model", "factors", "users", "start")
    assert stated == PROPERTIES | {name: PROPERTIES[name] | {"default": None} for name in optional}


def test_the_description_names_the_epochs_of_the_history_recipe() -> None:
    text = TrainParams.model_json_schema()["properties"]["users"]["description"]
    assert "With `history`, `epochs` is 6 and `learning_rate` 0.005 unless given." in text


@pytest.mark.parametrize(
    "body", [{"factors": 5.5}, {"factors": True}, {"model": "twotower"}, {"loss": "bpr"}]
)
def test_a_request_that_does_not_fit_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainParams.model_validate(body)


def test_what_a_request_leaves_open_comes_from_settings_and_recipe() -> None:
    request = TrainParams.model_validate({"users": "history", "negatives": 2, "factors": 5.0})
    values = request.completed(model="dncr", factors=8, users="free")
    assert (values["model"], values["factors"], values["users"]) == ("dncr", 5, "history")
    assert (values["epochs"], values["learning_rate"], values["negatives"]) == (6, 5e-3, 2)
    order = TrainOrder.model_validate(values).recipe(device="cpu")
    expected = recipe("history").with_(kind="dncr", factors=5, negatives=2, device="cpu")
    assert order == expected
