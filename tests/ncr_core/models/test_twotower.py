"""Two towers (eq. 7–9) and NeuPR with shared embeddings (eq. 24) by hand-computed numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ncr_core.errors import ConfigError
from ncr_core.models import ModelConfig, PairwiseRanker, SharedNeuPR, TwoTower, build_model
from ncr_core.ranking import PAD, ExactRanker
from tests.ncr_core.conftest import fill, wild_model


def fill_layers(layers: nn.ModuleList, *values: tuple[list[list[float]], list[float]]) -> None:
    for layer, (weight, bias) in zip(layers, values, strict=True):
        assert isinstance(layer, nn.Linear)
        fill(layer.weight, weight)
        fill(layer.bias, bias)


def both_logits(model: PairwiseRanker, user: int, i: int, j: int) -> tuple[float, float]:
    """z_uij and z_uji, as written."""
    vector = model.user_vectors(torch.tensor([user]))
    one, two = torch.tensor([i]), torch.tensor([j])
    return model.logits(vector, one, two).item(), model.logits(vector, two, one).item()


def test_two_separate_towers_by_hand() -> None:
    # d = 1, N = 3: e = 2, towers 4 → 2 → 1.
    model = TwoTower(ModelConfig(kind="twotower", factors=1, layers=3), n_users=1, n_items=2)
    fill(model.users.weight, [[0.1, 0.2]])
    fill(model.items.weight, [[0.3, -0.4], [0.5, 0.6]])
    assert model.other is not None
    fill_layers(
        model.preferred.layers,
        ([[1.0, 0.0, 2.0, 0.0], [0.0, 1.0, 0.0, 1.0]], [0.05, -0.1]),
        ([[1.5, -2.0]], [0.25]),
    )
    fill(model.preferred.weight, [4.0])
    fill_layers(
        model.other.layers,
        ([[0.0, 1.0, -1.0, 0.0], [1.0, 1.0, 0.0, 3.0]], [0.2, 0.0]),
        ([[1.0, 0.5]], [-0.1]),
    )
    fill(model.other.weight, [-3.0])

    def preferred(a: float, b: float) -> float:
        first, second = math.tanh(0.1 + 2 * a + 0.05), math.tanh(0.2 + b - 0.1)
        return 4.0 * math.tanh(1.5 * first - 2.0 * second + 0.25)

    def other(a: float, b: float) -> float:
        first, second = math.tanh(0.2 - a + 0.2), math.tanh(0.1 + 0.2 + 3 * b)
        return -3.0 * math.tanh(first + 0.5 * second - 0.1)

    z_uij, z_uji = both_logits(model, 0, 0, 1)
    assert z_uij == pytest.approx(preferred(0.3, -0.4) - other(0.5, 0.6), abs=1e-6)
    assert z_uji == pytest.approx(preferred(0.5, 0.6) - other(0.3, -0.4), abs=1e-6)


def test_one_shared_tower_by_hand() -> None:
    # d = 1, N = 2: e = 1, tower 2 → 1.
    shape = ModelConfig(kind="twotower", factors=1, layers=2, shared_towers=True)
    model = TwoTower(shape, n_users=1, n_items=2)
    fill(model.users.weight, [[0.5]])
    fill(model.items.weight, [[0.2], [0.7]])
    fill_layers(model.preferred.layers, ([[1.0, 2.0]], [0.1]))
    fill(model.preferred.weight, [3.0])
    assert model.other is None
    expected = 3.0 * math.tanh(0.5 + 0.4 + 0.1) - 3.0 * math.tanh(0.5 + 1.4 + 0.1)
    z_uij, z_uji = both_logits(model, 0, 0, 1)
    assert z_uij == pytest.approx(expected, abs=1e-6)
    assert z_uji == pytest.approx(-expected, abs=1e-6)


def test_neupr_with_shared_embeddings_by_hand() -> None:
    # d = 1, N = 2: e = 1, and the last layer, here the first as well, is 3 → 2e.
    shape = ModelConfig(kind="neupr", factors=1, layers=2, shared_embeddings=True)
    model = build_model(shape, n_users=1, n_items=2)
    assert isinstance(model, SharedNeuPR)
    fill(model.users.weight, [[0.5]])
    fill(model.items.weight, [[0.2], [-0.7]])
    fill_layers(model.tower.layers, ([[1.0, 2.0, 3.0], [-1.0, 0.5, 1.0]], [0.1, -0.2]))
    fill(model.weight, [2.0, -1.5])

    def z(i: float, j: float) -> float:
        first = 0.5 * i + (0.5 + 2 * i - 3 * j + 0.1)
        second = -0.5 * j + (-0.5 + 0.5 * i - j - 0.2)
        return 2.0 * math.tanh(first) - 1.5 * math.tanh(second)

    z_uij, z_uji = both_logits(model, 0, 0, 1)
    assert z_uij == pytest.approx(z(0.2, -0.7), abs=1e-6)
    assert z_uji == pytest.approx(z(-0.7, 0.2), abs=1e-6)


@pytest.mark.parametrize(("d", "layers", "widths"), [(8, 4, [96, 32, 16, 64]), (3, 2, [9, 6])])
def test_with_shared_embeddings_the_last_layer_is_as_wide_as_the_element_wise_part(
    d: int, layers: int, widths: list[int]
) -> None:
    shape = ModelConfig(kind="neupr", factors=d, layers=layers, shared_embeddings=True)
    model = build_model(shape, 2, 2)
    assert isinstance(model, SharedNeuPR)
    linear = [m for m in model.tower.layers if isinstance(m, nn.Linear)]
    assert [linear[0].in_features, *(m.out_features for m in linear)] == widths
    assert model.weight.shape == (2 * shape.tower_embedding,)


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_top_k_are_those_of_the_sum_of_both_scores(
    shared: bool, layers: int, activation: str
) -> None:
    shape = ModelConfig.from_dict(
        {
            "kind": "twotower",
            "factors": 4,
            "layers": layers,
            "shared_towers": shared,
            "activation": activation,
        }
    )
    model = wild_model(shape, 6, 40).double()
    assert isinstance(model, TwoTower)
    users, candidates = model.user_vectors(torch.arange(6)), torch.randperm(40)[:30]
    ranked = ExactRanker(model).rank(users, candidates.expand(6, -1), 10)
    of_items = model.item_vectors(candidates)
    for user, top in zip(users, ranked, strict=True):
        score = model.preferred(user, of_items) + (model.other or model.preferred)(user, of_items)
        expected = candidates[score.argsort(descending=True, stable=True)][:10]
        assert top.tolist() == expected.tolist()
    assert PAD not in ranked


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "mlp"}, "kind must be one of"),
        ({"factors": 0}, "factors must be 1 to 1,024, not 0"),
        ({"factors": 10_000}, "factors must be 1 to 1,024, not 10000"),
        ({"layers": 7}, "layers must be 1 to 6, not 7"),
        ({"activation": "gelu"}, "activation must be one of"),
        ({"kind": "dncr", "learn_weights": False}, "for nbpr"),
        ({"kind": "nbpr", "shared_embeddings": True}, "for neupr only"),
        ({"kind": "dncr", "shared_embeddings": True}, "for neupr only"),
        ({"kind": "neupr", "layers": 1, "shared_embeddings": True}, "at least 2 layers"),
        ({"kind": "neupr", "shared_towers": True}, "for twotower only"),
        ({"kind": "dncr", "item_bias": True}, "item biases are for nbpr"),
        ({"kind": "twotower", "item_bias": True}, "item biases are for nbpr"),
        ({"kind": "neupr", "shared_embeddings": True, "item_bias": True}, "separate embeddings"),
        ({"users": "history", "windows": ()}, "1 to 16 different numbers"),
        ({"users": "history", "windows": [3, 0, 3]}, "1 to 16 different numbers"),
        ({"users": "history", "windows": list(range(17))}, "1 to 16 different numbers"),
        ({"users": "history", "windows": (2, -1)}, "a number of items"),
        ({"users": "history", "windows": (1.5,)}, "a number of items"),
        ({"windows": (3,)}, "for users=.history. only"),
        ({"users": "nobody"}, "users must be one of free, history"),
        ({"depth": 4}, "unknown model settings: depth"),
    ],
)
def test_a_configuration_that_does_not_fit(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(wrong)


@pytest.mark.parametrize("kind", ["dncr", "neupr", "twotower"])
def test_embeddings_have_a_largest_size(kind: str) -> None:
    assert (
        ModelConfig.from_dict({"kind": kind, "factors": 512, "layers": 5}).tower_embedding == 4096
    )
    with pytest.raises(ConfigError, match=r"512 factors with 6 layers need .* 8,192; at most"):
        ModelConfig.from_dict({"kind": kind, "factors": 512, "layers": 6})
    assert ModelConfig.from_dict({"kind": "nbpr", "factors": 512, "layers": 6}).factors == 512
