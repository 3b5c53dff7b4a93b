"""Reading, filtering and splitting interactions, without torch; sampling is in `samplers`."""

from ncr_core.data.filters import compact, min_interactions
from ncr_core.data.interactions import IdIndex, Interactions, build_interactions
from ncr_core.data.splits import Split, leave_latest_out

__all__ = [
    "IdIndex",
    "Interactions",
    "Split",
    "build_interactions",
    "compact",
    "leave_latest_out",
    "min_interactions",
]
