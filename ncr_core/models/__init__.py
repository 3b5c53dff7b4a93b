"""The models: NBPR, DNCR, NeuPR and two towers, behind one contract."""

from ncr_core.model_config import ModelConfig
from ncr_core.models.base import PairwiseRanker
from ncr_core.models.dncr import DNCR
from ncr_core.models.nbpr import NBPR
from ncr_core.models.neupr import NeuPR, SharedNeuPR
from ncr_core.models.twotower import TwoTower

__all__ = [
    "DNCR",
    "MODELS",
    "NBPR",
    "ModelConfig",
    "NeuPR",
    "PairwiseRanker",
    "SharedNeuPR",
    "TwoTower",
    "build_model",
]

MODELS: dict[str, type[PairwiseRanker]] = {
    "nbpr": NBPR,
    "dncr": DNCR,
    "neupr": NeuPR,
    "twotower": TwoTower,
}


def build_model(config: ModelConfig, n_users: int, n_items: int) -> PairwiseRanker:
    """A model with new random parameters: seed torch before for repeatable parameters."""
    kind = SharedNeuPR if config.shared_embeddings else MODELS[config.kind]
    return kind(config, n_users, n_items)
