"""Batches of positives with their negatives, made on the training device without a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ncr_core.data.interactions import Interactions
from ncr_core.data.samplers import NegativeSampler
from ncr_core.errors import ConfigError, DataError
from ncr_core.models.users import Histories
from ncr_core.training.config import TrainConfig
from ncr_core.training.stated import StatedPairs, StatedRows

MAX_CELLS = 2**26  # of the scores of one batch's users for its shared negatives


@dataclass(frozen=True)
class Rows:
    """A positive a row, each with negatives of its own.

    ``users`` and ``items`` i are (R,), ``negatives`` j (R, n). ``histories`` is there where user
    vectors come from items, ``weights`` (R,) where positives do not all count the same, and
    ``stated`` where there are other pairs to learn beside them.
    """

    users: Tensor
    items: Tensor
    negatives: Tensor
    histories: Histories | None
    weights: Tensor | None = None
    stated: StatedRows | None = None


@dataclass(frozen=True)
class SharedRows:
    """A positive a row, and negatives that all rows share.

    ``users`` (Q,) are those a vector is needed for: each user once, or, with ``histories``, the
    user of each row. ``row`` (R,) tells which of them a row belongs to, ``items`` (R,) are the
    positives i, ``negatives`` (S,) the items j and ``valid`` (Q, S) which of these the user has not
    interacted with. ``weights`` (R,) and ``stated`` are as of ``Rows``.
    """

    users: Tensor
    row: Tensor
    items: Tensor
    negatives: Tensor
    valid: Tensor
    histories: Histories | None
    weights: Tensor | None = None
    stated: StatedRows | None = None


class Batches:
    """The positives in random order, each once an epoch, with fresh negatives.

    Negatives are never items that the user has only seen. What users stated comes along, see
    ``StatedPairs``.

    With ``histories`` or shared negatives whole users come in random order, so that a user's items
    are embedded and the negatives scored once for all the user's rows; a batch then has about as
    many rows as asked for.
    """

    def __init__(
        self,
        train: Interactions,
        config: TrainConfig,
        device: torch.device,
        *,
        histories: bool = False,
    ) -> None:
        if not config.shared_negatives and train.n_items < config.negatives + 1:
            raise ConfigError(
                f"{train.n_items} items are too few for {config.negatives} negatives a positive: "
                f"there must be at least {config.negatives + 1}"
            )
        seen = train.with_seen()
        choosing = seen.indptr[1:] - seen.indptr[:-1] < train.n_items
        useful = choosing[train.users]
        if not useful.any():
            raise DataError(
                "every user has interacted with every item: there is nothing to compare with"
                if train.nnz
                else "there are no interactions to learn from"
            )
        # A user who has seen every item has no negatives, so nothing to learn from.
        learned = train if useful.all() else train.select(useful)
        self._generator = torch.Generator(device=device).manual_seed(config.seed)
        self._users = torch.from_numpy(learned.users).to(device)
        self._items = torch.from_numpy(learned.items).to(device)
        self._indptr = torch.from_numpy(learned.indptr).to(device)
        self._weights: Tensor | None = None
        if learned.weights is not None:
            self._weights = torch.from_numpy(learned.weights).to(device)
        self._stated: StatedPairs | None = None
        if learned.stated is not None and len(learned.stated):
            self._stated = StatedPairs(learned, learned.stated, device, config.seed)
        if seen is not train:
            learned = seen.select(choosing[seen.users])
        self._sampler = NegativeSampler(learned, device, self._generator)
        self.n_items = train.n_items
        self.size = config.batch_size_for(len(self._users))
        self._negatives = config.negatives
        # A matrix of users by shared negatives: bounded whatever the batch.
        queries = self.size if histories else self.size * train.n_users // max(1, train.nnz)
        most = max(1, MAX_CELLS // max(1, queries))
        self._shared = min(config.shared_negatives, train.n_items, most)
        self._histories = histories
        self._device = device

    def __len__(self) -> int:
        """Batches an epoch; where whole users are drawn, at most so many."""
        return -(-len(self._users) // self.size)

    def __iter__(self) -> Iterator[Rows | SharedRows]:
        if self._histories or self._shared:
            yield from self._by_user()
            return
        order = torch.randperm(len(self._users), generator=self._generator, device=self._device)
        parts = torch.split(order, self.size)
        for part, pairs in zip(parts, self._shares(len(parts)), strict=True):
            yield self._own(self._users[part], self._items[part], None, self._weigh(part), pairs)

    def _shares(self, batches: int) -> Sequence[Tensor | None]:
        return [None] * batches if self._stated is None else self._stated.shares(batches)

    def _weigh(self, places: Tensor) -> Tensor | None:
        return None if self._weights is None else self._weights[places]

    def _by_user(self) -> Iterator[Rows | SharedRows]:
        lengths = self._indptr[1:] - self._indptr[:-1]
        some = lengths.nonzero().flatten()
        order = some[torch.randperm(len(some), generator=self._generator, device=self._device)]
        # As many batches as an epoch has, cut at the user in whom the next one begins.
        before = lengths[order].cumsum(0) - lengths[order]
        counts = torch.bincount(before // self.size)
        parts = torch.split(order, counts[counts > 0].tolist())
        for users, pairs in zip(parts, self._shares(len(parts)), strict=True):
            own = lengths[users]
            end = own.cumsum(0)
            at = torch.arange(int(end[-1]), device=self._device)
            row = torch.arange(len(users), device=self._device).repeat_interleave(own)
            first = end - own
            start = first[row]
            places = self._indptr[users][row] + at - start
            items, weights = self._items[places], self._weigh(places)
            histories = Histories(items, start, at, end[row]) if self._histories else None
            theirs = None
            if histories is not None and self._stated is not None:
                # Pairs of these users alone: others' items are not in this batch.
                pairs, theirs = self._stated.of_users(users, first, end)
            if self._shared:
                yield self._share(users, row, items, histories, weights, pairs, theirs)
            else:
                yield self._own(users[row], items, histories, weights, pairs, theirs)

    def _own(
        self,
        users: Tensor,
        items: Tensor,
        histories: Histories | None,
        weights: Tensor | None,
        pairs: Tensor | None,
        theirs: Histories | None = None,
    ) -> Rows:
        negatives = self._sampler.sample(users, self._negatives)
        stated = self._state(users, items, histories, weights, pairs, theirs)
        return Rows(users, items, negatives, histories, weights, stated)

    def _share(
        self,
        users: Tensor,
        row: Tensor,
        items: Tensor,
        histories: Histories | None,
        weights: Tensor | None,
        pairs: Tensor | None,
        theirs: Histories | None,
    ) -> SharedRows:
        if self._shared == self.n_items:
            drawn = torch.arange(self.n_items, device=self._device)
        else:
            drawn = torch.randint(
                self.n_items, (self._shared,), generator=self._generator, device=self._device
            )
        valid = ~self._sampler.seen(users.unsqueeze(1) * self.n_items + drawn)
        stated = self._state(users[row], items, histories, weights, pairs, theirs)
        if histories is None:
            return SharedRows(users, row, items, drawn, valid, None, weights, stated)
        each = torch.arange(len(row), device=self._device)
        return SharedRows(users[row], each, items, drawn, valid[row], histories, weights, stated)

    def _state(
        self,
        users: Tensor,
        items: Tensor,
        histories: Histories | None,
        weights: Tensor | None,
        pairs: Tensor | None,
        theirs: Histories | None,
    ) -> StatedRows | None:
        if self._stated is None or pairs is None:
            return None
        return self._stated.rows(pairs, theirs, users, items, weights, histories)
