"""What is learned of weights, disliked items and stated preferences."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from ncr_core.data import Interactions, Split, leave_latest_out
from ncr_core.data.stated import Stated
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.training import TrainConfig, train_model
from ncr_core.training.batches import Batches, Rows
from ncr_core.training.loop import learn_held_out
from ncr_core.training.optimizers import Adam
from tests.ncr_core.conftest import pairs_of

CPU = torch.device("cpu")
Plain = Callable[[ModelConfig, dict[str, object]], PairwiseRanker]


@pytest.fixture(scope="module")
def plain(split: Split) -> Plain:
    """Models that were told nothing, each trained once."""

    @cache
    def found(model: ModelConfig, changed: tuple[tuple[str, object], ...]) -> PairwiseRanker:
        return trained(split, model, **dict(changed))

    return lambda model, changed: found(model, tuple(changed.items()))


def trained(split: Split, model: ModelConfig, **changed: object) -> PairwiseRanker:
    torch.manual_seed(0)  # of dropout
    config = TrainConfig(epochs=4, seed=3, device="cpu", **changed)  # type: ignore[arg-type]
    return train_model(model, config, split).model


def margins(model: PairwiseRanker, triples: np.ndarray) -> Tensor:
    """z_uij − z_uji of (T, 3) users, winners and losers."""
    users, i, j = torch.from_numpy(triples).T
    with torch.no_grad():
        vectors = model.user_vectors(users)
        return model.logits(vectors, i, j) - model.logits(vectors, j, i)


NBPR = ModelConfig(kind="nbpr", factors=4)
WAYS = pytest.mark.parametrize(
    ("model", "changed"),
    [
        (NBPR, {}),
        (NBPR, {"shared_negatives": 30}),
        (NBPR, {"loss": "listwise", "shared_negatives": 120}),
        (NBPR, {"loss": "bpr", "optimizer": "sparse", "l2": 1e-4, "dropout": 0.1}),
        (ModelConfig(kind="dncr", factors=2, layers=3), {}),
        (ModelConfig(kind="neupr", factors=3, layers=2), {"fine_tune_epochs": 2}),
        (ModelConfig(kind="nbpr", factors=4, users="history"), {}),
        (
            ModelConfig(kind="nbpr", factors=4, users="history", windows=(2, 0)),
            {"shared_negatives": 30},
        ),
    ],
    ids=["nbpr", "shared", "listwise", "bpr", "dncr", "neupr", "history", "shared history"],
)


@WAYS
def test_nothing_stated_and_equal_weights_change_not_a_bit(
    split: Split, plain: Plain, model: ModelConfig, changed: dict[str, object]
) -> None:
    empty = replace(split, train=replace(split.train, stated=Stated()))
    second = trained(empty, model, **changed).state_dict()
    for name, value in plain(model, changed).state_dict().items():
        assert value.equal(second[name]), name


@pytest.mark.parametrize("loss", ["bce", "bpr"])
def test_without_any_of_it_training_is_the_plain_loop(split: Split, loss: str) -> None:
    """Every step written out: draw, score both orders, mean, Adam."""
    config = TrainConfig(epochs=2, seed=5, loss=loss, device="cpu", schedule="constant")  # type: ignore[arg-type]
    no_validation = replace(split, validation=np.full_like(split.validation, -1))
    found = train_model(NBPR, config, no_validation)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_model(NBPR, split.train.n_users, split.train.n_items)
    batches = Batches(split.train, config, CPU)
    optimizer = Adam(model, config, config.learning_rate, None)
    history = []
    softplus = torch.nn.functional.softplus
    for _ in range(2):
        total, steps = torch.zeros(()), 0
        for rows in batches:
            assert isinstance(rows, Rows)
            optimizer.zero_grad()
            z_uij, z_uji = model.pair_logits(
                model.user_vectors(rows.users), rows.items, rows.negatives
            )
            each = softplus(-z_uij) + softplus(z_uji) if loss == "bce" else softplus(-z_uij)
            each.mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += each.mean().detach()
            steps += 1
        history.append(float(total) / steps)
    assert found.history[0].loss == history
    for name, value in found.model.state_dict().items():
        assert value.equal(model.state_dict()[name]), name


def learned_triples(
    split: Split,
    plain: Plain,
    stated: Stated,
    triples: np.ndarray,
    model: ModelConfig,
    changed: dict[str, object],
) -> list[float]:
    """The share of pairs in the right order: without what is stated, with it, and ignoring it."""
    told = replace(split, train=replace(split.train, stated=stated))
    models = (
        plain(model, changed),
        trained(told, model, **changed),
        trained(told, model, stated_weight=0, **changed),
    )
    return [float((margins(m, triples) > 0).float().mean()) for m in models]


@WAYS
def test_dislikes_are_learned(
    split: Split,
    told: Interactions,
    plain: Plain,
    model: ModelConfig,
    changed: dict[str, object],
) -> None:
    assert told.stated is not None
    dislikes = told.stated.disliked
    stated = Stated(disliked=dislikes, disliked_weights=np.ones(len(dislikes), np.float32))
    triples = np.array([(u, i, j) for u, j in dislikes.tolist() for i in split.train.items_of(u)])
    without, with_it, ignored = learned_triples(split, plain, stated, triples, model, changed)
    assert with_it > 0.9 > max(without, ignored)


@WAYS
def test_statements_are_learned(
    split: Split, plain: Plain, model: ModelConfig, changed: dict[str, object]
) -> None:
    """Users say that they would rather have what hardly anyone takes."""
    by_popularity = np.argsort(split.train.item_counts())
    rows = []
    for user in range(0, split.train.n_users, 2):
        order = by_popularity[~np.isin(by_popularity, split.all_seen.items_of(user))]
        rows += [(user, int(order[k]), int(order[-1 - k])) for k in range(8)]
    pairs = pairs_of(rows, 3)
    stated = Stated(pairs=pairs, pair_weights=np.ones(len(pairs), np.float32))
    without, with_it, ignored = learned_triples(split, plain, stated, pairs, model, changed)
    assert with_it > 0.75 > 0.65 > max(without, ignored)


def test_heavier_positives_are_learned_more(synthetic: Interactions) -> None:
    """Half of each user's items count a hundred times the others."""
    heavy = np.random.default_rng(1).random(synthetic.nnz) < 0.5
    weights = np.where(heavy, 100, 1).astype(np.float32)
    none = np.full(synthetic.n_users, -1)
    plain, weighted = (
        trained(Split(matrix, none, none), NBPR)
        for matrix in (synthetic, replace(synthetic, weights=weights))
    )
    light_rivals = np.array(
        [
            (u, i, j)
            for u in range(100)
            for i in synthetic.items_of(u)[heavy[synthetic.indptr[u] : synthetic.indptr[u + 1]]]
            for j in synthetic.items_of(u)[~heavy[synthetic.indptr[u] : synthetic.indptr[u + 1]]]
        ]
    )
    ahead = [float((margins(m, light_rivals) > 0).float().mean()) for m in (plain, weighted)]
    assert ahead[1] > ahead[0] + 0.1


def test_the_held_out_items_are_learned_with_what_was_stated_of_them(told: Interactions) -> None:
    split = leave_latest_out(told)
    assert told.stated is not None
    assert split.train.stated is not None
    kept = {tuple(pair) for pair in split.train.stated.pairs.tolist()}
    held = pairs_of([tuple(p) for p in told.stated.pairs.tolist() if tuple(p) not in kept], 3)
    assert len(held) > 20
    model = trained(split, NBPR)
    before = float(margins(model, held).mean())
    models = [deepcopy(model), deepcopy(model)]
    for one, weight in zip(models, (1.0, 0.0), strict=True):
        learn_held_out(one, told, TrainConfig(seed=3, device="cpu", stated_weight=weight))
    told_of_them, not_told = (float(margins(one, held).mean()) for one in models)
    assert told_of_them > max(before, not_told) + 0.05
