"""Properties of lists beside accuracy: coverage, concentration, novelty and popularity."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.ranking.ranker import PAD


@dataclass(frozen=True)
class ListStatistics:
    """Coverage, concentration, novelty and popularity of users' lists."""

    coverage: float
    """The share of the catalogue's items that are in at least one list."""

    gini: float
    """The Gini coefficient of the numbers of lists that items are in (Fleder & Hosanagar 2009): 0
    if all items are in equally many lists, near 1 if few items fill all lists."""

    novelty: float
    """The mean of log₂(users / users of the item) over all places of the lists, in bits (Zhou et
    al. 2010). An item without users counts as an item with one user."""

    popularity_lift: float
    """The mean popularity of lists over the mean popularity of histories, minus 1 (Abdollahpouri et
    al. 2020): 0 for equally popular, 1 for twice as popular. The popularity of an item is its share
    of users. The popularity of a list or a history is the mean over its items."""

    def as_dict(self) -> dict[str, float]:
        """The figures, for JSON."""
        return asdict(self)


def list_statistics(users: IntArray, lists: IntArray, train: Interactions) -> ListStatistics:
    """Statistics of the lists of some users.

    Args:
        users: (B,) rows of users, at least one of them with an interaction.
        lists: (B, K) items, best first, padded with −1 at the end; each list has an item.
        train: the interactions that define popularity.

    Raises:
        ValueError: no user has an interaction, or a list is empty.
    """
    shown = lists != PAD
    lengths = shown.sum(axis=1)
    histories = [items for user in users.tolist() if len(items := train.items_of(user))]
    if not histories or (lengths == 0).any():
        raise ValueError("users need interactions, and lists of at least one item")
    exposure = np.sort(np.bincount(lists[shown], minlength=train.n_items))
    item_users = train.item_counts()
    popularity = item_users / train.n_users
    of_lists = np.where(shown, popularity[lists], 0.0).sum(axis=1) / lengths
    of_histories = [popularity[items].mean() for items in histories]
    places = np.arange(1, train.n_items + 1)
    gini = ((2 * places - train.n_items - 1) * exposure).sum() / (train.n_items * exposure.sum())
    bits = np.log2(train.n_users / np.maximum(item_users, 1))
    return ListStatistics(
        coverage=float((exposure > 0).mean()),
        gini=float(gini),
        novelty=float(bits[lists[shown]].mean()),
        popularity_lift=float(of_lists.mean() / np.mean(of_histories) - 1),
    )
