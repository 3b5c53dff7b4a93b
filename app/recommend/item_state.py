"""The model's knowledge of an item, and the number of lists that show the item."""

from __future__ import annotations

from typing import Literal

import numpy as np

from app.catalog.snapshot import Catalogue
from app.inference.loaded_model import LoadedModel
from app.inference.precomputed import PrecomputedCandidates

KnownFrom = Literal["none", "unknown", "trained", "fitted"]


def known_from(model: LoadedModel | None, catalogue: Catalogue, internal: int) -> KnownFrom:
    """The origin of the model's knowledge of an item: training, or a later fit to its users.

    `none`: there is no model. `unknown`: the model does not know the item.
    """
    if model is None:
        return "none"
    row = int(model.items(catalogue).rows(np.array([internal]))[0])
    if row < 0:
        return "unknown"
    return "trained" if row < model.trained.n_items else "fitted"


def exposure(
    model: LoadedModel | None, catalogue: Catalogue, internal: int
) -> tuple[int, int] | None:
    """The number of precomputed lists that have an item, and the number of all precomputed lists.

    None without precomputed lists.
    """
    made_ahead = None if model is None else model.engine.retriever.precomputed
    if model is None or not isinstance(made_ahead, PrecomputedCandidates) or not len(made_ahead):
        return None
    row = int(model.items(catalogue).rows(np.array([internal]))[0])
    lists = made_ahead.lists.items
    return (int((lists == row).any(axis=1).sum()) if row >= 0 else 0), len(lists)
