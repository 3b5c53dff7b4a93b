"""Batches of positives with their negatives, made on the training device without a DataLoader.

Negatives are uniform (§4.2: uniform from D_S and its mirror). Batches also have pairs of positives
and disliked items, and preferences that users stated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ncr_core.data.interactions import (
    BoolArray,
    FloatArray,
    IntArray,
    Interactions,
    UserFeedback,
)
from ncr_core.errors import ConfigError, DataError
from ncr_core.model_config import ModelConfig
from ncr_core.models.user_embeddings import UserHistories
from ncr_core.train_config import TrainConfig

MASK_CELLS = 256 * 2**20  # up to 256 MiB a boolean matrix is the fastest look-up
MAX_ROUNDS = 64
DRAWN_CELLS = 2**22  # negatives that a GPU draws at once: 32 MiB
BLIND_ROUNDS = 4  # after which one draw of a hundred thousand is bad, if one of ten items is seen


class NegativeSampler:
    """Draws uniform items that a user has not interacted with, by rejection.

    Raises DataError if a user has seen every item. The caller must leave out users without
    negatives.
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
        if self.device.type != "cpu":  # a look at the result would wait for the device
            for _ in range(BLIND_ROUNDS):
                drawn = torch.where(bad, self._draw((len(users), n)), drawn)
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
        """Draws from the list of unseen items, for users who have seen nearly every item."""
        every = torch.arange(self.n_items, device=self.device)
        for row in bad.any(dim=1).nonzero().flatten().tolist():
            unseen = every[~self.seen(users[row] * self.n_items + every)]
            count = int(bad[row].sum())
            pick = torch.randint(
                len(unseen), (count,), generator=self.generator, device=self.device
            )
            drawn[row, bad[row]] = unseen[pick]
        return drawn


@dataclass(frozen=True)
class PreferenceRows:
    """Pairs of items of which the user prefers the first.

    ``users``, ``winners``, ``losers`` and ``weights`` are (T,). ``histories`` is set if user
    vectors come from items.
    """

    users: Tensor
    winners: Tensor
    losers: Tensor
    weights: Tensor
    histories: UserHistories | None


class PreferencePairs:
    """Gives each batch its share of the stated pairs, and disliked rivals of its positives.

    In each epoch every positive of a user with disliked items meets a random one of them, and every
    stated pair comes once. The draws have a generator of their own, so the batches are the same
    with and without preferences.
    """

    def __init__(
        self, learned: Interactions, stated: UserFeedback, device: torch.device, seed: int
    ) -> None:
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self._device = device
        self._disliked = _RowsByUser(
            learned.n_users, stated.disliked, stated.disliked_weights, device
        )
        self._pairs = _RowsByUser(learned.n_users, stated.pairs, stated.pair_weights, device)
        positions = _winner_positions(learned, stated.pairs)[self._pairs.order]
        self._winner_position = torch.from_numpy(positions).to(device)

    def shares(self, batches: int) -> list[Tensor]:
        """The numbers of the stated pairs for each of the batches, in random order."""
        order = torch.randperm(
            len(self._pairs.users), generator=self.generator, device=self._device
        )
        return list(torch.tensor_split(order, batches))

    def pairs_of_users(
        self, users: Tensor, start: Tensor, end: Tensor
    ) -> tuple[Tensor, UserHistories]:
        """The numbers of the stated pairs of whole users (Q,), and the history of each pair.

        The users' items lie in a batch from ``start`` to ``end``. The histories have places in that
        batch, and no items of their own.

        A history leaves out the winner if the winner is one of the user's items. Otherwise it
        leaves out the latest item.
        """
        pairs, owner = self._pairs.all_rows(users)
        position = self._winner_position[pairs]
        left_out = torch.where(position < 0, end[owner] - 1, start[owner] + position)
        no_items = torch.empty(0, dtype=torch.long, device=self._device)
        return pairs, UserHistories(no_items, start[owner], left_out, end[owner])

    def rows(
        self,
        pairs: Tensor,
        pair_histories: UserHistories | None,
        users: Tensor,
        items: Tensor,
        weights: Tensor | None,
        histories: UserHistories | None,
        draws: Tensor | None = None,
    ) -> PreferenceRows | None:
        """The pairs of these numbers, and a disliked rival of each positive (R,) that has any.

        ``draws`` are uniform numbers for the positives that have any, by default new ones. None if
        there are no rows, and no ``draws``.
        """
        pair_users = self._pairs.users[pairs]
        winners, losers = self._pairs.columns[pairs].T
        has, rival = self._disliked.draw(users, self.generator, draws)
        # With draws of all ranks, every rank has to add up the losses of a batch, also of no rows.
        if draws is None and len(pairs) + len(has) == 0:
            return None
        rival_weights = self._disliked.weights[rival]
        if weights is not None:
            rival_weights = rival_weights * weights[has]
        joined = None
        if histories is not None and pair_histories is not None:
            joined = UserHistories(
                histories.items,
                torch.cat([pair_histories.start, histories.start[has]]),
                torch.cat([pair_histories.position, histories.position[has]]),
                torch.cat([pair_histories.end, histories.end[has]]),
            )
        return PreferenceRows(
            torch.cat([pair_users, users[has]]),
            torch.cat([winners, items[has]]),
            torch.cat([losers, self._disliked.columns[rival, 0]]),
            torch.cat([self._pairs.weights[pairs], rival_weights]),
            joined,
        )


