"""The next-item start beside the trained factors of an NBPR.

A training affords few factors, and moves them away from the start. An untrained start of many
factors also knows pairs of items that are too rare for few factors. `with_start` adds up the scores
of both: the factors of the start are further factors of one NBPR. docs/experiments.md has the gain.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ncr_core.data.interactions import Interactions
from ncr_core.model_config import ModelConfig
from ncr_core.models import NBPR, build_model
from ncr_core.recipes import affordable_start_factors
from ncr_core.train_config import TrainConfig
from ncr_core.training.initializers import next_item_start
from ncr_core.training.trainer import model_for, remember

_OF_ITEMS = ("items.weight", "users.items.weight")
_BY_FACTOR = (*_OF_ITEMS, "users.weight", "users.gap_offset")


def start_factors_of(config: ModelConfig, training: TrainConfig, train: Interactions) -> int:
    """The number of factors of the start that a training keeps beside its own; 0 for none.

    See `affordable_start_factors`. Only a training from the next-item start keeps its start.
    """
    if training.start != "next-item":
        return 0
    return affordable_start_factors(config, train.n_remembered, train.n_items, train.nnz)


@torch.no_grad()
def silence(model: NBPR) -> None:
    """Sets the vectors and biases of the ranked items to zero, so that all items tie."""
    model.items.weight.zero_()
    if model.bias is not None:
        model.bias.zero_()


@torch.no_grad()
def with_start(trained: NBPR, factors: int, train: Interactions, seed: int) -> NBPR:
    """An NBPR whose scores are those of a trained NBPR plus those of the untrained start.

    Args:
        trained: an NBPR with windows, without ``start_factors``.
        factors: the number of factors of the start.
        train: the interactions of the start, with the users and items of the NBPR.
        seed: as in `next_item_factors`.

    Returns:
        An NBPR with ``start_factors`` on the same device, whose users have their vectors.

    Raises:
        DataError: no item follows another.
    """
    start_config = replace(
        trained.config,
        factors=factors,
        window_matrices=False,
        by_gap=False,
        attention_layers=0,
        item_bias=False,
    )
    config = replace(trained.config, start_factors=factors)
    with torch.random.fork_rng(devices=[]):
        start = build_model(start_config, 1, train.n_items)  # its users are not asked for
    model = model_for(config, train, seed)
    model.to(trained.device)
    start.to(trained.device)
    next_item_start(start, train, seed)
    d, before, of_start = trained.config.factors, trained.state_dict(), start.state_dict()
    for name, value in model.state_dict().items():
        if name == "weight":
            value.view(2, -1)[:, :d] = before[name].view(2, d)
            value.view(2, -1)[:, d:] = 1.0
        elif name == "users.start_mix":
            value.copy_(of_start["users.mix"])
        elif name not in _BY_FACTOR:
            value.copy_(before[name])
        elif name != "users.weight":  # `remember` makes it
            value[:, :d] = before[name]
            value[:, d:] = of_start[name] if name in _OF_ITEMS else 0.0
    remember(model, train)
    model.eval()
    assert isinstance(model, NBPR)  # noqa: S101 - the kind of the trained model
    return model


@torch.no_grad()
def without_start(model: NBPR) -> NBPR:
    """The trained factors of an NBPR alone, the inverse of `with_start`, in memory of their own."""
    config = replace(model.config, start_factors=0)
    with torch.random.fork_rng(devices=[]):
        trained = build_model(config, model.n_users, model.n_items)
    trained.to(model.device)
    d, theirs = config.factors, model.state_dict()
    for name, value in trained.state_dict().items():
        if name == "weight":
            value.copy_(theirs[name].view(2, -1)[:, :d].flatten())
        else:
            value.copy_(theirs[name][:, :d] if name in _BY_FACTOR else theirs[name])
    trained.train(model.training)
    assert isinstance(trained, NBPR)  # noqa: S101 - the kind of the model
    return trained
