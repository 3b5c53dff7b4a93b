"""The frozen hold-out of a comparison: what is fair to a new model and to the one that is served.

It is fair when neither has learned what is held out, and both are given the same of the users:

* Users take part whose two held-out items the incumbent has not learned: it is measured as it was
  before it learned its own held-out items (``Evaluated``), and what came after its training it
  cannot have learned.
* What such a user has done since then, up to the held-out items, the challenger was trained on. The
  incumbent's vector of the user is fitted to it, as it would be for a list that is served.
* Candidates are items that both know; users whose held-out item only one of them knows are left
  out. That a new model knows new items is in its favour, but no measure of how well it ranks.

Who is left out depends on when things were done, not on how well a model ranks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ncr_core.data.interactions import BoolArray, IntArray, Interactions
from ncr_core.data.splits import Split
from ncr_core.evaluated import Evaluated, rows_of


@dataclass(frozen=True)
class Incumbent:
    """The model that is served, as it was measured.

    ``user_ids`` and ``item_ids`` are those of all its rows. ``earlier`` are the interactions, in
    the challenger's rows, that there were when it was trained; ``told`` those whose items it had
    met then in what the users said about pairs, perhaps in nothing else.
    """

    evaluated: Evaluated
    user_ids: Sequence[str]
    item_ids: Sequence[str]
    earlier: Interactions
    told: Interactions | None = None


@dataclass(frozen=True)
class HoldOut:
    """What both are measured on.

    ``split`` has the challenger's users and the n items that both know; its ``test`` is −1 for
    users who do not take part. ``items`` (n, 2) are the items' rows in the challenger and in the
    incumbent. ``own`` (n_users,) are the users' rows in the incumbent's evaluated copy, −1 where it
    has none, and ``behind`` (n_users,) tells of whom there is something in ``split.train`` that it
    has not learned. ``left_out`` counts users by the reason.
    """

    split: Split
    items: IntArray
    own: IntArray
    behind: BoolArray
    left_out: dict[str, int]

    @property
    def users(self) -> IntArray:
        """The users that take part, ascending."""
        return np.flatnonzero(self.split.test >= 0)


def frozen_hold_out(split: Split, incumbent: Incumbent) -> HoldOut:
    """The part of the challenger's hold-out that is fair to both."""
    train = split.train
    rows = _Rows(train, incumbent)
    users = np.flatnonzero(split.test >= 0)
    unknown = rows.item[split.test[users]] < 0
    learned = _learned_any(rows, split, users)
    # Known to it, but of another part of the users: there is no vector from before it learned all.
    no_copy = (rows.user[users] >= 0) & (rows.own[users] < 0)
    left_out = {
        "held-out item unknown to the incumbent": int(unknown.sum()),
        "held-out item learned by the incumbent": int((learned & ~unknown).sum()),
        "not held out from by the incumbent": int((no_copy & ~learned & ~unknown).sum()),
    }
    fair = users[~unknown & ~learned & ~no_copy]

    common = np.flatnonzero(rows.item >= 0)
    place = np.full(train.n_items, -1, dtype=np.int64)
    place[common] = np.arange(len(common))
    test, validation = (np.full(train.n_users, -1, dtype=np.int64) for _ in range(2))
    test[fair] = place[split.test[fair]]
    validation[fair] = place[split.validation[fair]]  # not learned by either, and no candidate
    taking = test >= 0
    known = train.reindex(train.user_ids, [train.item_ids[item] for item in common.tolist()])
    known = known.select(taking[known.users])
    behind = taking & (rows.own < 0)
    behind[known.users[~rows.learned(known.users, common[known.items])]] = True
    items = np.stack([common, rows.item[common]], axis=1)
    return HoldOut(Split(known, validation, test), items, rows.own, behind, left_out)


def learned_by(split: Split, incumbent: Incumbent) -> BoolArray:
    """(n_users,) of whom the incumbent's evaluated copy has learned something that is held out."""
    users = np.flatnonzero(split.test >= 0)
    rows = _Rows(split.train, incumbent)
    learned = np.zeros(split.train.n_users, dtype=np.bool_)
    learned[users] = _learned_any(rows, split, users)
    return learned


def _learned_any(rows: _Rows, split: Split, users: IntArray) -> BoolArray:
    held_out = (split.test[users], split.validation[users])
    test, validation = (rows.learned(users, x) | rows.told(users, x) for x in held_out)
    return test | validation


class _Rows:
    """Where the challenger's users and items are in the incumbent, −1 for those it does not know.

    ``own`` are the users' rows in the evaluated copy.
    """

    def __init__(self, train: Interactions, incumbent: Incumbent) -> None:
        evaluated = incumbent.evaluated
        self.user = rows_of(train.user_ids, incumbent.user_ids)
        self.item = rows_of(train.item_ids, incumbent.item_ids)
        copy_of = np.full(len(incumbent.user_ids) + 1, -1, dtype=np.int64)
        copy_of[evaluated.rows] = np.arange(len(evaluated.rows))
        self.own = copy_of[self.user]
        self._held_out = np.append(evaluated.held_out, [[-1, -1]], axis=0)
        self._earlier, self._told = incumbent.earlier, incumbent.told

    def learned(self, users: IntArray, items: IntArray) -> BoolArray:
        """Whether the evaluated copy was trained on these pairs."""
        return self._met(self._earlier, users, items)

    def told(self, users: IntArray, items: IntArray) -> BoolArray:
        """Whether it was trained on what these users said about these items."""
        if self._told is None:
            return np.zeros(len(users), dtype=np.bool_)
        return self._met(self._told, users, items)

    def _met(self, then: Interactions, users: IntArray, items: IntArray) -> BoolArray:
        # Nothing of what was held out, done or said, was in what the copy was trained on.
        theirs = self.item[items]
        held_out = (theirs[:, None] == self._held_out[self.own[users]]).any(axis=1)
        result: BoolArray = (
            then.contains(users, items) & (self.user[users] >= 0) & (theirs >= 0) & ~held_out
        )
        return result
