"""An epoch has every positive once, with negatives that the user has not interacted with."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from ncr_core.data import Interactions, Split, build_interactions, leave_latest_out
from ncr_core.data.interactions import UserFeedback
from ncr_core.errors import ConfigError, DataError
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.training import TrainConfig, train_model
from ncr_core.training import batches as module
from ncr_core.training.batches import Batches, NegativeSampler, Rows, SharedRows
from ncr_core.training.trainer import Adam, learn_held_out
from tests.ncr_core.conftest import pairs_of

CPU = torch.device("cpu")
MODES = pytest.mark.parametrize(
    ("shared", "histories"),
    [(0, False), (30, False), (0, True), (30, True)],
    ids=["own", "shared", "own of histories", "shared of histories"],
)


def batches_of(
    train: Interactions, *, shared: int = 0, histories: bool = False, seed: int = 0, size: int = 500
) -> Batches:
    config = TrainConfig(batch_size=size, negatives=3, shared_negatives=shared, seed=seed)
    return Batches(train, config, CPU, histories=histories)


def users_of(rows: Rows | SharedRows) -> Tensor:
    """(R,) the user of each row."""
    return rows.users[rows.row] if isinstance(rows, SharedRows) else rows.users


def tensors_of(rows: object) -> list[Tensor]:
    found: list[Tensor] = []
    for field in fields(rows):  # type: ignore[arg-type]
        value = getattr(rows, field.name)
        if is_dataclass(value):
            found += tensors_of(value)
        elif value is not None:
            found.append(value)
    return found


@MODES
def test_an_epoch_has_every_positive_exactly_once(
    synthetic: Interactions, shared: int, histories: bool
) -> None:
    batches = batches_of(synthetic, shared=shared, histories=histories)
    for _ in range(2):
        keys = torch.cat([users_of(rows) * batches.n_items + rows.items for rows in batches])
        assert keys.sort().values.tolist() == synthetic.keys.tolist()
        assert keys.tolist() != synthetic.keys.tolist()


@MODES
def test_a_batch_has_its_size_or_as_many_rows_as_whole_users_give(
    synthetic: Interactions, shared: int, histories: bool
) -> None:
    batches = batches_of(synthetic, shared=shared, histories=histories)
    sizes = [len(rows.items) for rows in batches]
    if not shared and not histories:
        assert sizes[:-1] == [500] * (len(sizes) - 1)
        assert 0 < sizes[-1] <= 500
    longest = int(np.diff(synthetic.indptr).max())
    assert max(sizes) < 500 + longest
    assert len(sizes) == len(batches) == -(-synthetic.nnz // 500)


@pytest.mark.parametrize("shared", [0, 3])
def test_a_user_of_several_batches_leaves_fewer_of_them(shared: int) -> None:
    rows = [("long", str(i), float(i)) for i in range(9)]
    rows += [(f"short {n}", str(i), float(i)) for n in range(3) for i in range(10, 12)]
    matrix = build_interactions(rows)
    batches = batches_of(matrix, shared=shared, histories=True, size=3)
    for _ in range(5):
        sizes = [len(part.items) for part in batches]
        assert sum(sizes) == matrix.nnz
        assert 0 not in sizes
        assert len(sizes) < len(batches) == 5


@pytest.mark.parametrize("histories", [False, True])
def test_own_negatives_are_never_interacted_with(synthetic: Interactions, histories: bool) -> None:
    for rows in batches_of(synthetic, histories=histories):
        assert isinstance(rows, Rows)
        assert rows.negatives.shape == (len(rows.items), 3)
        users = rows.users.unsqueeze(1).expand_as(rows.negatives)
        assert not synthetic.contains(users.numpy(), rows.negatives.numpy()).any()


@pytest.mark.parametrize("histories", [False, True])
def test_valid_is_exactly_what_was_not_interacted_with(
    synthetic: Interactions, histories: bool
) -> None:
    for rows in batches_of(synthetic, shared=30, histories=histories):
        assert isinstance(rows, SharedRows)
        assert rows.negatives.shape == (30,)
        assert rows.valid.shape == (len(rows.users), 30)
        users, items = torch.broadcast_tensors(rows.users.unsqueeze(1), rows.negatives)
        assert (rows.valid.numpy() == ~synthetic.contains(users.numpy(), items.numpy())).all()
        if histories:
            assert rows.row.equal(torch.arange(len(rows.items)))
        else:
            assert len(rows.users.unique()) == len(rows.users)


@pytest.mark.parametrize("more", [0, 1, 1_000])
def test_as_many_shared_negatives_as_items_are_all_items_in_order(
    synthetic: Interactions, more: int
) -> None:
    for rows in batches_of(synthetic, shared=synthetic.n_items + more):
        assert rows.negatives.equal(torch.arange(synthetic.n_items))
    fewer = next(iter(batches_of(synthetic, shared=synthetic.n_items - 1)))
    assert not fewer.negatives.equal(torch.arange(synthetic.n_items - 1))


@pytest.mark.parametrize("shared", [0, 30])
def test_histories_are_the_users_sequences_and_the_rows_places_in_them(
    synthetic: Interactions, shared: int
) -> None:
    for rows in batches_of(synthetic, shared=shared, histories=True):
        own = rows.histories
        assert own is not None
        assert own.items[own.position].equal(rows.items)
        places = zip(
            users_of(rows).tolist(),
            own.start.tolist(),
            own.position.tolist(),
            own.end.tolist(),
            strict=True,
        )
        for user, start, at, end in places:
            assert start <= at < end
            assert own.items[start:end].tolist() == synthetic.items_of(user).tolist()


def test_the_first_ten_positives_of_a_user_count_more(synthetic: Interactions) -> None:
    config = TrainConfig(batch_size=500, negatives=3, early_weight=4.0)
    weighted = replace(synthetic, weights=np.full(synthetic.nnz, 0.5, dtype=np.float32))
    for train, factor in ((synthetic, 1.0), (weighted, 0.5)):
        for rows in Batches(train, config, CPU, histories=True):
            assert rows.histories is not None
            assert rows.weights is not None
            place = rows.histories.position - rows.histories.start
            assert rows.weights.tolist() == [factor * (4.0 if p < 10 else 1.0) for p in place]


def test_a_long_history_leaves_a_batch_fewer_shared_negatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch of whole users ends with the one in whom it is full."""
    monkeypatch.setattr(module, "MAX_CELLS", 6_000)
    rows = [("long", f"i{n}", n) for n in range(280)]
    rows += [(f"u{u}", f"i{(u * 7 + n) % 300}", n) for u in range(60) for n in range(5)]
    for batch in batches_of(build_interactions(rows), shared=200, histories=True, size=20):
        assert isinstance(batch, SharedRows)
        assert batch.valid.numel() <= 6_000


