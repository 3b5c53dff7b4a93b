"""Losses and their gradients by hand; BPR-MF as a configuration of NBPR."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ncr_core.data import Split
from ncr_core.models import ModelConfig, build_model
from ncr_core.models.base import FactoredScores
from ncr_core.training import TrainConfig, losses
from ncr_core.training.losses import (
    LOSSES,
    SHARED_LOSSES,
    bce_loss,
    bpr_loss,
    listwise_loss,
    shared_listwise_loss,
)
from ncr_core.training.ranks import Ranks
from ncr_core.training.trainer import TrainingPhase, _batch_l2, train_loop


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


def listwise_by_hand(z_uij: list[float], z_uji: list[float], weight: float) -> float:
    """log(1 + w Σ exp(−z_uij)) + log(1 + w Σ exp(z_uji)) of one positive."""
    return math.log(1 + weight * sum(math.exp(-z) for z in z_uij)) + math.log(
        1 + weight * sum(math.exp(z) for z in z_uji)
    )


@pytest.mark.parametrize(("catalogue", "weight"), [(0, 1.0), (2, 1.0), (10, 5.0)])
def test_listwise_by_hand(catalogue: int, weight: float) -> None:
    z_uij, z_uji = torch.tensor([[1.0, -0.5]]), torch.tensor([[0.3, 0.2]])
    expected = math.log(1 + weight * (math.exp(-1.0) + math.exp(0.5))) + math.log(
        1 + weight * (math.exp(0.3) + math.exp(0.2))
    )
    assert listwise_loss(z_uij, z_uji, catalogue).item() == pytest.approx(expected, rel=1e-6)


def test_listwise_is_the_mean_over_the_positives() -> None:
    z_uij, z_uji = [[1.0, -0.5], [0.2, 2.0]], [[0.3, 0.2], [-1.0, 0.4]]
    expected = sum(listwise_by_hand(*z, 3.5) for z in zip(z_uij, z_uji, strict=True)) / 2
    loss = listwise_loss(torch.tensor(z_uij), torch.tensor(z_uji), 7)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_listwise_with_one_negative_is_bce() -> None:
    z_uij, z_uji = torch.randn(6, 1), torch.randn(6, 1)
    torch.testing.assert_close(listwise_loss(z_uij, z_uji), bce_loss(z_uij, z_uji))


def test_listwise_gradient_by_hand() -> None:
    z_uij = torch.tensor([[1.0, -0.5]], requires_grad=True)
    z_uji = torch.tensor([[0.3, 0.2]], requires_grad=True)
    listwise_loss(z_uij, z_uji, 10).backward()  # type: ignore[no-untyped-call]
    assert z_uij.grad is not None
    assert z_uji.grad is not None
    down = 1 + 5 * (math.exp(-1.0) + math.exp(0.5))
    up = 1 + 5 * (math.exp(0.3) + math.exp(0.2))
    expected = [-5 * math.exp(-1.0) / down, -5 * math.exp(0.5) / down]
    assert z_uij.grad[0].tolist() == pytest.approx(expected, rel=1e-5)
    expected = [5 * math.exp(0.3) / up, 5 * math.exp(0.2) / up]
    assert z_uji.grad[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_listwise_is_stable_far_out() -> None:
    far = torch.tensor([[-1e4, 1e4]])
    assert listwise_loss(far, -far, 1_000).item() == pytest.approx(2e4, rel=1e-3)


# Two users, who have a row and two, and five shared items: one that neither may be compared with.
S_I = [0.4, -1.1, 0.9]
S_J = [[0.7, -0.2, 1.3, 0.1, 8.0], [-0.6, 2.0, 0.5, -1.5, 8.0]]
VALID = [[True, False, True, True, False], [False, True, True, False, False]]
ROW = [0, 1, 1]


def shared_example(
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, FactoredScores, Tensor, Tensor]:
    return torch.tensor(S_I, dtype=dtype), scores_of(torch.tensor(S_J, dtype=dtype)), *masks()


def scores_of(s_j: Tensor) -> FactoredScores:
    """These scores (Q, S), with a vector (0, …, 1, …, 0) for each user."""
    return FactoredScores(torch.eye(len(s_j), dtype=s_j.dtype), s_j.T)


def masks() -> tuple[Tensor, Tensor]:
    return torch.tensor(VALID), torch.tensor(ROW)


def differences() -> list[list[float]]:
    """z_uij = s_i − s_j of each row's pairs that count."""
    return [
        [s_i - s for s, counts in zip(S_J[user], VALID[user], strict=True) if counts]
        for s_i, user in zip(S_I, ROW, strict=True)
    ]


