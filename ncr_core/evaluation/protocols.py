"""Evaluation protocols: the candidates that are ranked for each user, and their metrics.

Comparisons of models by sampled metrics can mislead (Krichene & Rendle, KDD'20). The figures
therefore also include metrics over the whole catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from ncr_core.data.interactions import BoolArray, IntArray
from ncr_core.data.splits import Split
from ncr_core.errors import TrainingError
from ncr_core.evaluation.metrics import FloatArray, held_out_ranks, hit_ratio, ndcg
from ncr_core.evaluation.metrics import K as K
from ncr_core.models.base import PairwiseRanker
from ncr_core.ranking.ranker import PAD, ExactRanker

NEGATIVES = 100
MAX_BLOCK_USERS, MAX_BLOCK_CELLS = 512, 2**24  # users by items: 128 MiB of candidates


class Ranks(Protocol):
    """A ranker of candidates that evaluations accept."""

    def rank(self, users: IntArray, candidates: IntArray, k: int) -> IntArray:
        """(B,) users and (B, M) candidates, padded with −1 → (B, ≤ k) candidates, best first."""
        ...


@runtime_checkable
class ScoredRanks(Ranks, Protocol):
    """A ranker by scores of users and items: the highest score comes first."""

    def scores(self, users: IntArray) -> FloatArray:
        """(B,) users → (B, n_items) finite scores."""
        ...


@runtime_checkable
class CatalogueRanks(Ranks, Protocol):
    """A ranker that may rank the whole catalogue without a list of candidates."""

    @property
    def ranks_catalogue(self) -> bool:
        """Whether the model is a product of vectors, as ``rank_catalogue`` requires."""
        ...

    def rank_catalogue(
        self, users: IntArray, allowed: BoolArray, tie_places: IntArray, k: int
    ) -> IntArray:
        """(B,) users and (B, n_items) allowed items → (B, ≤ k) items, best first, padded with −1.

        ``tie_places`` (n_items,) are the items' places in the order that decides ties. Raises
        ValueError unless ``ranks_catalogue``.
        """
        ...


class FullRanking(Protocol):
    """Computes `full_ranks`, in this process or in several others."""

    def __call__(
        self, model: Ranks, split: Split, held_out: IntArray, seed: int, /
    ) -> tuple[IntArray, int]:
        """The arguments and results are those of `full_ranks` with its ``K``."""
        ...


class SplitWithNegatives(Protocol):
    """A split that was published together with negatives of each test user."""

    @property
    def test_users(self) -> IntArray:
        """(n,) the users with a test item, ascending."""
        ...

    @property
    def test(self) -> IntArray:
        """(n_users,) test items, −1 where there is none."""
        ...

    @property
    def negatives(self) -> IntArray:
        """(n, M) the negatives of each test user, padded with −1."""
        ...


class ModelRanks:
    """Ranks candidates by a trained model.

    ``gap_classes`` (n_users,) are the users' gap classes, see ``PooledUsers``; by default class 0.
    """

    def __init__(self, model: PairwiseRanker, gap_classes: IntArray | None = None) -> None:
        self._model = model
        self._gap_classes = gap_classes
        self._ranker = ExactRanker(model)

    @torch.inference_mode()
    def rank(self, users: IntArray, candidates: IntArray, k: int) -> IntArray:
        """See `Ranks.rank`."""
        vectors = self._vectors(users)
        ranked = self._ranker.rank(vectors, torch.from_numpy(candidates), k)
        result: IntArray = ranked.cpu().numpy()
        return result

    @property
    def ranks_catalogue(self) -> bool:
        """See `CatalogueRanks.ranks_catalogue`."""
        return self._ranker.margins.sortable

    @torch.inference_mode()
    def rank_catalogue(
        self, users: IntArray, allowed: BoolArray, tie_places: IntArray, k: int
    ) -> IntArray:
        """See `CatalogueRanks.rank_catalogue`."""
        ranked = self._ranker.top(
            self._vectors(users), k, torch.from_numpy(allowed), torch.from_numpy(tie_places)
        )
        result: IntArray = ranked.cpu().numpy()
        return result

    @torch.inference_mode()
    def places(self, users: IntArray, held_out: IntArray, candidates: IntArray) -> IntArray:
        """(B,) numbers of candidates that beat the held-out item, or tie and stand before it.

        For additive models, and wherever preferences are transitive, the number is the held-out
        item's position in the list of Algorithm 1. ``places`` takes a fifth of the comparisons of
        the list.
        """
        items = torch.from_numpy(candidates).to(self._model.device)
        target = torch.from_numpy(held_out).to(self._model.device).unsqueeze(1).expand_as(items)
        vectors = self._vectors(users)
        margins = self._ranker.compare(vectors, target, items.clamp(min=0))
        is_target = items == target
        target_column = is_target.long().argmax(dim=1, keepdim=True)
        before = torch.arange(items.shape[1], device=items.device) < target_column
        # Written so that a margin that is not a number counts against the held-out item.
        beaten = ~((margins > 0) | ((margins == 0) & ~before)) & (items != PAD) & ~is_target
        result: IntArray = beaten.sum(dim=1).cpu().numpy()
        return result

    def _vectors(self, users: IntArray) -> torch.Tensor:
        rows = torch.from_numpy(users).to(self._model.device)
        vectors = self._model.user_vectors(rows)
        if self._gap_classes is None:
            return vectors
        classes = torch.from_numpy(self._gap_classes[users]).to(self._model.device)
        return self._model.after_gap(vectors, classes)


@dataclass(frozen=True)
class Metrics:
    """HR@k and NDCG@k of ``users`` users, each with at most ``items`` candidates."""

    hr: float
    ndcg: float
    users: int
    items: int

    @classmethod
    def of(cls, ranks: IntArray, items: int, k: int = K) -> Metrics:
        """The metrics of (n,) ranks of held-out items from 0, −1 outside the first k."""
        return cls(hit_ratio(ranks, k), ndcg(ranks, k), len(ranks), items)

    def line(self, name: str) -> str:
        """The figures as one line of text."""
        return (
            f"{name} HR@{K} {self.hr:.4f} NDCG@{K} {self.ndcg:.4f} "
            f"({self.users:,} users, {self.items:,} items)"
        )

    def as_dict(self) -> dict[str, float | int]:
        """The figures, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class CandidateSet:
    """(n,) users, their held-out items, and (n, M) candidates that include the held-out items."""

    users: IntArray
    held_out: IntArray
    candidates: IntArray