def test_there_are_no_histories_unless_they_are_asked_for(synthetic: Interactions) -> None:
    assert next(iter(batches_of(synthetic))).histories is None
    assert next(iter(batches_of(synthetic, shared=5))).histories is None


def test_too_few_items_for_the_negatives_are_an_error() -> None:
    rows = [("u", "a", 0.0), ("u", "b", 1.0), ("v", "c", 0.0)]
    with pytest.raises(ConfigError, match=r"3 items are too few for 3 negatives .* at least 4"):
        batches_of(build_interactions(rows))
    batches = batches_of(build_interactions([*rows, ("v", "d", 1.0)]))
    assert sum(len(part.items) for part in batches) == 4


@MODES
def test_the_same_seed_gives_the_same_batches(
    synthetic: Interactions, shared: int, histories: bool
) -> None:
    def epoch(batches: Batches) -> Tensor:
        return torch.cat([x.flatten().long() for rows in batches for x in tensors_of(rows)])

    one, two, other = (
        batches_of(synthetic, shared=shared, histories=histories, seed=seed) for seed in (3, 3, 4)
    )
    first = epoch(one)
    assert first.equal(epoch(two))
    assert not first.equal(epoch(other))
    second = epoch(one)
    assert not first.equal(second)
    assert second.equal(epoch(two))


