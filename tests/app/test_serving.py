"""A loaded model: answers do not depend on their company, and memory is bounded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from app.catalog.view import Catalogue, CatalogueRow
from app.core.cache import ENTRY_BYTES, ByteCache
from app.models.schemas import ModelRow
from app.recommend.candidates import SPARE, RankRequest
from app.recommend.catalogue_rows import filters_key
from app.recommend.places import RankedItem
from app.recommend.serving import ServingModel
from ncr_core.checkpoint import load_checkpoint, save_checkpoint
from ncr_core.fold_in import Evidence
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


def ask(
    user: int,
    n: int = 10,
    fold_in: list[int] | None = None,
    allowed: Sequence[int] | None = None,
    exclude: Sequence[int] = (),
) -> RankRequest:
    mask = np.ones(ITEMS, dtype=np.bool_)
    if allowed is not None:
        mask[:] = False
        mask[list(allowed)] = True
    evidence = None if fold_in is None else Evidence(np.array(fold_in))
    state = f"u{user}", len(fold_in or ())
    filters = None if allowed is None else tuple(allowed)
    return RankRequest(user, evidence, state, filters, lambda: mask, n, np.array(exclude, np.int64))


def rows(model: ServingModel, *requests: RankRequest) -> list[list[int]]:
    return [[place.row for place in places] for places in model.rank(requests)]


def test_a_list_does_not_depend_on_who_else_asks(model: ServingModel) -> None:
    requests = [ask(0), ask(1, n=200), ask(2, fold_in=[5, 6, 7]), ask(3, fold_in=[1]), ask(4)]
    together = rows(model, *requests)
    model.candidates.clear()
    for request, expected in zip(requests, together, strict=True):
        assert rows(model, request) == [expected]


def test_a_long_list_is_a_short_one_continued(model: ServingModel) -> None:
    short, whole = rows(model, ask(7, n=10)), rows(model, ask(7, n=1000))
    assert whole[0][:10] == short[0]
    assert sorted(whole[0]) == list(range(ITEMS))


def test_few_items_are_allowed(model: ServingModel) -> None:
    assert rows(model, ask(0, n=100, allowed=[])) == [[]]
    assert sorted(rows(model, ask(0, n=100, allowed=[0, 299]))[0]) == [0, 299]
    assert rows(model, ask(0, n=100, allowed=[0, 299], exclude=[0])) == [[299]]
    assert rows(model, ask(0, n=100, allowed=[], exclude=[3]), ask(1, n=5))[0] == []


@pytest.mark.parametrize("excluded", [3, SPARE, SPARE + 40, 280])
def test_excluding_items_is_as_if_they_were_not_allowed(model: ServingModel, excluded: int) -> None:
    exclude = rows(model, ask(3, n=1000))[0][:excluded]  # the best, where it matters most
    rest = [item for item in range(ITEMS) if item not in exclude]
    for n in (10, 1000):
        expected = rows(model, ask(3, n=n, allowed=rest))
        model.candidates.clear()
        assert rows(model, ask(3, n=n, exclude=exclude)) == expected  # not kept yet
        assert rows(model, ask(3, n=n, exclude=exclude)) == expected  # and kept
        assert len(expected[0]) == min(n, len(rest))


def test_candidates_are_kept_within_bounds_and_per_state_of_the_user(
    model: ServingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = ENTRY_BYTES + 4 * (CANDIDATES + SPARE)
    monkeypatch.setattr(model.candidates, "_lists", ByteCache(5 * entry))
    for user in range(20):
        assert not model.at_hand(ask(user))
        rows(model, ask(user))
    assert len(model.candidates.cache) == 5
    assert model.at_hand(ask(19))
    assert not model.at_hand(ask(0))
    assert not model.at_hand(ask(19, allowed=[1, 2]))
    before = rows(model, ask(19, n=300, fold_in=[1, 2]))
    assert rows(model, ask(19, n=300, fold_in=[1, 2, 3])) != before
    together = rows(model, *(ask(user) for user in range(20)))  # more than are kept
    assert together == [rows(model, ask(user))[0] for user in range(20)]


def test_scores_and_preferences_are_the_models_own(model: ServingModel) -> None:
    """Short lists and long ones are explained by different code; both by these definitions."""
    network, references = model._model, model._references
    user = network.user_vectors(torch.tensor([5]))

    def margin(i: int, j: int) -> float:
        one, other = torch.tensor([i]), torch.tensor([j])
        z = network.logits(user, one, other) - network.logits(user, other, one)
        return float(z)

    for n in (10, 120):
        places = model.rank([ask(5, n=n)])[0]
        for place, following in zip(places[:20], [*places[1:20], None], strict=False):
            against = torch.tensor([margin(place.row, int(j)) for j in references])
            assert place.score == pytest.approx(float(torch.sigmoid(against / 2).mean()), abs=1e-4)
            if following is not None:
                p = 1 / (1 + math.exp(-margin(place.row, following.row) / 2))
                assert place.preferred_over_next == pytest.approx(p, abs=1e-4)
        assert places[-1].preferred_over_next is None


def test_a_change_of_the_catalogue_that_shows_and_hides_nothing_keeps_the_epoch(
    model: ServingModel,
) -> None:
    def row(number: int, seq: int, hidden: bool = False) -> CatalogueRow:
        return CatalogueRow(number + 1, f"i{number}", None, [], hidden, False, seq)

    half = Catalogue().updated([row(n, 1) for n in range(150)])
    first = model.rows(half)
    assert first.internal.tolist() == [*range(1, 151), *[-1] * 150]
    titled = half.updated([row(7, 2)])
    assert model.rows(titled).epoch == first.epoch
    hidden = titled.updated([row(7, 3, hidden=True)])
    assert model.rows(hidden).epoch != first.epoch
    assert not model.rows(hidden).visible[7]
    whole = hidden.updated([row(n, 4) for n in range(150, 300)])
    assert model.rows(whole).internal.tolist() == list(range(1, 301))
    assert filters_key(first, True, ()) != filters_key(model.rows(whole), True, ())


def test_a_gpu_with_too_little_memory_ranks_in_halves_and_then_on_the_cpu(
    model: ServingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is needed to run out of its memory: what raises is torch's own error."""
    expected = rows(model, *(ask(user) for user in range(8)))
    fallbacks: list[str] = []
    room, honest = 3, model._rank

    def rank(requests: Sequence[RankRequest]) -> list[list[RankedItem]]:
        if len(requests) > room:
            raise torch.OutOfMemoryError
        return honest(requests)

    monkeypatch.setattr(model, "_rank", rank)
    monkeypatch.setattr(model, "_on_fallback", fallbacks.append)
    assert rows(model, *(ask(user) for user in range(8))) == expected
    assert fallbacks == ["half"] * 3  # 8, 4 and 4
    room = 0
    fallbacks.clear()
    assert rows(model, ask(0), ask(1)) == expected[:2]
    assert fallbacks == ["half", "cpu", "cpu"]