def sampled_candidates(
    split: Split, held_out: IntArray, seed: int, negatives: int = NEGATIVES
) -> CandidateSet:
    """P1: the held-out item among ``negatives`` sampled items without an interaction of the user.

    The held-out item's position is random: at a fixed position the item would gain or lose by every
    tie. Users with fewer unseen items than ``negatives`` get all of their unseen items.
    """
    rng, n_items = np.random.default_rng(seed), split.train.n_items
    users = np.flatnonzero(held_out >= 0)
    rows = np.full((len(users), negatives + 1), PAD, dtype=np.int64)
    for row, user in enumerate(users):
        drawn = _unseen_sample(rng, split.seen_items(user), n_items, negatives)
        mixed = np.append(drawn, held_out[user])
        rng.shuffle(mixed)
        rows[row, : len(mixed)] = mixed
    return CandidateSet(users, held_out[users], rows)


def given_candidates(published: SplitWithNegatives, seed: int) -> CandidateSet:
    """P2: the held-out item at a random position among its published negatives.

    The negatives keep their published order. The candidates are (n, M + 1). A user with fewer than
    M negatives, because the held-out item was one of them, has a row padded with −1.
    """
    users, negatives = published.test_users, published.negatives
    held_out = published.test[users]
    lengths = (negatives != PAD).sum(axis=1)
    position = np.random.default_rng(seed).integers(lengths + 1)[:, None]
    columns = np.arange(negatives.shape[1] + 1)
    # A column after the held-out item has the negative of the column before.
    source = np.minimum(columns - (columns > position), negatives.shape[1] - 1)
    rows = np.take_along_axis(negatives, source, axis=1)
    rows = np.where(columns == position, held_out[:, None], rows)
    return CandidateSet(users, held_out, rows)


