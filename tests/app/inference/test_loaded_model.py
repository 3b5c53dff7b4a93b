"""A loaded model: answers do not depend on their company, and memory is bounded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from app.catalog.snapshot import Catalogue, CatalogueRow
from app.core.cache import ENTRY_BYTES
from app.inference.loaded_model import MAX_HIDDEN, LoadedModel
from app.registry.schemas import ModelRow
from ncr_core.checkpoint import load_checkpoint, save_checkpoint
from ncr_core.fold_in import Evidence
from ncr_core.inference.retrieval import SPARE_CANDIDATES, ItemFilter, RankRequest, UserState
from ncr_core.models import ModelConfig
from ncr_core.ranking import BoundRanker, ExactRanker
from tests.ncr_core.conftest import wild_model

USERS, ITEMS, CANDIDATES = 40, 300, 50
ROW = ModelRow("v", "published", "", 0, "", "", 9, 0, 0, 0, {}, {}, None, 0, None)


@pytest.fixture(params=["nbpr", "dncr", "neupr"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    """A model whose preferences are often intransitive."""
    wild = wild_model(ModelConfig.from_dict({"kind": request.param, "factors": 4}), USERS, ITEMS)
    save_checkpoint(
        tmp_path / "c",
        wild,
        user_ids=[f"u{n}" for n in range(USERS)],
        item_ids=[f"i{n}" for n in range(ITEMS)],
        item_counts=np.arange(ITEMS),
    )
    return LoadedModel(ROW, load_checkpoint(tmp_path / "c"), CANDIDATES)


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
    state = UserState(user, evidence, (f"u{user}", len(fold_in or ())))
    key = state.key, None if allowed is None else tuple(allowed)
    return RankRequest(state, n, ItemFilter(mask), skipped=np.array(exclude, np.int64), key=key)


def rows(model: LoadedModel, *requests: RankRequest) -> list[list[int]]:
    return [[item.row for item in items] for items in model.engine.rank(requests)]


def test_a_list_does_not_depend_on_who_else_asks(model: LoadedModel) -> None:
    requests = [ask(0), ask(1, n=200), ask(2, fold_in=[5, 6, 7]), ask(3, fold_in=[1]), ask(4)]
    together = rows(model, *requests)
    model.candidate_cache.clear()
    for request, expected in zip(requests, together, strict=True):
        assert rows(model, request) == [expected]


def test_threads_that_rank_at_once_give_the_lists_of_one(model: LoadedModel) -> None:
    """With caches too small for all, so that entries come and go under the other threads."""
    small = 20 * (ENTRY_BYTES + 4 * (CANDIDATES + SPARE_CANDIDATES))
    shared = LoadedModel(ROW, model.trained.checkpoint, CANDIDATES, cache_bytes=small)
    requests = [ask(user, fold_in=[user] if user % 3 else None) for user in range(USERS)]
    expected = [rows(model, request)[0] for request in requests]

    def all_lists(start: int) -> list[list[int]]:
        order = np.roll(np.arange(USERS), start)
        lists = {user: rows(shared, requests[user])[0] for user in order}
        return [lists[user] for user in range(USERS)]

    with ThreadPoolExecutor(4) as threads:
        for lists in threads.map(all_lists, range(0, USERS, 5)):
            assert lists == expected


def test_a_long_list_is_a_short_one_continued(model: LoadedModel) -> None:
    short, whole = rows(model, ask(7, n=10)), rows(model, ask(7, n=1000))
    assert whole[0][:10] == short[0]
    assert sorted(whole[0]) == list(range(ITEMS))


def test_few_items_are_allowed(model: LoadedModel) -> None:
    assert rows(model, ask(0, n=100, allowed=[])) == [[]]
    assert sorted(rows(model, ask(0, n=100, allowed=[0, 299]))[0]) == [0, 299]
    assert rows(model, ask(0, n=100, allowed=[0, 299], exclude=[0])) == [[299]]
    assert rows(model, ask(0, n=100, allowed=[], exclude=[3]), ask(1, n=5))[0] == []


@pytest.mark.parametrize("excluded", [3, SPARE_CANDIDATES, SPARE_CANDIDATES + 40, 280])
def test_excluding_items_is_as_if_they_were_not_allowed(model: LoadedModel, excluded: int) -> None:
    exclude = rows(model, ask(3, n=1000))[0][:excluded]  # the best, where it matters most
    rest = [item for item in range(ITEMS) if item not in exclude]
    for n in (10, 1000):
        expected = rows(model, ask(3, n=n, allowed=rest))
        model.candidate_cache.clear()
        assert rows(model, ask(3, n=n, exclude=exclude)) == expected  # not kept yet
        assert rows(model, ask(3, n=n, exclude=exclude)) == expected  # and kept
        assert len(expected[0]) == min(n, len(rest))


def test_candidates_are_kept_within_bounds_and_per_state_of_the_user(
    model: LoadedModel,
) -> None:
    entry_bytes = ENTRY_BYTES + 4 * (CANDIDATES + SPARE_CANDIDATES)
    checkpoint, candidate_bytes = model.trained.checkpoint, 5 * entry_bytes
    model = LoadedModel(ROW, checkpoint, CANDIDATES, cache_bytes=math.ceil(candidate_bytes * 8 / 7))
    is_ready = model.engine.retriever.is_ready
    for user in range(20):
        assert not is_ready(ask(user))
        rows(model, ask(user))
    assert len(model.candidate_cache) == 5
    assert is_ready(ask(19))
    assert not is_ready(ask(0))
    assert not is_ready(ask(19, allowed=[1, 2]))
    assert is_ready(ask(19, exclude=range(SPARE_CANDIDATES)))
    # The catalogue has to be searched for what so many leave.
    assert not is_ready(ask(19, exclude=range(SPARE_CANDIDATES + 1)))
    before = rows(model, ask(19, n=300, fold_in=[1, 2]))
    assert rows(model, ask(19, n=300, fold_in=[1, 2, 3])) != before
    together = rows(model, *(ask(user) for user in range(20)))  # more than are kept
    assert together == [rows(model, ask(user))[0] for user in range(20)]


def test_scores_and_preferences_are_the_models_own(model: LoadedModel) -> None:
    """Short lists and long ones are explained by different code; both by these definitions."""
    network, references = model.engine.model, model.engine.references
    user = network.user_vectors(torch.tensor([5]))

    def margin(i: int, j: int) -> float:
        one, other = torch.tensor([i]), torch.tensor([j])
        z = network.logits(user, one, other) - network.logits(user, other, one)
        return float(z)

    for n in (10, 120):
        places = model.engine.rank([ask(5, n=n)])[0]
        for place, following in zip(places[:20], [*places[1:20], None], strict=False):
            against = torch.tensor([margin(place.row, int(j)) for j in references])
            assert place.score == pytest.approx(float(torch.sigmoid(against / 2).mean()), abs=1e-4)
            if following is not None:
                p = 1 / (1 + math.exp(-margin(place.row, following.row) / 2))
                assert place.preferred_over_next == pytest.approx(p, abs=1e-4)
        assert places[-1].preferred_over_next is None


def test_a_change_of_the_catalogue_that_shows_and_hides_nothing_keeps_candidates(
    model: LoadedModel,
) -> None:
    def row(number: int, seq: int, hidden: bool = False) -> CatalogueRow:
        return CatalogueRow(number + 1, f"i{number}", None, [], hidden, False, seq)

    half = Catalogue().updated([row(n, 1) for n in range(150)])
    first = model.items(half)
    assert first.internal.tolist() == [*range(1, 151), *[-1] * 150]
    titled = half.updated([row(7, 2)])
    assert model.items(titled).searched is first.searched
    assert model.items(titled).shown_seq == 1  # nothing of row 7 has changed
    hidden = titled.updated([row(7, 3, hidden=True)])
    items = model.items(hidden)
    assert (items.searched, items.hidden.tolist()) == (first.searched, [7])
    assert (bool(items.visible[7]), items.shown_seq) == (False, 3)
    many = hidden.updated([row(n, 4, hidden=True) for n in range(20, 20 + MAX_HIDDEN)])
    assert model.items(many).searched.mask.tolist() == model.items(many).visible.tolist()
    hidden = many.updated([row(n, 5) for n in range(20, 20 + MAX_HIDDEN)])
    assert len(model.items(hidden).hidden) == 0
    whole = hidden.updated([row(n, 6) for n in range(150, 300)])
    assert model.items(whole).internal.tolist() == list(range(1, 301))
    assert first.candidates_key(True, ()) != model.items(whole).candidates_key(True, ())


def test_candidates_of_a_category_depend_on_what_was_searched(model: LoadedModel) -> None:
    """An index that is made anew may leave out of the search what the one before skipped."""
    catalogue = Catalogue().updated(
        [CatalogueRow(n + 1, f"i{n}", None, [], False, False, 1) for n in range(ITEMS)]
    )
    model.items(catalogue)
    hidden = catalogue.updated([CatalogueRow(8, "i7", None, [], True, False, 2)])
    skipping = model.items(hidden)
    model.use_precomputed(MagicMock(), None)
    leaving_out = model.items(hidden)
    assert (skipping.hidden.tolist(), leaving_out.hidden.tolist()) == ([7], [])
    assert skipping.shown_seq == leaving_out.shown_seq
    keys = {items.candidates_key(True, ("comedy",)) for items in (skipping, leaving_out)}
    assert len(keys) == 2


def test_an_earlier_state_of_the_catalogue_after_a_later_one(model: LoadedModel) -> None:
    """Requests go on with the state that they began with."""
    earlier = Catalogue().updated([CatalogueRow(1, "i0", None, [], False, False, 1)])
    later = earlier.updated([CatalogueRow(2, "i1", None, [], False, False, 2)])
    expected = model.items(earlier)
    assert model.items(later).internal[:3].tolist() == [1, 2, -1]
    again = model.items(earlier)
    assert again.internal[:3].tolist() == [1, -1, -1]
    assert again.visible.tolist() == expected.visible.tolist()
    assert again.row_of.tolist() == expected.row_of.tolist()


def test_a_gpu_with_too_little_memory_ranks_in_halves_and_then_on_the_cpu(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is needed to run out of its memory: what raises is torch's own error."""
    expected = rows(model, *(ask(user) for user in range(8)))
    fallbacks: list[str] = []
    room = 3
    model = LoadedModel(ROW, model.trained.checkpoint, CANDIDATES, on_fallback=fallbacks.append)
    bind = ExactRanker.bind

    def bound(
        ranker: ExactRanker, users: torch.Tensor, boost: torch.Tensor | None = None
    ) -> BoundRanker:
        if ranker is model.engine.ranker and len(users) > room:
            raise torch.OutOfMemoryError
        return bind(ranker, users, boost)

    monkeypatch.setattr(ExactRanker, "bind", bound)
    assert rows(model, *(ask(user) for user in range(8))) == expected
    assert fallbacks == ["half"] * 3  # 8, 4 and 4
    room = 0
    fallbacks.clear()
    assert rows(model, ask(0), ask(1)) == expected[:2]
    assert fallbacks == ["half", "cpu", "cpu"]


def test_a_filter_is_what_is_visible_in_a_category_and_not_excluded() -> None:
    """By ids of which the model has some; an id it does not have hides no row."""
    random = np.random.default_rng(5)
    row_of = np.full(40, -1, dtype=np.int64)
    ids = random.permutation(40)[:30]
    row_of[ids] = np.arange(30)
    visible = random.random(30) < 0.7
    excluded, *within = (random.integers(0, 60, 12) for _ in range(3))
    for part in (None, [], within):
        expected = [
            bool(visible[row])
            and internal_id not in excluded
            and (part is None or any(internal_id in members for members in part))
            for row, internal_id in enumerate(ids.tolist())
        ]
        before = visible.copy()
        mask = ItemFilter(visible, excluded, part, row_of).mask()
        assert mask.tolist() == expected
        mask[:] = True
        assert (visible == before).all()  # the shared array is nobody's to write to
