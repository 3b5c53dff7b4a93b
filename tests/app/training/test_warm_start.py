"""When a training starts from the served model, and when from scratch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from app.events.training_snapshot import EventSnapshot
from app.jobs.schemas import TrainParams
from app.training.dataset import TrainingEvents
from app.training.gate import IncumbentComparison, ServingModel, ServingModelReadError
from app.training.warm_start import TrainingStart, choose_start
from ncr_core.checkpoint import Checkpoint
from ncr_core.comparison.evaluation_snapshot import EvaluationSnapshot
from ncr_core.data import build_interactions
from ncr_core.models import ModelConfig
from tests.ncr_core.conftest import wild_model

USERS, ITEMS = 20, 12
INTERACTIONS = build_interactions(
    [(f"u{n}", f"i{(n + k) % ITEMS}", k) for n in range(USERS) for k in range(6)]
)


NO_EVENTS = TrainingEvents(
    EventSnapshot(
        *[np.zeros(0, dtype=np.int64)] * 3,
        weight=np.zeros(0, dtype=np.float32),
        seq=np.zeros(0, dtype=np.int64),
        preferences=np.zeros((0, 5), dtype=np.int64),
        preference_weight=np.zeros(0, dtype=np.float32),
        max_seq=0,
    ),
    {},
    {},
)


def start_after(
    serving_model: Callable[[], ServingModel | None], config: ModelConfig
) -> TrainingStart:
    """The start of a training of this configuration that is to be warm."""
    start = choose_start(
        TrainParams.model_validate({"start": "warm"}),
        config,
        INTERACTIONS,
        np.ones(INTERACTIONS.n_users, dtype=np.bool_),
        IncumbentComparison(serving_model, NO_EVENTS, 0.05),
    )
    assert (start.base is None) == (start.report["from"] == "scratch")
    return start


def start_report(config: ModelConfig, users: list[str], items: list[str]) -> dict[str, object]:
    """The report on a start after a served model of this configuration, these users and items."""
    model = wild_model(config, len(users), len(items))
    rows = np.arange(len(users))
    evaluated = EvaluationSnapshot(model, rows, np.full((len(users), 2), -1))
    checkpoint = Checkpoint(model, users, items, np.ones(len(items), dtype=np.int64), [0], {})
    serving = ServingModel("v1", 0, checkpoint, evaluated)
    return start_after(lambda: serving, config).report


@pytest.mark.parametrize("users", ["free", "history"])
def test_warm_start_falls_back_to_scratch_when_the_served_model_shares_no_users_or_items(
    users: str,
) -> None:
    config = ModelConfig.from_dict({"kind": "nbpr", "factors": 4, "users": users})
    some, others = list(INTERACTIONS.user_ids)[:15], [f"x{n}" for n in range(15)]
    items = list(INTERACTIONS.item_ids)
    assert start_report(config, some, items) == {"from": "warm", "version": "v1"}
    report = start_report(config, some, [f"y{n}" for n in range(ITEMS)])
    assert report == {"from": "scratch", "because": "v1 knows none of these items"}
    report = start_report(config, others, items)
    if users == "free":
        assert report == {"from": "scratch", "because": "v1 knows none of these users"}
    else:  # whose vectors are made of their items
        assert report["from"] == "warm"


def test_warm_start_falls_back_to_scratch_when_the_served_model_is_unreadable_or_missing() -> None:
    def unreadable() -> ServingModel:
        raise ServingModelReadError("v1", "it is damaged")

    config = ModelConfig.from_dict({"kind": "nbpr", "factors": 4})
    for serving_model, reason in (
        (unreadable, "the model that is served cannot be read: it is damaged"),
        (lambda: None, "no model is served"),
    ):
        report = start_after(serving_model, config).report
        assert report == {"from": "scratch", "because": reason}