class _RowsByUser:
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

    def draw(
        self, users: Tensor, generator: torch.Generator, draws: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The places of the (B,) users who have a row, and a random row of each of them.

        ``draws`` are uniform numbers for these places, by default those of the generator.
        """
        has = self._counts[users].nonzero().flatten()
        drawing = users[has]
        if draws is None:
            draws = torch.rand(len(drawing), generator=generator, device=drawing.device)
        return has, self._indptr[drawing] + (draws * self._counts[drawing]).long()

    def all_rows(self, users: Tensor) -> tuple[Tensor, Tensor]:
        """All rows of (Q,) users, and the place of the user of each row."""
        counts = self._counts[users]
        owner = torch.arange(len(users), device=users.device).repeat_interleave(counts)
        first = counts.cumsum(0) - counts
        offset = torch.arange(len(owner), device=users.device) - first[owner]
        return self._indptr[users][owner] + offset, owner


def _winner_positions(learned: Interactions, pairs: IntArray) -> IntArray:
    """(P,) the position of each winner among its user's items; −1 for a winner outside them."""
    users, row = np.unique(pairs[:, 0], return_inverse=True)
    theirs = learned.of_rows(users)
    if theirs.nnz == 0:
        return np.full(len(pairs), -1)
    order = np.argsort(theirs.users * theirs.n_items + theirs.items)
    wanted = row * theirs.n_items + pairs[:, 1]
    index = np.minimum(np.searchsorted(theirs.keys, wanted), theirs.nnz - 1)
    is_present = theirs.keys[index] == wanted
    return np.where(is_present, order[index] - theirs.indptr[row], -1)


EARLY = 10  # positives of a user


def _position_weights(learned: Interactions, early_weight: float) -> FloatArray | None:
    """The weights of positives, times ``early_weight`` for each user's first ``EARLY``."""
    if early_weight == 1.0:
        return learned.weights
    weights = (
        np.ones(learned.nnz, np.float32) if learned.weights is None else learned.weights.copy()
    )
    lengths = np.diff(learned.indptr)
    for position in range(EARLY):
        weights[learned.indptr[:-1][lengths > position] + position] *= early_weight
    return weights


MAX_CELLS = 2**26  # of the scores of one batch's users for its shared negatives


@dataclass(frozen=True)
class Rows:
    """Rows with a positive each, and with negatives of their own.

    ``users`` and ``items`` i are (R,), ``negatives`` j (R, n). ``histories`` is set if user vectors
    come from items. ``weights`` (R,) is set if positives have different weights. ``preferences`` is
    set if there are other pairs to learn.
    """

    users: Tensor
    items: Tensor
    negatives: Tensor
    histories: UserHistories | None
    weights: Tensor | None = None
    preferences: PreferenceRows | None = None


@dataclass(frozen=True)
class SharedRows:
    """Rows with a positive each, and negatives that all rows share.

    ``users`` (Q,) are the users that need a vector: each user once, or the user of each row with
    ``histories``. ``row`` (R,) is the place of each row's user in ``users``. ``items`` (R,) are the
    positives i and ``negatives`` (S,) the items j. ``valid`` (Q, S) says which of the negatives the
    user has not interacted with. ``weights`` (R,) and ``preferences`` are as in ``Rows``.
    """

    users: Tensor
    row: Tensor
    items: Tensor
    negatives: Tensor
    valid: Tensor
    histories: UserHistories | None
    weights: Tensor | None = None
    preferences: PreferenceRows | None = None


@dataclass(frozen=True)
class Share:
    """The users of one of ``size`` ranks: the users whose row is ``rank`` modulo ``size``."""

    rank: int = 0
    size: int = 1
    lengths: NDArray[np.int32] | None = field(default=None, repr=False, compare=False)
    """(n_users,) the number of positives of each user of all ranks, for data that have the users of
    this share alone (`TrainingPart`); None for data that have all users."""
    dislikes: NDArray[np.bool_] | None = field(default=None, repr=False, compare=False)
    """(n_users,) whether each user of all ranks has disliked items, with ``lengths``; None if no
    user of any rank has disliked an item or stated a preference."""

    def holds(self, users: Tensor) -> Tensor:
        """(B,) rows of users → (B,) whether they are of this share."""
        return users % self.size == self.rank

    def rows(self, users: Tensor) -> Tensor:
        """(B,) rows of users of this share → (B,) their rows in the data of this rank."""
        return users if self.lengths is None else users // self.size


WHOLE = Share()


def own_rows(rows: Rows | SharedRows, share: Share) -> Rows | SharedRows:
    """The rows of a batch that are about the users of a share; there may be none.

    All ranks draw the same, so the rows of all ranks together are the batch.
    """
    preferences = rows.preferences
    if preferences is not None:
        keep = share.holds(preferences.users)
        preferences = PreferenceRows(
            preferences.users[keep],
            preferences.winners[keep],
            preferences.losers[keep],
            preferences.weights[keep],
            _own_histories(preferences.histories, keep),
        )
    if isinstance(rows, Rows):
        keep = share.holds(rows.users)
        weights = None if rows.weights is None else rows.weights[keep]
        histories = _own_histories(rows.histories, keep)
        users, items, negatives = rows.users[keep], rows.items[keep], rows.negatives[keep]
        return Rows(users, items, negatives, histories, weights, preferences)
    own = share.holds(rows.users)
    keep = own[rows.row]
    return SharedRows(
        rows.users[own],
        (own.cumsum(0) - 1)[rows.row[keep]],
        rows.items[keep],
        rows.negatives,
        rows.valid[own],
        _own_histories(rows.histories, keep),
        None if rows.weights is None else rows.weights[keep],
        preferences,
    )


def _own_histories(histories: UserHistories | None, keep: Tensor) -> UserHistories | None:
    if histories is None:
        return None
    start, position, end = histories.start[keep], histories.position[keep], histories.end[keep]
    return UserHistories(histories.items, start, position, end)


def learned_and_seen(train: Interactions) -> tuple[Interactions, Interactions]:
    """The positives to learn from, and all items that their users have seen.

    A user who has seen every item has no negatives, so nothing to learn from. Raises DataError if
    nothing is left.
    """
    every = train.with_seen()
    has_unseen = np.diff(every.indptr) < train.n_items
    learned = _of_users(train, has_unseen)
    if learned.nnz == 0:
        raise _nothing_to_learn(train)
    return learned, learned if every is train else _of_users(every, has_unseen)


def _of_users(interactions: Interactions, users: BoolArray) -> Interactions:
    """The interactions of some users by the (n_users,) mask of them; others have none."""
    if users.all():
        return interactions
    return interactions.select(interactions.entries_of(users))


def _nothing_to_learn(train: Interactions) -> DataError:
    return DataError(
        "every user has interacted with every item: training needs an item without an interaction"
        if train.nnz
        else "the data has no interactions to learn from"
    )


def draws_without_users(train: Interactions, config: TrainConfig) -> bool:
    """Whether the random draws of an epoch depend on no user's items: shared negatives alone."""
    return bool(config.shared_negatives) and not train.feedback


def may_be_parted(model: ModelConfig, config: TrainConfig) -> bool:
    """Whether a rank with whole tables needs no other user's positives (`TrainingPart`).

    It does not if users' vectors are pooled from their items, and if the negatives are shared.
    """
    return model.users == "history" and config.shared_negatives > 0


@dataclass(frozen=True)
class TrainingPart:
    """The positives of one rank's users, for ranks that need not know those of other users."""

    interactions: Interactions
    """The positives of the users of the share, in the order of their rows."""
    share: Share
    """The share of the rank, with the ``lengths`` of all users."""

    @classmethod
    def every(cls, train: Interactions, ranks: int) -> Iterator[TrainingPart]:
        """The parts of so many ranks, one after the other.

        Raises DataError if there is nothing to learn from, as `learned_and_seen` does.
        """
        lengths = learned_lengths(train)
        learned = train
        if lengths.sum() < train.nnz:
            learned = train.select(train.entries_of(lengths > 0))
        feedback, dislikes = train.feedback, None
        if feedback is not None and len(feedback.disliked) + len(feedback.pairs):
            dislikes = np.bincount(feedback.disliked[:, 0], minlength=train.n_users) > 0
        for rank in range(ranks):
            rows = np.arange(rank, train.n_users, ranks)
            own = learned.of_rows(rows)
            if feedback is not None:
                own = replace(own, feedback=feedback.of_rows(rows, train.n_users))
            yield cls(own, Share(rank, ranks, lengths, dislikes))


def learned_lengths(train: Interactions) -> NDArray[np.int32]:
    """(n_users,) numbers of positives to learn from, 0 for users who have seen every item.

    Raises DataError, as `learned_and_seen` does, if there is nothing to learn from.
    """
    lengths = np.diff(train.indptr).astype(np.int32)
    lengths[_full_users(train, lengths)] = 0
    if not lengths.any():
        raise _nothing_to_learn(train)
    return lengths


def _full_users(train: Interactions, lengths: NDArray[np.int32]) -> BoolArray:
    """(n_users,) users who have seen every item, without all items of all users in memory."""
    if train.feedback is None or not len(train.feedback.seen):
        return lengths >= train.n_items
    only_seen = np.bincount(train.feedback.seen[:, 0], minlength=train.n_users)
    perhaps = np.flatnonzero(lengths + only_seen >= train.n_items)
    theirs = replace(
        train.of_rows(perhaps), feedback=train.feedback.of_rows(perhaps, train.n_users)
    )
    full = np.zeros(train.n_users, dtype=np.bool_)
    full[perhaps] = np.diff(theirs.with_seen().indptr) >= train.n_items
    return full


class Batches:
    """The positives in random order, each once an epoch, with fresh negatives.

    Items that the user has only seen are never negatives. Stated preferences are part of the
    batches, see ``PreferencePairs``.

    With ``histories`` or shared negatives, whole users come in random order. The model then embeds
    a user's items and scores the negatives once for all rows of the user. A batch then has about as
    many rows as its size.

    With a ``share``, batches have only the rows of its users. All shares draw the same, so the rows
    of all ranks together are the whole batches. A batch may have no row of a share. ``train`` may
    have the users of the share alone if the negatives are shared and ``histories`` is set.

    Raises ConfigError if there are too few items for the negatives, and DataError if there is no
    interaction to learn from.
    """

    def __init__(
        self,
        train: Interactions,
        config: TrainConfig,
        device: torch.device,
        *,
        histories: bool = False,
        share: Share = WHOLE,
    ) -> None:
        if not config.shared_negatives and train.n_items < config.negatives + 1:
            raise ConfigError(
                f"{train.n_items} items are too few for {config.negatives} negatives a positive: "
                f"there must be at least {config.negatives + 1}"
            )
        if share.lengths is None:
            learned, seen = learned_and_seen(train)
        else:
            learned, every = train, train.with_seen()
            seen = _of_users(every, np.diff(every.indptr) < train.n_items)
        self._generator = torch.Generator(device=device).manual_seed(config.seed)
        self._items = torch.from_numpy(learned.items).to(device)
        self._indptr = torch.from_numpy(learned.indptr).to(device)
        self._weights: Tensor | None = None
        weights = _position_weights(learned, config.early_weight)
        if weights is not None:
            self._weights = torch.from_numpy(weights).to(device)
        self._preferences: PreferencePairs | None = None
        has_preferences = learned.feedback is not None and len(learned.feedback) > 0
        if share.lengths is not None:  # those of any rank: all ranks do the same sums
            has_preferences = share.dislikes is not None
        if learned.feedback is not None and has_preferences:
            self._preferences = PreferencePairs(learned, learned.feedback, device, config.seed)
        self._sampler = NegativeSampler(seen, device, self._generator)
        self.n_items = train.n_items
        self._lengths = self._indptr[1:] - self._indptr[:-1]
        if share.lengths is not None:
            self._lengths = torch.from_numpy(share.lengths).to(device)
        self._positives = int(self._lengths.sum())
        self.size = config.batch_size_for(self._positives)
        self._negatives = config.negatives
        # A matrix of users by shared negatives: bounded whatever the batch.
        queries = self.size * train.n_users // max(1, train.nnz)
        if histories:  # a row each, and whole users: a batch may end with a long one
            queries = self.size + int(self._lengths.max())
        max_shared = max(1, MAX_CELLS // max(1, queries))
        self._shared = min(config.shared_negatives, train.n_items, max_shared)
        self._histories = histories
        self._users: Tensor | None = None
        if not (histories or self._shared):
            self._users = torch.from_numpy(learned.users).to(device)
        self._device = device
        self._share = share
        # Each rank then makes the rows of its own users alone.
        self._is_shared_early = share.lengths is not None or draws_without_users(train, config)
        self._dislikes: Tensor | None = None
        if share.dislikes is not None:
            self._dislikes = torch.from_numpy(share.dislikes).to(device)

    def __len__(self) -> int:
        """The number of batches an epoch; with whole users, an upper limit."""
        return -(-self._positives // self.size)

    def __iter__(self) -> Iterator[Rows | SharedRows]:
        if self._share.size == 1 or self._is_shared_early:
            yield from self._batches()
            return
        for rows in self._batches():
            yield own_rows(rows, self._share)

    def drawn_at_once(self) -> int:
        """The number of batches, of rows with negatives of their own, that are drawn together.

        A GPU draws many, because each draw waits for the device.
        """
        if self._device.type == "cpu":
            return 1
        return max(1, DRAWN_CELLS // (self.size * self._negatives))

    def generators(self) -> list[torch.Generator]:
        """The generators that draw the batches, to store and restore their states."""
        preferences = [] if self._preferences is None else [self._preferences.generator]
        return [self._generator, *preferences]

    def _batches(self) -> Iterator[Rows | SharedRows]:
        if self._users is None:
            yield from self._whole_users()
            return
        order = torch.randperm(len(self._users), generator=self._generator, device=self._device)
        shares = iter(self._preference_shares(len(self)))
        for some in torch.split(order, self.size * self.drawn_at_once()):
            users = self._users[some]
            drawn = (some, users, self._sampler.sample(users, self._negatives))
            parts = zip(*(torch.split(each, self.size) for each in drawn), strict=True)
            for part, users, negatives in parts:
                items, weights = self._items[part], self._weights_at(part)
                yield self._rows(users, items, negatives, None, weights, next(shares))

    def _preference_shares(self, batches: int) -> Sequence[Tensor | None]:
        return [None] * batches if self._preferences is None else self._preferences.shares(batches)

    def _weights_at(self, positions: Tensor) -> Tensor | None:
        return None if self._weights is None else self._weights[positions]

    def _users_of_batches(self) -> list[Tensor]:
        """Whole users in random order, in as many parts as an epoch has batches."""
        active = self._lengths.nonzero().flatten()
        order = active[torch.randperm(len(active), generator=self._generator, device=self._device)]
        # As many batches as an epoch has, cut at the user in whom the next one begins.
        lengths = self._lengths[order]
        counts = torch.bincount((lengths.cumsum(0) - lengths) // self.size)
        return list(torch.split(order, counts[counts > 0].tolist()))

    def _rival_draws(self, users: Tensor) -> Tensor | None:
        """Uniform numbers for the positives of a part's users that have disliked rivals.

        Every rank draws those of all users of a batch, so that all ranks draw the same. None for
        data that have all users.
        """
        if self._preferences is None or self._dislikes is None:
            return None
        disliking = users[self._dislikes[users]]
        owners = disliking.repeat_interleave(self._lengths[disliking].long())
        generator = self._preferences.generator
        draws = torch.rand(len(owners), generator=generator, device=self._device)
        return draws[self._share.holds(owners)]

    def _whole_users(self) -> Iterator[Rows | SharedRows]:
        parts = self._users_of_batches()
        # With histories, the pairs come with their users.
        shares = [None] * len(parts) if self._histories else self._preference_shares(len(parts))
        for of_all_ranks, pairs in zip(parts, shares, strict=True):
            users, draws = of_all_ranks, self._rival_draws(of_all_ranks)
            if self._share.size > 1 and self._is_shared_early:
                users = users[self._share.holds(users)]
            user_lengths = self._lengths[users].long()
            users = self._share.rows(users)
            end = user_lengths.cumsum(0)
            first = end - user_lengths
            position = torch.arange(int(user_lengths.sum()), device=self._device)
            row = torch.arange(len(users), device=self._device).repeat_interleave(user_lengths)
            start = first[row]
            index = self._indptr[users][row] + position - start
            items, weights = self._items[index], self._weights_at(index)
            histories = None
            if self._histories:
                histories = UserHistories(items, start, position, end[row])
            pair_histories = None
            if histories is not None and self._preferences is not None:
                # Pairs of these users alone: others' items are not in this batch.
                pairs, pair_histories = self._preferences.pairs_of_users(users, first, end)
            if self._shared:
                yield self._shared_rows(
                    users, row, items, histories, weights, pairs, pair_histories, draws
                )
            else:
                negatives = self._sampler.sample(users[row], self._negatives)
                yield self._rows(
                    users[row], items, negatives, histories, weights, pairs, pair_histories
                )

    def _rows(
        self,
        users: Tensor,
        items: Tensor,
        negatives: Tensor,
        histories: UserHistories | None,
        weights: Tensor | None,
        pairs: Tensor | None,
        pair_histories: UserHistories | None = None,
    ) -> Rows:
        preferences = self._preference_rows(users, items, histories, weights, pairs, pair_histories)
        return Rows(users, items, negatives, histories, weights, preferences)

    def _shared_rows(
        self,
        users: Tensor,
        row: Tensor,
        items: Tensor,
        histories: UserHistories | None,
        weights: Tensor | None,
        pairs: Tensor | None,
        pair_histories: UserHistories | None,
        draws: Tensor | None,
    ) -> SharedRows:
        if self._shared == self.n_items:
            drawn = torch.arange(self.n_items, device=self._device)
        else:
            drawn = torch.randint(
                self.n_items, (self._shared,), generator=self._generator, device=self._device
            )
        valid = ~self._sampler.seen(users.unsqueeze(1) * self.n_items + drawn)
        preferences = self._preference_rows(
            users[row], items, histories, weights, pairs, pair_histories, draws
        )
        if histories is None:
            return SharedRows(users, row, items, drawn, valid, None, weights, preferences)
        each = torch.arange(len(row), device=self._device)
        return SharedRows(
            users[row], each, items, drawn, valid[row], histories, weights, preferences
        )

    def _preference_rows(
        self,
        users: Tensor,
        items: Tensor,
        histories: UserHistories | None,
        weights: Tensor | None,
        pairs: Tensor | None,
        pair_histories: UserHistories | None,
        draws: Tensor | None = None,
    ) -> PreferenceRows | None:
        if self._preferences is None or pairs is None:
            return None
        return self._preferences.rows(
            pairs, pair_histories, users, items, weights, histories, draws
        )
