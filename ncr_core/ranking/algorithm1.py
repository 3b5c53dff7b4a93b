"""Algorithm 1 as the paper writes it: the literal reference that every faster ranker must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def algorithm1(
    candidates: Sequence[Item], beats: Callable[[Item, Item], bool], k: int
) -> list[Item]:
    """The top ``k`` of ``candidates`` by K passes, each choosing a most preferred item (§4.4).

    ``beats(j, champion)`` says whether ŷ_u,j,max > ŷ_u,max,j: strictly, so ties keep the champion.
    The outcome may depend on the order of the candidates where the preference is intransitive.
    """
    remaining = list(candidates)
    ranked: list[Item] = []
    for _ in range(min(k, len(remaining))):
        best = 0
        for challenger in range(1, len(remaining)):
            if beats(remaining[challenger], remaining[best]):
                best = challenger
        ranked.append(remaining.pop(best))
    return ranked
