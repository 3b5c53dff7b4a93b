"""Adam by rows moves what dense Adam moves, and no more; which of the two is chosen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ncr_core.data import Split
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.training import TrainConfig
from ncr_core.training.config import Optimizer
from ncr_core.training.loop import Schedule, learn_held_out, train_loop
from ncr_core.training.losses import bce_loss
from ncr_core.training.optimizers import Adam
from tests.ncr_core.conftest import wild_model

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
    return {
        name: table
        for name, table in model.named_parameters()
        if name.startswith(("users", "items"))
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
        assert tables_of(start)[name].grad is None


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
    model = build_model(ModelConfig(kind="nbpr", factors=1), n_users, n_items)
    Adam(model, config_of("auto", **more), 0.1, None)
    assert (model.sparse_users, model.sparse_items) == (users_by_rows, items_by_rows)
    users, i, j = FIRST
    bce_loss(*model.pair_logits(model.user_vectors(users), i, j)).backward()  # type: ignore[no-untyped-call]
    for name, by_rows in (("users.weight", users_by_rows), ("items.weight", items_by_rows)):
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        assert gradient.is_sparse == by_rows


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
    history = train_loop(model, split, training, Schedule("by rows", 2, 3e-2))
    assert model.sparse_items
    assert model.sparse_users
    assert history.loss[1] < 0.99 * history.loss[0]


def test_a_batch_of_whole_users_may_hold_more_items_than_there_are(split: Split) -> None:
    """A tower projects the whole table then, which gives no gradient by rows."""
    torch.manual_seed(0)
    shape = ModelConfig(kind="dncr", factors=2, layers=3, users="history")
    model = build_model(shape, split.train.n_users, split.train.n_items)
    training = TrainConfig(optimizer="sparse", batch_size=39, negatives=2, device="cpu")
    history = train_loop(model, split, training, Schedule("by rows", 2, 3e-2))
    assert model.sparse_items
    assert history.loss[1] < history.loss[0]


@pytest.mark.parametrize("optimizer", ["dense", "sparse"])
def test_the_fixed_weight_of_bpr_mf_stays_1(
    optimizer: Optimizer, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ncr_core.training.loop.HELD_OUT_STEPS", 4)
    shape = ModelConfig(kind="nbpr", factors=4, learn_weights=False)
    model = build_model(shape, split.train.n_users, split.train.n_items)
    training = TrainConfig(
        loss="bpr", optimizer=optimizer, batch_size=64, negatives=1, device="cpu"
    )
    train_loop(model, split, training, Schedule("bpr-mf", 1, 1e-1))
    items = model.get_parameter("items.weight").clone()
    learn_held_out(model, split.all_seen, training)
    assert not model.get_parameter("items.weight").equal(items)
    weight = model.get_parameter("weight")
    assert weight.eq(1).all()
    assert not weight.requires_grad
