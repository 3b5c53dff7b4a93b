"""The training loop: it learns, repeats itself, stops in time, and says what went wrong."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ncr_core import recipes
from ncr_core.data import Split, build_interactions, leave_latest_out
from ncr_core.data.synthetic import synthetic_catalogue
from ncr_core.errors import ConfigError, DataError, TrainingError
from ncr_core.evaluation.protocols import ModelRanks, evaluate_sampled, sampled_candidates
from ncr_core.models import DNCR, NBPR, ModelConfig, NeuPR, PairwiseRanker, build_model
from ncr_core.models.user_embeddings import UserHistories
from ncr_core.reproduction.baselines.scoring import Popularity
from ncr_core.train_config import Optimizer
from ncr_core.training import History, Progress, TrainConfig, train_model, trainer
from ncr_core.training import pretraining as pretraining_module
from ncr_core.training.losses import bce_loss
from ncr_core.training.pretraining import part_config, refit_config
from ncr_core.training.trainer import Adam, TrainingPhase, learn_held_out, train_loop
from ncr_core.training.validation import validation_figures
from tests.ncr_core.conftest import wild_model

QUICK = TrainConfig(epochs=12, batch_size=256, patience=12, fine_tune_epochs=3, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nbpr", "dncr", "neupr"])
def test_every_model_learns_more_than_popularity(kind: str) -> None:
    split = leave_latest_out(build_interactions(synthetic_catalogue(600, 240, 30).interactions))
    trained = train_model(ModelConfig.from_dict({"kind": kind, "factors": 8}), QUICK, split)
    test = sampled_candidates(split, split.test, seed=1)
    learned = evaluate_sampled(ModelRanks(trained.model), test)
    popular = evaluate_sampled(Popularity(split.train), test)
    assert learned.ndcg > 1.3 * popular.ndcg


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_same_seed_gives_the_same_model(split: Split, dropout: float) -> None:
    config = TrainConfig(epochs=2, batch_size=512, dropout=dropout, device="cpu", seed=3)
    before = torch.get_rng_state()
    one, two = (
        train_model(ModelConfig(kind="dncr", factors=4), config, split).model for _ in range(2)
    )
    assert torch.get_rng_state().equal(before)  # the caller's draws are its own
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

    def remember(model: torch.nn.Module, train: object) -> None:
        states.append(model.get_parameter("users.weight").detach().clone())

    monkeypatch.setattr(trainer, "remember", remember)
    monkeypatch.setattr(trainer, "figures_of", lambda positions: (next(scores), 0.0))
    config = TrainConfig(epochs=6, patience=3, batch_size=512, device="cpu")
    trained = train_model(ModelConfig(kind="nbpr", factors=4), config, split)
    assert trained.history[0].ndcg == [0.1, 0.3, 0.2, 0.2, 0.2]
    assert trained.history[0].best_epoch == 2
    assert trained.model.get_parameter("users.weight").equal(states[1])


@pytest.mark.parametrize(
    ("scores", "epochs", "best"),
    [
        ([0.5, 0.1, 0.2, 0.3, 0.4, 0.6], 5, 5),  # the first is the start's
        ([0.5, 0.2, 0.1, 0.1, 0.1, 0.6], 4, 0),
    ],
)
def test_epochs_below_the_start_go_on_while_they_improve(
    split: Split, monkeypatch: pytest.MonkeyPatch, scores: list[float], epochs: int, best: int
) -> None:
    measured = iter(scores)
    monkeypatch.setattr(trainer, "figures_of", lambda positions: (next(measured), 0.0))
    config = TrainConfig(epochs=5, patience=3, batch_size=512, start="spectral", device="cpu")
    (history,) = train_model(ModelConfig(kind="nbpr", factors=4), config, split).history
    assert (history.start[0], history.ndcg) == (scores[0], scores[1 : epochs + 1])
    assert history.best_epoch == best


def test_without_validation_items_it_runs_all_epochs_and_keeps_the_last(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[torch.Tensor] = []
    monkeypatch.setattr(
        trainer,
        "remember",
        lambda model, _: states.append(model.get_parameter("users.weight").detach().clone()),
    )
    seen: list[Progress] = []
    config = TrainConfig(epochs=4, patience=1, batch_size=512, device="cpu")
    whole = split.with_validation_in_train()
    trained = train_model(ModelConfig(kind="nbpr", factors=4), config, whole, seen.append)
    history = trained.history[0]
    assert len(history.loss) == len(history.seconds) == len(states) == 4
    assert history.ndcg == history.hr == []
    assert history.best_epoch == 4
    assert [p.ndcg for p in seen] == [None] * 4
    assert trained.model.get_parameter("users.weight").equal(states[3])
    assert not states[3].equal(states[2])


@pytest.mark.parametrize("users", ["free", "history"])
def test_given_parts_a_neupr_starts_from_them(
    users: str, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """z_uij = α z_uij^N + (1 − α) z_uij^D at the start (eq. 26), whatever the users are."""
    shape = ModelConfig.from_dict(
        {"kind": "neupr", "factors": 3, "layers": 3, "users": users, "item_bias": True}
    )
    n_users, n_items = split.train.n_users, split.train.n_items
    nbpr, dncr = (
        wild_model(part_config(shape, kind), n_users, n_items, seed)  # type: ignore[arg-type]
        for seed, kind in enumerate(("nbpr", "dncr"))
    )
    assert isinstance(nbpr, NBPR)
    assert isinstance(dncr, DNCR)
    phases: list[trainer.TrainingPhase] = []

    def train_loop(
        model: PairwiseRanker,
        split: Split,
        config: TrainConfig,
        phase: trainer.TrainingPhase,
        *_,
    ) -> History:
        phases.append(phase)
        return History(phase.name)

    monkeypatch.setattr(pretraining_module, "train_loop", train_loop)
    config = TrainConfig(alpha=0.3, fine_tune_epochs=7, fine_tune_rate=0.02, device="cpu")
    trained = train_model(shape, config, split, parts=(nbpr, dncr))
    assert phases == [trainer.TrainingPhase("train neupr", 7, 0.02)]
    assert [h.phase for h in trained.history] == ["train neupr"]
    model = trained.model
    assert isinstance(model, NeuPR)
    rows, i, j = torch.arange(20), torch.randint(n_items, (20,)), torch.randint(n_items, (20,))
    z_n, z_d, z = (m.logits(m.user_vectors(rows), i, j) for m in (nbpr, dncr, model))
    torch.testing.assert_close(z, 0.3 * z_n + 0.7 * z_d, atol=1e-5, rtol=1e-4)
    before = nbpr.items.weight.clone()
    with torch.no_grad():
        model.items_n.weight.add_(1.0)
    assert nbpr.items.weight.equal(before)


def test_given_parts_only_the_whole_is_trained(split: Split) -> None:
    config = TrainConfig(
        epochs=1, fine_tune_epochs=1, batch_size=512, shared_negatives=50, device="cpu"
    )
    shape = ModelConfig(kind="neupr", factors=2, layers=3)
    phases: list[Progress] = []
    first = train_model(shape, config, split, phases.append)
    assert [p.phase for p in phases] == ["pre-train nbpr", "pre-train dncr", "train neupr"]
    parts = tuple(
        train_model(part_config(shape, kind), replace(config, shared_negatives=n), split).model
        for kind, n in (("nbpr", 50), ("dncr", 0))
    )
    again = train_model(shape, config, split, phases.append, parts)  # type: ignore[arg-type]
    assert [p.phase for p in phases[3:]] == ["train neupr"]
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert a.equal(b)


def test_the_configuration_of_a_refit_has_the_epochs_that_were_chosen() -> None:
    config = TrainConfig(epochs=20, fine_tune_epochs=10, l2=0.5)
    phases = [History(name, best_epoch=n) for name, n in (("a", 3), ("b", 8), ("c", 2))]
    nbpr = ModelConfig(kind="nbpr", factors=2)
    assert refit_config(nbpr, config, phases[:1]) == replace(config, epochs=3)
    neupr = replace(nbpr, kind="neupr")
    again = refit_config(neupr, config, phases)
    assert again == replace(config, epochs=8, fine_tune_epochs=2)
    alone = replace(config, pretrain=False)
    assert refit_config(neupr, alone, phases[1:2]) == replace(alone, epochs=8)
    shared = replace(neupr, shared_embeddings=True)
    assert refit_config(shared, config, phases[:1]) == replace(config, epochs=3)


@pytest.mark.parametrize("kind", ["dncr", "twotower", "neupr"])
def test_shared_negatives_are_not_for_towers(kind: str, split: Split) -> None:
    config = TrainConfig(shared_negatives=20, pretrain=False, device="cpu")
    with pytest.raises(ConfigError, match=f"shared negatives are for nbpr, not {kind}"):
        train_model(ModelConfig.from_dict({"kind": kind, "factors": 2}), config, split)


def test_a_neupr_with_a_small_tower_starts_as_its_nbpr(split: Split) -> None:
    """With α = 1 the tower adds nothing until fine-tuning teaches it to."""
    shape = ModelConfig(kind="neupr", factors=5, tower_factors=2, layers=3, item_bias=True)
    assert part_config(shape, "nbpr") == ModelConfig(
        kind="nbpr", factors=5, layers=3, item_bias=True
    )
    assert part_config(shape, "dncr") == ModelConfig(kind="dncr", factors=2, layers=3)
    config = TrainConfig(epochs=1, fine_tune_epochs=0, alpha=1.0, batch_size=512, device="cpu")
    neupr = train_model(shape, config, split).model
    nbpr = train_model(part_config(shape, "nbpr"), config, split).model
    users, i, j = (torch.randint(n, (50,)) for n in (split.train.n_users, *[neupr.n_items] * 2))
    expected = nbpr.logits(nbpr.user_vectors(users), i, j)
    torch.testing.assert_close(neupr.logits(neupr.user_vectors(users), i, j), expected)


def test_held_out_items_can_be_learned_at_the_end(split: Split) -> None:
    """After it, a model prefers what was held out to what nobody took, more than before."""
    model = train_model(ModelConfig(kind="nbpr", factors=8), QUICK, split).model
    test = sampled_candidates(split, split.test, seed=1, negatives=50)
    before = evaluate_sampled(ModelRanks(model), test)
    learn_held_out(model, split.all_seen, QUICK)
    assert evaluate_sampled(ModelRanks(model), test).ndcg > 1.1 * before.ndcg


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "NBPR",
        "DNCR",
        "NeuPR history",
        "NBPR history",
    ],
)
def test_held_out_items_are_learned_elsewhere_as_here(method: str, split: Split) -> None:
    recipe = recipes.tuned(method).with_(factors=4, epochs=1, device="cpu", dropout=0.0)
    here = train_model(recipe.model, recipe.training, split).model
    elsewhere, phases = copy.deepcopy(here), []

    def run_phase(*arguments: Any) -> History:
        phases.append(arguments[3])
        return train_loop(*arguments)

    learn_held_out(here, split.all_seen, recipe.training)
    learn_held_out(elsewhere, split.all_seen, recipe.training, run_phase)
    assert [(each.name, each.learning_rate) for each in phases] == [
        ("learn the held-out items", recipe.training.fine_tune_rate)
    ]
    assert phases[0].epochs > 2  # of so little data
    for name, value in here.state_dict().items():
        assert torch.equal(value, elsewhere.state_dict()[name]), name
    assert not elsewhere.training


@pytest.mark.slow
@pytest.mark.parametrize("further", [False, True])
def test_users_vectors_are_made_without_dropout(further: bool, split: Split) -> None:
    recipe = recipes.recipe("next-item-attention").with_(
        factors=8, epochs=1, learning_rate=0.02, stopping="paper"
    )
    model = train_model(recipe.model, recipe.training, split, shrink=False).model
    if further:
        learn_held_out(model, split.train, recipe.training)
    users = torch.arange(model.n_users, device=model.device)
    vectors = model.user_vectors(users).clone()
    model.eval()
    trainer.remember(model, split.train)
    assert torch.equal(vectors, model.user_vectors(users))


def test_held_out_items_that_are_learned_into_infinity(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the very last step, which shows in no loss."""
    model = train_model(ModelConfig(kind="nbpr", factors=2), replace(QUICK, epochs=1), split).model

    def overflows(model: PairwiseRanker, *args: object) -> float:
        with torch.no_grad():
            next(iter(model.parameters())).view(-1)[0] = torch.inf
        return 0.5

    monkeypatch.setattr(trainer, "train_epoch", overflows)
    with pytest.raises(TrainingError, match="a parameter became infinite"):
        learn_held_out(model, split.all_seen, QUICK)


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


