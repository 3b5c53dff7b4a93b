"""What lists are like beside how often they are right: whose items they show, and how many."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.ranking.ranker import PAD


@dataclass(frozen=True)
class ListStatistics:
    """Coverage, concentration, novelty and popularity of users' lists."""

    coverage: float
    """The share of the catalogue's items that are in a list, of anyone."""

    gini: float
    """The Gini coefficient of the numbers of lists that items are in: 0 where all are in equally
    many, near 1 where few items are in all (Fleder & Hosanagar 2009)."""

    novelty: float
    """Bits: the mean of log₂(users / users of the item) over all places of the lists (Zhou et al.
    2010). An item without users counts as one with one user."""

    popularity_lift: float
    """How much more popular lists are than histories: 0 for equally popular, 1 for twice as popular
    (Abdollahpouri et al. 2020). An item's popularity is its share of users; of a list, and of a
    user's items, the mean counts."""

    def as_dict(self) -> dict[str, float]:
        """The figures, for JSON."""
        return asdict(self)


def list_statistics(users: IntArray, lists: IntArray, train: Interactions) -> ListStatistics:
    """Statistics of the lists of some users.

    Args:
        users: (B,) rows of users, at least one of them with an interaction.
        lists: (B, K) items, best first, padded with −1 at the end; each list has an item.
        train: the interactions that popularity is counted in.

    Raises:
        ValueError: there is no user with an interaction, or a list without items.
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
