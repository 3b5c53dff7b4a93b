"""Effects of own items, beside leaving each out by brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from ncr_core.checkpoint import Checkpoint
from ncr_core.explain import influence
from ncr_core.explain.influence import Floats, InfluenceExplainer, IntArray
from ncr_core.fold_in import Evidence, FoldIn, FoldInConfig
from ncr_core.fold_in.evidence import PairSampler, WeightedPairs
from ncr_core.inference.engine import InferenceEngine
from ncr_core.inference.retrieval import ItemFilter, RankRequest, UserState
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.ranking import ExactRanker
from tests.ncr_core.conftest import CONFIGS, config_name, wild_model

USERS, ITEMS = 60, 38  # few enough for own items to be compared with all others
TO_THE_END = FoldInConfig(steps=200, tolerance=1e-7, strength=0.5)
OWN = np.array([4, 31, 8, 30, 2, 25, 16])
SHOWN = np.array([12, 20, 33, 5, 37])

FREE = [config for config in CONFIGS if config.users == "free"]
POOLED = [config for config in CONFIGS if config.users == "history"]


def mild_model(config: ModelConfig, items: int = ITEMS) -> PairwiseRanker:
    """With margins of a few, as those of trained models are."""
    model = wild_model(config, USERS, items)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)
    return model


def attribution_of(fold_in: FoldIn) -> InfluenceExplainer:
    return InfluenceExplainer(fold_in, ExactRanker(fold_in.model), torch.tensor([1, 9, 22, 35]))


def mean_margins(model: PairwiseRanker, vector: Tensor, shown: IntArray) -> Tensor:
    """(n,) of each shown item over the others, by the equation as written."""
    margins = []
    for s in shown:
        over = [t for t in shown if t != s]
        i, j = torch.full((len(over),), int(s)), torch.tensor(over)
        users = vector.expand(len(over), -1)
        margins.append((model.logits(users, i, j) - model.logits(users, j, i)).mean())
    return torch.stack(margins)


def minimum(model: PairwiseRanker, fold_in: FoldIn, pairs: WeightedPairs, start: Floats) -> Tensor:
    """(E,) what minimises the loss of these pairs, next to where it starts; by LBFGS."""
    mean, basis = (torch.from_numpy(x) for x in (fold_in.prior.mean, fold_in.prior.basis))
    first = torch.linalg.lstsq(basis, torch.from_numpy(start) - mean).solution
    v = first.clone().requires_grad_(True)
    i, j, w = (torch.from_numpy(x) for x in (pairs.winners, pairs.losers, pairs.weights))
    optimizer = torch.optim.LBFGS(
        [v],
        max_iter=500,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        users = (mean + basis @ v).expand(len(i), -1)
        half = (model.logits(users, i, j) - model.logits(users, j, i)) / 2
        loss = (w * torch.nn.functional.softplus(-half)).sum() + v.square().sum() / 2
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return (mean + basis @ v).detach()


def by_brute_force(
    model: PairwiseRanker, fold_in: FoldIn, evidence: Evidence, shown: IntArray
) -> tuple[Tensor, IntArray, Floats]:
    """The user's vector, and own items with their effects as they are defined."""
    double = model.double()
    maker = PairSampler(model.n_items, fold_in.config)
    own, weights = maker.weighted_items(evidence)
    others = maker.sample(evidence, likes=False)
    j = np.setdiff1d(np.arange(model.n_items), [*evidence.items, *evidence.disliked])

    def without(item: int | None) -> WeightedPairs:
        kept = own != item if item is not None else np.ones(len(own), bool)
        each = fold_in.config.strength * weights[kept] / len(j)
        return WeightedPairs(
            np.concatenate([own[kept].repeat(len(j)), others.winners]),
            np.concatenate([np.tile(j, kept.sum()), others.losers]),
            np.concatenate([each.repeat(len(j)), others.weights]),
        )

    vector = minimum(double, fold_in, without(None), fold_in.prior.mean)
    margins = mean_margins(double, vector, shown)
    effects = [
        margins
        - mean_margins(double, minimum(double, fold_in, without(int(k)), vector.numpy()), shown)
        for k in own
    ]
    found: Floats = torch.stack(effects, dim=1).numpy()
    model.float()
    return vector, own, found