@pytest.mark.parametrize("users", ["free", "history"])
def test_a_loss_that_stops_being_finite_leaves_the_best_epoch(
    users: str, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    good_epoch = trainer.train_epoch
    states: list[dict[str, torch.Tensor]] = []

    def one_epoch(model: PairwiseRanker, *others: object) -> float:
        if states:
            good_epoch(model, *others)  # type: ignore[arg-type]
            return math.nan
        loss = good_epoch(model, *others)  # type: ignore[arg-type]
        states.append({name: x.detach().clone() for name, x in model.named_parameters()})
        return loss

    monkeypatch.setattr(trainer, "train_epoch", one_epoch)
    config = TrainConfig(epochs=3, batch_size=512, device="cpu")
    shape = ModelConfig.from_dict({"kind": "nbpr", "factors": 4, "users": users})
    with pytest.raises(TrainingError, match="nan in epoch 2 of train nbpr") as caught:
        train_model(shape, config, split)
    error = caught.value
    assert isinstance(error.model, NBPR)
    for name, parameter in error.model.named_parameters():
        assert parameter.equal(states[0][name])
    assert len(error.history.loss) == len(error.history.ndcg) == error.history.best_epoch == 1
    assert validation_figures(error.model, split, config)[0] == error.history.ndcg[0]


def test_a_first_epoch_without_a_finite_loss_leaves_nothing(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "train_epoch", lambda *_: math.inf)
    with pytest.raises(TrainingError, match="inf in epoch 1") as caught:
        train_model(ModelConfig(kind="nbpr", factors=2), TrainConfig(device="cpu"), split)
    assert caught.value.model is None
    assert caught.value.history is None


def test_users_who_have_seen_everything_are_left_out_of_training() -> None:
    rows = [("all", str(i), float(i)) for i in range(5)]
    rows += [("some", str(i), float(i)) for i in range(4)]
    matrix = build_interactions(rows)
    users = {
        int(u)
        for batch in trainer.Batches(matrix, TrainConfig(device="cpu"), torch.device("cpu"))
        for u in batch.users
    }
    assert users == {1}
    alone = matrix.select(matrix.users == 0)
    with pytest.raises(DataError, match="every user has interacted with every item"):
        train_model(
            ModelConfig(kind="nbpr", factors=2),
            TrainConfig(device="cpu"),
            Split(alone, np.full(2, -1), np.full(2, -1)),
        )


@pytest.mark.parametrize("name", ["next-item", "als-nbpr"])
def test_a_start_alone_needs_an_item_that_somebody_lacks_too(name: str) -> None:
    rows = [(user, item, float(n)) for n, item in enumerate("abcd") for user in ("ann", "bob")]
    everything = build_interactions(rows)
    nothing = np.full(2, -1)
    chosen = recipes.recipe(name).with_(epochs=0, factors=2, device="cpu")
    with pytest.raises(DataError, match="every user has interacted with every item"):
        train_model(chosen.model, chosen.training, Split(everything, nothing, nothing))


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
    with pytest.raises(ConfigError, match="does not exist"):
        TrainConfig(device="cuda:99").torch_device()
    with pytest.raises(ConfigError, match="unknown device"):
        TrainConfig(device="abacus").torch_device()


N_USERS, N_ITEMS = 40, 60
MODELS = [
    ModelConfig(kind="nbpr", factors=4, item_bias=True),
    ModelConfig(kind="dncr", factors=2, layers=3),
    ModelConfig(kind="neupr", factors=3, layers=3),
    ModelConfig(kind="twotower", factors=3, layers=2),
]
each_model = pytest.mark.parametrize("model_config", MODELS, ids=lambda config: config.kind)

Batch = tuple[Tensor, Tensor, Tensor]
FIRST: Batch = (torch.tensor([3, 3, 17]), torch.tensor([5, 8, 5]), torch.tensor([[1], [9], [8]]))
SECOND: Batch = (torch.tensor([4, 30, 9]), torch.tensor([50, 2, 7]), torch.tensor([[3], [4], [4]]))


def config_of(optimizer: Optimizer, **more: int) -> TrainConfig:
    sizes = {"batch_size": 3, "negatives": 1} | more
    return TrainConfig(optimizer=optimizer, device="cpu", **sizes)  # type: ignore[arg-type]


def after(model_config: ModelConfig, optimizer: Optimizer, *batches: Batch) -> PairwiseRanker:
    """The same model after a step for each batch."""
    model = wild_model(model_config, N_USERS, N_ITEMS).requires_grad_(True)
    adam = Adam(model, config_of(optimizer), 0.1, None)
    for users, i, j in batches:
        adam.zero_grad()
        bce_loss(*model.pair_logits(model.user_vectors(users), i, j)).backward()  # type: ignore[no-untyped-call]
        adam.step()
    return model.requires_grad_(False)


def tables_of(model: PairwiseRanker) -> dict[str, Tensor]:
    """The tables of users and items; biases as tables of one column."""
    return {
        name: table.reshape(len(table), -1)
        for name, table in model.named_parameters()
        if name.startswith(("users", "items")) or name == "bias"
    }


def rows_of(name: str, batch: Batch) -> set[int]:
    users, i, j = batch
    every = users if name.startswith("users") else torch.cat([i, j.flatten()])
    return set(every.tolist())


@each_model
def test_a_step_by_rows_moves_the_rows_of_the_batch_as_dense_adam_does(
    model_config: ModelConfig,
) -> None:
    start = wild_model(model_config, N_USERS, N_ITEMS)
    dense, sparse = (after(model_config, way, FIRST) for way in ("dense", "sparse"))  # type: ignore[arg-type]
    assert (dense.sparse_users, dense.sparse_items) == (False, False)
    assert (sparse.sparse_users, sparse.sparse_items) == (True, True)
    for (name, a), b in zip(dense.named_parameters(), sparse.parameters(), strict=True):
        # A step is 0.1 long; where a gradient is tiny, the two add their ε in different places.
        torch.testing.assert_close(a, b, atol=2e-3, rtol=0, msg=name)
    for name, table in tables_of(sparse).items():
        moved = (table != tables_of(start)[name]).any(dim=1).nonzero().flatten()
        assert set(moved.tolist()) == rows_of(name, FIRST)


@each_model
def test_rows_outside_the_batch_rest_only_where_adam_goes_by_rows(
    model_config: ModelConfig,
) -> None:
    for optimizer in ("dense", "sparse"):
        once, twice = (
            after(model_config, optimizer, *batches)  # type: ignore[arg-type]
            for batches in ([FIRST], [FIRST, SECOND])
        )
        for name, table in tables_of(twice).items():
            moved = set((table != tables_of(once)[name]).any(dim=1).nonzero().flatten().tolist())
            both = rows_of(name, FIRST) | rows_of(name, SECOND)
            assert moved == (both if optimizer == "dense" else rows_of(name, SECOND))


@pytest.mark.parametrize(
    ("more", "n_users", "n_items", "users_by_rows", "items_by_rows"),
    [
        ({}, 60, 120, False, False),
        ({}, 61, 120, True, False),
        ({}, 60, 121, False, True),
        ({"negatives": 3}, 61, 240, True, False),
        ({"negatives": 3}, 60, 241, False, True),
        ({"shared_negatives": 7}, 61, 200, True, False),
        ({"shared_negatives": 7}, 60, 201, False, True),
        ({"batch_size": 0}, 5_000, 5_000, False, False),
    ],
)
def test_tables_that_are_large_for_the_batch_are_taken_by_rows(
    more: dict[str, int], n_users: int, n_items: int, users_by_rows: bool, items_by_rows: bool
) -> None:
    shape = ModelConfig(kind="nbpr", factors=1, item_bias=True)
    model = build_model(shape, n_users, n_items)
    Adam(model, config_of("auto", **more), 0.1, None)
    assert (model.sparse_users, model.sparse_items) == (users_by_rows, items_by_rows)
    users, i, j = FIRST
    bce_loss(*model.pair_logits(model.user_vectors(users), i, j)).backward()  # type: ignore[no-untyped-call]
    of_items = {"items.weight": items_by_rows, "bias": items_by_rows}
    for name, by_rows in ({"users.weight": users_by_rows} | of_items).items():
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        assert gradient.is_sparse == by_rows


HISTORY = ModelConfig(
    kind="nbpr", factors=4, users="history", windows=(1, 0), by_length=True, item_bias=True
)
# Two users: the rows are the second and third item of one, and the first item of the other.
HISTORIES = UserHistories(
    torch.tensor([3, 7, 3, 9, 41]),
    torch.tensor([0, 0, 3]),
    torch.tensor([1, 2, 3]),
    torch.tensor([3, 3, 5]),
)


def after_histories(
    optimizer: Optimizer, n_items: int = N_ITEMS, config: ModelConfig = HISTORY
) -> PairwiseRanker:
    """A model with pooled users after a step, with the gradients of that step."""
    model = wild_model(config, N_USERS, n_items).requires_grad_(True)
    adam = Adam(model, config_of(optimizer), 0.1, None)
    users, i, j = FIRST
    vectors = model.training_vectors(users, HISTORIES)
    bce_loss(*model.pair_logits(vectors, i, j)).backward()  # type: ignore[no-untyped-call]
    adam.step()
    return model


@pytest.mark.parametrize(
    "config",
    [
        HISTORY,
        replace(HISTORY, windows=(0,), by_length=False),
        replace(HISTORY, factors=8, attention_layers=1),
        ModelConfig(
            kind="neupr", factors=4, layers=3, users="history", windows=(1, 0), item_bias=True
        ),
    ],
    ids=["windows", "all others", "attention", "neupr"],
)
def test_pooled_items_learn_by_rows_what_they_learn_on_whole_tables(config: ModelConfig) -> None:
    dense, sparse = (after_histories(way, config=config) for way in ("dense", "sparse"))  # type: ignore[arg-type]
    assert (dense.sparse_pooled_items, sparse.sparse_pooled_items) == (False, True)
    assert sparse.get_parameter("bias").grad.is_sparse  # type: ignore[union-attr]
    for (name, a), b in zip(dense.named_parameters(), sparse.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=0, msg=name)
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad.to_dense(), msg=name)


