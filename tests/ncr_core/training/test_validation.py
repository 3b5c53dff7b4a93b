"""What several processes measure of a model in training is what one process measures."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from ncr_core.data.splits import Split
from ncr_core.evaluation.protocols import (
    ModelRanks,
    evaluate_full,
    evaluate_sampled,
    sampled_candidates,
)
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.train_config import TrainConfig
from ncr_core.training import validation
from ncr_core.training.ranks import DataParallelRanks, Ranks, ShardedTables, without_pooled
from ncr_core.training.trainer import remember
from ncr_core.training.validation import ValidationPositions, figures_of, validation_figures
from tests.ncr_core.conftest import wild_model


def _model(split: Split, kind: str, users: str) -> PairwiseRanker:
    torch.manual_seed(1)
    config = ModelConfig.from_dict({"kind": kind, "factors": 8, "users": users})
    model = build_model(config, split.train.n_users, split.train.n_items)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    remember(model, split.train)
    return model.requires_grad_(False)


class _Rank(Ranks):
    """A rank of several that talks to nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def measured(self, n_users: int) -> np.ndarray:
        return np.arange(self.rank, n_users, self.size)


def _found(
    model: PairwiseRanker, split: Split, config: TrainConfig, rank: int, size: int
) -> list[int]:
    """The positions that a rank finds, whose model has the vectors of its own users alone."""
    positions = ValidationPositions(model, split, config, _Rank(rank, size))
    own = model
    if model.config.users == "history":
        own = build_model(model.config, positions.train.n_users, model.n_items)
        own.load_state_dict(without_pooled(model), strict=False)
        remember(own, positions.train)
    return positions(own.requires_grad_(False)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["full", "sampled"])
@pytest.mark.parametrize(
    "kind, users",
    [("nbpr", "free"), ("nbpr", "history"), ("dncr", "history"), ("neupr", "history")],
)
@pytest.mark.parametrize("most", [7, 10_000])
def test_each_user_is_measured_by_one_rank(
    protocol: str, kind: str, users: str, most: int, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VALIDATION_USERS", "FULL_VALIDATION_USERS"):
        monkeypatch.setattr(validation, name, most)
    monkeypatch.setattr(validation, "MIN_RANKED_USERS", 5)
    monkeypatch.setattr(validation, "MAX_RANKED_CELLS", 5 * split.train.n_items)
    config = TrainConfig(validation=protocol, device="cpu")  # type: ignore[arg-type]
    model = _model(split, kind, users)
    whole = ValidationPositions(model, split, config)(model)
    assert (whole > 0).all()
    expected = 5 if protocol == "full" and kind != "nbpr" else most
    assert len(whole) == min(expected, (split.validation >= 0).sum())
    counted = validation.validated_users(split, model.config if protocol == "full" else None)
    assert counted == len(whole)
    for size in (2, 11):  # of which some may have no user
        found = [_found(model, split, config, rank, size) for rank in range(size)]
        assert np.sum(found, axis=0).tolist() == whole.tolist()
        counts = np.count_nonzero(found, axis=1)
        assert counts.max() - counts.min() <= 1


def test_a_configuration_tells_a_product_and_draws_nothing(config: ModelConfig) -> None:
    model = wild_model(config, 3, 5)
    state = torch.get_rng_state()
    assert validation.is_product(config) == ModelRanks(model).ranks_catalogue
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("n_users", [0, 1, 300])
def test_ranks_measure_every_user_once(size: int, n_users: int) -> None:
    def measured(kind: type[DataParallelRanks | ShardedTables]) -> list[list[int]]:
        every = []
        for rank in range(size):
            ranks = kind.__new__(kind)
            ranks.rank, ranks.size = rank, size
            every.append(ranks.measured(n_users).tolist())
        return every

    shares = measured(DataParallelRanks)
    assert sorted(chain(*shares)) == [*range(n_users)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert measured(ShardedTables) == [[*range(n_users)], *[[]] * (size - 1)]


def test_the_figures_are_those_of_the_protocols(split: Split) -> None:
    model = _model(split, "nbpr", "history")
    ranks = ModelRanks(model)
    full = evaluate_full(ranks, split, split.validation, seed=0)
    sampled = evaluate_sampled(ranks, sampled_candidates(split, split.validation, seed=3))
    config = TrainConfig(validation="full", seed=3, device="cpu")
    assert validation_figures(model, split, config) == (full.ndcg, full.hr)
    config = replace(config, validation="sampled")
    assert validation_figures(model, split, config) == (sampled.ndcg, sampled.hr)


def test_figures_by_hand() -> None:
    ndcg, hr = figures_of(np.array([1, 3, 11, 10]))
    assert hr == pytest.approx(3 / 4)
    assert ndcg == pytest.approx((1 + 1 / 2 + 1 / np.log2(11)) / 4)
