"""Each model's logit by hand-computed numbers, and the contract that every model keeps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ncr_core.errors import ConfigError
from ncr_core.models import DNCR, NBPR, ModelConfig, NeuPR, PairwiseRanker, build_model
from ncr_core.models.users import Histories
from ncr_core.ranking import ExactRanker
from tests.ncr_core.conftest import wild_model


def fill(parameter: Tensor, values: list[float] | list[list[float]]) -> None:
    with torch.no_grad():
        parameter.copy_(torch.tensor(values))


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
            histories = Histories(i, torch.zeros_like(i), i, torch.full((5,), 5))
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
        half = s_i.unsqueeze(1) - s_j
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "mlp"},
        {"factors": 0},
        {"factors": 10_000},
        {"layers": 7},
        {"activation": "gelu"},
        {"kind": "dncr", "learn_weights": False},
    ],
)
def test_a_configuration_that_does_not_fit(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ModelConfig.from_dict(wrong)
