"""A loaded model: answers do not depend on their company, and memory is bounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.models.schemas import ModelRow
from app.recommend import serving
from app.recommend.serving import RankRequest, ServingModel
from ncr_core.checkpoint import load_checkpoint, save_checkpoint
from ncr_core.models import ModelConfig
from tests.ncr_core.conftest import wild_model

USERS, ITEMS, CANDIDATES = 40, 300, 50
ROW = ModelRow("v", "published", "", 0, "", "", 9, 0, 0, 0, {}, {}, None, 0, None)


@pytest.fixture(params=["nbpr", "dncr", "neupr"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ServingModel:
    """A model whose preferences are often intransitive."""
    wild = wild_model(ModelConfig.from_dict({"kind": request.param, "factors": 4}), USERS, ITEMS)
    save_checkpoint(
        tmp_path / "c",
        wild,
        user_ids=[f"u{n}" for n in range(USERS)],
        item_ids=[f"i{n}" for n in range(ITEMS)],
        item_counts=np.arange(ITEMS),
    )
    return ServingModel(ROW, load_checkpoint(tmp_path / "c"), CANDIDATES)


def ask(user: int, n: int = 10, fold_in: list[int] | None = None) -> RankRequest:
    allowed = np.ones(ITEMS, dtype=np.bool_)
    items = None if fold_in is None else np.array(fold_in)
    return RankRequest(user, items, (f"u{user}", len(fold_in or ())), allowed, n)


def rows(model: ServingModel, *requests: RankRequest) -> list[list[int]]:
    return [[place.row for place in places] for places in model.rank(requests)]


def test_a_list_does_not_depend_on_who_else_asks(model: ServingModel) -> None:
    requests = [ask(0), ask(1, n=200), ask(2, fold_in=[5, 6, 7]), ask(3, fold_in=[1]), ask(4)]
    together = rows(model, *requests)
    model._scores.clear()
    for request, expected in zip(requests, together, strict=True):
        assert rows(model, request) == [expected]


def test_a_long_list_is_a_short_one_continued(model: ServingModel) -> None:
    short, whole = rows(model, ask(7, n=10)), rows(model, ask(7, n=1000))
    assert whole[0][:10] == short[0]
    assert sorted(whole[0]) == list(range(ITEMS))


def test_few_items_are_allowed(model: ServingModel) -> None:
    request = ask(0, n=100)
    request.allowed[:] = False
    assert rows(model, request) == [[]]
    request.allowed[[0, 299]] = True
    assert sorted(rows(model, request)[0]) == [0, 299]


def test_scores_are_kept_within_bounds_and_per_state_of_the_user(
    model: ServingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_kept", 5)
    for user in range(20):
        rows(model, ask(user))
    assert len(model._scores) == 5
    assert serving.SCORES_BYTES // (8 * ITEMS) >= 5
    before = rows(model, ask(19, n=300, fold_in=[1, 2]))
    assert rows(model, ask(19, n=300, fold_in=[1, 2, 3])) != before
