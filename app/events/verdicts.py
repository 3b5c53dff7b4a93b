"""What several events about one thing come to: the last word counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Verdicts:
    """Each thing is liked, disliked or only seen. All are places among the events, ascending."""

    liked: IntArray
    """The latest positive event of each thing that is liked."""
    liked_weights: NDArray[np.float32]
    """The highest weight that any of its events has."""
    disliked: IntArray
    """The latest negative event of each thing that is disliked."""
    disliked_weights: NDArray[np.float32]
    """The weight of that event, without its sign."""
    only_seen: IntArray
    """The latest event of each other thing."""


def verdicts(things: IntArray, weights: NDArray[np.float32]) -> Verdicts:
    """Decides for each of the ``things`` (n,) that n events are about, oldest first.

    The latest event whose weight is not 0 says whether it is liked. Repeating a positive event adds
    nothing: the highest weight counts, so that a hundred clicks are not a purchase.
    """
    order = np.argsort(things, kind="stable")
    sorted_things, sorted_weights = things[order], weights[order]
    begins = np.ones(len(things), dtype=np.bool_)
    begins[1:] = sorted_things[1:] != sorted_things[:-1]
    starts = np.flatnonzero(begins)
    if len(starts) == 0:
        none, nothing = np.zeros(0, np.int64), np.zeros(0, np.float32)
        return Verdicts(none, nothing, none, nothing, none)
    at = np.arange(len(things))
    ends = np.append(starts[1:], len(things)) - 1
    positive = np.maximum.reduceat(np.where(sorted_weights > 0, at, -1), starts)
    negative = np.maximum.reduceat(np.where(sorted_weights < 0, at, -1), starts)
    strongest = np.maximum.reduceat(sorted_weights, starts)
    likes, dislikes = positive > negative, negative > positive
    liked, disliked = order[positive[likes]], order[negative[dislikes]]
    by_place = np.argsort(liked)
    disliked.sort()
    return Verdicts(
        liked[by_place],
        strongest[likes][by_place],
        disliked,
        -weights[disliked],
        np.sort(order[ends[~(likes | dislikes)]]),
    )


def standing(pairs: IntArray) -> IntArray:
    """(P, k) statements, oldest first, the last two columns a winner and a loser → places.

    Of the statements that are equal but for the order of the two, the latest stands.
    """
    if len(pairs) < 2:
        return np.arange(len(pairs))
    unordered = np.concatenate([pairs[:, :-2], np.sort(pairs[:, -2:], axis=1)], axis=1)[::-1]
    _, from_end = np.unique(unordered, axis=0, return_index=True)
    return np.sort(len(pairs) - 1 - from_end)
