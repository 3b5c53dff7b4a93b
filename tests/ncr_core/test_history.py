"""User vectors pooled from the user's own items: by hand, in training, and remembered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ncr_core.checkpoint import load_checkpoint, save_checkpoint
from ncr_core.data import Interactions, Split
from ncr_core.evaluation.protocols import ModelRanks, evaluate_sampled, sampled_candidates
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.models import users as users_module
from ncr_core.models.baselines.popularity import Popularity
from ncr_core.models.users import Histories, HistoryUsers
from ncr_core.training import TrainConfig, train_model
from ncr_core.training import loop as loop_module
from tests.ncr_core.conftest import wild_model

P = [[1.0, 2.0], [3.0, -1.0], [0.0, 4.0], [-2.0, 1.0]]
MIX = [[[1.0, 2.0], [0.5, -1.0]], [[0.0, 1.0], [-1.0, 3.0]]]
P0, P1, P2, P3 = torch.tensor(P, dtype=torch.float64)
M0, M1 = torch.tensor(MIX, dtype=torch.float64)
ZERO = torch.zeros(2, dtype=torch.float64)
WINDOWS = [(0,), (1,), (2, 0), (0, 3, 1)]


def pooling(windows: tuple[int, ...]) -> HistoryUsers:
    """Of items and matrices as above."""
    users = HistoryUsers(2, 4, 2, windows, 0.05).double()
    with torch.no_grad():
        users.items.weight.copy_(torch.tensor(P))
        users.mix.copy_(torch.tensor(MIX[: len(windows)]))
    return users.requires_grad_(False)


def histories_of(*sequences: list[int]) -> Histories:
    """A row for each item of each user."""
    lengths = torch.tensor([len(own) for own in sequences])
    end = lengths.cumsum(0).repeat_interleave(lengths)
    items = torch.tensor([item for own in sequences for item in own])
    start = end - lengths.repeat_interleave(lengths)
    return Histories(items, start, torch.arange(len(items)), end)


# The users have items 3, 1 and 0, 2, 1, from old to new.
BY_HAND: dict[tuple[int, ...], tuple[list[Tensor], list[Tensor]]] = {
    (0,): (
        [(P3 + P1) / 2**0.5 @ M0, (P0 + P2 + P1) / 3**0.5 @ M0],
        [P1 @ M0, P3 @ M0] + [x / 2**0.5 @ M0 for x in (P2 + P1, P0 + P1, P0 + P2)],
    ),
    (1,): ([P1 @ M0, P1 @ M0], [ZERO, P3 @ M0, ZERO, P0 @ M0, P2 @ M0]),
    (2, 0): (
        [
            (P3 + P1) / 2**0.5 @ (M0 + M1),
            (P2 + P1) / 2**0.5 @ M0 + (P0 + P2 + P1) / 3**0.5 @ M1,
        ],
        [ZERO, P3 @ (M0 + M1), ZERO, P0 @ (M0 + M1), (P0 + P2) / 2**0.5 @ (M0 + M1)],
    ),
}


@pytest.mark.parametrize("windows", list(BY_HAND), ids=str)
def test_vectors_by_hand(windows: tuple[int, ...]) -> None:
    users = pooling(windows)
    of, at = BY_HAND[windows]
    items = torch.tensor([3, 1, 0, 2, 1])
    torch.testing.assert_close(users.of(items, torch.tensor([2, 3])), torch.stack(of))
    torch.testing.assert_close(users.at(histories_of([3, 1], [0, 2, 1])), torch.stack(at))


def test_before_training_a_vector_is_the_mean_over_the_windows() -> None:
    users = HistoryUsers(2, 4, 2, (2, 0), 0.05)
    assert users.mix.eq(torch.eye(2) / 2).all()
    assert users.weight.eq(0).all()


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_training_vector_knows_neither_its_positive_nor_what_came_later(
    windows: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    users = HistoryUsers(2, 12, 3, windows, 1.0).double().requires_grad_(False)
    users.mix.normal_()
    rows = histories_of([4, 0, 7, 2, 9], [7, 1, 4, 11])
    before = users.at(rows)
    for r in range(len(rows.items)):
        at, end = int(rows.at[r]), int(rows.end[r])
        unknown = rows.items[at : at + 1 if windows == (0,) else end]
        kept = users.items.weight.clone()
        users.items.weight[unknown] += torch.randn(len(unknown), 3, dtype=torch.float64)
        torch.testing.assert_close(users.at(rows)[r], before[r])
        known = int(rows.items[at - 1 if at > rows.start[r] else end - 1])
        users.items.weight[known] += 1.0
        moved = bool((users.at(rows)[r] - before[r]).abs().max() > 1e-3)
        assert moved == (windows == (0,) or at > int(rows.start[r]))
        users.items.weight.copy_(kept)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("at_once", [1, 3, 256])
def test_what_is_remembered_is_each_users_own_vector(
    windows: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users_module, "USERS_AT_ONCE", at_once)
    torch.manual_seed(0)
    lengths = torch.tensor([0, 4, 1, 0, 0, 0, 6, 2, 3, 0])
    users = HistoryUsers(len(lengths), 12, 3, windows, 1.0).requires_grad_(False)
    users.mix.normal_()
    users.weight.fill_(7.0)
    items = torch.randint(12, (int(lengths.sum()),))
    users.remember(items, lengths)
    for user, own in enumerate(torch.split(items, lengths.tolist())):
        alone = users.of(own, torch.tensor([len(own)]))[0]
        torch.testing.assert_close(users.weight[user], alone)
        assert bool(alone.eq(0).all()) == (len(own) == 0)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_weights_count_within_a_window(windows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    users = HistoryUsers(3, 12, 3, windows, 1.0).double().requires_grad_(False)
    users.mix.normal_()
    lengths = torch.tensor([4, 0, 6])
    items, weights = torch.randint(12, (10,)), torch.rand(10, dtype=torch.float64) + 0.1
    weighted = users.of(items, lengths, weights)
    for row, part in ((0, slice(0, 4)), (2, slice(4, 10))):
        expected = torch.zeros(3, dtype=torch.float64)
        for window, matrix in zip(windows, users.mix, strict=True):
            own, w = items[part][-window:], weights[part][-window:]
            mean = (users.items.weight[own] * w.unsqueeze(1)).sum(0) / w.sum()
            expected += mean * len(own) ** 0.5 @ matrix
        torch.testing.assert_close(weighted[row], expected)
        torch.testing.assert_close(users.one(items[part], weights[part]), expected)
        torch.testing.assert_close(
            users.one(items[part], torch.full((len(items[part]),), 3.0)),
            users.of(items[part], torch.tensor([len(items[part])]))[0],
        )
    assert weighted[1].eq(0).all()
    users.remember(items, lengths, weights)
    torch.testing.assert_close(users.weight, weighted)


def test_remembering_leaves_free_embeddings_alone() -> None:
    model = wild_model(ModelConfig(kind="nbpr", factors=2), 2, 3)
    before = model.user_vectors(torch.arange(2)).clone()
    model.remember(torch.tensor([0, 1]), torch.tensor([1, 1]))
    assert model.user_vectors(torch.arange(2)).equal(before)


MODELS = [
    ModelConfig(kind="nbpr", factors=4, users="history", windows=(1, 3, 0), item_bias=True),
    ModelConfig(kind="dncr", factors=2, layers=3, users="history"),
    ModelConfig(kind="neupr", factors=3, layers=3, users="history", windows=(2, 0)),
]
each_model = pytest.mark.parametrize("model_config", MODELS, ids=lambda config: config.kind)


def vectors_of_all(model: PairwiseRanker, interactions: Interactions) -> Tensor:
    every = range(interactions.n_users)
    return model.vectors_of([torch.from_numpy(interactions.items_of(u)) for u in every])


@each_model
def test_a_trained_model_knows_its_users_by_their_items(
    model_config: ModelConfig, split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "HELD_OUT_STEPS", 4)
    config = TrainConfig(
        epochs=2, negatives=2, pretrain=False, batch_size=1024, learning_rate=0.05, device="cpu"
    )
    model = train_model(model_config, config, split).model
    users = torch.arange(split.train.n_users)
    vectors = model.user_vectors(users)
    torch.testing.assert_close(vectors, vectors_of_all(model, split.train))

    every = split.all_seen
    loop_module.learn_held_out(model, every, config)
    later = model.user_vectors(users)
    torch.testing.assert_close(later, vectors_of_all(model, every))
    assert (later - vectors).abs().amax(dim=1).min() > 1e-5

    save_checkpoint(
        tmp_path / "model",
        model,
        user_ids=every.user_ids,
        item_ids=every.item_ids,
        item_counts=every.item_counts(),
    )
    loaded = load_checkpoint(tmp_path / "model").model
    assert loaded.user_vectors(users).equal(later)
    items = [torch.tensor([3, 1, 8]), torch.tensor([2])]
    assert loaded.vectors_of(items).equal(model.vectors_of(items))


def test_it_stays_at_the_vectors_of_its_best_epoch(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.1, 0.3, 0.2])
    monkeypatch.setattr(
        loop_module, "validate", lambda *_: loop_module.Metrics(0.0, next(scores), 1, 1)
    )
    config = TrainConfig(epochs=3, batch_size=1024, learning_rate=0.05, device="cpu")
    trained = train_model(MODELS[0], config, split)
    assert trained.history[0].best_epoch == 2
    vectors = trained.model.user_vectors(torch.arange(split.train.n_users))
    torch.testing.assert_close(vectors, vectors_of_all(trained.model, split.train))


@pytest.mark.parametrize("kind", ["nbpr", "neupr"])
@pytest.mark.parametrize("loss", ["bce", "listwise"])
def test_it_learns_more_than_popularity(kind: str, loss: str, split: Split) -> None:
    config = TrainConfig(
        epochs=5,
        fine_tune_epochs=1,
        batch_size=256,
        patience=5,
        loss=loss,  # type: ignore[arg-type]
        device="cpu",
    )
    shape = ModelConfig(kind="nbpr", factors=8, layers=3, users="history", windows=(0,))
    model = train_model(replace(shape, kind=kind), config, split).model  # type: ignore[arg-type]
    test = sampled_candidates(split, split.test, seed=1, negatives=50)
    popular = evaluate_sampled(Popularity(split.train), test)
    learned = evaluate_sampled(ModelRanks(model), test)
    assert learned.ndcg > 1.5 * popular.ndcg
