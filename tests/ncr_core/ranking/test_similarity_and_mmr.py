"""Similarity of items, and lists with more variety."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ncr_core.fold_in import extended
from ncr_core.fold_in.items import item_rows
from ncr_core.models import ModelConfig
from ncr_core.ranking.similarity import MAX_DIMENSIONS, ItemSpace, diversified
from tests.ncr_core.conftest import wild_model

N_ITEMS = 60


def unit(seed: int, p: int, d: int = 5) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(p, d)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@given(st.integers(0, 999), st.integers(0, 40), st.integers(1, 50))
def test_without_diversity_a_list_is_as_it_was(seed: int, p: int, n: int) -> None:
    assert diversified(unit(seed, p), n, 0.0).tolist() == list(range(min(n, p)))


@given(st.integers(0, 999), st.integers(1, 30), st.integers(1, 30), st.floats(0, 1))
def test_each_place_goes_to_the_largest_sum(seed: int, p: int, n: int, diversity: float) -> None:
    """Against the definition, written as it is in the paper."""
    vectors = unit(seed, p)
    chosen: list[int] = []
    while len(chosen) < min(n, p):

        def value(at: int, chosen: list[int] = chosen) -> float:
            nearest = max([0.0, *(float(vectors[at] @ vectors[other]) for other in chosen)])
            return (1 - diversity) * (1 - at / p) - diversity * nearest

        left = [at for at in range(p) if at not in chosen]
        best = max(value(at) for at in left)
        # Of those that are equal but for rounding either may come.
        found = int(diversified(vectors, n, diversity)[len(chosen)])
        assert value(found) == pytest.approx(best, abs=1e-6)
        chosen.append(found)
    assert chosen[:1] == [0]


def test_a_little_diversity_passes_over_a_twin() -> None:
    vectors = np.array([[1, 0], [1, 0], [0, 1], [-1, 0]], dtype=np.float32)
    assert diversified(vectors, 4, 0.1).tolist() == [0, 1, 2, 3]
    assert diversified(vectors, 4, 0.3).tolist() == [0, 2, 1, 3]
    assert diversified(vectors, 4, 0.5).tolist() == [0, 2, 3, 1]
    assert diversified(vectors, 2, 1.0).tolist() == [0, 2]


def table_vectors(model: torch.nn.Module) -> np.ndarray:
    """What ranking knows of items, centred, as the definition says."""
    tables = model.tables()  # type: ignore[operator]
    parts = [] if tables.linear is None else [tables.linear.items]
    if tables.tower is not None:
        parts += [tables.tower.first, tables.tower.second]
    parts += [scale * point.items for scale, point in tables.points if point.bias is None]
    if not any(part.shape[1] for part in parts):  # a layer alone: it knows popularity only
        return np.zeros((N_ITEMS, 0))
    vectors = torch.cat(parts, dim=1).double()
    vectors = vectors - vectors.mean(dim=0)
    norms = vectors.norm(dim=1, keepdim=True)
    return torch.where(norms > 0, vectors / norms, 0.0).numpy()


def test_similarities_are_the_cosines_of_what_ranking_knows(config: ModelConfig) -> None:
    model = wild_model(config, 20, N_ITEMS)
    space = ItemSpace(model.tables(), N_ITEMS)
    expected = table_vectors(model)
    assert space.vectors.shape[1] <= expected.shape[1]
    assert space.vectors @ space.vectors.T == pytest.approx(expected @ expected.T, abs=1e-5)


@pytest.mark.slow
def test_many_dimensions_become_those_that_matter() -> None:
    model = wild_model(ModelConfig(kind="nbpr", factors=100), 20, 500)
    with torch.no_grad():
        model.items.weight[:, 50:] *= 0.01  # type: ignore[union-attr,index,operator]
    space, expected = ItemSpace(model.tables(), 500), table_vectors(model)
    assert space.vectors.shape == (500, MAX_DIMENSIONS)
    assert space.vectors @ space.vectors.T == pytest.approx(expected @ expected.T, abs=0.01)


def test_other_later_items_do_not_change_the_similarity_of_the_items_before(
    config: ModelConfig,
) -> None:
    model = wild_model(config, 20, N_ITEMS)
    space = ItemSpace(model.tables(), N_ITEMS)
    others = extended(model, item_rows(model, torch.tensor([3, 59])))
    later = space.with_others(N_ITEMS, others.tables(), N_ITEMS + 2)
    anew = ItemSpace(others.tables(), N_ITEMS + 2, N_ITEMS)
    assert anew.vectors == pytest.approx(later.vectors, abs=1e-6)
    assert np.array_equal(later.vectors[:N_ITEMS], space.vectors)
    assert later.vectors[N_ITEMS:] == pytest.approx(space.vectors[[3, 59]], abs=1e-6)
    fewer = later.with_others(N_ITEMS, model.tables(), N_ITEMS)
    assert np.array_equal(fewer.vectors, space.vectors)


def test_the_nearest_are_allowed_and_not_the_item_itself() -> None:
    space = ItemSpace(
        wild_model(ModelConfig(kind="neupr", factors=4), 20, N_ITEMS).tables(), N_ITEMS
    )
    similarity = space.vectors @ space.vectors[7]
    allowed = np.ones(N_ITEMS, dtype=np.bool_)
    order = [item for item in np.argsort(-similarity, kind="stable").tolist() if item != 7]
    assert [row for row, _ in space.nearest(7, allowed, 10)] == order[:10]
    assert [row for row, _ in space.nearest(7, allowed, 1000)] == order
    assert [score for _, score in space.nearest(7, allowed, 3)] == pytest.approx(
        similarity[order[:3]].tolist()
    )
    allowed[order[:2]] = False
    assert [row for row, _ in space.nearest(7, allowed, 1)] == [order[2]]
    assert space.nearest(7, np.zeros(N_ITEMS, dtype=np.bool_), 5) == []


def test_items_that_are_all_alike_have_no_similarity() -> None:
    model = wild_model(ModelConfig(kind="nbpr", factors=3), 5, 4)
    with torch.no_grad():
        model.items.weight[:] = 1.0  # type: ignore[union-attr,index,operator]
    space = ItemSpace(model.tables(), 4)
    assert np.isfinite(space.vectors).all()
    assert len(space.nearest(0, np.ones(4, dtype=np.bool_), 9)) == 3
