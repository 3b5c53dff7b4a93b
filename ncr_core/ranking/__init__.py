"""From pairwise preferences to ranked lists."""

from ncr_core.ranking.algorithm1 import STRATEGIES, Strategy, algorithm1
from ncr_core.ranking.candidates import (
    ExactRetriever,
    FaissRetriever,
    Retriever,
    anchors_of,
    cheap_to_rank,
    shortlist_for,
    spread_over_popularity,
)
from ncr_core.ranking.margins import Margins
from ncr_core.ranking.ranker import PAD, BoundRanker, ExactRanker, Ranker, compile_kernels

__all__ = [
    "PAD",
    "STRATEGIES",
    "BoundRanker",
    "ExactRanker",
    "ExactRetriever",
    "FaissRetriever",
    "Margins",
    "Ranker",
    "Retriever",
    "Strategy",
    "algorithm1",
    "anchors_of",
    "cheap_to_rank",
    "compile_kernels",
    "shortlist_for",
    "spread_over_popularity",
]
