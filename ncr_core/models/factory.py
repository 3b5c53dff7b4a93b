"""From a configuration to a model."""

from __future__ import annotations

from ncr_core.models.config import ModelConfig
from ncr_core.models.dncr import DNCR
from ncr_core.models.nbpr import NBPR
from ncr_core.models.neupr import NeuPR
from ncr_core.models.neupr_shared import SharedNeuPR
from ncr_core.models.ranker import PairwiseRanker
from ncr_core.models.twotower import TwoTower

MODELS: dict[str, type[PairwiseRanker]] = {
    "nbpr": NBPR,
    "dncr": DNCR,
    "neupr": NeuPR,
    "twotower": TwoTower,
}


def build_model(config: ModelConfig, n_users: int, n_items: int) -> PairwiseRanker:
    """A freshly initialised model; seed torch before for a repeatable one."""
    kind = SharedNeuPR if config.shared_embeddings else MODELS[config.kind]
    return kind(config, n_users, n_items)
