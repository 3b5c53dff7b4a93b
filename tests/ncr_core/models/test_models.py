"""Each model's logit by hand-computed numbers, and the contract that every model keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ncr_core.checkpoint import load_checkpoint, save_checkpoint
from ncr_core.data import Interactions, Split
from ncr_core.errors import ConfigError
from ncr_core.evaluation.protocols import ModelRanks, evaluate_sampled, sampled_candidates
from ncr_core.models import DNCR, NBPR, ModelConfig, NeuPR, PairwiseRanker, build_model
from ncr_core.models import user_embeddings as users_module
from ncr_core.models.user_embeddings import PooledUsers, UserHistories, gap_class
from ncr_core.ranking import ExactRanker
from ncr_core.reproduction.baselines.scoring import Popularity
from ncr_core.training import TrainConfig, train_model
from ncr_core.training import trainer as loop_module
from tests.ncr_core.conftest import fill, wild_model


def logit(model: NBPR | DNCR | NeuPR, user: int, i: int, j: int) -> float:
    vector = model.user_vectors(torch.tensor([user]))
    return model.logits(vector, torch.tensor([i]), torch.tensor([j])).item()


def test_nbpr_by_hand() -> None:
    model = NBPR(ModelConfig(kind="nbpr", factors=2), n_users=1, n_items=2)
    fill(model.users.weight, [[1.0, 2.0]])
    fill(model.items.weight, [[3.0, 4.0], [5.0, -6.0]])
    fill(model.weight, [0.5, 1.0, 2.0, -1.0])
    # U⊙V_0 = (3, 8), U⊙V_1 = (5, −12): w₁·(3, 8) − w₂·(5, −12) = 9.5 − 22
    assert logit(model, 0, 0, 1) == pytest.approx(9.5 - 22.0)
    # w₁·(5, −12) − w₂·(3, 8) = −9.5 − (−2)
    assert logit(model, 0, 1, 0) == pytest.approx(-9.5 + 2.0)


def test_dncr_by_hand() -> None:
    # d = 1, N = 3: e = 2, tower 6 → 2 → 1.
    model = DNCR(ModelConfig(kind="dncr", factors=1, layers=3), n_users=1, n_items=2)
    fill(model.users.weight, [[0.1, 0.2]])
    fill(model.items.weight, [[0.3, -0.4], [0.5, 0.6]])
    first, second = model.tower.layers
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    fill(first.weight, [[1.0, 0.0, 2.0, 0.0, 3.0, 0.0], [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]])
    fill(first.bias, [0.05, -0.1])
    fill(second.weight, [[1.5, -2.0]])
    fill(second.bias, [0.25])
    fill(model.weight, [4.0])
    # x₁ = (.1, .2, .3, −.4, −.5, −.6)
    x2 = (math.tanh(0.1 + 0.6 - 1.5 + 0.05), math.tanh(0.2 - 0.4 - 0.6 - 0.1))
    x3 = math.tanh(1.5 * x2[0] - 2.0 * x2[1] + 0.25)
    assert logit(model, 0, 0, 1) == pytest.approx(4.0 * x3, abs=1e-6)


def test_neupr_by_hand() -> None:
    # d = 1, N = 2: e = 1, tower 3 → 1; w = [w₁, w₂, w_D].
    model = NeuPR(ModelConfig(kind="neupr", factors=1, layers=2), n_users=1, n_items=2)
    fill(model.users_n.weight, [[2.0]])
    fill(model.items_n.weight, [[3.0], [-1.0]])
    fill(model.users_d.weight, [[0.5]])
    fill(model.items_d.weight, [[0.2], [0.7]])
    layer = model.tower.layers[0]
    assert isinstance(layer, nn.Linear)
    fill(layer.weight, [[1.0, 2.0, 3.0]])
    fill(layer.bias, [0.1])
    fill(model.weight, [0.5, 0.25, -2.0])
    deep = math.tanh(0.5 + 0.4 - 2.1 + 0.1)
    assert logit(model, 0, 0, 1) == pytest.approx(0.5 * 6.0 + 0.25 * 2.0 - 2.0 * deep, abs=1e-6)


def test_neupr_starts_from_its_parts() -> None:
    nbpr = wild_model(ModelConfig(kind="nbpr", factors=2), 3, 4, seed=1)
    dncr = wild_model(ModelConfig(kind="dncr", factors=2), 3, 4, seed=2)
    model = NeuPR(ModelConfig(kind="neupr", factors=2), 3, 4)
    assert isinstance(nbpr, NBPR)
    assert isinstance(dncr, DNCR)
    model.start_from(nbpr, dncr, alpha=0.3)
    for u, i, j in [(0, 1, 2), (2, 3, 0)]:
        expected = 0.3 * logit(nbpr, u, i, j) + 0.7 * logit(dncr, u, i, j)
        assert logit(model, u, i, j) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ConfigError, match="alpha"):
        model.start_from(nbpr, dncr, alpha=1.5)


class TestContract:
    """What every PairwiseRanker keeps."""

    def test_both_orders_are_the_logits_as_written(self, config: ModelConfig) -> None:
        model = wild_model(config, 7, 11)
        for n_pairs in (1, 9):  # fewer and more items in the batch than in the catalogue
            users = model.user_vectors(torch.arange(5))
            i = torch.randint(11, (5,))
            j = torch.randint(11, (5, n_pairs))
            z_uij, z_uji = model.pair_logits(users, i, j)
            assert z_uij.shape == z_uji.shape == (5, n_pairs)
            for column in range(n_pairs):
                ij = model.logits(users, i, j[:, column])
                ji = model.logits(users, j[:, column], i)
                torch.testing.assert_close(z_uij[:, column], ij, atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(z_uji[:, column], ji, atol=1e-5, rtol=1e-4)

    def test_margins_are_the_difference_of_the_logits(self, config: ModelConfig) -> None:
        model = wild_model(config, 5, 8)
        users = model.user_vectors(torch.arange(5))
        i, j = torch.randint(8, (5, 6)), torch.randint(8, (5, 6))
        margins = ExactRanker(model).compare(users, i, j)
        for column in range(6):
            a, b = i[:, column], j[:, column]
            expected = model.logits(users, a, b) - model.logits(users, b, a)
            torch.testing.assert_close(margins[:, column].float(), expected, atol=1e-4, rtol=1e-4)

    def test_margins_are_antisymmetric_and_an_item_ties_with_its_twin(
        self, config: ModelConfig
    ) -> None:
        model = wild_model(config, 4, 6)
        with torch.no_grad():
            for name, table in model.named_parameters():
                if name.startswith(("items", "bias")):
                    table[5] = table[2]
        ranker = ExactRanker(model)
        users = model.user_vectors(torch.arange(4))
        two, five = torch.full((4, 1), 2), torch.full((4, 1), 5)
        assert ranker.compare(users, two, five).eq(0).all()
        assert ranker.compare(users, two, two).eq(0).all()
        i, j = torch.randint(6, (4, 9)), torch.randint(6, (4, 9))
        torch.testing.assert_close(
            ranker.compare(users, i, j), -ranker.compare(users, j, i), atol=1e-5, rtol=0
        )

    def test_every_parameter_learns(self, config: ModelConfig) -> None:
        model = wild_model(config, 5, 6).requires_grad_(True)
        if not config.learn_weights:
            model.get_parameter("weight").requires_grad_(False)
        users, i, j = torch.arange(5), torch.arange(5), torch.randint(6, (5, 4))
        histories = None
        if config.users == "history":  # one user's five items, a row each
            histories = UserHistories(i, torch.zeros_like(i), i, torch.full((5,), 5))
        z_uij, z_uji = model.pair_logits(model.training_vectors(users, histories), i, j)
        (z_uij.sigmoid().sum() - z_uji.sigmoid().square().sum()).backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                assert parameter.grad.abs().sum() > 0, name

    def test_shared_negatives_give_half_the_margin(self, config: ModelConfig) -> None:
        model = wild_model(config, 5, 7)
        users, i, shared = torch.randn(5, vector_size(model)), torch.arange(5), torch.arange(7)
        if not model.shares_negatives:
            pytest.skip("its logits are not bilinear")
        z_uij, z_uji = model.pair_logits(users, i, shared.expand(5, -1))
        row = torch.tensor([0, 1, 2, 3, 4])
        s_i, s_j = model.shared_scores(users, row, i, shared)
        half = s_i.unsqueeze(1) - s_j.matrix()
        torch.testing.assert_close(half, (z_uij - z_uji) / 2, atol=1e-5, rtol=1e-4)


def vector_size(model: PairwiseRanker) -> int:
    return model.user_vectors(torch.tensor([0])).shape[1]


@pytest.mark.parametrize(
    ("d", "embedding", "widths"),
    [
        (8, 32, [96, 32, 16, 8]),
        (16, 64, [192, 64, 32, 16]),
        (24, 96, [288, 96, 48, 24]),
        (32, 128, [384, 128, 64, 32]),
        (64, 256, [768, 256, 128, 64]),
    ],
)
def test_sizes_follow_the_predictive_factors(d: int, embedding: int, widths: list[int]) -> None:
    model = DNCR(ModelConfig(kind="dncr", factors=d), 2, 2)
    linear = [m for m in model.tower.layers if isinstance(m, nn.Linear)]
    assert model.users.embedding_dim == embedding
    assert [linear[0].in_features, *(m.out_features for m in linear)] == widths
    assert NBPR(ModelConfig(kind="nbpr", factors=d), 2, 2).users.embedding_dim == d


def test_the_papers_initialisation() -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="neupr", factors=32, init="paper"), 200, 200)
    for name, parameter in model.named_parameters():
        if parameter.numel() > 500:
            assert parameter.std().item() == pytest.approx(0.01, rel=0.2), name


P = [[1.0, 2.0], [3.0, -1.0], [0.0, 4.0], [-2.0, 1.0]]
MIX = [[[1.0, 2.0], [0.5, -1.0]], [[0.0, 1.0], [-1.0, 3.0]]]
P0, P1, P2, P3 = torch.tensor(P, dtype=torch.float64)
M0, M1 = torch.tensor(MIX, dtype=torch.float64)
ZERO = torch.zeros(2, dtype=torch.float64)
WINDOWS = [(0,), (1,), (2, 0), (0, 3, 1)]


def pooling(windows: tuple[int, ...]) -> PooledUsers:
    """Of items and matrices as above."""
    users = PooledUsers(2, 4, 2, windows, 0.05).double()
    with torch.no_grad():
        users.items.weight.copy_(torch.tensor(P))
        users.mix.copy_(torch.tensor(MIX[: len(windows)]))
    return users.requires_grad_(False)


def histories_of(*sequences: list[int]) -> UserHistories:
    """A row for each item of each user."""
    lengths = torch.tensor([len(own) for own in sequences])
    end = lengths.cumsum(0).repeat_interleave(lengths)
    items = torch.tensor([item for own in sequences for item in own])
    start = end - lengths.repeat_interleave(lengths)
    return UserHistories(items, start, torch.arange(len(items)), end)


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
    torch.testing.assert_close(users.pool(items, torch.tensor([2, 3])), torch.stack(of))
    torch.testing.assert_close(
        users.without_positives(histories_of([3, 1], [0, 2, 1])), torch.stack(at)
    )


def test_a_gap_scales_and_moves_vectors_of_its_class_alone() -> None:
    config = ModelConfig(kind="nbpr", factors=2, users="history", windows=(2, 0), by_gap=True)
    model = build_model(config, 3, 4)
    vectors, classes = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([0, 1, 2])
    assert model.fitted_gaps == frozenset()
    assert torch.equal(model.after_gap(vectors, classes), vectors)
    model.users.gap_scale[1:] = torch.tensor([0.5, 1.0])  # type: ignore[union-attr,index]
    model.users.gap_offset[2] = torch.tensor([1.0, -1.0])  # type: ignore[union-attr,index]
    moved = torch.tensor([[1.0, 2.0], [1.5, 2.0], [6.0, 5.0]])
    assert torch.equal(model.after_gap(vectors, classes), moved)
    assert model.fitted_gaps == {1, 2}
    assert [gap_class(s) for s in (-1, 3_600, 3_600.5, 86_400, 86_401)] == [0, 0, 1, 1, 2]

    before = build_model(replace(config, by_gap=False), 3, 4)
    assert not [name for name in before.state_dict() if "gap" in name]  # as stored until now
    assert torch.equal(before.after_gap(vectors, classes), vectors)
    with pytest.raises(ConfigError, match="by_gap is for nbpr with windows"):
        ModelConfig(kind="neupr", users="history", windows=(2, 0), by_gap=True)


def test_vectors_by_length_by_hand() -> None:
    users = PooledUsers(2, 4, 2, (2, 0), 0.05, by_length=True).double().requires_grad_(False)
    users.items.weight.copy_(torch.tensor(P))
    users.mix.copy_(torch.tensor(MIX))
    of = [
        (P3 + P1) / 2**0.5 @ (M0 + M1),
        (P2 + P1) / 2**0.5 @ M0 + (P0 + P2 + P1) / 3**0.5 @ M1,
        P2 / 2**0.5 @ M0 + P2 @ M1,
        ZERO,
    ]
    items, lengths = torch.tensor([3, 1, 0, 2, 1, 2]), torch.tensor([2, 3, 1, 0])
    torch.testing.assert_close(users.pool(items, lengths), torch.stack(of))
    at = [ZERO, P3 / 2**0.5 @ M0 + P3 @ M1]
    torch.testing.assert_close(users.without_positives(histories_of([3, 1])), torch.stack(at))
    weights = torch.tensor([2.0, 6.0], dtype=torch.float64)
    one = (P3 + 3 * P1) / 2 / 2**0.5 @ (M0 + M1)
    torch.testing.assert_close(users.pool_one(items[:2]), of[0])
    torch.testing.assert_close(users.pool_one(items[5:]), of[2])
    torch.testing.assert_close(users.pool_one(items[:2], weights), one)
    torch.testing.assert_close(users.pool(items[:2], lengths[:1], weights)[0], one)
    # Of 0, 1, 2 and 3 items; 5, 8, 12, 20, 40 and more are the other classes.
    users.gate[:4] = torch.tensor([5.0, 0.25, 0.5, 2.0])
    users.offset[0], users.offset[1] = P0, P1
    moved = torch.stack([0.5 * of[0], 2.0 * of[1], 0.25 * of[2] + P1, P0])
    torch.testing.assert_close(users.pool(items, lengths), moved)
    torch.testing.assert_close(users.pool_one(items[5:]), moved[2])
    torch.testing.assert_close(users.pool_one(items[:2], weights), 0.5 * one)
    torch.testing.assert_close(
        users.without_positives(histories_of([3, 1])), torch.stack([P0, 0.25 * at[1] + P1])
    )
    many, alone = torch.tensor([3, 1] * 21), torch.tensor([42])
    before = users.pool(many, alone)
    users.gate[9] = 3.0
    torch.testing.assert_close(users.pool(many, alone), 3.0 * before)


@pytest.mark.parametrize("windows", list(BY_HAND), ids=str)
def test_a_number_a_window_is_a_multiple_of_the_unit_matrix(windows: tuple[int, ...]) -> None:
    numbers = torch.tensor([2.0, -0.5], dtype=torch.float64)[: len(windows), None, None]
    matrices = pooling(windows)
    matrices.mix.copy_(numbers * torch.eye(2))
    users = PooledUsers(2, 4, 2, windows, 0.05, matrices=False).double().requires_grad_(False)
    users.items.weight.copy_(torch.tensor(P))
    users.mix.copy_(numbers)
    items, lengths = torch.tensor([3, 1, 0, 2, 1]), torch.tensor([2, 3])
    rows = histories_of([3, 1], [0, 2, 1])
    torch.testing.assert_close(users.pool(items, lengths), matrices.pool(items, lengths))
    torch.testing.assert_close(users.pool_one(items), matrices.pool_one(items))
    torch.testing.assert_close(users.without_positives(rows), matrices.without_positives(rows))


def test_before_training_a_vector_is_the_mean_over_the_windows() -> None:
    users = PooledUsers(2, 4, 2, (2, 0), 0.05)
    assert users.mix.eq(torch.eye(2) / 2).all()
    assert users.weight.eq(0).all()


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_training_vector_knows_neither_its_positive_nor_what_came_later(
    windows: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    users = PooledUsers(2, 12, 3, windows, 1.0).double().requires_grad_(False)
    users.mix.normal_()
    rows = histories_of([4, 0, 7, 2, 9], [7, 1, 4, 11])
    before = users.without_positives(rows)
    for r in range(len(rows.items)):
        at, end = int(rows.position[r]), int(rows.end[r])
        unknown = rows.items[at : at + 1 if windows == (0,) else end]
        kept = users.items.weight.clone()
        users.items.weight[unknown] += torch.randn(len(unknown), 3, dtype=torch.float64)
        torch.testing.assert_close(users.without_positives(rows)[r], before[r])
        known = int(rows.items[at - 1 if at > rows.start[r] else end - 1])
        users.items.weight[known] += 1.0
        moved = bool((users.without_positives(rows)[r] - before[r]).abs().max() > 1e-3)
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
    users = PooledUsers(len(lengths), 12, 3, windows, 1.0).requires_grad_(False)
    users.mix.normal_()
    users.weight.fill_(7.0)
    items = torch.randint(12, (int(lengths.sum()),))
    users.remember(items, lengths)
    for user, own in enumerate(torch.split(items, lengths.tolist())):
        alone = users.pool(own, torch.tensor([len(own)]))[0]
        torch.testing.assert_close(users.weight[user], alone)
        assert bool(alone.eq(0).all()) == (len(own) == 0)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_weights_count_within_a_window(windows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    users = PooledUsers(3, 12, 3, windows, 1.0).double().requires_grad_(False)
    users.mix.normal_()
    lengths = torch.tensor([4, 0, 6])
    items, weights = torch.randint(12, (10,)), torch.rand(10, dtype=torch.float64) + 0.1
    weighted = users.pool(items, lengths, weights)
    for row, part in ((0, slice(0, 4)), (2, slice(4, 10))):
        expected = torch.zeros(3, dtype=torch.float64)
        for window, matrix in zip(windows, users.mix, strict=True):
            own, w = items[part][-window:], weights[part][-window:]
            mean = (users.items.weight[own] * w.unsqueeze(1)).sum(0) / w.sum()
            expected += mean * len(own) ** 0.5 @ matrix
        torch.testing.assert_close(weighted[row], expected)
        torch.testing.assert_close(users.pool_one(items[part], weights[part]), expected)
        torch.testing.assert_close(
            users.pool_one(items[part], torch.full((len(items[part]),), 3.0)),
            users.pool(items[part], torch.tensor([len(items[part])]))[0],
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
    return model.pooled_vectors([torch.from_numpy(interactions.items_of(u)) for u in every])


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
    assert loaded.pooled_vectors(items).equal(model.pooled_vectors(items))


def test_it_stays_at_the_vectors_of_its_best_epoch(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.1, 0.3, 0.2])
    monkeypatch.setattr(loop_module, "figures_of", lambda positions: (next(scores), 0.0))
    config = TrainConfig(epochs=3, batch_size=1024, learning_rate=0.05, device="cpu")
    trained = train_model(MODELS[0], config, split)
    assert next(scores, None) is None  # each epoch had one of them
    assert trained.history[0].best_epoch == 2
    vectors = trained.model.user_vectors(torch.arange(split.train.n_users))
    torch.testing.assert_close(vectors, vectors_of_all(trained.model, split.train))


@pytest.mark.slow
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
