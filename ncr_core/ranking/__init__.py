"""From pairwise preferences to ranked lists."""

from ncr_core.ranking.algorithm1 import algorithm1
from ncr_core.ranking.candidates import CandidateGenerator, anchors_of, spread_over_popularity
from ncr_core.ranking.exact import PAD, ExactRanker
from ncr_core.ranking.margins import Margins
from ncr_core.ranking.scan import resumable_scan

__all__ = [
    "PAD",
    "CandidateGenerator",
    "ExactRanker",
    "Margins",
    "algorithm1",
    "anchors_of",
    "resumable_scan",
    "spread_over_popularity",
]
