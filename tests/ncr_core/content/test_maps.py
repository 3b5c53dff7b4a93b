"""What a model learns of attributes: priors of its fold-ins, kept in its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ncr_core.checkpoint import CONTENT, CONTENT_CONFIG, load_checkpoint, save_checkpoint
from ncr_core.content import ContentMaps, map_items, map_users
from ncr_core.errors import CheckpointError, DataError
from ncr_core.fold_in import Evidence, FoldIn, FoldInConfig, ItemFoldIn, extended
from ncr_core.fold_in.items import item_rows, split_rows
from ncr_core.models import ModelConfig, PairwiseRanker
from tests.ncr_core.conftest import wild_model

USERS, N = 40, 60
ITEM_GENRES = [{"genre": f"g{row % 3}"} for row in range(N)]
USER_AGES = [{"age": 10 * (row % 4)} for row in range(USERS)]


def told_model(config: ModelConfig) -> PairwiseRanker:
    """A model whose items lie by their genre, and whose users by their age."""
    model = wild_model(config, USERS, N)
    rng = torch.Generator().manual_seed(1)
    rows = item_rows(model, torch.arange(N))
    of_genre = torch.randn(3, rows.shape[1], generator=rng)
    parts = split_rows(model, 0.2 * rows + of_genre[torch.arange(N) % 3])
    with torch.no_grad():
        for name, values in parts.items():
            model.get_parameter(name).copy_(values)
        for part in model.user_parts():
            of_age = torch.randn(4, part.weight.shape[1], generator=rng)
            part.weight.mul_(0.2).add_(of_age[torch.arange(USERS) % 4])
    return model


def maps_of(model: PairwiseRanker) -> ContentMaps:
    return ContentMaps(
        map_items(model, ITEM_GENRES, np.arange(1, N + 1)),
        map_users(model, USER_AGES, np.full(USERS, 9)),
    )


def test_items_and_users_lie_where_their_attributes_say(config: ModelConfig) -> None:
    maps = maps_of(told_model(config))
    assert maps.items is not None
    assert maps.users is not None
    assert maps.items.encoder.names == ("genre",)
    assert maps.users.encoder.names == ("age",)
    assert min(maps.items.explained, maps.users.explained) > 0.7


def test_an_item_without_users_is_ranked_as_predicted(config: ModelConfig) -> None:
    model = told_model(config)
    placement = maps_of(model).items
    assert placement is not None
    priors = placement.predict([{"genre": "g0"}, {"genre": "g2"}, {}])
    fold_in = ItemFoldIn(model, residual=placement.residual)
    assert fold_in([torch.zeros(0, 1)] * 3, priors=priors).equal(priors)
    mean = fold_in([torch.zeros(0, 1)])
    unknown = torch.full_like(mean, torch.nan)
    assert fold_in([torch.zeros(0, 1)], priors=unknown).equal(mean)
    larger = extended(model, priors)
    assert item_rows(larger, torch.arange(N, N + 3)).equal(priors)


@pytest.mark.slow
def test_an_item_with_users_depends_on_its_own_prior_alone(config: ModelConfig) -> None:
    model = told_model(config)
    placement = maps_of(model).items
    assert placement is not None
    fold_in = ItemFoldIn(model, residual=placement.residual)
    priors = placement.predict([{"genre": "g0"}, {"genre": "g1"}])
    takers = model.user_vectors(torch.arange(0, USERS, 4))
    fitted = fold_in([takers] * 2, priors=priors)
    assert fitted.isfinite().all()
    assert fold_in([takers], priors=priors[1:])[0].equal(fitted[1])
    nobody = torch.full_like(priors, torch.nan)
    assert fold_in([takers] * 2, priors=nobody).equal(fold_in([takers] * 2))


def test_users_move_an_item_from_its_prior() -> None:
    model = told_model(ModelConfig(kind="nbpr", factors=4, item_bias=True))
    placement = maps_of(model).items
    assert placement is not None
    fold_in = ItemFoldIn(model, residual=placement.residual)
    priors = placement.predict([{"genre": "g0"}])
    every = model.user_vectors(torch.arange(USERS))
    takers = torch.arange(0, USERS, 4)
    fitted = fold_in([every[takers]], priors=priors)

    def gained(rows: torch.Tensor) -> float:
        """How much more of these users' margin over the others the new item has."""
        margins = []
        for vectors in (fitted, priors):
            larger = extended(model, vectors)
            new, others = torch.full_like(rows, N), torch.arange(0, N, 6).expand(len(rows), -1)
            z_new, z_other = larger.pair_logits(every[rows], new, others)
            margins.append(float((z_new - z_other).mean()))
        return margins[0] - margins[1]

    assert gained(takers) > gained(torch.arange(1, USERS, 4))


@pytest.mark.parametrize("kind", ["nbpr", "neupr"])
def test_users_outweigh_attributes_the_more_the_more_there_are(kind: Any) -> None:
    model = told_model(ModelConfig(kind=kind, factors=4, item_bias=True))
    placement = maps_of(model).items
    assert placement is not None
    fold_in = ItemFoldIn(model, residual=placement.residual)
    priors = placement.predict([{"genre": "g0"}, {"genre": "g1"}])
    every = model.user_vectors(torch.arange(USERS))
    few, many = (fold_in([every[:k]] * 2, priors=priors) for k in (2, USERS))
    of_priors, of_few, of_many = (float((v[0] - v[1]).norm()) for v in (priors, few, many))
    assert of_many < of_few <= of_priors * 1.01