def full_candidates(split: Split, held_out: IntArray, seed: int) -> Iterator[CandidateSet]:
    """The held-out item among all items that the user has not interacted with, by blocks of users.

    The order is one random permutation of the catalogue for all users.
    """
    order = _catalogue_order(split, seed)
    for users, allowed in _allowed_items(split, held_out):
        allowed = allowed[:, order]
        rows = np.full(allowed.shape, PAD, dtype=np.int64)
        filled = np.arange(len(order)) < allowed.sum(axis=1)[:, None]
        rows[filled] = np.broadcast_to(order, allowed.shape)[allowed]
        rows = rows[:, : filled.any(axis=0).sum()]
        yield CandidateSet(users, held_out[users], rows)


def full_lists(
    model: Ranks, split: Split, held_out: IntArray, seed: int, k: int
) -> Iterator[tuple[IntArray, IntArray]]:
    """(B,) users with a held-out item and (B, ≤ k) their best unseen items, by blocks of users.

    Lists are padded with −1. ``seed`` gives the order of the catalogue, which decides ties.
    """
    if isinstance(model, CatalogueRanks) and model.ranks_catalogue:  # a product, in place of a sort
        places = _catalogue_places(split, seed)
        for users, allowed in _allowed_items(split, held_out):
            yield users, model.rank_catalogue(users, allowed, places, k)
    else:
        for block in full_candidates(split, held_out, seed):
            yield block.users, model.rank(block.users, block.candidates, k)


def _catalogue_order(split: Split, seed: int) -> IntArray:
    return np.random.default_rng(seed).permutation(split.train.n_items)


def _catalogue_places(split: Split, seed: int) -> IntArray:
    """(n_items,) the place of each item in the order of the catalogue."""
    order = _catalogue_order(split, seed)
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return places