def agreement(found: Floats, expected: Floats) -> tuple[float, float]:
    """The correlation, and what is off as a share of all."""
    together = np.corrcoef(found.ravel(), expected.ravel())[0, 1]
    return float(together), float(np.abs(found - expected).sum() / np.abs(expected).sum())


@pytest.mark.slow
@pytest.mark.parametrize("config", FREE, ids=config_name)
def test_effects_are_those_of_leaving_each_own_item_out(config: ModelConfig) -> None:
    model = mild_model(config)
    fold_in = FoldIn(model, TO_THE_END, compiled=False)
    evidence = Evidence(OWN)
    vector, own, expected = by_brute_force(model, fold_in, evidence, SHOWN)
    items, effects = attribution_of(fold_in).effects(vector, evidence, SHOWN, trained=False)
    assert items.tolist() == own.tolist() == sorted(OWN.tolist())
    assert effects.shape == (len(SHOWN), len(OWN))
    assert effects.sum(axis=0) == pytest.approx(0, abs=1e-5)  # margins are against each other
    if np.abs(expected).max() < 1e-9:  # the user's vector plays no part in the order
        assert np.abs(effects).max() < 1e-9
        return
    together, off = agreement(effects, expected)
    if config.activation == "tanh" and config.kind != "twotower" and not config.shared_embeddings:
        assert together > 0.99
        assert off < 0.1
    else:  # kinks, or a curvature that is not taken into account
        assert together > 0.9


def test_weights_dislikes_and_stated_preferences_are_part_of_the_loss() -> None:
    model = mild_model(ModelConfig(kind="nbpr", factors=6))
    fold_in = FoldIn(model, TO_THE_END, compiled=False)
    evidence = Evidence(
        OWN,
        weights=np.array([1.0, 5.0, 1.0, 0.2, 1.0, 1.0, 2.0]),
        disliked=np.array([16, 34]),
        pairs=np.array([[3, 4], [12, 20]]),
    )
    vector, own, expected = by_brute_force(model, fold_in, evidence, SHOWN)
    items, effects = attribution_of(fold_in).effects(vector, evidence, SHOWN, trained=False)
    assert items.tolist() == own.tolist() == [2, 4, 8, 25, 30, 31]  # 16 is disliked
    assert agreement(effects, expected)[1] < 0.1


def test_a_step_with_leverage_comes_nearer_than_one_without() -> None:
    """Of one own item the whole pull is its own: H⁻¹g alone falls far short of leaving it out."""
    model = mild_model(ModelConfig(kind="nbpr", factors=4))
    fold_in = FoldIn(model, replace(TO_THE_END, strength=4.0), compiled=False)
    evidence = Evidence(np.array([7]))
    vector, _, expected = by_brute_force(model, fold_in, evidence, SHOWN)
    _, effects = attribution_of(fold_in).effects(vector, evidence, SHOWN, trained=False)
    assert agreement(effects, expected)[1] < 0.3
    left = torch.from_numpy(fold_in.prior.mean).float()
    whole = mean_margins(model, vector.float(), SHOWN) - mean_margins(model, left, SHOWN)
    assert expected[:, 0] == pytest.approx(whole.numpy(), abs=1e-4)


@pytest.mark.parametrize("config", POOLED, ids=config_name)
def test_a_pooled_vector_changes_as_its_pool_does(config: ModelConfig) -> None:
    model = wild_model(config, USERS, ITEMS)
    fold_in = FoldIn(model)
    vector = model.pooled_vector(torch.from_numpy(OWN))
    items, effects = attribution_of(fold_in).effects(vector, Evidence(OWN), SHOWN, trained=True)
    assert items.tolist() == sorted(OWN.tolist())
    slopes = torch.autograd.functional.jacobian(lambda u: mean_margins(model, u, SHOWN), vector)
    for at, item in enumerate(items):
        rest = model.pooled_vectors([torch.from_numpy(OWN[item != OWN])])[0]
        exact = mean_margins(model, vector, SHOWN) - mean_margins(model, rest, SHOWN)
        if config.kind == "nbpr":
            assert effects[:, at] == pytest.approx(exact.numpy(), abs=1e-4)
        assert effects[:, at] == pytest.approx((slopes @ (vector - rest)).numpy(), abs=1e-4)