def test_a_user_without_events_is_where_attributes_say(config: ModelConfig) -> None:
    model = told_model(config)
    placement = maps_of(model).users
    assert placement is not None
    fold_in = FoldIn(model, residual=placement.residual)
    priors = placement.predict([{"age": 0}, {"age": 30}])
    assert fold_in([Evidence()] * 2, priors=priors).equal(priors)
    nobody = torch.full_like(priors, torch.nan)
    evidence = [Evidence(np.array([3, 7])), Evidence(disliked=np.array([5]))]
    assert fold_in(evidence, priors=nobody).equal(fold_in(evidence))
    # One at a time is the same, bit by bit.
    mixed = torch.stack([priors[0], nobody[0]])
    together = fold_in(evidence, priors=mixed)
    assert together[0].equal(fold_in(evidence[:1], priors=mixed[:1])[0])
    assert together[1].equal(fold_in(evidence[1:])[0])


@pytest.mark.parametrize("users", ["free", "history"])
def test_events_outweigh_attributes_the_more_the_more_there_are(users: str) -> None:
    model = told_model(ModelConfig(kind="nbpr", factors=4, users=users))
    placement = maps_of(model).users
    assert placement is not None
    fold_in = FoldIn(model, FoldInConfig(half_life=0), residual=placement.residual)
    priors = placement.predict([{"age": 0}, {"age": 30}])
    distances = []
    for k in (0, 1, 4, 50):
        vectors = fold_in([Evidence(np.arange(k))] * 2, priors=priors)
        distances.append(float((vectors[0] - vectors[1]).norm()))
    assert distances[0] == pytest.approx(float((priors[0] - priors[1]).norm()))
    assert distances[0] > distances[2] > distances[3]


def test_compiled_code_takes_priors_as_torch_does(config: ModelConfig) -> None:
    model = told_model(config)
    placement = maps_of(model).users
    assert placement is not None
    priors = placement.predict([{"age": 10}])
    exact = FoldInConfig(tolerance=1e-9, steps=60)
    evidence = [Evidence(np.array([3, 7, 9]), disliked=np.array([11]))]
    compiled, in_torch = (
        FoldIn(model, exact, residual=placement.residual, compiled=way)(evidence, priors=priors)
        for way in (True, False)
    )
    assert compiled.numpy() == pytest.approx(in_torch.numpy(), rel=1e-3, abs=1e-3)


def test_priors_that_do_not_fit_are_refused() -> None:
    model = told_model(ModelConfig(kind="nbpr", factors=4))
    for wrong in (torch.zeros(1, 3), torch.zeros(2, 4), torch.tensor([[0, 0, 0, torch.inf]])):
        with pytest.raises(DataError, match="prior"):
            ItemFoldIn(model)([torch.zeros(0, 4)], priors=wrong)
        with pytest.raises(DataError, match="prior"):
            FoldIn(model)([Evidence()], priors=wrong)
    with pytest.raises(DataError, match="residual"):
        ItemFoldIn(model, residual=torch.eye(3))
    with pytest.raises(DataError, match="residual"):
        FoldIn(model, residual=torch.eye(3))


def test_nothing_is_learned_of_attributes_that_tell_nothing() -> None:
    model = wild_model(ModelConfig(kind="nbpr", factors=4), USERS, N)
    counts = np.full(N, 3)
    assert map_items(model, [{}] * N, counts) is None
    assert map_items(model, [{"row": f"r{row}"} for row in range(N)], counts) is None
    assert map_items(model, ITEM_GENRES, np.where(np.arange(N) < 5, 3, 0)) is None
    named = map_items(told_model(ModelConfig()), ITEM_GENRES, counts, names=["other"])
    assert named is None


def save(folder: Path, model: PairwiseRanker, maps: ContentMaps | None) -> Path:
    save_checkpoint(
        folder,
        model,
        user_ids=[f"u{row}" for row in range(USERS)],
        item_ids=[f"i{row}" for row in range(N)],
        item_counts=np.arange(N),
        content=maps,
    )
    return folder


def test_a_checkpoint_keeps_them(tmp_path: Path, config: ModelConfig) -> None:
    model = told_model(config)
    maps = maps_of(model)
    assert maps.items is not None
    loaded = load_checkpoint(save(tmp_path / "a", model, maps)).content
    assert loaded.items is not None
    assert loaded.users is not None
    asked = [{"genre": "g1"}, {"genre": "?"}, {}]
    assert loaded.items.predict(asked).equal(maps.items.predict(asked))
    assert loaded.items.residual.equal(maps.items.residual)
    for none in (None, ContentMaps()):
        folder = save(tmp_path / f"without {none is None}", model, none)
        assert not load_checkpoint(folder).content
        assert not (folder / CONTENT).exists()


def test_a_damaged_one_is_refused(tmp_path: Path) -> None:
    model = told_model(ModelConfig(kind="nbpr", factors=4))
    folder = save(tmp_path / "a", model, maps_of(model))
    whole = (folder / CONTENT_CONFIG).read_bytes()
    (folder / CONTENT_CONFIG).write_bytes(whole.replace(b"genre", b"genrE"))
    with pytest.raises(CheckpointError):
        load_checkpoint(folder)
    (folder / CONTENT_CONFIG).unlink()
    with pytest.raises(CheckpointError):
        load_checkpoint(folder)


def test_those_of_another_model_are_refused(tmp_path: Path) -> None:
    small, large = (told_model(ModelConfig(kind="nbpr", factors=d)) for d in (3, 4))
    with pytest.raises(CheckpointError, match="4 numbers each, not 3"):
        load_checkpoint(save(tmp_path / "a", large, ContentMaps(items=maps_of(small).items)))
    maps = maps_of(large)
    stored = json.dumps(maps.items.config() if maps.items else None)
    assert "genre" in stored