def test_a_step_by_rows_moves_the_earlier_items_of_histories_alone() -> None:
    start, moved = wild_model(HISTORY, N_USERS, N_ITEMS), after_histories("sparse")
    tables = (model.get_parameter("users.items.weight") for model in (start, moved))
    differs = torch.ne(*tables).any(dim=1).nonzero().flatten()
    # The first two items of the first user; the others come before no positive.
    assert differs.tolist() == [3, 7]


@pytest.mark.parametrize(("n_items", "by_rows"), [(60, False), (61, True)])
def test_pooled_items_are_taken_by_rows_where_they_are_many(n_items: int, by_rows: bool) -> None:
    model = after_histories("auto", n_items)
    assert model.sparse_pooled_items == by_rows
    gradient = model.get_parameter("users.items.weight").grad
    assert gradient is not None
    assert gradient.is_sparse == by_rows


def test_free_users_have_no_pooled_items_by_rows() -> None:
    model = build_model(MODELS[0], N_USERS, N_ITEMS)
    Adam(model, config_of("sparse"), 0.1, None)
    assert not model.sparse_pooled_items


def test_a_table_no_larger_than_the_batch_is_never_taken_by_rows() -> None:
    model = build_model(ModelConfig(kind="nbpr", factors=1), 3, 6)
    Adam(model, config_of("sparse"), 0.1, None)
    assert (model.sparse_users, model.sparse_items) == (False, False)


