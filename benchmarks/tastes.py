"""Users whose tastes are known: what they would take, what they do, and what they say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ncr_core.data import Interactions
from ncr_core.data.stated import Stated

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FACTORS = 6
SCALE = 1.6  # of utilities: how much tastes differ beside the chance of each choice
SHOWN = 40
SAID = 10


@dataclass(frozen=True)
class Tastes:
    """A world of users and items.

    A user takes an item that is shown with probability σ(utility); what is not taken may be
    disliked, the more likely the less it is liked, or is only seen. Of two items a user says to
    prefer the first with probability σ(difference of the utilities) (Bradley & Terry 1952).
    """

    utility: Floats
    """(n_users, n_items)"""
    popularity: Floats
    """(n_items,) what items are shown by."""

    @classmethod
    def draw(cls, n_users: int, n_items: int, seed: int) -> Tastes:
        """Utilities from latent factors, and what all users have in common."""
        rng = np.random.default_rng(seed)
        users = rng.standard_normal((n_users, FACTORS))
        items = rng.standard_normal((n_items, FACTORS))
        quality = 0.5 * rng.standard_normal(n_items)
        utility = SCALE * (users @ items.T) / np.sqrt(FACTORS) + quality - 1.0
        # Items are shown for many reasons, and quality is one.
        popularity = np.exp(quality + 0.8 * rng.standard_normal(n_items))
        return cls(utility, popularity)

    def acted(self, seed: int, shown: int = SHOWN, said: int = SAID) -> Interactions:
        """What users took of what they were shown, in random order, and all else that is known."""
        rng = np.random.default_rng([seed, 1])
        n_users, n_items = self.utility.shape
        taken: list[tuple[int, int]] = []
        seen: list[tuple[int, int]] = []
        disliked: list[tuple[int, int]] = []
        pairs: list[tuple[int, int, int]] = []
        share = self.popularity / self.popularity.sum()
        for user, own in enumerate(self.utility):
            items = rng.choice(n_items, size=shown, replace=False, p=share)
            takes = rng.random(shown) < sigmoid(own[items])
            dislikes = ~takes & (rng.random(shown) < 0.6 * sigmoid(-own[items] - 1.0))
            taken += [(user, i) for i in items[takes].tolist()]
            disliked += [(user, i) for i in items[dislikes].tolist()]
            seen += [(user, i) for i in items[~(takes | dislikes)].tolist()]
            asked = rng.choice(n_items, size=(said, 2), p=share)
            asked = asked[asked[:, 0] != asked[:, 1]]
            pairs += [(user, *pair) for pair in self.answers(user, asked, rng).tolist()]
        positives = np.array(taken, dtype=np.int64)
        return Interactions.from_arrays(
            positives[:, 0],
            positives[:, 1],
            user_ids=[str(u) for u in range(n_users)],
            item_ids=[str(i) for i in range(n_items)],
            stated=Stated(
                np.array(seen, dtype=np.int64).reshape(-1, 2),
                np.array(disliked, dtype=np.int64).reshape(-1, 2),
                np.ones(len(disliked), np.float32),
                np.array(pairs, dtype=np.int64).reshape(-1, 3),
                np.ones(len(pairs), np.float32),
            ),
        )

    def answers(self, user: int, asked: Ints, rng: np.random.Generator) -> Ints:
        """(P, 2) pairs that the user is asked about → the same, the preferred one first."""
        own = self.utility[user]
        first = rng.random(len(asked)) < sigmoid(own[asked[:, 0]] - own[asked[:, 1]])
        return np.where(first[:, None], asked, asked[:, ::-1])

    def ndcg(self, users: Ints, ranked: Ints, candidates: Ints) -> Floats:
        """(n,) NDCG of (n, k) lists of (n, M) candidates, padded −1, against the known tastes.

        The gain of an item is the probability that the user takes it, and the ideal list is that of
        the candidates with the highest.
        """
        gains = np.where(candidates >= 0, self._probability(users, candidates), 0.0)
        k = ranked.shape[1]
        ideal = -np.sort(-gains, axis=1)[:, :k]
        discount = 1 / np.log2(np.arange(2, k + 2))
        found = np.where(ranked >= 0, self._probability(users, ranked), 0.0)
        quotient: Floats = (found @ discount) / (ideal @ discount)
        return quotient

    def _probability(self, users: Ints, items: Ints) -> Floats:
        return sigmoid(self.utility[users[:, None], np.maximum(items, 0)])


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + e^−x), without overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def untouched(matrix: Interactions, stated: Stated, seed: int) -> Ints:
    """(n_users, M) the items of which a user has neither done nor said anything, in one random
    order for all, padded −1."""
    free = np.ones((matrix.n_users, matrix.n_items), dtype=np.bool_)
    free[matrix.users, matrix.items] = False
    for rows in (stated.seen, stated.disliked, stated.pairs[:, :2], stated.pairs[:, [0, 2]]):
        free[rows[:, 0], rows[:, 1]] = False
    order = np.random.default_rng([seed, 2]).permutation(matrix.n_items)
    free = free[:, order]
    rows = np.full(free.shape, -1, dtype=np.int64)
    rows[np.arange(free.shape[1]) < free.sum(axis=1)[:, None]] = np.broadcast_to(order, free.shape)[
        free
    ]
    return rows[:, : int(free.sum(axis=1).max())]
