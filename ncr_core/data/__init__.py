"""Reading, filtering and splitting interactions, without torch.

`ncr_core.training.batches` samples the negatives.
"""

from ncr_core.data.dataset import Dataset, load_interactions
from ncr_core.data.interactions import (
    IdIndex,
    Interactions,
    build_interactions,
    compact,
    min_interactions,
)
from ncr_core.data.splits import Split, leave_latest_out

__all__ = [
    "Dataset",
    "IdIndex",
    "Interactions",
    "Split",
    "build_interactions",
    "compact",
    "leave_latest_out",
    "load_interactions",
    "min_interactions",
]
