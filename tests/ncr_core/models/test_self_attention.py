"""The causal encoder equals its formula written out item by item, and knows no later item."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from ncr_core.errors import ConfigError
from ncr_core.model_config import HEADS, ModelConfig
from ncr_core.models import self_attention
from ncr_core.models.self_attention import CausalEncoder
from ncr_core.models.user_embeddings import PooledUsers
from tests.ncr_core.models.test_models import histories_of

SIZE = 6


def encoder_of(layers: int, seed: int = 0) -> CausalEncoder:
    """Everything in it random, in double precision."""
    torch.manual_seed(seed)
    encoder = CausalEncoder(SIZE, layers).double().eval().requires_grad_(False)
    for parameter in encoder.parameters():
        parameter.normal_()
    return encoder


def as_written(encoder: CausalEncoder, items: Tensor, weights: Tensor | None = None) -> Tensor:
    """One user's items (k, size) → (k, size), item by item and head by head."""
    x = [encoder.norm(item) for item in items]
    for layer in encoder.layers:
        parts = [layer.projections(layer.attention_norm(v)).view(3, HEADS, -1) for v in x]
        changed = []
        for t in range(len(x)):
            first = max(0, t - self_attention.WINDOW + 1)
            heads = []
            for head in range(HEADS):
                scores = torch.stack(
                    [
                        parts[t][0, head] @ parts[n][1, head] / math.sqrt(SIZE / HEADS)
                        + layer.lag_bias[head, t - n]
                        + (0.0 if weights is None else weights[n].log())
                        for n in range(first, t + 1)
                    ]
                )
                values = torch.stack([parts[n][2, head] for n in range(first, t + 1)])
                heads.append(scores.softmax(0) @ values)
            v = x[t] + layer.heads(torch.cat(heads))
            changed.append(v + layer.down(gelu(layer.up(layer.dense_norm(v)))))
        x = changed
    return torch.stack([encoder.output(encoder.last_norm(v)) for v in x])


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_its_formula_for_histories_of_any_length(
    layers: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_attention, "WINDOW", 4)
    encoder = encoder_of(layers)
    lengths = [1, 3, 4, 9, 2, 13]
    users = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    items = torch.randn(sum(lengths), SIZE, dtype=torch.float64)
    weights = torch.rand(sum(lengths), dtype=torch.float64) + 0.1 if weighted else None
    encoded = encoder(items, users, weights)
    for user in range(len(lengths)):
        own = users == user
        alone = as_written(encoder, items[own], None if weights is None else weights[own])
        torch.testing.assert_close(encoded[own], alone)
    assert len(encoder(items[:0], users[:0])) == 0


@pytest.mark.parametrize("layers", [1, 2])
def test_items_beyond_its_reach_change_nothing(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_attention, "WINDOW", 4)
    encoder = encoder_of(layers)
    items = torch.randn(30, SIZE, dtype=torch.float64)
    one = torch.zeros(30, dtype=torch.long)
    last = encoder(items, one)[-1]
    reach = encoder.reach
    torch.testing.assert_close(encoder(items[-reach:], one[-reach:])[-1], last)
    shorter = encoder(items[-reach + 1 :], one[-reach + 1 :])[-1]
    assert (shorter - last).abs().max() > 1e-9


