"""Copeland's and Borda's orders, the certificate, and the share of cycles."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ranking_strategies import certified, cyclic_share
from ncr_core.errors import ConfigError
from ncr_core.models import ModelConfig
from ncr_core.ranking import PAD, ExactRanker, algorithm1
from ncr_core.ranking.tournament import mean_preference, top_positions, wins
from tests.ncr_core.conftest import wild_model


def tournament(rng: np.random.Generator, m: int) -> torch.Tensor:
    upper = np.triu(rng.standard_normal((m, m)), 1)
    return torch.from_numpy(upper - upper.T).unsqueeze(0)


def test_by_hand() -> None:
    # a > b > c > a, and each of them beats d; then a candidate that is not there.
    margins = torch.zeros(1, 5, 5)
    for i, j, by in ((0, 1, 2.0), (1, 2, 0.5), (2, 0, 1.0), (0, 3, 1.0), (1, 3, 1.0), (2, 3, 4.0)):
        margins[0, i, j], margins[0, j, i] = by, -by
    lengths = torch.tensor([4])
    won = wins(margins, lengths)
    assert won.tolist() == [[2, 2, 2, 0, -1]]
    assert top_positions(won, lengths, 3).tolist() == [[0, 1, 2]]  # ties: as they stand
    assert cyclic_share(won, lengths).tolist() == [0.25]
    assert not certified(won, lengths, 1).item()
    mean = mean_preference(margins, lengths)[0]
    sigmoid = lambda x: 1 / (1 + np.exp(-x / 2))  # noqa: E731
    assert mean[0].item() == pytest.approx((sigmoid(2.0) + sigmoid(-1.0) + sigmoid(1.0)) / 3)
    assert mean[2].item() == pytest.approx((sigmoid(1.0) + sigmoid(-0.5) + sigmoid(4.0)) / 3)
    assert top_positions(mean_preference(margins, lengths), lengths, 5).tolist() == [
        [2, 0, 1, 3, PAD]
    ]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), m=st.integers(1, 12), k=st.integers(1, 13))
def test_what_is_certified_is_algorithm1_in_any_order(seed: int, m: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    margins = tournament(rng, m)
    if seed % 2:  # transitive but for some pair
        margins = (torch.arange(m)[None] - torch.arange(m)[:, None]).double().unsqueeze(0)
        if m > 2:
            i, j = rng.permutation(m)[:2]
            margins[0, i, j], margins[0, j, i] = margins[0, j, i].clone(), margins[0, i, j].clone()
    lengths = torch.tensor([m])
    won = wins(margins, lengths)
    cycles = sum(
        sorted(int(won_in) for won_in in (margins[0][np.ix_(t, t)] > 0).sum(dim=1)) == [1, 1, 1]
        for t in combinations(range(m), 3)
    )
    triples = m * (m - 1) * (m - 2) // 6
    assert cyclic_share(won, lengths).item() == pytest.approx(cycles / max(1, triples))
    if certified(won, lengths, k).item():
        expected = top_positions(won, lengths, k)[0].tolist()
        for _ in range(3):
            order = rng.permutation(m).tolist()
            assert algorithm1(order, lambda i, j: bool(margins[0, i, j] > 0), k) == expected


def test_the_ranker_by_wins_and_by_mean_probability(config: ModelConfig, compiled: bool) -> None:
    model = wild_model(config, 12, 40)
    ranker = ExactRanker(model, compiled=compiled)
    users = model.user_vectors(torch.arange(12))
    candidates = torch.stack([torch.randperm(40)[:33] for _ in range(12)])
    lengths = torch.randint(0, 34, (12,))
    candidates[torch.arange(33) >= lengths.unsqueeze(1)] = PAD
    margins = ranker.all_margins(users, candidates)
    items = candidates.clamp(min=0)
    for i, j in ((0, 5), (31, 2), (17, 32)):
        both = lengths > max(i, j)
        expected = ranker.compare(users, items[:, i : i + 1], items[:, j : j + 1])[:, 0]
        assert torch.allclose(margins[both, i, j].double(), expected[both], atol=2e-4, rtol=1e-4)
        assert margins[both, i, j].sign().equal(expected[both].sign().to(margins.dtype))
        assert margins[~both, i, j].eq(0).all()
    for strategy, score in (("copeland", wins), ("borda", mean_preference)):
        ranked = ranker.rank(users, candidates, 9, strategy)  # type: ignore[arg-type]
        places = top_positions(score(margins, lengths), lengths, 9)
        expected_items = items.gather(1, places.clamp(min=0)).masked_fill(places == PAD, PAD)
        assert ranked.equal(expected_items)
    with pytest.raises(ConfigError, match="unknown strategy"):
        ranker.rank(users, candidates, 9, "condorcet")  # type: ignore[arg-type]
