"""NeuMF and its parts: the equations by hand, the start from trained parts, and that they learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ncr_core.data import Interactions, Split
from ncr_core.errors import ConfigError, DataError, TrainingError
from ncr_core.evaluation.protocols import (
    Metrics,
    evaluate_full,
    evaluate_sampled,
    sampled_candidates,
)
from ncr_core.reproduction.baselines import neumf
from ncr_core.reproduction.baselines.neumf import (
    GMF,
    MLP,
    FittedNeuMF,
    NeuMF,
    NeuMFConfig,
    Phase,
    PointwiseModel,
    fit_neumf,
    pointwise_loss,
    train_phase,
)
from ncr_core.reproduction.baselines.scoring import Popularity
from ncr_core.training.trainer import Progress

QUICK = NeuMFConfig(
    epochs=12, batch_size=128, patience=12, fine_tune_epochs=3, learning_rate=5e-2, device="cpu"
)


def put(parameter: Tensor, values: Any) -> None:
    with torch.no_grad():
        parameter.copy_(torch.tensor(values))


def small_gmf() -> GMF:
    model = GMF(2, 3, factors=2)
    put(model.users.weight, [[1.0, 2.0], [3.0, -1.0]])
    put(model.items.weight, [[0.5, 1.0], [2.0, 0.0], [-1.0, 4.0]])
    put(model.weight, [2.0, -1.0])
    put(model.bias, 0.25)
    return model


def small_mlp() -> MLP:
    """One dense layer, 4 → 2."""
    model = MLP(2, 3, factors=2, layers=2)
    assert model.users.weight.shape == (2, 2)
    put(model.users.weight, [[1.0, 2.0], [3.0, -1.0]])
    put(model.items.weight, [[0.5, 1.0], [2.0, 0.0], [-1.0, 4.0]])
    dense = model.get_submodule("layers.0")
    put(dense.get_parameter("weight"), [[1.0, 0.0, 2.0, 0.0], [0.0, 1.0, 0.0, -1.0]])
    put(dense.get_parameter("bias"), [0.5, 0.0])
    put(model.weight, [1.0, 10.0])
    put(model.bias, -1.0)
    return model


def wild(model: PointwiseModel, seed: int = 0) -> PointwiseModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.7, generator=generator)
    return model


def test_gmf_by_hand() -> None:
    """Item 1 of user 0: 2·1·2 − 1·2·0 + 0.25."""
    logits = small_gmf()(torch.tensor([0, 1]), torch.tensor([[0, 1, 2], [2, 2, 0]]))
    assert logits.tolist() == [[-0.75, 4.25, -9.75], [-1.75, -1.75, 4.25]]


def test_mlp_by_hand() -> None:
    """Item 0 of user 0: ReLU(1 + 2·0.5 + 0.5) + 10·ReLU(2 − 1) − 1; the one of item 2 is cut."""
    logits = small_mlp()(torch.tensor([0, 1]), torch.tensor([[0, 1, 2], [0, 1, 2]]))
    assert logits.tolist() == [[11.5, 24.5, -1.0], [3.5, 6.5, 0.5]]


def test_the_towers_widths_are_the_papers() -> None:
    model = MLP(3, 4, factors=8)
    assert model.users.weight.shape == (3, 16)
    assert model.items.weight.shape == (4, 16)
    shapes = [p.shape for name, p in model.named_parameters() if name.startswith("layers")]
    assert shapes == [(16, 32), (16,), (8, 16), (8,)]
    assert model.weight.shape == (8,)


def test_neumf_is_the_sum_of_its_two_halves() -> None:
    model = NeuMF(2, 3, factors=2, layers=2)
    model.start_from(small_gmf(), small_mlp(), 0.5)
    logits = model(torch.tensor([0]), torch.tensor([[0, 1, 2]]))
    assert logits.tolist() == [[(11.5 - 0.75) / 2, (24.5 + 4.25) / 2, (-1 - 9.75) / 2]]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_starting_from_trained_parts(alpha: float) -> None:
    gmf, mlp = GMF(5, 7, 3), MLP(5, 7, 3)
    wild(gmf, 1), wild(mlp, 2)
    model = NeuMF(5, 7, 3)
    model.start_from(gmf, mlp, alpha)
    users, items = torch.arange(5), torch.arange(7).expand(5, 7)
    torch.testing.assert_close(
        model(users, items), alpha * gmf(users, items) + (1 - alpha) * mlp(users, items)
    )
    assert model.gmf.weight.equal(alpha * gmf.weight)
    assert model.mlp.users.weight.equal(mlp.users.weight)
    with torch.no_grad():
        gmf.users.weight.zero_()
    assert bool(model.gmf.users.weight.any())  # copied, not shared


def test_starting_from_what_does_not_fit() -> None:
    model = NeuMF(5, 7, 3)
    with pytest.raises(ConfigError, match="alpha"):
        model.start_from(GMF(5, 7, 3), MLP(5, 7, 3), 1.5)
    with pytest.raises(ConfigError, match="sizes"):
        model.start_from(GMF(5, 7, 4), MLP(5, 7, 3))


@pytest.mark.parametrize("make", [GMF, MLP, NeuMF])
@pytest.mark.parametrize("n_items", [9, 400])  # the item table whole, or the rows asked for
def test_scores_in_blocks_are_the_forward(
    make: type[GMF] | type[MLP] | type[NeuMF], n_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ncr_core.reproduction.baselines.neumf.BLOCK_CELLS", 7 * 8)
    model = wild(make(11, n_items, 4))
    users = torch.tensor([4, 0, 10, 4, 7, 1, 2])
    with torch.no_grad():
        every = model(users, torch.arange(n_items).expand(7, n_items))
        torch.testing.assert_close(torch.stack([model.scorer()(u) for u in users.tolist()]), every)
        few = torch.tensor([[1, 8]]).expand(7, 2)
        torch.testing.assert_close(model(users, few), every.gather(1, few))


def test_the_gradient_of_the_loss_by_hand() -> None:
    """∂L/∂z = (σ(z) − y)/n, and ∂z/∂p = h⊙q, ∂z/∂q = h⊙p, ∂z/∂h = p⊙q."""
    model = small_gmf()
    put(model.items.weight, [[0.5, 1.0], [0.5, 0.0], [-0.25, 0.5]])
    users, items = torch.tensor([0]), torch.tensor([[1, 2]])  # item 1 is taken, item 2 is not
    pointwise_loss(model(users, items)).backward()
    p, h = np.array([1.0, 2.0]), np.array([2.0, -1.0])
    q = np.array([[0.5, 0.0], [-0.25, 0.5]])
    z = q @ (h * p) + 0.25
    of_z = (1 / (1 + np.exp(-z)) - np.array([1.0, 0.0])) / 2
    expected = {
        "users.weight": np.array([of_z @ (h * q), [0.0, 0.0]]),
        "items.weight": np.array([[0.0, 0.0], of_z[0] * h * p, of_z[1] * h * p]),
        "weight": of_z @ (p * q),
        "bias": np.array(of_z.sum()),
    }
    for name, gradient in expected.items():
        found = model.get_parameter(name).grad
        assert found is not None
        np.testing.assert_allclose(found.numpy(), gradient, rtol=1e-5, atol=1e-7)


def test_the_loss_by_hand() -> None:
    z = [[0.3, -1.0, 2.0], [-4.0, 0.0, 0.5]]
    sure = [math.log(1 / (1 + math.exp(-x))) for row in z for x in (row[0], -row[1], -row[2])]
    assert float(pointwise_loss(torch.tensor(z))) == pytest.approx(-sum(sure) / 6)


def test_l2_counts_each_row_as_often_as_it_is_used() -> None:
    l2 = small_gmf().l2(torch.tensor([0, 0, 1]), torch.tensor([[0, 1], [1, 1], [2, 2]]))
    assert l2.item() == pytest.approx((5 + 5 + 10) / 3 + (1.25 + 3 * 4 + 2 * 17) / 6)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gmf", "mlp", "neumf"])
def test_every_model_learns_more_than_popularity(split: Split, model: str) -> None:
    config = NeuMFConfig(**{**vars(QUICK), "model": model})
    fitted = fit_neumf(split, config)
    test = sampled_candidates(split, split.test, seed=1, negatives=50)
    learned, popular = (
        evaluate_sampled(ranks, test) for ranks in (fitted, Popularity(split.train))
    )
    assert learned.ndcg > 1.2 * popular.ndcg
    full = evaluate_full(fitted, split, split.test, 0)
    assert full.ndcg > 1.2 * evaluate_full(Popularity(split.train), split, split.test, 0).ndcg


def test_a_users_scores_do_not_depend_on_the_others() -> None:
    fitted = FittedNeuMF(wild(NeuMF(6, 200, 4)), [])
    together = fitted.scores(np.array([3, 0, 5, 3]))
    assert together.shape == (4, 200)
    for row, user in enumerate([3, 0, 5, 3]):
        np.testing.assert_array_equal(together[row], fitted.scores(np.array([user]))[0])


def test_ranking_between_epochs_is_that_of_the_scores() -> None:
    model = wild(NeuMF(6, 200, 4))
    candidates = np.random.default_rng(0).permuted(np.tile(np.arange(200), (6, 1)), axis=1)[:, :20]
    candidates[:, 5] = -1
    users = np.arange(6)
    np.testing.assert_array_equal(
        neumf._Training(model).rank(users, candidates, 20),
        FittedNeuMF(model, []).rank(users, candidates, 20),
    )


@pytest.mark.slow
def test_progress_and_repeatability(split: Split) -> None:
    config = NeuMFConfig(epochs=2, fine_tune_epochs=1, batch_size=512, device="cpu", seed=3)
    seen: list[Progress] = []
    one, two = fit_neumf(split, config, seen.append), fit_neumf(split, config)
    assert [(p.phase, p.epoch, p.epochs) for p in seen] == [
        ("pre-train gmf", 1, 2),
        ("pre-train gmf", 2, 2),
        ("pre-train mlp", 1, 2),
        ("pre-train mlp", 2, 2),
        ("train neumf", 1, 1),
    ]
    assert all(math.isfinite(p.loss) and p.ndcg is not None for p in seen)
    assert seen[0].eta_s > 0
    assert seen[-1].eta_s == 0
    assert [len(h.loss) for h in one.history] == [2, 2, 1]
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert a.equal(b)


def test_it_stops_early_and_keeps_the_best_epoch(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, states = iter([0.1, 0.3, 0.2, 0.2, 0.9]), list[Tensor]()

    def evaluate(ranks: neumf._Training, held_out: object) -> Metrics:
        states.append(ranks.model.get_parameter("users.weight").detach().clone())
        return Metrics(0.0, next(scores), 1, 1)

    monkeypatch.setattr(neumf, "evaluate_sampled", evaluate)
    config = NeuMFConfig(model="gmf", epochs=5, patience=2, device="cpu")
    fitted = fit_neumf(split, config)
    assert fitted.history[0].ndcg == [0.1, 0.3, 0.2, 0.2]
    assert fitted.history[0].best_epoch == 2
    assert fitted.model.get_parameter("users.weight").equal(states[1])


def test_without_validation_items_every_epoch_is_run(split: Split) -> None:
    none = Split(split.train, np.full_like(split.validation, -1), split.test)
    config = NeuMFConfig(epochs=3, fine_tune_epochs=2, patience=1, device="cpu")
    seen: list[Progress] = []
    fitted = fit_neumf(none, config, seen.append)
    assert [h.best_epoch for h in fitted.history] == [3, 3, 2]
    assert all(p.ndcg is None for p in seen)
    assert not any(h.ndcg for h in fitted.history)


def test_sgd_after_pretraining(split: Split) -> None:
    config = NeuMFConfig(epochs=1, fine_tune_epochs=1, fine_tune_optimizer="sgd", device="cpu")
    assert math.isfinite(fit_neumf(split, config).history[-1].loss[0])


def test_a_loss_that_is_not_finite_stops(split: Split) -> None:
    config = NeuMFConfig(model="mlp", epochs=2, batch_size=256, schedule="constant", device="cpu")
    model = MLP(split.train.n_users, split.train.n_items, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TrainingError, match=r"epoch 1 of mlp at learning rate 1e\+30: try a"):
        train_phase(model, split, config, Phase("mlp", 2, 1e30))
    for name, value in model.state_dict().items():
        assert value.equal(before[name])


def test_nothing_to_learn_from(split: Split) -> None:
    every = Interactions(np.array([0, 2, 4]), np.array([0, 1, 1, 0]), ["a", "b"], ["x", "y"])
    held = np.full(2, -1)
    with pytest.raises(DataError, match="without another item"):
        fit_neumf(Split(every, held, held), QUICK)


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "ncf"},
        {"schedule": "cosine"},
        {"fine_tune_optimizer": "rmsprop"},
        {"epochs": 0},
        {"batch_size": 0},
        {"negatives": 0},
        {"patience": 0},
        {"fine_tune_epochs": 0},
        {"learning_rate": 0.0},
        {"fine_tune_rate": math.nan},
        {"l2": -1.0},
        {"alpha": math.nan},
        {"factors": 0},
        {"layers": 1},
    ],
)
def test_a_configuration_that_does_not_fit(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        NeuMFConfig(**wrong)
