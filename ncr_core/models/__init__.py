"""The models: NBPR, DNCR, NeuPR, behind one contract."""

from ncr_core.models.config import ModelConfig
from ncr_core.models.dncr import DNCR
from ncr_core.models.factory import MODELS, build_model
from ncr_core.models.nbpr import NBPR
from ncr_core.models.neupr import NeuPR
from ncr_core.models.ranker import PairwiseRanker

__all__ = ["DNCR", "MODELS", "NBPR", "ModelConfig", "NeuPR", "PairwiseRanker", "build_model"]
