"""Uniform negative sampling on the training device (§4.2: uniform from D_S and its mirror)."""

from __future__ import annotations

import torch
from torch import Tensor

from ncr_core.data.interactions import Interactions
from ncr_core.errors import DataError

MASK_CELLS = 256 * 2**20  # up to 256 MiB a boolean matrix is the fastest look-up
MAX_ROUNDS = 64


class NegativeSampler:
    """Draws items that a user has not interacted with, uniformly, by rejection.

    Raises DataError when some user has seen every item: such a user has no negatives and must be
    left out before.
    """

    def __init__(
        self, seen: Interactions, device: torch.device, generator: torch.Generator
    ) -> None:
        self.n_items = seen.n_items
        self.device = device
        self.generator = generator
        full = (seen.indptr[1:] - seen.indptr[:-1]) >= seen.n_items
        if full.any():
            raise DataError(f"{int(full.sum())} users have seen every one of {self.n_items} items")
        self._mask: Tensor | None = None
        if seen.n_users * seen.n_items <= MASK_CELLS:
            self._mask = torch.zeros(seen.n_users * seen.n_items, dtype=torch.bool, device=device)
            self._mask[torch.from_numpy(seen.keys).to(device)] = True
        self._keys = torch.from_numpy(seen.keys).to(device)

    def sample(self, users: Tensor, n: int) -> Tensor:
        """(B,) users → (B, n) items, none of them among the user's, with replacement."""
        drawn = self._draw((len(users), n))
        base = (users * self.n_items).unsqueeze(1).expand(-1, n)
        bad = self.seen(base + drawn)
        for _ in range(MAX_ROUNDS):
            if not bool(bad.any()):
                return drawn
            at = bad.nonzero(as_tuple=True)
            again = self._draw((len(at[0]),))
            drawn[at] = again
            bad[at] = self.seen(base[at] + again)
        return self._exhaust(users, drawn, bad)

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(self.n_items, shape, generator=self.generator, device=self.device)

    def seen(self, keys: Tensor) -> Tensor:
        """Whether each key, user · n_items + item, is an interaction; any shape."""
        if self._mask is not None:
            return self._mask[keys]
        at = torch.searchsorted(self._keys, keys).clamp_(max=len(self._keys) - 1)
        return self._keys[at] == keys

    def _exhaust(self, users: Tensor, drawn: Tensor, bad: Tensor) -> Tensor:
        """For users who have seen nearly everything, draws from the list of what they have not."""
        every = torch.arange(self.n_items, device=self.device)
        for row in bad.any(dim=1).nonzero().flatten().tolist():
            unseen = every[~self.seen(users[row] * self.n_items + every)]
            count = int(bad[row].sum())
            pick = torch.randint(
                len(unseen), (count,), generator=self.generator, device=self.device
            )
            drawn[row, bad[row]] = unseen[pick]
        return drawn
