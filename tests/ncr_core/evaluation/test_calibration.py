"""Temperatures and calibration errors: worked by hand, by their properties, and on models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncr_core.data.splits import Split
from ncr_core.evaluation.calibration import (
    DecidedPairs,
    ReliabilityBin,
    calibrate,
    calibration_error,
    cross_fit,
    decided_pairs,
    fit_temperature,
    probability,
    reliability,
)
from ncr_core.evaluation.metrics import FloatArray
from ncr_core.evaluation.protocols import CandidateSet
from ncr_core.models import ModelConfig
from ncr_core.ranking import PAD
from ncr_core.training import TrainConfig, train_model
from tests.ncr_core.conftest import wild_model


def sampled_from(temperature: float, n: int, seed: int) -> FloatArray:
    """Margins of winners where margins of this temperature say who wins."""
    rng = np.random.default_rng(seed)
    margins = rng.normal(scale=4.0, size=n)
    won = rng.random(n) < probability(margins, temperature)
    return np.where(won, margins, -margins)


def test_a_probability_is_the_sigmoid_of_half_the_margin_over_the_temperature() -> None:
    found = probability(np.array([0.0, 2 * math.log(3), -2 * math.log(3)]))
    assert found == pytest.approx([0.5, 0.75, 0.25])
    assert probability(np.array([4 * math.log(3)]), 2.0) == pytest.approx([0.75])


def test_three_of_four_right_at_one_margin() -> None:
    """Smoothed, p = ¾ + (1/6)(¼ − ¾) = 2/3: with targets 5/6 and 1/6, (3·5 + 1)/(4·6)."""
    margins = np.array([2.0, 2.0, 2.0, -2.0])
    temperature = fit_temperature(margins)
    assert probability(np.array([2.0]), temperature) == pytest.approx(16 / 24)
    assert temperature == pytest.approx(1 / math.log(2))


def test_with_many_pairs_the_smoothing_is_gone() -> None:
    margins = np.repeat([2.0, -2.0], [300_000, 100_000])
    assert probability(np.array([2.0]), fit_temperature(margins)) == pytest.approx(0.75, abs=1e-5)


def test_the_likelihood_is_best_at_the_temperature_that_is_found() -> None:
    margins = sampled_from(2.0, 500, 3)
    target = (len(margins) + 1) / (len(margins) + 2)

    def loss(temperature: float) -> float:
        p = probability(margins, temperature)
        return float(-(target * np.log(p) + (1 - target) * np.log1p(-p)).mean())

    found = fit_temperature(margins)
    for factor in (0.9, 0.999, 1.001, 1.1):
        assert loss(found) < loss(found * factor)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_a_known_temperature_is_found_again(temperature: float) -> None:
    found = fit_temperature(sampled_from(temperature, 200_000, 1))
    assert found == pytest.approx(temperature, rel=0.03)


@settings(max_examples=60, deadline=None)
@given(
    margins=st.lists(st.floats(-50, 50), min_size=1, max_size=60),
    factor=st.floats(1e-3, 1e3),
)
def test_margins_times_a_number_are_the_temperature_times_it(
    margins: list[float], factor: float
) -> None:
    given_margins = np.array(margins)
    if np.abs(given_margins).mean() < 1e-6:
        return  # nearly nothing, which the number may make nothing
    before, after = fit_temperature(given_margins), fit_temperature(given_margins * factor)
    assert after == pytest.approx(before * factor, rel=1e-6)


def test_what_cannot_tell_gets_a_temperature_all_the_same() -> None:
    assert fit_temperature(np.zeros(7)) == 1.0
    worse_than_chance = fit_temperature(np.array([-1.0, -2.0, 1.0]))
    assert probability(np.array([2.0]), worse_than_chance)[0] == pytest.approx(0.5, abs=0.01)
    all_right = fit_temperature(np.array([3.0, 3.0]))  # two of two are not certainty
    assert probability(np.array([3.0]), all_right)[0] == pytest.approx(0.75)
    with pytest.raises(ValueError, match="finite"):
        fit_temperature(np.zeros(0))
    with pytest.raises(ValueError, match="finite"):
        fit_temperature(np.array([1.0, math.nan]))


def test_bins_by_hand() -> None:
    """Four pairs at p = ¾ of which two are right, four at p = 0.9 of which all are, and a tie."""
    low, high = 2 * math.log(3), 2 * math.log(9)
    margins = np.array([low, -low, low, -low, high, high, high, high])
    found = reliability(margins, bins=2)
    assert [one.pairs for one in found] == [4, 4]
    assert [one.probability for one in found] == pytest.approx([0.75, 0.9])
    assert [one.share for one in found] == [0.5, 1.0]
    assert calibration_error(found) == pytest.approx((0.25 + 0.1) / 2)
    assert reliability(np.zeros(3)) == [ReliabilityBin(3, 0.5, 0.5)]
    assert calibration_error(reliability(np.zeros(3))) == 0.0


def test_bins_hold_about_as_many_pairs_each_and_equal_ones_together() -> None:
    margins = sampled_from(1.0, 1_500, 5)
    assert {one.pairs for one in reliability(margins)} == {100}
    crowded = reliability(np.concatenate([margins, np.ones(1_000)]))
    assert sum(one.pairs for one in crowded) == 2_500
    assert max(one.pairs for one in crowded) >= 1_000


@settings(max_examples=40, deadline=None)
@given(margins=st.lists(st.floats(-20, 20), min_size=1, max_size=100))
def test_a_bin_in_the_one_order_is_off_by_as_much_in_the_other(margins: list[float]) -> None:
    """The error over both orders of each pair, in bins over [0, 1], is the one that is given."""
    given_margins = np.array(margins)
    bins = reliability(given_margins)
    both = [
        *bins,
        *(ReliabilityBin(one.pairs, 1 - one.probability, 1 - one.share) for one in bins),
    ]
    assert calibration_error(both) == pytest.approx(calibration_error(bins))
    assert 0.0 <= calibration_error(bins) <= 1.0


def test_the_error_is_measured_on_users_that_the_temperature_was_not_fitted_to() -> None:
    """Users of one temperature each: what is right for the one half is wrong for the other."""
    margins = np.concatenate([sampled_from(0.5, 20_000, 1), sampled_from(4.0, 20_000, 2)])
    found = cross_fit(DecidedPairs(np.repeat([3, 8], 20_000), margins))
    assert found is not None
    assert found.ece > 0.05
    assert 0.5 < found.temperature < 4.0
    mixed = cross_fit(DecidedPairs(np.tile(np.arange(400), 100), margins))
    assert mixed is not None
    assert mixed.ece < found.ece
    assert mixed.temperature == pytest.approx(found.temperature)


def test_a_temperature_mends_what_is_too_sure() -> None:
    margins = sampled_from(3.0, 60_000, 4)
    found = cross_fit(DecidedPairs(np.repeat(np.arange(600), 100), margins))
    assert found is not None
    assert found.temperature == pytest.approx(3.0, rel=0.05)
    assert found.ece < 0.01 < 0.05 < found.ece_before
    assert found.pairs == sum(one.pairs for one in found.bins) == 60_000
    stored = found.as_dict()
    assert stored["bins"][0].keys() == {"pairs", "probability", "share"}
    assert {k: v for k, v in stored.items() if k != "bins"} == found.figures()


def test_one_user_is_not_enough_to_measure_on() -> None:
    assert cross_fit(DecidedPairs(np.zeros(5, np.int64), np.ones(5))) is None
    assert cross_fit(DecidedPairs(np.zeros(0, np.int64), np.zeros(0))) is None


def test_pairs_are_the_held_out_item_over_each_of_the_others(config: ModelConfig) -> None:
    model = wild_model(config, 4, 9)
    candidates = CandidateSet(
        np.array([2, 0]), np.array([5, 1]), np.array([[7, 5, 3, PAD], [1, 8, 0, 4]])
    )
    pairs = decided_pairs(model, candidates)
    assert pairs.users.tolist() == [2, 2, 0, 0, 0]
    expected = [(2, 5, 7), (2, 5, 3), (0, 1, 8), (0, 1, 0), (0, 1, 4)]
    users, i, j = (torch.tensor(rows) for rows in zip(*expected, strict=True))
    vectors = model.user_vectors(users)
    margins = model.logits(vectors, i, j) - model.logits(vectors, j, i)
    assert pairs.margins == pytest.approx(margins.double().numpy(), abs=1e-4)


@pytest.mark.slow
def test_a_trained_model_is_calibrated_on_what_it_was_not_shown(split: Split) -> None:
    trained = train_model(
        ModelConfig(kind="nbpr", factors=8), TrainConfig(epochs=30, patience=30, seed=1), split
    )
    found = calibrate(trained.model, split)
    assert found is not None
    assert found.pairs > 20_000
    assert found.ece < 0.05
    assert found.ece < 0.7 * found.ece_before  # it was trained for too long, and is too sure
    again = calibrate(trained.model, split)
    assert again == found
