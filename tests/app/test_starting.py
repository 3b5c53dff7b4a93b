"""What a training begins with where it is to go on from what is served."""

from __future__ import annotations

import numpy as np
import pytest

from app.jobs.gate import Comparison
from app.jobs.schemas import TrainParams
from app.jobs.served import ServedModel
from app.jobs.starting import start_of
from ncr_core.checkpoint import Checkpoint
from ncr_core.data import build_interactions
from ncr_core.evaluated import Evaluated
from ncr_core.models import ModelConfig
from tests.ncr_core.conftest import wild_model

USERS, ITEMS = 20, 12
EVERY = build_interactions(
    [(f"u{n}", f"i{(n + k) % ITEMS}", k) for n in range(USERS) for k in range(6)]
)


def about_starting(config: ModelConfig, users: list[str], items: list[str]) -> dict[str, object]:
    """What is said of a warm start from a model of these."""
    model = wild_model(config, len(users), len(items))
    rows = np.arange(len(users))
    held_out = np.full((len(users), 2), -1)
    checkpoint = Checkpoint(model, users, items, np.ones(len(items), dtype=np.int64), [0], {})
    served = ServedModel("v1", 0, checkpoint, Evaluated(model, rows, held_out))

    def nothing(interactions, users, seq):  # type: ignore[no-untyped-def]
        none = interactions.select(np.zeros(interactions.nnz, dtype=np.bool_))
        return none, none

    start = start_of(
        TrainParams.model_validate({"start": "warm"}),
        config,
        EVERY,
        np.ones(EVERY.n_users, dtype=np.bool_),
        Comparison(lambda: served, nothing, 0.05),
    )
    assert (start.base is None) == (start.about["from"] == "scratch")
    return start.about


@pytest.mark.parametrize("users", ["free", "history"])
def test_a_model_of_other_items_or_users_is_nothing_to_go_on_from(users: str) -> None:
    config = ModelConfig.from_dict({"kind": "nbpr", "factors": 4, "users": users})
    some, others = list(EVERY.user_ids)[:15], [f"x{n}" for n in range(15)]
    items = list(EVERY.item_ids)
    assert about_starting(config, some, items)["from"] == "warm"
    found = about_starting(config, some, [f"y{n}" for n in range(ITEMS)])
    assert found == {"from": "scratch", "because": "v1 knows none of these items"}
    found = about_starting(config, others, items)
    if users == "free":
        assert found == {"from": "scratch", "because": "v1 knows none of these users"}
    else:  # whose vectors are made of their items
        assert found["from"] == "warm"
