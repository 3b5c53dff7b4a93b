"""A loaded model: answers do not depend on their company, and memory is bounded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from app.catalog.snapshot import Catalogue, CatalogueRow
from app.core.cache import ENTRY_BYTES
from app.inference.loaded_model import MAX_HIDDEN, LoadedModel
from app.registry.schemas import ModelRow
from ncr_core.checkpoint import load_checkpoint, save_checkpoint
from ncr_core.fold_in import Evidence
from ncr_core.fold_in.items import item_rows
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


@pytest.mark.slow
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


QUESTIONS = st.lists(
    st.fixed_dictionaries(
        {
            "user": st.integers(0, 5),
            "fold_in": st.sampled_from([None, [7], [1, 2]]),
            "newer": st.booleans(),
            "left_out": st.integers(0, ITEMS) | st.just(SPARE_CANDIDATES + 4),
            "best": st.booleans(),
            "category": st.sampled_from([0, 0, 2, 9]),
            "selected": st.sampled_from([0, 0, 3, 40]),
            "boosted": st.booleans(),
            "keyed": st.sampled_from([True, True, False]),
        }
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module", params=["nbpr", "neupr"])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model that has 20 items more than its training, and keeps candidates."""
    wild = wild_model(ModelConfig.from_dict({"kind": request.param, "factors": 4}), USERS, ITEMS)
    folder = tmp_path_factory.mktemp("kept") / "c"
    save_checkpoint(
        folder,
        wild,
        user_ids=[f"u{n}" for n in range(USERS)],
        item_ids=[f"i{n}" for n in range(ITEMS)],
        item_counts=np.arange(ITEMS),
    )
    trained = LoadedModel(ROW, load_checkpoint(folder), CANDIDATES)
    vectors = item_rows(wild, torch.arange(20)).flip(0) * 0.9
    return trained.extended([f"i{ITEMS + n}" for n in range(20)], vectors, "r")


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(questions=QUESTIONS, data=st.data())
def test_kept_candidates_give_the_lists_of_a_search_anew(
    kept: LoadedModel, questions: list[dict[str, Any]], data: st.DataObject
) -> None:
    """Whatever is left out, of whichever items, and whoever asked for what before."""
    everything = kept.engine.n_items
    boost = np.random.default_rng(0).normal(size=everything)
    requests, anew = [], []
    for question in questions:
        allowed = np.ones(everything, dtype=np.bool_)
        within = few = selected = None
        if question["category"]:
            within = [np.arange(0, everything, question["category"])]
        if question["selected"]:
            few = np.arange(0, everything, question["selected"])
            selected = np.zeros(everything, dtype=np.bool_)
            selected[few] = True
            few = few if len(few) < 20 else None
        items = ItemFilter(allowed, np.array([3, 4]), within, None, selected, few)
        evidence = None
        if question["fold_in"] is not None:
            evidence = Evidence(np.array(question["fold_in"]))
        state = UserState(question["user"], evidence, (question["user"], str(question["fold_in"])))
        about = (question["category"], question["selected"], question["boosted"])
        key = (state.key, about) if question["keyed"] else None
        whole = RankRequest(state, 10, items, key=key, boost=boost if question["boosted"] else None)
        if question["keyed"] and question["newer"] and about == (0, 0, False):
            whole = replace(whole, key=(key, "newer"), trained_key=(key, "trained"))
        fresh = replace(whole, key=None, trained_key=None)
        if question["best"]:
            ((*best,),) = kept.engine.rank([replace(fresh, n=everything)])
            skipped = [item.row for item in best[: question["left_out"]]]
        else:
            seed = data.draw(st.integers(0, 99))
            order = np.random.default_rng(seed).permutation(everything)
            skipped = order[: question["left_out"]].tolist()
        requests.append(replace(whole, skipped=np.array(skipped, dtype=np.int64)))
        allowed = allowed.copy()
        allowed[skipped] = False
        anew.append(replace(fresh, items=replace(items, allowed=allowed)))
    expected = [rows(kept, request)[0] for request in anew]
    assert rows(kept, *requests) == expected
    assert [rows(kept, request)[0] for request in requests] == expected
    retriever = kept.engine.retriever
    assert all(retriever.is_ready(request) for request in requests if request.key is not None)


def test_many_left_out_items_are_searched_for_once(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever, searched = model.engine.retriever, []
    search = retriever._search

    def counted(vectors: Tensor, *arguments: Any) -> list[NDArray[np.int32]]:
        searched.append(len(vectors))
        return search(vectors, *arguments)

    monkeypatch.setattr(retriever, "_search", counted)
    best = rows(model, ask(3, n=ITEMS))[0]
    searched.clear()
    for left_out in range(SPARE_CANDIDATES + 1, 2 * SPARE_CANDIDATES + 1):
        assert rows(model, ask(3, exclude=best[:left_out]))
    assert searched == [1]
    rows(model, *(ask(user, exclude=best[:60]) for user in range(10)))
    assert searched == [1, 9]  # all in one search, but for the one that is kept


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
    # The catalogue has to be searched, once, for what so many leave.
    assert not is_ready(ask(19, exclude=range(SPARE_CANDIDATES + 1)))
    rows(model, ask(19, exclude=range(SPARE_CANDIDATES + 1)))
    assert is_ready(ask(19, exclude=range(SPARE_CANDIDATES + 1)))
    assert is_ready(ask(19, exclude=range(2 * SPARE_CANDIDATES)))
    assert not is_ready(ask(19, exclude=range(2 * SPARE_CANDIDATES + 1)))
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


def test_a_machine_with_too_little_memory_makes_no_second_copy_of_the_model(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallbacks: list[str] = []
    model = LoadedModel(ROW, model.trained.checkpoint, CANDIDATES, on_fallback=fallbacks.append)

    def bound(*arguments: Any) -> BoundRanker:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(ExactRanker, "bind", bound)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        rows(model, ask(0), ask(1))
    assert fallbacks == []


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
