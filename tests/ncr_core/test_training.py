"""The training loop: it learns, repeats itself, stops in time, and says what went wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ncr_core.data import Interactions, Split, build_interactions, leave_latest_out
from ncr_core.data.synthetic import synthetic_catalogue
from ncr_core.errors import ConfigError, DataError, TrainingError
from ncr_core.evaluation.protocols import ModelRanks, evaluate_sampled, sampled_candidates
from ncr_core.models import ModelConfig
from ncr_core.models.baselines.popularity import Popularity
from ncr_core.training import Progress, TrainConfig, train_model
from ncr_core.training import loop as loop_module
from ncr_core.training.fold_in import fold_in, mean_user
from ncr_core.training.loop import learn_held_out

QUICK = TrainConfig(epochs=12, batch_size=256, patience=12, fine_tune_epochs=3, device="cpu")


@pytest.mark.parametrize("kind", ["nbpr", "dncr", "neupr"])
def test_every_model_learns_more_than_popularity(kind: str) -> None:
    split = leave_latest_out(build_interactions(synthetic_catalogue(600, 240, 30).interactions))
    trained = train_model(ModelConfig.from_dict({"kind": kind, "factors": 8}), QUICK, split)
    test = sampled_candidates(split, split.test, seed=1)
    learned = evaluate_sampled(ModelRanks(trained.model), test)
    popular = evaluate_sampled(Popularity(split.train), test)
    assert learned.ndcg > 1.3 * popular.ndcg


def test_the_same_seed_gives_the_same_model(split: Split) -> None:
    config = TrainConfig(epochs=2, batch_size=512, device="cpu", seed=3)
    one, two = (
        train_model(ModelConfig(kind="dncr", factors=4), config, split).model for _ in range(2)
    )
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert a.equal(b)


def test_progress_of_a_pretrained_neupr(split: Split) -> None:
    seen: list[Progress] = []
    config = TrainConfig(epochs=2, fine_tune_epochs=1, batch_size=512, device="cpu")
    trained = train_model(ModelConfig(kind="neupr", factors=4), config, split, seen.append)
    phases = [(p.phase, p.epoch, p.epochs) for p in seen]
    assert phases == [
        ("pre-train nbpr", 1, 2),
        ("pre-train nbpr", 2, 2),
        ("pre-train dncr", 1, 2),
        ("pre-train dncr", 2, 2),
        ("train neupr", 1, 1),
    ]
    assert all(math.isfinite(p.loss) and p.ndcg is not None and p.eta_s >= 0 for p in seen)
    assert seen[-1].eta_s == 0
    assert [h.phase for h in trained.history] == ["pre-train nbpr", "pre-train dncr", "train neupr"]


def test_it_stops_early_and_keeps_the_best_epoch(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.1, 0.3, 0.2, 0.2, 0.2, 0.9])
    states: list[torch.Tensor] = []

    def validate(model: torch.nn.Module, held_out: object) -> loop_module.Metrics:
        states.append(model.get_parameter("users.weight").detach().clone())
        return loop_module.Metrics(0.0, next(scores), 1, 1)

    monkeypatch.setattr(loop_module, "validate", validate)
    config = TrainConfig(epochs=6, patience=3, batch_size=512, device="cpu")
    trained = train_model(ModelConfig(kind="nbpr", factors=4), config, split)
    assert trained.history[0].ndcg == [0.1, 0.3, 0.2, 0.2, 0.2]
    assert trained.history[0].best_epoch == 2
    assert trained.model.get_parameter("users.weight").equal(states[1])


def test_held_out_items_can_be_learned_at_the_end(split: Split) -> None:
    """After it, a model prefers what was held out to what nobody took, more than before."""
    model = train_model(ModelConfig(kind="nbpr", factors=8), QUICK, split).model
    test = sampled_candidates(split, split.test, seed=1, negatives=50)
    before = evaluate_sampled(ModelRanks(model), test)
    learn_held_out(model, split.all_seen, QUICK)
    assert evaluate_sampled(ModelRanks(model), test).ndcg > 1.1 * before.ndcg


def test_the_papers_stopping_rule(split: Split) -> None:
    config = TrainConfig(
        epochs=40, stopping="paper", schedule="constant", learning_rate=1e-9, device="cpu"
    )
    trained = train_model(ModelConfig(kind="nbpr", factors=4), config, split)
    assert len(trained.history[0].loss) == 2  # nothing falls by 0.1 % at this rate


def test_a_loss_that_is_not_finite_says_what_to_try(split: Split) -> None:
    config = TrainConfig(
        epochs=3, learning_rate=1e30, schedule="constant", batch_size=256, device="cpu"
    )
    with pytest.raises(TrainingError, match=r"epoch 1 .* learning rate 1e\+30: try a smaller"):
        train_model(ModelConfig(kind="nbpr", factors=4), config, split)


def test_users_who_have_seen_everything_are_left_out_of_training() -> None:
    rows = [("all", str(i), float(i)) for i in range(5)]
    rows += [("some", str(i), float(i)) for i in range(4)]
    matrix = build_interactions(rows)
    users = {
        int(u)
        for batch in loop_module.Batches(matrix, TrainConfig(device="cpu"), torch.device("cpu"))
        for u in batch.users
    }
    assert users == {1}
    alone = matrix.select(matrix.users == 0)
    with pytest.raises(DataError, match="nothing to compare"):
        train_model(
            ModelConfig(kind="nbpr", factors=2),
            TrainConfig(device="cpu"),
            Split(alone, np.full(2, -1), np.full(2, -1)),
        )


def test_one_user_is_too_few() -> None:
    split = leave_latest_out(build_interactions([("only", str(i), float(i)) for i in range(9)]))
    with pytest.raises(DataError, match="1 user is too few"):
        train_model(ModelConfig(kind="nbpr", factors=2), TrainConfig(device="cpu"), split)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"alpha": 1.5},
        {"alpha": math.nan},
        {"loss": "hinge"},
        {"learning_rate": 0.0},
        {"learning_rate": math.nan},
    ],
)
def test_a_configuration_that_does_not_fit(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        TrainConfig(**wrong)  # type: ignore[arg-type]


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="not there"):
        TrainConfig(device="cuda:99").torch_device()
    with pytest.raises(ConfigError, match="unknown device"):
        TrainConfig(device="abacus").torch_device()


@pytest.mark.parametrize("kind", ["nbpr", "neupr"])
def test_folding_in_gives_left_out_users_lists_of_their_own(
    synthetic: Interactions, kind: str
) -> None:
    """Users that training never saw, by their items alone, beat the popularity list."""
    newcomers = synthetic.users >= 240
    old = synthetic.select(~newcomers)
    split = leave_latest_out(old)
    model = train_model(ModelConfig.from_dict({"kind": kind, "factors": 8}), QUICK, split).model
    model.requires_grad_(False)
    whole = leave_latest_out(synthetic)
    test = sampled_candidates(whole, whole.test, seed=1, negatives=50)
    new = test.users >= 240
    items = [torch.from_numpy(whole.train.items_of(u)) for u in test.users[new]]
    centre = mean_user(model)
    starts = centre.expand(len(items), -1)
    vectors = fold_in(model, starts, items, centre)
    assert vectors.equal(fold_in(model, starts, items, centre))
    for at in (0, 7):  # alone or in company
        alone = fold_in(model, centre, items[at : at + 1], centre)[0]
        torch.testing.assert_close(vectors[at], alone, atol=1e-4, rtol=1e-3)
    assert (vectors - centre).norm(dim=1).min() > 0.1 * centre.norm()

    class Folded:
        def rank(self, users: np.ndarray, candidates: np.ndarray, k: int) -> np.ndarray:
            rows = torch.from_numpy(users - 240)
            ranked = loop_module.ModelRanks(model)._ranker.rank(
                vectors[rows], torch.from_numpy(candidates), k
            )
            return ranked.numpy()

    chosen = loop_module.CandidateSet(test.users[new], test.held_out[new], test.candidates[new])
    folded = evaluate_sampled(Folded(), chosen)
    popular = evaluate_sampled(Popularity(split.train), chosen)
    assert folded.ndcg > 1.1 * popular.ndcg