def test_the_one_cycle_schedule_ends_where_training_goes_on_for_longer() -> None:
    model = build_model(MODELS[1], N_USERS, N_ITEMS)
    adam = Adam(model, config_of("sparse"), 0.1, 10)
    rates = []
    for _ in range(13):
        adam.step()
        rates.append([group["lr"] for o in adam._optimizers for group in o.param_groups])
    assert len(rates[0]) == 2  # of the dense and of the sparse parameters
    assert max(rates) == pytest.approx([0.1, 0.1])
    assert rates[-1] == rates[8] == pytest.approx([0.0, 0.0], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_config", "more"),
    [
        (MODELS[0], {"l2": 1e-4}),
        (MODELS[0], {"shared_negatives": 40, "batch_size": 64}),
        (MODELS[1], {}),
        (MODELS[2], {"l2": 1e-4}),
        (ModelConfig(kind="nbpr", factors=4, users="history"), {}),
    ],
    ids=["nbpr", "nbpr shared", "dncr", "neupr", "nbpr history"],
)
def test_training_by_rows_lowers_the_loss(
    model_config: ModelConfig, more: dict[str, float], split: Split
) -> None:
    torch.manual_seed(0)
    model = build_model(model_config, split.train.n_users, split.train.n_items)
    settings = {"batch_size": 32, "negatives": 2, "dropout": 0.1} | more
    training = TrainConfig(optimizer="sparse", device="cpu", **settings)  # type: ignore[arg-type]
    history = train_loop(model, split, training, TrainingPhase("by rows", 2, 3e-2))
    assert model.sparse_items
    assert model.sparse_users
    assert model.sparse_pooled_items == (model_config.users == "history")
    assert history.loss[1] < 0.99 * history.loss[0]


