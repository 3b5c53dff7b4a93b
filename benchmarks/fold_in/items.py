"""Items that training did not see, fitted to a few of their users: do the others find them?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fold_in.trained import KINDS, trained
from benchmarks.fold_in.users import Vectors
from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.data.splits import Split
from ncr_core.evaluation.metrics import hit_ratio
from ncr_core.evaluation.protocols import NEGATIVES, CandidateSet, K, ModelRanks, ranks_of
from ncr_core.fold_in import ItemFoldIn, extended

ITEMS, LEAST_USERS = 100, 60  # that are left out, and of how many users each, at least
COUNTS = (5, 20)  # users that an item is fitted to
ASKED = 100  # of its other users, and as many who never took it, at most
HEAD = ["model", "users of the item", "way", "found by others HR@10", "shown to strangers", "of"]


@dataclass(frozen=True)
class Setting:
    """Splits that differ in what they have of the left-out items.

    ``items`` (m,) are rows of ``every``, the last m of them; ``takers[m]`` who took an item up, in
    random order, ``askers[m]`` whose interaction with it is held out, ``strangers[m]`` who had
    nothing to do with it.
    """

    every: Interactions
    items: IntArray
    takers: list[IntArray]
    askers: list[IntArray]
    strangers: list[IntArray]

    @classmethod
    def of(cls, interactions: Interactions) -> Setting:
        rng = np.random.default_rng(0)
        enough = np.flatnonzero(interactions.item_counts() >= LEAST_USERS)
        chosen = np.sort(rng.permutation(enough)[:ITEMS])
        rest = np.setdiff1d(np.arange(interactions.n_items), chosen)
        names = [interactions.item_ids[i] for i in np.concatenate([rest, chosen])]
        every = interactions.reindex(interactions.user_ids, names)
        items = np.arange(len(rest), len(names))
        takers, askers, strangers = [], [], []
        for item in items:
            users = rng.permutation(every.users[every.items == item])
            takers.append(users[: max(COUNTS)])
            askers.append(users[max(COUNTS) :][:ASKED])
            others = np.setdiff1d(np.arange(every.n_users), users)
            strangers.append(rng.permutation(others)[:ASKED])
        return cls(every, items, takers, askers, strangers)

    def split(self, count: int | None) -> Split:
        """With so many users of each left-out item; None: all but those who are asked. 0: without
        these items altogether."""
        every, first = self.every, int(self.items[0])
        kept = every.items < first
        latest = np.full(every.n_users, -1, dtype=np.int64)
        np.maximum.at(latest, every.users[kept], np.flatnonzero(kept))
        latest = latest[latest >= 0]
        validation = np.full(every.n_users, -1, dtype=np.int64)
        validation[every.users[latest]] = every.items[latest]
        for at, item in enumerate(self.items):
            own = np.flatnonzero(every.items == item)
            if count is None:
                kept[own] = ~np.isin(every.users[own], self.askers[at])
            else:
                kept[own] = np.isin(every.users[own], self.takers[at][:count])
        kept[latest] = False
        left = every.select(kept)
        if count == 0:
            left = left.reindex(every.user_ids, every.item_ids[:first])
        return Split(left, validation, np.full_like(validation, -1))

    def candidates(self, users: list[IntArray]) -> list[CandidateSet]:
        """Each left-out item for each of its ``users``, among items that are not left out and that
        the user had nothing to do with, at a random place."""
        rng, first = np.random.default_rng(1), int(self.items[0])
        sets = []
        for item, own in zip(self.items, users, strict=True):
            rows = np.empty((len(own), NEGATIVES + 1), dtype=np.int64)
            for row, user in zip(rows, own, strict=True):
                unseen = np.setdiff1d(np.arange(first), self.every.items_of(user))
                row[:] = rng.permutation(np.append(rng.permutation(unseen)[:NEGATIVES], item))
            sets.append(CandidateSet(own, np.full(len(own), item), rows))
        return sets


def quality(interactions: Interactions, work: Path) -> list[list[Any]]:
    """Rows: how often an item is in the top 10 of 101 for those of its users that were held out,
    and for users who had nothing to do with it, of whom a tenth would meet it by chance."""
    setting = Setting.of(interactions)
    found, shown = (setting.candidates(users) for users in (setting.askers, setting.strangers))
    rows: list[list[Any]] = []
    for kind in KINDS:
        base, _ = trained(kind, "items-0", setting.split(0), work)
        for count in COUNTS:
            full, _ = trained(kind, f"items-{count}", setting.split(count), work)
            rows.append([kind, count, "retrained", *_asked(ModelRanks(full), found, shown)])
            every = base.user_vectors(torch.arange(base.n_users))
            takers = [every[torch.from_numpy(own[:count])] for own in setting.takers]
            larger = extended(base, ItemFoldIn(base)(takers))
            ranks = Vectors(larger, np.arange(base.n_users), every)
            rows.append([kind, count, "fold-in", *_asked(ranks, found, shown)])
    return rows


def _asked(
    ranks: ModelRanks | Vectors, found: list[CandidateSet], shown: list[CandidateSet]
) -> tuple[float, float, int]:
    return _rate(ranks, found), _rate(ranks, shown), sum(len(each.users) for each in found)


def _rate(ranks: ModelRanks | Vectors, sets: list[CandidateSet]) -> float:
    """The mean over the items."""
    return float(np.mean([hit_ratio(ranks_of(ranks, each, K), K) for each in sets]))
