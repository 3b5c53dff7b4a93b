"""From pairwise preferences to ranked lists."""

from ncr_core.ranking.algorithm1 import algorithm1
from ncr_core.ranking.candidates import (
    CandidateGenerator,
    anchors_of,
    cheap_to_rank,
    spread_over_popularity,
)
from ncr_core.ranking.exact import PAD, ExactRanker
from ncr_core.ranking.margins import Margins
from ncr_core.ranking.scan import resumable_scan
from ncr_core.ranking.shortlist import FaissShortlist, FullShortlist, Shortlist, shortlist_for
from ncr_core.ranking.tournament import STRATEGIES, Strategy

__all__ = [
    "PAD",
    "STRATEGIES",
    "CandidateGenerator",
    "ExactRanker",
    "FaissShortlist",
    "FullShortlist",
    "Margins",
    "Shortlist",
    "Strategy",
    "algorithm1",
    "anchors_of",
    "cheap_to_rank",
    "resumable_scan",
    "shortlist_for",
    "spread_over_popularity",
]
