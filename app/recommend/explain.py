"""Why an item is in a list: the user's own items that it is due to most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from app.catalog.view import Catalogue
from app.recommend.places import RankedItem, Reason
from ncr_core.fold_in import Evidence
from ncr_core.ranking.attribution import Attribution

MOST = 3


def explained(
    attribution: Attribution,
    vector: Tensor,
    evidence: Evidence,
    places: Sequence[RankedItem],
    temperature: float,
    *,
    trained: bool,
) -> list[RankedItem]:
    """The places of a list with the reasons for each; arguments as of `Attribution.effects`."""
    shown = np.array([place.row for place in places], dtype=np.int64)
    own, effects = attribution.effects(vector, evidence, shown, trained=trained)
    log_odds = effects / (2.0 * temperature)  # P = σ(margin / 2T)
    return [
        place._replace(because=_largest(own, of_place))
        for place, of_place in zip(places, log_odds, strict=True)
    ]


def _largest(own: NDArray[np.int64], effects: NDArray[np.float64]) -> tuple[Reason, ...]:
    best = np.argsort(-effects, kind="stable")[:MOST]
    return tuple(Reason(int(own[at]), float(effects[at])) for at in best if effects[at] > 0.0)


def reasons_told(
    catalogue: Catalogue, ids: NDArray[np.int64], places: Sequence[RankedItem]
) -> dict[int, list[dict[str, Any]]]:
    """The reasons for each place as they are sent, by its row; ``ids`` are the catalogue's of the
    model's rows."""
    return {
        place.row: [
            {
                "id": catalogue.external_ids[ids[row]],
                "title": catalogue.titles[ids[row]],
                "effect": round(effect, 6),
            }
            for row, effect in place.because
        ]
        for place in places
    }