@pytest.mark.parametrize("fast", [False, True])
def test_gradients_come_from_the_own_earlier_items_within_reach_alone(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the real window, over borders of blocks and users, in training and single precision."""
    monkeypatch.setattr(self_attention, "may_use_bfloat16", lambda x: fast)
    monkeypatch.setattr(self_attention, "DROPOUT", 0.0)
    encoder = encoder_of(1).float().train()
    lengths = [30, 150, 1, 90]
    users = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    items = torch.randn(sum(lengths), SIZE, requires_grad=True)
    encoded = encoder(items, users)
    assert encoded.dtype == torch.float32
    for row in (0, 29, 30, 63, 64, 93, 94, 128, 179, 180, 181, 270):
        (gradient,) = torch.autograd.grad(encoded[row].square().sum(), items, retain_graph=True)
        touched = gradient.abs().amax(dim=1) > 0
        place = torch.arange(len(items))
        visible = (users == users[row]) & (place <= row) & (place > row - encoder.reach)
        assert torch.isfinite(gradient).all()
        assert not (touched & ~visible).any()
        if not fast:  # of three digits the smallest shares may be zero
            assert (touched == visible).all()


def pooled_users(windows: tuple[int, ...] = (2, 0)) -> PooledUsers:
    torch.manual_seed(1)
    users = PooledUsers(4, 12, SIZE, windows, 1.0, by_length=True, attention_layers=2).double()
    for parameter in users.parameters():
        parameter.data.normal_()
    return users.eval().requires_grad_(False)


def test_a_vector_is_what_training_saw_after_the_same_items() -> None:
    users = pooled_users()
    sequences = [[4, 0, 7, 2, 9], [7], [1, 4, 11, 5]]
    before = users.without_positives(histories_of(*sequences))
    prefixes = [own[:n] for own in sequences for n in range(len(own))]
    lengths = torch.tensor([len(prefix) for prefix in prefixes])
    items = torch.tensor([item for prefix in prefixes for item in prefix])
    torch.testing.assert_close(users.pool(items, lengths), before)
    for prefix, vector in zip(prefixes, before, strict=True):
        if prefix:
            torch.testing.assert_close(users.pool_one(torch.tensor(prefix)), vector)


def test_no_vector_knows_a_later_item() -> None:
    users = pooled_users()
    rows = histories_of([4, 0, 7, 2, 9], [3, 1, 6])
    before = users.without_positives(rows)
    for r in range(len(rows.items)):
        kept = users.items.weight.clone()
        later = rows.items[int(rows.position[r]) : int(rows.end[r])]
        users.items.weight[later] += torch.randn(len(later), SIZE, dtype=torch.float64)
        torch.testing.assert_close(users.without_positives(rows)[r], before[r])
        users.items.weight.copy_(kept)


def test_weights_count_beside_each_other() -> None:
    users = pooled_users()
    items, lengths = torch.tensor([3, 1, 5, 0, 2]), torch.tensor([3, 2])
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0, 4.0], dtype=torch.float64)
    weighted = users.pool(items, lengths, weights)
    torch.testing.assert_close(users.pool(items, lengths, 7 * weights), weighted)
    torch.testing.assert_close(users.pool_one(items[:3], weights[:3]), weighted[0])
    assert users.encoder is not None
    embedded, one = users.items.weight[items[:3]], torch.zeros(3, dtype=torch.long)
    hardly = torch.tensor([1e-30, 1e-30, 1.0], dtype=torch.float64)
    alone = users.encoder(embedded[2:], one[2:])[0]
    torch.testing.assert_close(users.encoder(embedded, one, hardly)[2], alone, atol=1e-6, rtol=0)


def test_at_the_start_it_adds_nothing() -> None:
    torch.manual_seed(0)
    plain = PooledUsers(2, 12, SIZE, (2, 0), 1.0)
    with_attention = PooledUsers(2, 12, SIZE, (2, 0), 1.0, attention_layers=2).eval()
    with_attention.load_state_dict(plain.state_dict(), strict=False)
    items, lengths = torch.tensor([3, 1, 5, 0, 2]), torch.tensor([3, 2])
    assert torch.equal(with_attention.pool(items, lengths), plain.pool(items, lengths))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"users": "free"}, "attention_layers are for windows"),
        ({"users": "history"}, "attention_layers are for windows"),
        ({"users": "history", "windows": (1, 0), "factors": 7}, "divisible by 2"),
        ({"users": "history", "windows": (1, 0), "attention_layers": 5}, "attention_layers"),
    ],
)
def test_a_configuration_that_does_not_fit(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{"kind": "nbpr", "factors": 6, "attention_layers": 2, **wrong})  # type: ignore[arg-type]
