"""The model that is served, as a training needs it: to begin from, and to be compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from app.events.snapshot import EventSnapshot
from ncr_core.checkpoint import Checkpoint
from ncr_core.data.interactions import BoolArray, IntArray, Interactions
from ncr_core.errors import CheckpointError
from ncr_core.evaluated import Evaluated, rows_of
from ncr_core.evaluation.frozen import Incumbent

Earlier = Callable[[Interactions, BoolArray, int], tuple[Interactions, Interactions]]
"""Of some users, when all up to a seq had come in: the interactions that there were, and those
whose items the users had named in a stated preference.
"""


class Unreadable(CheckpointError):  # noqa: N818 - what it says of the version
    """The checkpoint of the version that is served is damaged or gone."""

    def __init__(self, version: str, reason: str) -> None:
        super().__init__(reason)
        self.version = version


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
        done, told = earlier(every, users, self.trained_seq)
        ids = self.checkpoint.user_ids, self.checkpoint.item_ids
        return Incumbent(evaluated, *ids, done, told)


def earlier_in(
    snapshot: EventSnapshot, user_ids: dict[int, str], item_ids: dict[int, str]
) -> Earlier:
    """By the seqs of a snapshot's events, whatever they mean by their types, and by those of its
    stated preferences, whether they are taken back later or not.
    """
    preferences = snapshot.preferences
    # The item that is rather had, and the other one.
    told = np.concatenate([preferences[:, [0, 1, 4]], preferences[:, [0, 2, 4]]])

    def earlier(
        interactions: Interactions, users: BoolArray, seq: int
    ) -> tuple[Interactions, Interactions]:
        mask = users[interactions.users]
        own = interactions.users[mask] * interactions.n_items + interactions.items[mask]

        def among(user_id: IntArray, item_id: IntArray, seqs: IntArray) -> Interactions:
            old = seqs <= seq
            user = _rows(user_id[old], user_ids, interactions.user_ids)
            item = _rows(item_id[old], item_ids, interactions.item_ids)
            theirs = (user >= 0) & (item >= 0)
            theirs &= users[user]  # −1 is any user, and left out already
            found = mask.copy()
            found[mask] = np.isin(own, user[theirs] * interactions.n_items + item[theirs])
            return interactions.select(found)

        return among(snapshot.user_id, snapshot.item_id, snapshot.seq), among(*told.T)

    return earlier


def _rows(ids: IntArray, names: dict[int, str], of: Sequence[str]) -> IntArray:
    """Rows by internal ids; −1 for what has none."""
    different, at = np.unique(ids, return_inverse=True)
    rows: IntArray = rows_of([names.get(i, "") for i in different.tolist()], of)[at]
    return rows
