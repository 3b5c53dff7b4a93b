"""The model that is served, as a training needs it: to begin from, and to be compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from app.events.snapshot import EventSnapshot
from ncr_core.checkpoint import Checkpoint
from ncr_core.data.interactions import BoolArray, IntArray, Interactions
from ncr_core.evaluated import Evaluated, rows_of
from ncr_core.evaluation.frozen import Incumbent

Earlier = Callable[[Interactions, BoolArray, int], Interactions]
"""Of some users, the interactions that there were when events up to a seq had come in."""


@dataclass(frozen=True)
class ServedModel:
    """The active version when it was asked for.

    ``evaluated`` is None for one that was written before there were such copies.
    """

    version: str
    trained_seq: int
    checkpoint: Checkpoint
    evaluated: Evaluated | None

    def incumbent(self, every: Interactions, users: BoolArray, earlier: Earlier) -> Incumbent:
        """The model to compare with, on these users (n_users,) of the new one's data."""
        evaluated = self.evaluated
        if evaluated is None:
            # It has learned everything that there was: only what is newer is news to it.
            rows = np.arange(len(self.checkpoint.user_ids))
            held_out = np.full((len(rows), 2), -1)
            evaluated = Evaluated(self.checkpoint.model, rows, held_out)
        return Incumbent(
            evaluated,
            self.checkpoint.user_ids,
            self.checkpoint.item_ids,
            earlier(every, users, self.trained_seq),
        )


def earlier_in(
    snapshot: EventSnapshot, user_ids: dict[int, str], item_ids: dict[int, str]
) -> Earlier:
    """By the seqs of a snapshot's events, whatever they mean by their types."""

    def earlier(interactions: Interactions, users: BoolArray, seq: int) -> Interactions:
        user_row = _Rows(snapshot.user_id, user_ids, interactions.user_ids)
        item_row = _Rows(snapshot.item_id, item_ids, interactions.item_ids)
        old = snapshot.seq <= seq
        user, item = user_row.of(snapshot.user_id[old]), item_row.of(snapshot.item_id[old])
        theirs = (user >= 0) & (item >= 0)
        theirs &= users[user]  # −1 is any user, and left out already
        keys = user[theirs] * interactions.n_items + item[theirs]
        mask = users[interactions.users]
        own = interactions.users[mask] * interactions.n_items + interactions.items[mask]
        mask[mask] = np.isin(own, keys)
        return interactions.select(mask)

    return earlier


class _Rows:
    """Rows by internal ids; −1 for what has none."""

    def __init__(self, ids: IntArray, names: dict[int, str], of: Sequence[str]) -> None:
        self._ids = np.unique(ids)
        self._rows = rows_of([names.get(i, "") for i in self._ids.tolist()], of)

    def of(self, ids: IntArray) -> IntArray:
        rows: IntArray = self._rows[np.searchsorted(self._ids, ids)]
        return rows
