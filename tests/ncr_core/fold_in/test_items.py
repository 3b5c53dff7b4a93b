"""Items that training has not seen: their vectors, and the model that has them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ncr_core.data import Interactions, Split, leave_latest_out
from ncr_core.errors import ConfigError, DataError
from ncr_core.explain.influence import InfluenceExplainer
from ncr_core.fold_in import Evidence, FoldIn, FoldInConfig, ItemFoldIn, extended
from ncr_core.fold_in.evidence import WeightedPairs
from ncr_core.fold_in.items import item_rows
from ncr_core.fold_in.users import UserMargins
from ncr_core.models import ModelConfig
from ncr_core.ranking import ExactRanker
from ncr_core.ranking.similarity import ItemSpace
from ncr_core.recipes import recipe
from ncr_core.training import TrainConfig, train_model
from tests.ncr_core.conftest import config_name, wild_model

USERS, N = 12, 40


def test_rows_of_the_items_added_again_are_the_same_items(config: ModelConfig) -> None:
    model = wild_model(config, USERS, N)
    again = torch.tensor([7, 0, 33])
    larger = extended(model, item_rows(model, again))
    assert larger.n_items == N + 3
    users = model.user_vectors(torch.arange(USERS))
    assert larger.user_vectors(torch.arange(USERS)).equal(users)
    candidates = torch.tensor([[7, 5, 0, 33, 21]]).expand(USERS, -1)
    copies = torch.tensor([[N, 5, N + 1, N + 2, 21]]).expand(USERS, -1)
    ranked = ExactRanker(model).rank(users, candidates, 5)
    of_copies = ExactRanker(larger).rank(users, copies, 5)
    original = torch.cat([torch.arange(N), again])
    assert original[of_copies].equal(ranked)
    assert not any(parameter.requires_grad for parameter in larger.parameters())


def test_a_larger_model_shares_what_it_has_in_common() -> None:
    model = wild_model(ModelConfig(kind="neupr", factors=4), USERS, N)
    larger = extended(model, item_rows(model, torch.tensor([1])))
    before, after = model.state_dict(), larger.state_dict()
    assert after["users_d.weight"].data_ptr() == before["users_d.weight"].data_ptr()
    assert len(before["items_d.weight"]) == N
    twice = extended(larger, item_rows(model, torch.tensor([2, 3])))
    assert twice.n_items == N + 3


@pytest.mark.parametrize("by_length", [False, True])
def test_new_items_add_nothing_to_pooled_users(by_length: bool) -> None:
    shape = ModelConfig(
        kind="neupr",
        factors=3,
        layers=3,
        users="history",
        windows=(2, 0),
        by_length=by_length,
    )
    model = wild_model(shape, USERS, N)
    larger = extended(model, item_rows(model, torch.tensor([1])))
    assert all(not tensor.is_meta for tensor in [*larger.parameters(), *larger.buffers()])
    if not by_length:
        assert larger.pooled_vector(torch.tensor([N])).eq(0).all()
    own = torch.tensor([3, 4])
    assert larger.pooled_vector(own).equal(model.pooled_vector(own))
    fold_in = FoldIn(larger, trained_items=N)
    with_it, only_it, without = fold_in([Evidence(np.array(own)) for own in ([N, 3, N], [N], [3])])
    assert with_it.equal(without)
    assert only_it.equal(fold_in.newcomer)
    weighted = Evidence(np.array([3, N, 4]), np.array([1.0, 9.0, 2.0]))
    same = Evidence(np.array([3, 4]), np.array([1.0, 2.0]))
    assert fold_in([weighted]).equal(fold_in([same]))
    attribution = InfluenceExplainer(fold_in, ExactRanker(larger), torch.tensor([0, 5]))
    shown = np.array([7, 8, N])
    items, _ = attribution.effects(with_it, weighted, shown, trained=True)
    assert items.tolist() == [3, 4]
    items, effects = attribution.effects(only_it, Evidence(np.array([N])), shown, trained=True)
    assert (items.tolist(), effects.shape) == ([], (3, 0))


def test_new_items_leave_users_vectors_and_reasons_as_they_are(config: ModelConfig) -> None:
    model = wild_model(config, USERS, N)
    larger = extended(model, item_rows(model, torch.tensor([1, 2])))
    evidence = Evidence(np.array([3, 9, 4]), disliked=np.array([7]), pairs=np.array([[1, 2]]))
    before, after = FoldIn(model), FoldIn(larger, trained_items=N)
    vector = before([evidence])[0]
    assert after([evidence])[0].equal(vector)
    shown, anchors = np.array([11, 12, 13]), torch.tensor([0, 5])
    told, again = (
        InfluenceExplainer(fold_in, ExactRanker(fold_in.model), anchors).effects(
            vector, evidence, shown, trained=False
        )
        for fold_in in (before, after)
    )
    assert told[0].tolist() == again[0].tolist()
    assert told[1] == pytest.approx(again[1], rel=1e-9, abs=1e-12)


@pytest.mark.slow
def test_others_may_use_the_model_while_items_are_fitted(config: ModelConfig) -> None:
    model = wild_model(config, USERS, N)
    every = model.user_vectors(torch.arange(USERS))
    fold_in = ItemFoldIn(model)
    items = np.arange(N)
    pairs = WeightedPairs(items, items[::-1].copy(), np.ones(N))
    margins = UserMargins(model, pairs)
    own = every[3].double().numpy()
    alone, space, vectors = margins(own), ItemSpace(model.tables(), N), fold_in([every])
    compared = 0
    with ThreadPoolExecutor(1) as thread:
        for _ in range(100):  # a fitting may have ended before anything was compared
            fitting = thread.submit(fold_in, [every])
            while not fitting.done():
                compared += 1
                assert all(map(np.array_equal, margins(own), alone))
                assert np.array_equal(ItemSpace(model.tables(), N).vectors, space.vectors)
            assert fitting.result().equal(vectors)
            if compared >= 3:
                break
    assert compared >= 3


def test_vectors_that_do_not_fit_are_refused() -> None:
    model = wild_model(ModelConfig(kind="neupr", factors=4, item_bias=True), USERS, N)
    with pytest.raises(ConfigError, match="numbers each"):
        extended(model, torch.zeros(2, 5))
    some = model.user_vectors(torch.arange(3))
    for wrong in (torch.tensor([1.0]), torch.tensor([1.0, 0.0, 1.0])):
        with pytest.raises(DataError):
            ItemFoldIn(model)([some], [wrong])


@pytest.mark.slow
def test_an_item_vector_depends_on_its_users_alone(config: ModelConfig) -> None:
    model = wild_model(config, USERS, N)
    fold_in = ItemFoldIn(model)
    every = model.user_vectors(torch.arange(USERS))
    users = [every[:5], every[:0], every[3:4]]
    vectors = fold_in(users)
    for at, own in enumerate(users):
        assert fold_in([own]).equal(vectors[at : at + 1])
    mean = item_rows(model, torch.arange(N)).mean(0)
    torch.testing.assert_close(vectors[1], mean, atol=1e-5, rtol=1e-5)
    assert (vectors[0] - mean).norm() > 0.05 * mean.norm()
    assert ItemFoldIn(model)(users).equal(vectors)  # as another server has it


TRAINED = [
    ModelConfig(kind="nbpr", factors=8),
    ModelConfig(kind="nbpr", factors=8, users="history", windows=(1, 4, 0), item_bias=True),
    ModelConfig(kind="dncr", factors=8),
    ModelConfig(kind="neupr", factors=8),
    ModelConfig(kind="neupr", factors=8, users="history", windows=(2, 0), item_bias=True),
    recipe("next-item").with_(factors=8).model,
]


@pytest.mark.slow
@pytest.mark.parametrize("config", TRAINED, ids=config_name)
def test_an_item_is_shown_to_few_who_did_not_take_it_up(config: ModelConfig, split: Split) -> None:
    """Whoever took it up, as many users have it among the best tenth of the items; or up to as many
    as took it up, where these are more. The heavier they count, the further it is ahead with them.
    """
    n_users, n_items = split.train.n_users, split.train.n_items
    training = TrainConfig(
        epochs=12, fine_tune_epochs=2, start="spectral", batch_size=256, device="cpu"
    )
    model = train_model(config, training, split).model.requires_grad_(False)
    every = model.user_vectors(torch.arange(n_users))
    users = [every[:5], every[:5], every[5:25], every[25:26], every[:90]]
    weights = [torch.ones(len(own)) for own in users]
    weights[1] *= 10
    ranker = ExactRanker(extended(model, ItemFoldIn(model)(users, weights)))
    others = torch.arange(n_items).expand(n_users, -1)
    ahead: list[float] = []
    for at, own in enumerate(users):
        item = torch.full_like(others, n_items + at)
        wins = (ranker.compare(every, item, others) > 0).double().mean(1)
        share = float((wins >= 0.9).double().mean())
        least, most = FoldInConfig().shown, max(FoldInConfig().shown, len(own) / n_users)
        assert 0.6 * least < share < 1.6 * most, len(own)
        ahead.append(float(wins[:5].mean() - wins[5:].mean()))
    assert ahead[1] > ahead[0] > 0
    # As many as took it up may have it, however many of them are given.
    fold_in = ItemFoldIn(model, FoldInConfig(shown=0.001))
    of_all, of_few = (fold_in([every[:90]], n_users=[n])[0] for n in (90, 1))
    assert not of_all.equal(of_few)
    assert fold_in([every[:90]])[0].equal(of_all)


@pytest.mark.slow
def test_users_find_an_item_that_people_like_them_took_up(synthetic: Interactions) -> None:
    """Popular items left out of training and fitted to 10 users: the others have them ahead of
    where strangers have them."""
    chosen = np.argsort(-synthetic.item_counts())[:8]
    names = [name for at, name in enumerate(synthetic.item_ids) if at not in chosen]
    rest = synthetic.reindex(synthetic.user_ids, names)
    config = TrainConfig(epochs=12, fine_tune_epochs=3, batch_size=256, device="cpu")
    shape = ModelConfig(kind="neupr", factors=8)
    model = train_model(shape, config, leave_latest_out(rest)).model.requires_grad_(False)
    every = model.user_vectors(torch.arange(model.n_users))
    takers = [np.unique(synthetic.users[synthetic.items == item]) for item in chosen]
    vectors = ItemFoldIn(model)([every[torch.from_numpy(own[:10])] for own in takers])
    ranker = ExactRanker(extended(model, vectors))
    ahead: list[tuple[float, float]] = []
    for at, own in enumerate(takers):
        item = torch.full((model.n_users, 1), model.n_items + at)
        others = torch.arange(model.n_items).expand(model.n_users, -1)
        wins = (ranker.compare(every, item.expand_as(others), others) > 0).double().mean(1)
        strangers = np.setdiff1d(np.arange(model.n_users), own)
        ahead.append((float(wins[own[10:]].mean()), float(wins[strangers].mean())))
    found, met = np.mean(ahead, axis=0)
    assert found > met + 0.1