def _allowed_items(split: Split, held_out: IntArray) -> Iterator[tuple[IntArray, BoolArray]]:
    """(B,) users with a held-out item and (B, n_items) the items allowed for each, by blocks.

    The array of a block is valid until the next block.
    """
    n_items = split.train.n_items
    block = max(1, min(MAX_BLOCK_USERS, MAX_BLOCK_CELLS // n_items))
    users = np.flatnonzero(held_out >= 0)
    # One array: with a new one for each block, the allocator may keep the memory of them all.
    every = np.ones((min(block, len(users)), n_items), dtype=np.bool_)
    for start in range(0, len(users), block):
        part = users[start : start + block]
        allowed = every[: len(part)]
        seen = [split.seen_items(user) for user in part]
        for row, items in enumerate(seen):
            allowed[row, items] = False
        allowed[np.arange(len(part)), held_out[part]] = True
        yield part, allowed
        for row, items in enumerate(seen):
            allowed[row, items] = True


def of_random_users(held_out: IntArray, most: int) -> IntArray:
    """The held-out items (n_users,) of at most ``most`` random users, −1 for all other users.

    The users of a smaller ``most`` are among the users of a larger ``most``.
    """
    users = np.flatnonzero(held_out >= 0)
    chosen = np.random.default_rng(0).permutation(users)[:most]
    some = np.full_like(held_out, -1)
    some[chosen] = held_out[chosen]
    return some


def evaluate_sampled(model: Ranks, candidates: CandidateSet, k: int = K) -> Metrics:
    """HR and NDCG of one candidate set."""
    ranks = ranks_of(model, candidates, k)
    items = int((candidates.candidates != PAD).sum(axis=1).max())
    return Metrics.of(ranks, items, k)


def evaluate_full(
    model: Ranks,
    split: Split,
    held_out: IntArray,
    seed: int,
    *,
    on_users: Callable[[int], None] | None = None,
    k: int = K,
) -> Metrics:
    """HR and NDCG over all unseen items.

    A ``ScoredRanks`` with a score that is not finite raises TrainingError.

    Args:
        model: the ranker to evaluate.
        split: the split that the model was trained on.
        held_out: (n_users,) the items to find, −1 for users who do not take part.
        seed: the seed of the candidates' order, which decides ties.
        on_users: called with the number of users of each finished block.
        k: the length of the lists.
    """
    ranks, items = full_ranks(model, split, held_out, seed, on_users=on_users, k=k)
    return Metrics.of(ranks, items, k)


def full_ranks(
    model: Ranks,
    split: Split,
    held_out: IntArray,
    seed: int,
    *,
    on_users: Callable[[int], None] | None = None,
    k: int = K,
) -> tuple[IntArray, int]:
    """(n,) ranks of the held-out items from 0, −1 outside the first k; and the number of items.

    The arguments and errors are as in ``evaluate_full``. The users are the users with a held-out
    item, in ascending order. The number of items is the largest number that was ranked for a user.
    """
    ranks, items = [], 0
    if isinstance(model, CatalogueRanks) and model.ranks_catalogue:
        places = _catalogue_places(split, seed)
        for users, allowed in _allowed_items(split, held_out):
            ranked = model.rank_catalogue(users, allowed, places, k)
            ranks.append(held_out_ranks(ranked, held_out[users]))
            items = max(items, int(allowed.sum(axis=1).max()))
            if on_users is not None:
                on_users(len(users))
        return np.concatenate(ranks), items
    if isinstance(model, ScoredRanks):
        places = _catalogue_places(split, seed)
        for users, allowed in _allowed_items(split, held_out):
            ranks.append(_score_ranks(model.scores(users), allowed, held_out[users], places, k))
            items = max(items, int(allowed.sum(axis=1).max()))
            if on_users is not None:
                on_users(len(users))
        return np.concatenate(ranks), items
    for block in full_candidates(split, held_out, seed):
        ranks.append(ranks_of(model, block, k))
        items = max(items, block.candidates.shape[1])
        if on_users is not None:
            on_users(len(block.users))
    return np.concatenate(ranks), items


def _score_ranks(
    scores: FloatArray, allowed: BoolArray, held_out: IntArray, places: IntArray, k: int
) -> IntArray:
    """The ranks of (B,) held-out items: the numbers of allowed items before each held-out item.

    Sorting the (B, n_items) scores would take many times as long. Of items with equal scores the
    item that is first by (n_items,) ``places`` comes first.
    """
    if not np.isfinite(scores[allowed]).all():
        raise TrainingError("the scores of a model are not finite numbers")
    own = scores[np.arange(len(scores)), held_out][:, None]
    ahead = (scores > own) | ((scores == own) & (places < places[held_out][:, None]))
    ranks = (ahead & allowed).sum(axis=1)
    return np.where(ranks < k, ranks, PAD)


def ranks_of(model: Ranks, candidates: CandidateSet, k: int, *, block: int = 1024) -> IntArray:
    """(n,) ranks of the held-out items from 0, −1 outside the first k."""
    parts = []
    for start in range(0, len(candidates.users), block):
        part = slice(start, start + block)
        ranked = model.rank(candidates.users[part], candidates.candidates[part], k)
        parts.append(held_out_ranks(ranked, candidates.held_out[part]))
    return np.concatenate(parts)


def _unseen_sample(rng: np.random.Generator, seen: IntArray, n_items: int, n: int) -> IntArray:
    """``n`` different items outside ``seen``, or all such items if there are fewer."""
    if n_items - len(seen) <= 2 * n:
        unseen = np.setdiff1d(np.arange(n_items), seen)
        return rng.permutation(unseen)[:n]
    excluded, sample = set(seen.tolist()), list[int]()
    while len(sample) < n:
        for item in rng.integers(n_items, size=2 * n).tolist():
            if item not in excluded:
                excluded.add(item)
                sample.append(item)
    return np.array(sample[:n], dtype=np.int64)
