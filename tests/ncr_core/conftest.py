"""Small models and data that the tests of ncr_core share."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ncr_core.data import Interactions, Split, build_interactions, leave_latest_out
from ncr_core.data.interactions import UserFeedback
from ncr_core.data.synthetic import synthetic_catalogue
from ncr_core.models import ModelConfig, PairwiseRanker, build_model

CONFIGS = [
    ModelConfig(kind="nbpr", factors=4),
    ModelConfig(kind="nbpr", factors=3, learn_weights=False),
    ModelConfig(kind="dncr", factors=2, layers=1),
    ModelConfig(kind="dncr", factors=2, layers=2),
    ModelConfig(kind="dncr", factors=2, layers=6),
    ModelConfig(kind="neupr", factors=3, layers=1),
    ModelConfig(kind="dncr", factors=4, layers=4, activation="relu"),
    ModelConfig(kind="neupr", factors=4, layers=3),
    ModelConfig(kind="neupr", factors=8, init="paper"),
    ModelConfig(kind="neupr", factors=7, tower_factors=2, layers=3),
    ModelConfig(kind="neupr", factors=3, layers=2, shared_embeddings=True),
    ModelConfig(kind="neupr", factors=2, layers=4, shared_embeddings=True),
    ModelConfig(kind="twotower", factors=4, layers=3),
    ModelConfig(kind="twotower", factors=4, layers=2, shared_towers=True, activation="relu"),
    ModelConfig(kind="twotower", factors=2, layers=1),
    ModelConfig(kind="nbpr", factors=4, item_bias=True),
    ModelConfig(kind="nbpr", factors=4, users="history", windows=(1, 3, 0), item_bias=True),
    ModelConfig(kind="nbpr", factors=4, users="history", windows=(2, 0), attention_layers=2),
    ModelConfig(kind="nbpr", factors=3, start_factors=2, users="history", windows=(1, 3, 0)),
    ModelConfig(
        kind="nbpr",
        factors=4,
        start_factors=3,
        users="history",
        windows=(2, 0),
        by_length=True,
        attention_layers=1,
        item_bias=True,
    ),
    ModelConfig(kind="dncr", factors=2, layers=3, users="history"),
    ModelConfig(kind="neupr", factors=3, layers=3, users="history", windows=(2, 0), item_bias=True),
    ModelConfig(kind="neupr", factors=2, layers=3, users="history", shared_embeddings=True),
]


def wild_model(config: ModelConfig, n_users: int, n_items: int, seed: int = 0) -> PairwiseRanker:
    """A model with weights so large that its preferences are often intransitive."""
    torch.manual_seed(seed)
    model = build_model(config, n_users, n_items)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.7)
        for name, buffer in model.named_buffers():
            assert name.endswith("weight"), name  # vectors that would be pooled
            buffer.normal_(std=0.7)
    return model.requires_grad_(False).eval()


def fill(parameter: torch.Tensor, values: list[float] | list[list[float]]) -> None:
    with torch.no_grad():
        parameter.copy_(torch.tensor(values))


def config_name(config: ModelConfig) -> str:
    """What a configuration changes, for the names of tests."""
    usual = ModelConfig(kind=config.kind, factors=config.factors).as_dict()
    own = {k: v for k, v in config.as_dict().items() if v != usual[k]}
    return "-".join([config.kind, str(config.factors), *(f"{k}={v}" for k, v in own.items())])


def pairs_of(rows: list[tuple[int, ...]], width: int) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def unseen(matrix: Interactions, user: int, n: int) -> list[int]:
    """Items that the user has not interacted with."""
    return np.setdiff1d(np.arange(matrix.n_items), matrix.items_of(user))[:n].tolist()


@pytest.fixture(params=CONFIGS, ids=config_name)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    chosen: ModelConfig = request.param
    return chosen


@pytest.fixture(scope="session")
def synthetic() -> Interactions:
    return build_interactions(synthetic_catalogue(300, 120, 20).interactions)


@pytest.fixture(scope="session")
def split(synthetic: Interactions) -> Split:
    return leave_latest_out(synthetic)


@pytest.fixture(scope="session")
def told(synthetic: Interactions) -> Interactions:
    """Every third user dislikes two items, every fifth stated three preferences, and every seventh
    only saw ten items."""
    disliked = [(u, i) for u in range(0, 300, 3) for i in unseen(synthetic, u, 2)]
    seen = [(u, i) for u in range(0, 300, 7) for i in unseen(synthetic, u, 12)[2:]]
    pairs = []
    for user in range(0, 300, 5):
        own, (first, second) = synthetic.items_of(user), unseen(synthetic, user, 40)[-2:]
        pairs += [
            (user, int(own[0]), first),
            (user, first, second),
            (user, int(own[-1]), second),
        ]
    return replace(
        synthetic,
        weights=np.random.default_rng(0).uniform(0.5, 3, synthetic.nnz).astype(np.float32),
        feedback=UserFeedback(
            pairs_of(seen, 2),
            pairs_of(disliked, 2),
            np.arange(1, len(disliked) + 1, dtype=np.float32),
            pairs_of(pairs, 3),
            np.arange(1, len(pairs) + 1, dtype=np.float32),
        ),
    )


@pytest.fixture(scope="session")
def ml_1m() -> Path:
    """The folder of MovieLens 1M, by NCR_TEST_DATA or beside the checkout."""
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    path = Path(os.environ.get("NCR_TEST_DATA", beside)) / "ml-1m"
    if not path.is_dir():
        pytest.skip("MovieLens 1M is not here: set NCR_TEST_DATA to the folder that holds ml-1m/")
    return path


@pytest.fixture(params=[True, False], ids=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest) -> bool:
    """Whether towers are ranked by compiled code; numba is there wherever the tests are run."""
    chosen: bool = request.param
    return chosen