@pytest.mark.slow
def test_a_batch_of_whole_users_may_hold_more_items_than_there_are(split: Split) -> None:
    """A tower projects the whole table then, which gives no gradient by rows."""
    torch.manual_seed(0)
    shape = ModelConfig(kind="dncr", factors=2, layers=3, users="history")
    model = build_model(shape, split.train.n_users, split.train.n_items)
    training = TrainConfig(optimizer="sparse", batch_size=39, negatives=2, device="cpu")
    history = train_loop(model, split, training, TrainingPhase("by rows", 2, 3e-2))
    assert model.sparse_items
    assert history.loss[1] < history.loss[0]


@pytest.mark.parametrize("optimizer", ["dense", "sparse"])
def test_the_fixed_weight_of_bpr_mf_stays_1(
    optimizer: Optimizer, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ncr_core.training.trainer.HELD_OUT_STEPS", 4)
    shape = ModelConfig(kind="nbpr", factors=4, learn_weights=False)
    model = build_model(shape, split.train.n_users, split.train.n_items)
    training = TrainConfig(
        loss="bpr", optimizer=optimizer, batch_size=64, negatives=1, device="cpu"
    )
    train_loop(model, split, training, TrainingPhase("bpr-mf", 1, 1e-1))
    items = model.get_parameter("items.weight").clone()
    learn_held_out(model, split.all_seen, training)
    assert not model.get_parameter("items.weight").equal(items)
    weight = model.get_parameter("weight")
    assert weight.eq(1).all()
    assert not weight.requires_grad
