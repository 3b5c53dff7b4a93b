"""From a configuration to a model."""

from __future__ import annotations

from ncr_core.models.config import ModelConfig
from ncr_core.models.dncr import DNCR
from ncr_core.models.nbpr import NBPR
from ncr_core.models.neupr import NeuPR
from ncr_core.models.ranker import PairwiseRanker

MODELS: dict[str, type[PairwiseRanker]] = {"nbpr": NBPR, "dncr": DNCR, "neupr": NeuPR}


def build_model(config: ModelConfig, n_users: int, n_items: int) -> PairwiseRanker:
    """A freshly initialised model; seed torch before for a repeatable one."""
    return MODELS[config.kind](config, n_users, n_items)