@pytest.mark.parametrize("name", ["bce", "bpr"])
def test_shared_negatives_give_the_pair_loss_of_the_pairs_that_count(name: str) -> None:
    z = torch.tensor([x for own in differences() for x in own], dtype=torch.float64)
    assert len(z) == 7
    shared = SHARED_LOSSES[name](*shared_example(), 100)
    torch.testing.assert_close(shared, LOSSES[name](z, -z, 100))


@pytest.mark.parametrize(("catalogue", "weight"), [(0, 1.0), (5, 1.0), (40, 8.0)])
def test_shared_negatives_give_the_listwise_loss_of_the_pairs_that_count(
    catalogue: int, weight: float
) -> None:
    """The weight is that of the drawn items, whether or not they count for a user."""
    rows = [listwise_by_hand(z, [-x for x in z], weight) for z in differences()]
    shared = shared_listwise_loss(*shared_example(), catalogue)
    assert shared.item() == pytest.approx(sum(rows) / 3, rel=1e-12)


@pytest.mark.parametrize("name", list(LOSSES))
def test_shared_losses_are_the_pair_losses_where_every_pair_counts(name: str) -> None:
    s_i, s_j, valid, row = shared_example()
    z = s_i.unsqueeze(1) - s_j.matrix()[row]
    shared = SHARED_LOSSES[name](s_i, s_j, torch.ones_like(valid), row, 40)
    torch.testing.assert_close(shared, LOSSES[name](z, -z, 40))


def test_the_gradient_of_the_shared_listwise_loss_is_its_numerical_one() -> None:
    torch.manual_seed(0)
    s_i, _, valid, row = shared_example()
    factors = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 3), (5, 3), (5,))]
    torch.autograd.gradcheck(
        lambda a, *b: shared_listwise_loss(a, FactoredScores(*b), valid, row, 40),
        [each.requires_grad_(True) for each in (s_i, *factors)],
    )


@pytest.mark.parametrize("cells", [1, 7, 2**19])
def test_scores_are_summed_in_blocks_of_any_size(
    cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "BLOCK_CELLS", cells)
    torch.manual_seed(0)
    users, items = (torch.randn(n, 4, requires_grad=True) for n in (9, 6))
    bias = torch.randn(6, requires_grad=True)
    s_i, valid, row = torch.randn(12), torch.rand(9, 6) > 0.3, torch.randint(9, (12,))
    leaves = (users, items, bias)
    scores = (users @ items.T + bias).masked_fill(~valid, -1e9)
    expected = 2 * torch.nn.functional.softplus(scores.logsumexp(1)[row] - s_i).mean()
    loss = shared_listwise_loss(s_i, FactoredScores(*leaves), valid, row)
    # Where the processor has bfloat16, products have three digits.
    torch.testing.assert_close(loss, expected, atol=0.02, rtol=0)
    for ours, theirs in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0)


@pytest.mark.parametrize("name", list(SHARED_LOSSES))
@pytest.mark.parametrize("nobody", [False, True], ids=["one user", "nobody"])
def test_a_user_without_a_negative_that_counts_gives_no_gradient(name: str, nobody: bool) -> None:
    s_i, s_j, valid, row = shared_example(torch.float32)
    valid[1] = False
    if nobody:
        valid[0] = False
    s_i.requires_grad_(True)
    s_j.items.requires_grad_(True)
    loss = SHARED_LOSSES[name](s_i, s_j, valid, row, 40)
    loss.backward()  # type: ignore[no-untyped-call]
    assert s_i.grad is not None
    assert s_j.items.grad is not None
    of_j = s_j.items.grad.T
    assert all(x.isfinite().all() for x in (loss, s_i.grad, of_j))
    assert s_i.grad[1:].eq(0).all()
    assert of_j[1].eq(0).all()
    assert bool(s_i.grad[0] == 0) == nobody
    assert of_j[~valid].eq(0).all()


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
    loss = loss + 0.01 * _batch_l2(model, vectors, of_i, of_j, Ranks())
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
    history = train_loop(model, split, training, TrainingPhase("bpr-mf", 4, 1e-2))
    assert history.loss[-1] < history.loss[0]
    assert model.get_parameter("weight").eq(1).all()
