"""From interactions to a trained model: one phase, or three for a pre-trained NeuPR (§4.7)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from ncr_core.data.splits import Split
from ncr_core.errors import DataError
from ncr_core.models import DNCR, NBPR, ModelConfig, NeuPR, PairwiseRanker, build_model
from ncr_core.models.config import Kind
from ncr_core.training.config import TrainConfig
from ncr_core.training.loop import History, OnProgress, Schedule, train_loop

# What an epoch takes beside one of NBPR's, as measured at d = 8; only for the time left.
EPOCH_COST = {"nbpr": 1.0, "dncr": 4.5, "neupr": 5.0}


@dataclass(frozen=True)
class Trained:
    """A trained model and what each of its phases gave."""

    model: PairwiseRanker
    history: list[History]


def train_model(
    model_config: ModelConfig,
    config: TrainConfig,
    split: Split,
    on_progress: OnProgress | None = None,
) -> Trained:
    """Trains a model from scratch; NeuPR with ``config.pretrain`` by eq. 26.

    Repeatable by ``config.seed`` on one device. Raises DataError or TrainingError.
    """
    if split.train.n_users < 2:
        raise DataError(
            f"{split.train.n_users} user is too few: a model learns from what users have in common"
        )
    if model_config.kind != "neupr" or not config.pretrain:
        model = _build(model_config, split, config.seed)
        schedule = Schedule(f"train {model_config.kind}", config.epochs, config.learning_rate)
        return Trained(model, [train_loop(model, split, config, schedule, on_progress)])

    histories: list[History] = []
    fine_tuning = config.fine_tune_epochs * EPOCH_COST["neupr"]
    later = {"nbpr": config.epochs * EPOCH_COST["dncr"] + fine_tuning, "dncr": fine_tuning}

    def pretrained(kind: Kind) -> PairwiseRanker:
        part = _build(replace(model_config, kind=kind), split, config.seed)
        schedule = Schedule(f"pre-train {kind}", config.epochs, config.learning_rate)
        left = later[kind] / EPOCH_COST[kind]
        histories.append(train_loop(part, split, config, schedule, on_progress, left))
        return part

    nbpr = cast(NBPR, pretrained("nbpr"))
    dncr = cast(DNCR, pretrained("dncr"))
    neupr = cast(NeuPR, _build(model_config, split, config.seed).to(nbpr.device))
    neupr.start_from(nbpr, dncr, config.alpha)
    schedule = Schedule("train neupr", config.fine_tune_epochs, config.fine_tune_rate)
    histories.append(train_loop(neupr, split, config, schedule, on_progress))
    return Trained(neupr, histories)


def _build(config: ModelConfig, split: Split, seed: int) -> PairwiseRanker:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_model(config, split.train.n_users, split.train.n_items)
