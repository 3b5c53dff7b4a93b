"""A tower as a product: its margins are those of the NBPR, and drawn negatives stand for all."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from ncr_core.data import Split
from ncr_core.errors import ConfigError
from ncr_core.models import DNCR, NBPR, ModelConfig, build_model
from ncr_core.models.user_embeddings import FreeUsers, PooledUsers
from ncr_core.recipes import Recipe, recipe
from ncr_core.training import TrainConfig, proposal, train_model
from ncr_core.training.batches import SharedRows
from ncr_core.training.losses import drawn_listwise_loss, listwise_loss
from ncr_core.training.pretraining import learn_everything, part_config, refit_config
from ncr_core.training.product_tower import CENTRE, CURVATURE, start_as_product
from ncr_core.training.proposal import Proposal
from ncr_core.training.trainer import remember

FREE = ModelConfig(kind="dncr", factors=6, layers=4)
RECENT = replace(FREE, users="history", windows=(1, 3, 0), by_length=True)
PRODUCT = TrainConfig(
    tower_start="product",
    epochs=2,
    fine_tune_epochs=1,
    fine_tune_rate=1e-4,
    batch_size=256,
    negatives=8,
    shared_negatives=30,
    loss="listwise",
    device="cpu",
)


def wild_nbpr(config: ModelConfig, split: Split) -> NBPR:
    """An NBPR with the factors of the product, all of whose parameters are random and large."""
    torch.manual_seed(1)
    shape = part_config(config, "nbpr")
    nbpr = cast(NBPR, build_model(shape, split.train.n_users, split.train.n_items))
    with torch.no_grad():
        for parameter in nbpr.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
        nbpr.weight.add_(1.0)
    remember(nbpr, split.train)
    return nbpr.requires_grad_(False)


def product_of(nbpr: NBPR, config: ModelConfig, split: Split) -> DNCR:
    torch.manual_seed(2)
    dncr = cast(DNCR, build_model(config, split.train.n_users, split.train.n_items))
    start_as_product(dncr, nbpr)
    remember(dncr, split.train)
    return dncr.requires_grad_(False)


def half_margins(model: NBPR | DNCR, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
    vectors = model.user_vectors(users)
    z_uij, z_uji = model.pair_logits(vectors, i, j)
    torch.testing.assert_close(model.logits(vectors, i, j[:, 0]), z_uij[:, 0], atol=2e-3, rtol=2e-3)
    return (z_uij - z_uji) / 2


def drawn_loss(model: DNCR, proposal: Proposal, rows: SharedRows, n_items: int) -> Tensor:
    items, log_counts = proposal.draw(rows, n_items)
    vectors = model.user_vectors(rows.users)
    both = model.pair_logits(vectors[rows.row], rows.items, items)
    return drawn_listwise_loss(*both, log_counts)


def test_four_units_make_a_product() -> None:
    """At c the second derivative of tanh is largest, and the third is 0."""
    x, delta = torch.meshgrid(
        *[torch.linspace(-0.1, 0.1, 9, dtype=torch.float64)] * 2, indexing="ij"
    )
    units = [
        s * t * torch.tanh(CENTRE + s * x + t * delta)
        for s, t in ((1, 1), (1, -1), (-1, 1), (-1, -1))
    ]
    product = sum(units) / (4 * CURVATURE)
    assert (product - x * delta).abs().max() < 0.015 * 0.01
    c = torch.tensor(CENTRE, dtype=torch.float64)
    square = 1 - torch.tanh(c) ** 2
    assert float(-2 * torch.tanh(c) * square) == pytest.approx(CURVATURE)
    assert float(square * (6 * torch.tanh(c) ** 2 - 2)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("layers", [2, 3, 4, 5])
@pytest.mark.parametrize("config", [FREE, RECENT], ids=["free", "by recency"])
def test_a_tower_has_the_margins_of_its_nbpr(
    config: ModelConfig, layers: int, split: Split
) -> None:
    config = replace(config, layers=layers)
    nbpr = wild_nbpr(config, split)
    assert nbpr.config.factors == config.tower_embedding // 4
    dncr = product_of(nbpr, config, split)
    users = torch.arange(split.train.n_users)
    i, j = (torch.randint(split.train.n_items, (len(users), n)) for n in (1, 20))
    expected = half_margins(nbpr, users, i[:, 0], j)
    found = half_margins(dncr, users, i[:, 0], j)
    small = expected.abs() < 1.0  # of larger ones the layers above are the tanh
    assert small.float().mean() > 0.05
    assert (found - expected)[small].norm() < 0.1 * expected[small].norm()
    decided = expected.abs() > 0.1
    assert (found.sign() == expected.sign())[decided].float().mean() > 0.99


def test_other_coordinates_stay_as_they_were_initialised(split: Split) -> None:
    nbpr = wild_nbpr(RECENT, split)
    torch.manual_seed(2)
    untouched = build_model(RECENT, split.train.n_users, split.train.n_items)
    dncr = product_of(nbpr, RECENT, split)
    for name in ("items.weight", "users.items.weight"):
        assert dncr.get_parameter(name)[:, 6:].equal(untouched.get_parameter(name)[:, 6:])
    assert isinstance(dncr.users, PooledUsers)
    assert dncr.users.mix[:, 6:, 6:].equal(untouched.get_parameter("users.mix")[:, 6:, 6:])
    assert not dncr.users.mix[:, 6:, :6].any()
    assert not dncr.users.mix[:, :6, 6:].any()


def test_a_factor_that_no_user_has_is_no_division_by_zero(split: Split) -> None:
    nbpr = wild_nbpr(FREE, split)
    assert isinstance(nbpr.users, FreeUsers)
    nbpr.users.weight[:, 0] = 0.0
    dncr = product_of(nbpr, FREE, split)
    assert all(parameter.isfinite().all() for parameter in dncr.parameters())


def test_the_drawn_loss_by_hand() -> None:
    z_uij, z_uji = torch.tensor([[2.0, 0.5]]), torch.tensor([[-1.0, 0.3]])
    counts = [3.0, 0.25]
    expected = math.log(1 + sum(n * math.exp(-z) for n, z in zip(counts, [2.0, 0.5], strict=True)))
    expected += math.log(1 + sum(n * math.exp(z) for n, z in zip(counts, [-1.0, 0.3], strict=True)))
    found = drawn_listwise_loss(z_uij, z_uji, torch.tensor([counts]).log())
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_items_that_are_drawn_alike_give_the_listwise_loss() -> None:
    z_uij, z_uji = torch.randn(5, 4), torch.randn(5, 4)
    weights = torch.rand(5)
    alike = torch.full((5, 4), math.log(40 / 4))
    found = drawn_listwise_loss(z_uij, z_uji, alike, weights)
    torch.testing.assert_close(found, listwise_loss(z_uij, z_uji, 40, weights))


def test_drawn_items_stand_for_all_valid_items(split: Split) -> None:
    """Also where the proposal and the model differ: the mean of Σ_j exp(z_j) is that of all."""
    nbpr = wild_nbpr(FREE, split)
    with torch.no_grad():
        nbpr.weight.mul_(0.05)
    dncr = product_of(wild_nbpr(FREE, split), FREE, split)
    with torch.no_grad():
        dncr.weight.mul_(0.02)
    users = torch.tensor([3])
    items = torch.arange(0, 40)
    valid = torch.ones(1, 40, dtype=torch.bool)
    valid[0, 5:15] = False
    rows = SharedRows(
        users, torch.zeros(2, dtype=torch.long), torch.tensor([50, 51]), items, valid, None
    )
    vectors = dncr.user_vectors(users)
    compared = items[valid[0]].repeat(2, 1)
    z_uij, z_uji = dncr.pair_logits(vectors[rows.row], rows.items, compared)
    every = drawn_listwise_loss(z_uij, z_uji, torch.zeros_like(z_uij))
    found = drawn_loss(dncr, Proposal(nbpr, 20_000, 0), rows, 40)
    assert found.item() == pytest.approx(every.item(), rel=0.01)
    # Half of the catalogue: each item stands for two.
    twice = drawn_loss(dncr, Proposal(nbpr, 20_000, 1), rows, 80)
    doubled = drawn_listwise_loss(z_uij, z_uji, torch.full_like(z_uij, math.log(2)))
    assert twice.item() == pytest.approx(doubled.item(), rel=0.01)


def test_a_user_without_any_valid_item_is_compared_with_nothing(split: Split) -> None:
    nbpr = wild_nbpr(FREE, split)
    dncr = product_of(nbpr, FREE, split)
    users, nothing = torch.tensor([3]), torch.zeros(1, 9, dtype=torch.bool)
    rows = SharedRows(
        users, torch.zeros(1, dtype=torch.long), torch.tensor([50]), torch.arange(9), nothing, None
    )
    assert drawn_loss(dncr, Proposal(nbpr, 4, 0), rows, 60).item() == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("config", [FREE, RECENT], ids=["free", "by recency"])
def test_a_dncr_is_trained_from_a_trained_nbpr(config: ModelConfig, split: Split) -> None:
    trained, again = (train_model(config, PRODUCT, split) for _ in range(2))
    nbpr, dncr = trained.history
    assert [nbpr.phase, dncr.phase] == ["pre-train nbpr", "train dncr"]
    assert [len(nbpr.loss), len(dncr.loss)] == [2, 1]
    assert nbpr.best is not None
    assert dncr.start[0] == pytest.approx(nbpr.best[0], abs=0.03)
    assert isinstance(trained.model, DNCR)
    for one, two in zip(
        trained.model.state_dict().values(), again.model.state_dict().values(), strict=True
    ):
        assert one.equal(two)
    assert refit_config(config, PRODUCT, trained.history) == replace(
        PRODUCT, epochs=nbpr.best_epoch, fine_tune_epochs=dncr.best_epoch
    )


def test_without_fine_tuning_it_stays_the_product(split: Split) -> None:
    config = replace(PRODUCT, fine_tune_epochs=0)
    trained = train_model(FREE, config, split)
    assert trained.history[1].loss == []
    assert trained.history[1].best == tuple(trained.history[1].start)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "neupr"},
        {"layers": 1},
        {"factors": 3, "layers": 2},
        {"activation": "relu"},
        {"users": "history", "windows": (1, 0), "window_matrices": False},
        {"users": "history", "windows": (1, 0), "attention_layers": 1},
    ],
)
def test_what_no_tower_can_start_as_a_product(changes: dict[str, Any]) -> None:
    shape = ModelConfig(**{"kind": "dncr", "factors": 4, **changes})
    with pytest.raises(
        ConfigError, match='tower_start="product" is for dncr with two or more layers'
    ):
        Recipe("any", shape, PRODUCT)


def test_a_training_without_a_recipe_refuses_such_a_tower_too(split: Split) -> None:
    shape = replace(FREE, activation="relu")
    with pytest.raises(ConfigError, match='tower_start="product" is for dncr'):
        train_model(shape, PRODUCT, split)
    nbpr = wild_nbpr(FREE, split)
    other = cast(DNCR, build_model(replace(FREE, factors=5), nbpr.n_users, nbpr.n_items))
    with pytest.raises(ConfigError, match="the product of 5 factors cannot start from 6 factors"):
        start_as_product(other, nbpr)


def test_the_tower_learns_from_what_the_nbpr_draws(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def draw(proposal: Proposal, rows: SharedRows, n_items: int) -> tuple[Tensor, Tensor]:
        drawn.append((len(rows.items), n_items))
        return original(proposal, rows, n_items)

    original = Proposal.draw
    monkeypatch.setattr(Proposal, "draw", draw)
    train_model(FREE, PRODUCT, split)
    assert sum(n for n, _ in drawn) == split.train.nnz
    assert {n_items for _, n_items in drawn} == {split.train.n_items}


@pytest.mark.parametrize("cells", [1, 2**24])
def test_many_rows_are_drawn_block_by_block(
    cells: int, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposal, "MAX_CELLS", cells)
    users, row = torch.tensor([3, 4]), torch.tensor([0, 1, 1, 0, 1])
    valid = torch.zeros(2, 9, dtype=torch.bool)
    valid[0, 2], valid[1, 7] = True, True
    rows = SharedRows(users, row, torch.arange(5), torch.arange(20, 29), valid, None)
    items, log_counts = Proposal(wild_nbpr(FREE, split), 3, 0).draw(rows, 9)
    assert items.equal(torch.where(row == 0, 22, 27).unsqueeze(1).expand(-1, 3))
    torch.testing.assert_close(log_counts, torch.full((5, 3), math.log(1 / 3)))


def test_everything_is_learned_by_another_fit(split: Split) -> None:
    """Not by passes against uniform items, which spoil the lists of such a tower."""
    any_recipe = Recipe("any", FREE, replace(PRODUCT, start="spectral"))
    trained = train_model(FREE, any_recipe.training, split)
    found = learn_everything(any_recipe, trained, split, split.all_seen)
    nothing = np.full(split.train.n_users, -1)
    again = refit_config(FREE, any_recipe.training, trained.history)
    expected = train_model(FREE, again, Split(split.all_seen, nothing, nothing)).model
    for one, two in zip(found.state_dict().values(), expected.state_dict().values(), strict=True):
        assert one.equal(two)


def test_a_product_may_start_from_als() -> None:
    als = recipe("nbpr-from-als")
    assert als.with_(kind="dncr", tower_start="product", shared_negatives=9).training.start == "als"
    with pytest.raises(ConfigError, match='start="als" is for nbpr with free users, and for such'):
        als.with_(kind="dncr")
    dncr = recipe("next-item-nbpr").with_(kind="dncr", tower_start="product")
    assert dncr.training.shared_negatives == 512
    assert dncr.with_(kind="nbpr").training.tower_start == "random"


def test_a_product_needs_items_to_draw_from(split: Split) -> None:
    unshared = replace(PRODUCT, shared_negatives=0)
    for refused in (
        lambda: Recipe("any", FREE, unshared),
        lambda: train_model(FREE, unshared, split),
    ):
        with pytest.raises(ConfigError, match='tower_start="product" needs shared_negatives'):
            refused()
