"""Pairs beside the drawn ones: positives over disliked items, and preferences that users stated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ncr_core.data.interactions import Interactions
from ncr_core.data.stated import FloatArray, IntArray, Stated
from ncr_core.models.users import Histories


@dataclass(frozen=True)
class StatedRows:
    """Pairs of items of which the user would rather have the first.

    ``users``, ``winners``, ``losers`` and ``weights`` are (T,). ``histories`` is there where user
    vectors come from items.
    """

    users: Tensor
    winners: Tensor
    losers: Tensor
    weights: Tensor
    histories: Histories | None


class StatedPairs:
    """Gives each batch its share of the stated pairs, and its positives' disliked rivals.

    Every positive of a user with disliked items meets one of them an epoch, drawn at random, and
    every stated pair comes once an epoch. The draws are apart from those of the batches, which stay
    the same with and without.
    """

    def __init__(
        self, learned: Interactions, stated: Stated, device: torch.device, seed: int
    ) -> None:
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._device = device
        self._disliked = _ByUser(learned.n_users, stated.disliked, stated.disliked_weights, device)
        self._pairs = _ByUser(learned.n_users, stated.pairs, stated.pair_weights, device)
        place = _places(learned, stated.pairs)[self._pairs.order]
        self._place = torch.from_numpy(place).to(device)

    def shares(self, batches: int) -> list[Tensor]:
        """The numbers of the stated pairs for each of so many batches, in random order."""
        order = torch.randperm(
            len(self._pairs.users), generator=self._generator, device=self._device
        )
        return list(torch.tensor_split(order, batches))

    def of_users(self, users: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Histories]:
        """For whole users (Q,) whose items lie in a batch from ``start`` to ``end``: the numbers of
        their stated pairs, and the place of each in ``Histories`` without the batch's items.

        The history leaves the winner out if it is one of the user's items, else the latest of them.
        """
        pairs, owner = self._pairs.every(users)
        place = self._place[pairs]
        at = torch.where(place < 0, end[owner] - 1, start[owner] + place)
        nothing = torch.empty(0, dtype=torch.long, device=self._device)
        return pairs, Histories(nothing, start[owner], at, end[owner])

    def rows(
        self,
        pairs: Tensor,
        pair_histories: Histories | None,
        users: Tensor,
        items: Tensor,
        weights: Tensor | None,
        histories: Histories | None,
    ) -> StatedRows | None:
        """The pairs of these numbers, and a disliked rival for each positive (R,) that has any."""
        of_pairs = self._pairs.users[pairs]
        winners, losers = self._pairs.columns[pairs].T
        has, rival = self._disliked.draw(users, self._generator)
        if len(pairs) + len(has) == 0:
            return None
        own = self._disliked.weights[rival]
        if weights is not None:
            own = own * weights[has]
        joined = None
        if histories is not None and pair_histories is not None:
            joined = Histories(
                histories.items,
                torch.cat([pair_histories.start, histories.start[has]]),
                torch.cat([pair_histories.at, histories.at[has]]),
                torch.cat([pair_histories.end, histories.end[has]]),
            )
        return StatedRows(
            torch.cat([of_pairs, users[has]]),
            torch.cat([winners, items[has]]),
            torch.cat([losers, self._disliked.columns[rival, 0]]),
            torch.cat([self._pairs.weights[pairs], own]),
            joined,
        )


class _ByUser:
    """Weighted rows whose first column is a user, ordered by user."""

    def __init__(
        self, n_users: int, rows: IntArray, weights: FloatArray, device: torch.device
    ) -> None:
        self.order = np.argsort(rows[:, 0], kind="stable")
        rows = rows[self.order]
        counts = np.bincount(rows[:, 0], minlength=n_users)
        indptr = np.concatenate([[0], np.cumsum(counts)])
        self.users = torch.from_numpy(rows[:, 0]).to(device)
        self.columns = torch.from_numpy(rows[:, 1:]).to(device)
        self.weights = torch.from_numpy(weights[self.order]).to(device)
        self._indptr = torch.from_numpy(indptr).to(device)
        self._counts = torch.from_numpy(counts).to(device)

    def draw(self, users: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Which of (B,) users have any row, and a row of each of these at random."""
        has = self._counts[users].nonzero().flatten()
        own = users[has]
        draw = torch.rand(len(own), generator=generator, device=own.device)
        return has, self._indptr[own] + (draw * self._counts[own]).long()

    def every(self, users: Tensor) -> tuple[Tensor, Tensor]:
        """All rows of (Q,) users, and which of the users each is of."""
        counts = self._counts[users]
        owner = torch.arange(len(users), device=users.device).repeat_interleave(counts)
        first = counts.cumsum(0) - counts
        place = torch.arange(len(owner), device=users.device) - first[owner]
        return self._indptr[users][owner] + place, owner


def _places(learned: Interactions, pairs: IntArray) -> IntArray:
    """(P,) where each winner stands among its user's items; −1 where it does not."""
    order = np.argsort(learned.users * learned.n_items + learned.items)
    wanted = pairs[:, 0] * learned.n_items + pairs[:, 1]
    if learned.nnz == 0:
        return np.full(len(pairs), -1)
    at = np.minimum(np.searchsorted(learned.keys, wanted), learned.nnz - 1)
    found = learned.keys[at] == wanted
    return np.where(found, order[at] - learned.indptr[pairs[:, 0]], -1)
