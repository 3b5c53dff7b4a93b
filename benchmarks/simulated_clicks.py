"""Users who click, with tastes that are known: for benchmarks of what clicks can tell."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

USERS, ITEMS, FACTORS, SHOWN = 2_000, 400, 8, 10


class World:
    """2,000 users and 400 items; a user's utility of an item is a product of 8 factors, of variance
    1, and what the item is to everyone.

    A user looks from the top, clicks an item in view with a probability that grows with its
    utility, and goes on with 0.85 after an item left alone and with 0.5 after a click: the
    dependent click model (Guo, Liu & Wang, WSDM 2009), so that low places are seldom seen.
    """

    ON, AFTER_CLICK = 0.85, 0.5

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        users = rng.normal(size=(USERS, FACTORS))
        items = rng.normal(size=(ITEMS, FACTORS))
        taste = users @ items.T / np.sqrt(FACTORS)
        self.utility: FloatArray = taste + 0.5 * rng.normal(size=ITEMS)
        # The best items are clicked by one in twelve who look at them: about a fifth of the lists.
        self.attraction: FloatArray = 0.0875 / (1 + np.exp(-2 * (self.utility - 2.0)))
        # A tenth of the users make about half of the requests.
        activity = rng.lognormal(0, 1.3, USERS)
        self.activity: FloatArray = activity / activity.sum()

    def version(self, error: float, seed: int) -> IntArray:
        """(USERS, SHOWN) lists of a model that knows utilities up to errors of this deviation."""
        rng = np.random.default_rng(seed)
        scores = self.utility + error * rng.normal(size=self.utility.shape)
        order: IntArray = np.argsort(-scores, axis=1)[:, :SHOWN]
        return order

    def ndcg(self, lists: IntArray) -> float:
        """NDCG of the lists, with the attractions as gains."""
        discount = 1 / np.log2(np.arange(SHOWN) + 2)
        gains = np.take_along_axis(self.attraction, lists, axis=1) @ discount
        best = -np.sort(-self.attraction, axis=1)[:, :SHOWN] @ discount
        return float((gains / best).mean())

    def requests(self, n: int, rng: np.random.Generator) -> IntArray:
        """The users of n requests."""
        return rng.choice(USERS, size=n, p=self.activity)

    def clicks(
        self, users: IntArray, lists: IntArray, rng: np.random.Generator
    ) -> NDArray[np.bool_]:
        """(n, SHOWN) what users (n,) click of lists (n, SHOWN)."""
        likes = rng.random(lists.shape) < self.attraction[users[:, None], lists]
        goes_on = rng.random(lists.shape) < np.where(likes, self.AFTER_CLICK, self.ON)
        seen = np.ones(lists.shape, dtype=np.bool_)
        seen[:, 1:] = np.logical_and.accumulate(goes_on[:, :-1], axis=1)
        found: NDArray[np.bool_] = likes & seen
        return found
