"""Losses and their gradients by hand; BPR-MF as a configuration of NBPR."""

from __future__ import annotations

import math

import pytest
import torch

from ncr_core.data import Split
from ncr_core.models import ModelConfig, build_model
from ncr_core.training import TrainConfig
from ncr_core.training.loop import Schedule, _batch_l2, train_loop
from ncr_core.training.losses import bce_loss, bpr_loss


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_bce_by_hand() -> None:
    z_uij, z_uji = torch.tensor([[2.0, 0.0]]), torch.tensor([[-1.0, 0.5]])
    expected = (
        -math.log(sigmoid(2)) - math.log(1 - sigmoid(-1)) - math.log(0.5) - math.log(sigmoid(-0.5))
    ) / 2
    assert bce_loss(z_uij, z_uji).item() == pytest.approx(expected, rel=1e-6)


def test_bce_gradient_by_hand() -> None:
    z_uij = torch.tensor([0.7], requires_grad=True)
    z_uji = torch.tensor([0.3], requires_grad=True)
    bce_loss(z_uij, z_uji).backward()  # type: ignore[no-untyped-call]
    assert z_uij.grad is not None
    assert z_uji.grad is not None
    assert z_uij.grad.item() == pytest.approx(sigmoid(0.7) - 1)
    assert z_uji.grad.item() == pytest.approx(sigmoid(0.3))


def test_bpr_by_hand_and_stable_far_out() -> None:
    assert bpr_loss(torch.tensor([1.5]), torch.tensor([9.0])).item() == pytest.approx(
        -math.log(sigmoid(1.5)), rel=1e-6
    )
    far = torch.tensor([-1e4, 1e4])
    assert bce_loss(far, -far).item() == pytest.approx(1e4)


def bpr_mf_step(
    u: torch.Tensor, v: torch.Tensor, users: list[int], i: list[int], j: list[int], l2: float
) -> float:
    """−ln σ(U_u·V_i − U_u·V_j) + λ‖Θ‖² (eq. 3, 4), the mean over the pairs, in plain loops."""
    total = 0.0
    for a, b, c in zip(users, i, j, strict=True):
        x = float(u[a] @ v[b] - u[a] @ v[c])
        norm = float(u[a] @ u[a] + v[b] @ v[b] + v[c] @ v[c])
        total += -math.log(sigmoid(x)) + l2 * norm
    return total / len(users)


def test_bpr_mf_is_a_configuration_of_nbpr() -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="nbpr", factors=5, learn_weights=False), 4, 6)
    with torch.no_grad():
        for table in (model.get_parameter("users.weight"), model.get_parameter("items.weight")):
            table.normal_()
    users, i, j = [0, 1, 2, 3], [0, 2, 4, 5], [1, 1, 3, 0]
    vectors = model.user_vectors(torch.tensor(users))
    of_i, of_j = torch.tensor(i), torch.tensor(j).unsqueeze(1)
    loss = bpr_loss(*model.pair_logits(vectors, of_i, of_j))
    loss = loss + 0.01 * _batch_l2(model, vectors, of_i, of_j)
    expected = bpr_mf_step(
        model.get_parameter("users.weight").detach(),
        model.get_parameter("items.weight").detach(),
        users,
        i,
        j,
        0.01,
    )
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_bpr_mf_trains_with_its_weights_fixed(split: Split) -> None:
    config = ModelConfig(kind="nbpr", factors=4, learn_weights=False)
    model = build_model(config, split.train.n_users, split.train.n_items)
    training = TrainConfig(loss="bpr", l2=1e-3, epochs=4, batch_size=256, device="cpu")
    history = train_loop(model, split, training, Schedule("bpr-mf", 4, 1e-2))
    assert history.loss[-1] < history.loss[0]
    assert model.get_parameter("weight").eq(1).all()