def sampler(seen: Interactions, seed: int = 0) -> NegativeSampler:
    return NegativeSampler(seen, CPU, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cells", [0, 2**28], ids=["sorted keys", "mask"])
def test_never_a_seen_item(
    synthetic: Interactions, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MASK_CELLS", cells)
    users = torch.arange(synthetic.n_users).repeat(5)
    drawn = sampler(synthetic).sample(users, 7)
    assert drawn.shape == (len(users), 7)
    every = users.unsqueeze(1).expand_as(drawn)
    assert not synthetic.contains(every.numpy(), drawn.numpy()).any()


def test_uniform_over_what_is_unseen() -> None:
    seen = build_interactions([("u", "a", 0), ("v", "b", 0), ("v", "c", 0), ("v", "d", 0)])
    drawn = sampler(seen).sample(torch.zeros(4_000, dtype=torch.long), 3).flatten()
    share = torch.bincount(drawn, minlength=4) / len(drawn)
    assert share[0] == 0
    assert (share[1:] - 1 / 3).abs().max() < 0.02


def test_a_user_with_one_unseen_item_gets_just_that() -> None:
    n = 5_000
    rows = [("u", str(i), 0.0) for i in range(n)] + [("v", "last", 0.0)]
    drawn = sampler(build_interactions(rows)).sample(torch.tensor([0, 0]), 4)
    assert drawn.eq(n).all()


def test_a_user_who_has_seen_everything_is_an_error() -> None:
    with pytest.raises(DataError, match="seen every one of 1 items"):
        sampler(build_interactions([("u", "a", 0)]))


def test_the_same_seed_draws_the_same(synthetic: Interactions) -> None:
    users = torch.arange(synthetic.n_users)
    assert sampler(synthetic, 3).sample(users, 4).equal(sampler(synthetic, 3).sample(users, 4))
    assert not sampler(synthetic, 3).sample(users, 4).equal(sampler(synthetic, 4).sample(users, 4))


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


@pytest.mark.slow
@WAYS
def test_nothing_stated_and_equal_weights_change_not_a_bit(
    split: Split, plain: Plain, model: ModelConfig, changed: dict[str, object]
) -> None:
    empty = replace(split, train=replace(split.train, feedback=UserFeedback()))
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
    stated: UserFeedback,
    triples: np.ndarray,
    model: ModelConfig,
    changed: dict[str, object],
) -> list[float]:
    """The share of pairs in the right order: without what is stated, with it, and ignoring it."""
    told = replace(split, train=replace(split.train, feedback=stated))
    models = (
        plain(model, changed),
        trained(told, model, **changed),
        trained(told, model, stated_weight=0, **changed),
    )
    return [float((margins(m, triples) > 0).float().mean()) for m in models]


@pytest.mark.slow
@WAYS
def test_dislikes_are_learned(
    split: Split,
    told: Interactions,
    plain: Plain,
    model: ModelConfig,
    changed: dict[str, object],
) -> None:
    assert told.feedback is not None
    dislikes = told.feedback.disliked
    stated = UserFeedback(disliked=dislikes, disliked_weights=np.ones(len(dislikes), np.float32))
    triples = np.array([(u, i, j) for u, j in dislikes.tolist() for i in split.train.items_of(u)])
    without, with_it, ignored = learned_triples(split, plain, stated, triples, model, changed)
    assert with_it > 0.9 > max(without, ignored)


@pytest.mark.slow
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
    stated = UserFeedback(pairs=pairs, pair_weights=np.ones(len(pairs), np.float32))
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


@pytest.mark.slow
def test_the_held_out_items_are_learned_with_what_was_stated_of_them(told: Interactions) -> None:
    split = leave_latest_out(told)
    assert told.feedback is not None
    assert split.train.feedback is not None
    kept = {tuple(pair) for pair in split.train.feedback.pairs.tolist()}
    held = pairs_of([tuple(p) for p in told.feedback.pairs.tolist() if tuple(p) not in kept], 3)
    assert len(held) > 20
    model = trained(split, NBPR)
    before = float(margins(model, held).mean())
    models = [deepcopy(model), deepcopy(model)]
    for one, weight in zip(models, (1.0, 0.0), strict=True):
        learn_held_out(one, told, TrainConfig(seed=3, device="cpu", stated_weight=weight))
    told_of_them, not_told = (float(margins(one, held).mean()) for one in models)
    assert told_of_them > max(before, not_told) + 0.05