@pytest.mark.parametrize("config", POOLED, ids=config_name)
@pytest.mark.parametrize("at_once", [1, 3, 32])
def test_pools_are_weighted_and_of_any_number_at_once(
    config: ModelConfig, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(influence, "POOLS_AT_ONCE", at_once)
    model = wild_model(config, USERS, ITEMS)
    own = np.append(OWN, OWN[0])  # the first once more
    weights = np.linspace(0.5, 2.0, len(own)).astype(np.float32)

    def pool(mask: npt.NDArray[np.bool_]) -> Tensor:
        return model.pooled_vector(torch.from_numpy(own[mask]), torch.from_numpy(weights[mask]))

    vector = pool(own >= 0)
    items, effects = attribution_of(FoldIn(model)).effects(
        vector, Evidence(own, weights), SHOWN, trained=True
    )
    assert items.tolist() == sorted(OWN.tolist())
    slopes = torch.autograd.functional.jacobian(lambda u: mean_margins(model, u, SHOWN), vector)
    for at, item in enumerate(items):
        expected = slopes @ (vector - pool(own != item))
        assert effects[:, at] == pytest.approx(expected.numpy(), abs=1e-4)


def test_the_pool_of_nothing_is_a_newcomer() -> None:
    config = ModelConfig(kind="nbpr", factors=4, users="history")
    model = wild_model(config, USERS, ITEMS)
    fold_in = FoldIn(model)
    vector = model.pooled_vector(torch.tensor([7]))
    _, effects = attribution_of(fold_in).effects(
        vector, Evidence(np.array([7])), SHOWN, trained=False
    )
    margins = [mean_margins(model, u, SHOWN).numpy() for u in (vector, fold_in.newcomer)]
    assert effects[:, 0] == pytest.approx(margins[0] - margins[1], abs=1e-4)


def test_a_trained_vector_gives_old_items_as_much_weight_as_new_ones() -> None:
    model = mild_model(ModelConfig(kind="neupr", factors=4))
    fold_in = FoldIn(model, replace(TO_THE_END, half_life=1.0))
    attribution, many = attribution_of(fold_in), np.arange(30)
    vector = model.user_vectors(torch.tensor([3]))[0]
    counted, _ = attribution.effects(vector, Evidence(many), SHOWN, trained=False)
    assert counted.tolist() == list(range(23, 30))  # older ones count less than a hundredth
    every, effects = attribution.effects(vector, Evidence(many), SHOWN, trained=True)
    assert every.tolist() == many.tolist()
    by_size = np.abs(effects).sum(axis=0).argsort()[-10:]
    assert (by_size < 15).sum() > 2


def test_after_a_break_own_items_count_as_much_less_as_the_scores_do() -> None:
    config = ModelConfig(kind="nbpr", factors=4, users="history", windows=(2, 0), by_gap=True)
    model = build_model(config, 1, 8).requires_grad_(False)
    evidence, everything = Evidence(np.array([1, 6])), ItemFilter(np.ones(8, dtype=np.bool_))
    model.remember(torch.from_numpy(evidence.items), torch.tensor([2]))
    model.users.gap_scale[2] = 0.25  # type: ignore[union-attr,index]
    items = [f"item-{row}" for row in range(8)]
    checkpoint = Checkpoint(model, ["ann"], items, np.ones(8, dtype=np.int64), [0, 7], {})
    engine = InferenceEngine(checkpoint, candidates=8)

    def effects(seconds: float) -> dict[tuple[int, int], float]:
        user = UserState(0, gap_class=engine.gap_class(seconds))
        (ranked,) = engine.rank([RankRequest(user, 8, everything, explain_by=evidence)])
        return {(item.row, why.row): why.effect for item in ranked for why in item.because}

    in_a_sitting, after_a_day = effects(60), effects(90_000)
    assert len(in_a_sitting) > 4
    assert effects(7_200) == in_a_sitting  # of this class nothing was learned
    assert after_a_day == pytest.approx({pair: e / 4 for pair, e in in_a_sitting.items()})
