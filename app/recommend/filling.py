"""Popular items, where a model has nothing to say or no more."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.recommend.asking import Asked, allowed_items, ids_of
from app.recommend.entries import RankedList, entry_of, listed


def popular_rest(asked: Asked, popular: NDArray[np.int64], before: RankedList) -> RankedList:
    """What fills a list up to ``n`` behind the items that are in it: of the allowed ones the most
    popular, then those that nobody took up yet, newest first."""
    allowed = fillers(asked)
    allowed[list(before.ids)] = False
    first = len(before.ids) + 1
    chosen = most_popular(popular, allowed, asked.filters.n - len(before.ids))
    because = () if asked.filters.explain else None
    entries = [
        entry_of(asked.catalogue, item, rank, "popular", because=because)
        for rank, item in enumerate(chosen, first)
    ]
    return listed(entries, chosen)


def fillers(asked: Asked) -> NDArray[np.bool_]:
    """By internal id: what may be in the list, the exclusions left out."""
    allowed = allowed_items(asked)
    allowed[ids_of(asked.catalogue, asked.filters.exclude)] = False
    return allowed


def most_popular(popular: NDArray[np.int64], allowed: NDArray[np.bool_], n: int) -> list[int]:
    """The first ``n`` allowed ones of the popular, most first, then of the others, newest first."""
    popular = popular[popular < len(allowed)]
    chosen = popular[allowed[popular]][:n]
    if len(chosen) < n:
        rest = allowed.copy()
        rest[popular] = False
        chosen = np.concatenate([chosen, np.flatnonzero(rest)[::-1][: n - len(chosen)]])
    found: list[int] = chosen.tolist()
    return found
