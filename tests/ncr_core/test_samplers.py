"""Negatives are never the user's own, and uniform over the rest."""

from __future__ import annotations

import pytest
import torch

from ncr_core.data import Interactions, build_interactions
from ncr_core.data import samplers as module
from ncr_core.data.samplers import NegativeSampler
from ncr_core.errors import DataError

CPU = torch.device("cpu")


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
