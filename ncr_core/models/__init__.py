"""The models: NBPR, DNCR, NeuPR and two towers, behind one contract."""

from ncr_core.models.config import ModelConfig
from ncr_core.models.dncr import DNCR
from ncr_core.models.factory import MODELS, build_model
from ncr_core.models.nbpr import NBPR
from ncr_core.models.neupr import NeuPR
from ncr_core.models.neupr_shared import SharedNeuPR
from ncr_core.models.ranker import PairwiseRanker
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
