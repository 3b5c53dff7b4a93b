"""The part of a hold-out that is fair to a new model and to the one that is served.

It is fair when neither model has learned what is held out, and both know the same of the users:

* A user takes part if the incumbent has learned neither of their two held-out items. The incumbent
  is evaluated as it was before it learned its own held-out items (`EvaluationSnapshot`), and it
  cannot have learned what came after its training.
* The challenger was trained on what such a user has done since then, up to the held-out items. The
  incumbent's vector of the user is fitted to the same, as it would be for a served list.
* Candidates are the items that both models know. Users whose held-out item only one of them knows
  are excluded. That a new model knows new items is in its favour, but no measure of its ranking.

Whether a user is excluded depends on when things were done, not on how well a model ranks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ncr_core.checkpoint import EvaluationSnapshot
from ncr_core.data.interactions import BoolArray, IntArray, Interactions, row_indices
from ncr_core.data.splits import Split


@dataclass(frozen=True)
class Incumbent:
    """The served model, as it was evaluated before it was served."""

    evaluated: EvaluationSnapshot
    user_ids: Sequence[str]
    """The ids of all its user rows."""
    item_ids: Sequence[str]
    """The ids of all its item rows."""
    trained_on: Interactions
    """The interactions, in the challenger's rows, that there were when it was trained."""
    compared: Interactions | None = None
    """Users and items, in the challenger's rows, of the pairwise preferences it was trained on."""


@dataclass(frozen=True)
class FairHoldOut:
    """What both models are evaluated on."""

    split: Split
    """The challenger's users and the n items that both models know; ``test`` is −1 for users who do
    not take part."""
    items: IntArray
    """(n, 2) the items' rows in the challenger and in the incumbent."""
    incumbent_rows: IntArray
    """(n_users,) the users' rows in the incumbent's `EvaluationSnapshot`, −1 where it has none."""
    has_new_items: BoolArray
    """(n_users,) users with items in ``split.train`` that the incumbent has not learned."""
    excluded: dict[str, int]
    """The number of users that do not take part, by the reason."""

    @property
    def users(self) -> IntArray:
        """The users that take part, ascending."""
        return np.flatnonzero(self.split.test >= 0)


def fair_hold_out(split: Split, incumbent: Incumbent) -> FairHoldOut:
    """Select the part of the challenger's hold-out that is fair to both models."""
    train = split.train
    knowledge = _IncumbentKnowledge(train, incumbent)
    users = np.flatnonzero(split.test >= 0)
    unknown = knowledge.item_rows[split.test[users]] < 0
    learned = knowledge.learned_held_out(split, users)
    # The snapshot has vectors only of users that it held items out of.
    no_snapshot = (knowledge.user_rows[users] >= 0) & (knowledge.snapshot_rows[users] < 0)
    excluded = {
        "held-out item unknown to the incumbent": int(unknown.sum()),
        "held-out item learned by the incumbent": int((learned & ~unknown).sum()),
        "not held out from by the incumbent": int((no_snapshot & ~learned & ~unknown).sum()),
    }
    fair = users[~unknown & ~learned & ~no_snapshot]

    common = np.flatnonzero(knowledge.item_rows >= 0)
    column = np.full(train.n_items, -1, dtype=np.int64)
    column[common] = np.arange(len(common))
    test, validation = (np.full(train.n_users, -1, dtype=np.int64) for _ in range(2))
    test[fair] = column[split.test[fair]]
    validation[fair] = column[split.validation[fair]]  # learned by neither, and no candidate
    takes_part = test >= 0
    common_train = train.reindex(train.user_ids, [train.item_ids[item] for item in common.tolist()])
    common_train = common_train.select(takes_part[common_train.users])
    learned_entries = knowledge.learned(common_train.users, common[common_train.items])
    has_new_items = takes_part & (knowledge.snapshot_rows < 0)
    has_new_items[common_train.users[~learned_entries]] = True
    return FairHoldOut(
        Split(common_train, validation, test),
        np.stack([common, knowledge.item_rows[common]], axis=1),
        knowledge.snapshot_rows,
        has_new_items,
        excluded,
    )


def leaked_users(split: Split, incumbent: Incumbent) -> BoolArray:
    """(n_users,) users of whom the incumbent's snapshot has learned a held-out item."""
    users = np.flatnonzero(split.test >= 0)
    leaked = np.zeros(split.train.n_users, dtype=np.bool_)
    leaked[users] = _IncumbentKnowledge(split.train, incumbent).learned_held_out(split, users)
    return leaked


class _IncumbentKnowledge:
    """What the incumbent knows of the challenger's users and items; rows are −1 for unknown ones.

    ``snapshot_rows`` are the users' rows in the `EvaluationSnapshot`.
    """

    def __init__(self, train: Interactions, incumbent: Incumbent) -> None:
        snapshot = incumbent.evaluated
        self.user_rows = row_indices(train.user_ids, incumbent.user_ids)
        self.item_rows = row_indices(train.item_ids, incumbent.item_ids)
        row_in_snapshot = np.full(len(incumbent.user_ids) + 1, -1, dtype=np.int64)
        row_in_snapshot[snapshot.rows] = np.arange(len(snapshot.rows))
        self.snapshot_rows = row_in_snapshot[self.user_rows]
        self._held_out = np.append(snapshot.held_out, [[-1, -1]], axis=0)
        self._trained_on, self._compared = incumbent.trained_on, incumbent.compared

    def learned_held_out(self, split: Split, users: IntArray) -> BoolArray:
        """Whether the snapshot was trained on a held-out item of each user, or on its preferences.

        Items that it held out itself count as not learned.
        """
        result = np.zeros(len(users), dtype=np.bool_)
        for items in (split.test[users], split.validation[users]):
            result |= self.learned(users, items)
            if self._compared is not None:
                result |= self._trained(self._compared, users, items)
        return result

    def learned(self, users: IntArray, items: IntArray) -> BoolArray:
        """Whether the snapshot was trained on these interactions."""
        return self._trained(self._trained_on, users, items)

    def _trained(self, data: Interactions, users: IntArray, items: IntArray) -> BoolArray:
        # What the incumbent held out was in nothing that its snapshot was trained on.
        rows = self.item_rows[items]
        held_out = (rows[:, None] == self._held_out[self.snapshot_rows[users]]).any(axis=1)
        known = (self.user_rows[users] >= 0) & (rows >= 0)
        result: BoolArray = data.contains(users, items) & known & ~held_out
        return result
