"""The first stage of a list: users' vectors and their candidates, both kept in caches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ncr_core.fold_in import Evidence, FoldIn
from ncr_core.models.base import PairwiseRanker
from ncr_core.ranking import PAD, ExactRanker, Retriever, cheap_to_rank
from ncr_core.ranking.candidates import BEST_LAST
from ncr_core.ranking.ranker import top_allowed

SPARE_CANDIDATES = 56  # kept beyond M, so that a few skipped items need no new search
# A request that skips more has a list of its own depth, with twice as many spare ones, or four
# times: users who leave out ever more items are searched for a few times in all. They are more than
# ``BEST_LAST``, so that tied items are in the same order among the first candidates as among all.
MAX_SCORES = 2**23  # users times items in one search: 64 MiB of float64
MAX_GPU_SCORES = 2**26  # a GPU needs many users at once
SHORTLIST_FACTOR = 5  # times the candidates
POOL_FACTOR, MIN_POOL = 5, 50  # a diverse list is chosen from max(5n, 50) ranked items

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Key = TypeVar("Key", bound=Hashable, contravariant=True)
Value = TypeVar("Value")

_NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class UserState:
    """A user as a model sees them: a trained row, fold-in evidence, both, or neither."""

    row: int | None = None
    """The user's row in the model; None for a user who was not trained on."""
    evidence: Evidence | None = None
    """The evidence that the vector is fitted to. None: the vector needs no fit. A user without
    evidence has the trained vector, or without a row ``prior``, or else the mean of all users."""
    key: Hashable = None
    """The key of the fitted vector in a cache. The key changes with ``evidence``. None: no
    cache."""
    gap_class: int = 0
    """The gap class of the time since the user's last event, see `InferenceEngine.gap_class`."""
    prior: NDArray[np.float32] | None = None
    """(E,) the vector that the user's attributes predict (`ContentPlacement.predict`), for a user
    who was not trained on, or not with attributes. ``key`` changes with ``prior``. None: the user
    has no attributes, or the trained vector says more."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemFilter:
    """The items that one user may get.

    Only a search for candidates makes the mask over all items: most requests find their candidates
    in a cache.
    """

    allowed: BoolArray
    """(n_items,) items that may be recommended. Requests share the array and do not write to it."""
    excluded: IntArray = field(default_factory=lambda: _NO_ROWS)
    """Ids of items that this user does not get, such as seen items."""
    within: Sequence[IntArray] | None = None
    """Ids of the only items that may be recommended, in any number of arrays; None: any item."""
    row_of: IntArray | None = None
    """The row of each id, −1 for ids that the model does not have; None: ids are rows."""
    selected: BoolArray | None = None
    """(n_items,) rows that a filter leaves; None: all rows. Requests share the array."""
    few: IntArray | None = None
    """The rows of ``selected``, ascending, if they are few. Few rows are ranked without a
    search."""

    def mask(self) -> BoolArray:
        """(n_items,) items that the user may get, in a new array."""
        if self.within is None:
            mask = self.allowed.copy()
        else:
            mask = np.zeros_like(self.allowed)
            for ids in self.within:
                rows = self._rows(ids)
                mask[rows] = self.allowed[rows]
        if self.selected is not None:
            mask &= self.selected
        mask[self._rows(self.excluded)] = False
        return mask

    def few_rows(self) -> IntArray | None:
        """The rows that the user may get, ascending, without a mask; None if the rows are many."""
        if self.few is None:
            return None
        rows = self.few[self.allowed[self.few]]
        if self.within is not None:
            inside = [self._rows(ids) for ids in self.within]
            rows = rows[np.isin(rows, np.concatenate([_NO_ROWS, *inside]))]
        return rows[~np.isin(rows, self._rows(self.excluded))]

    def _rows(self, ids: IntArray) -> IntArray:
        if self.row_of is None:
            return ids
        rows = self.row_of[ids[ids < len(self.row_of)]]
        return rows[rows >= 0]


@dataclass(frozen=True, slots=True, eq=False)
class RankRequest:
    """A list of the best ``n`` items for one user. Rows are the model's own."""

    user: UserState
    n: int
    items: ItemFilter
    """The items that candidates may be taken from, ``skipped`` items included."""
    skipped: IntArray = field(default_factory=lambda: _NO_ROWS)
    """Rows that this request alone leaves out. ``key`` does not depend on these rows."""
    diversity: float = 0.0
    """The share of the order given up for variety, 0 to 1, see `diversified`."""
    explain_by: Evidence | None = None
    """All evidence of the user, to explain each item by; None: no explanations."""
    key: Hashable = None
    """The key of the candidates in a cache. The key changes with ``items`` and with the user's key
    and gap class. None: the candidates are not kept."""
    trained_key: Hashable = None
    """The key of the candidates among the items of the training, if the model has newer items. The
    key stays when the newer items change. None: no newer items, or the candidates are not kept."""
    key_bytes: int = 0
    """The memory of the strings in ``key``, in bytes."""
    boost: NDArray[np.float64] | None = None
    """(n_items,) b: the margin of i over j is b_i − b_j larger. Requests share the array. ``key``
    changes with ``boost``. None: no boost."""
    page: int | None = None
    """The number of items of a page, if ``n`` counts the items of all pages of a diverse list."""

    @property
    def pool(self) -> int:
        """The number of ranked items for a diverse page, or for a diverse list without pages."""
        return max(MIN_POOL, POOL_FACTOR * (self.page or self.n))

    @property
    def depth(self) -> int:
        """The length of the ranked list that the ``n`` items are chosen from."""
        return self.pool if self.diversity and self.page is None else self.n

    def mask(self) -> BoolArray:
        """(n_items,) items that may be in the list, in a new array."""
        mask = self.items.mask()
        mask[self.skipped] = False
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class CandidateList:
    """A user's candidates."""

    items: NDArray[np.int32]
    """The best allowed rows, best first."""
    complete: bool
    """Whether ``items`` are all allowed items."""


class Cache(Protocol[Key, Value]):
    """A bounded store of values by key. Callers do not ask for the key None."""

    def get(self, key: Key) -> Value | None:
        """The value, or None."""

    def put(self, key: Key, value: Value, size: int) -> None:
        """Keeps a value of ``size`` bytes."""

    def has(self, key: Key) -> bool:
        """Whether the value is there."""


class NoCache:
    """A cache that keeps nothing."""

    def get(self, key: Hashable) -> None:
        """None."""

    def put(self, key: Hashable, value: object, size: int) -> None:
        """Does nothing."""

    def has(self, key: Hashable) -> bool:
        """False."""
        return False


class CandidateSource(Protocol):
    """A source of candidates that were computed elsewhere."""

    def find(self, request: RankRequest) -> CandidateList | None:
        """The candidates of exactly this request, or None."""


class CandidateGenerator:
    """Scores every item by its mean margin over a few anchor items, and keeps the best M.

    For an additive model the scores order items exactly as the model does. In a large catalogue
    ``shortlist`` first finds the best items by s_ui alone: ``SHORTLIST_FACTOR`` times as many as
    are wanted. The scores then choose among these items.
    """

    def __init__(
        self,
        ranker: ExactRanker,
        anchors: Sequence[int],
        seed: int,
        shortlist: Retriever | None = None,
    ) -> None:
        self.ranker = ranker
        self.shortlist = shortlist
        self.anchors = torch.tensor(list(anchors), dtype=torch.long, device=ranker.device)
        order = torch.randperm(ranker.n_items, generator=torch.Generator().manual_seed(seed))
        self.order = torch.empty_like(order)
        self.order[order] = torch.arange(len(order))
        self.order = self.order.to(ranker.device)

    @property
    def is_exact(self) -> bool:
        """Whether the candidates are in the order of the model, up to rounding errors."""
        return self.ranker.margins.sortable and self.shortlist is None

    def scores(self, users: Tensor) -> Tensor:
        """(B, E) user vectors → (B, n_items) mean margins against the anchors."""
        return self.ranker.mean_margins(users, self.anchors)

    def search(self, users: Tensor, allowed: Tensor, m: int, boost: Tensor | None = None) -> Tensor:
        """The best ``m`` of (B, n_items) allowed items for (B, E) user vectors: (B, ≤ m), padded.

        With a shortlist only its items are scored, for large catalogues. ``boost`` (n_items,) is
        added to the scores of items.
        """
        boost = None if boost is None else boost.to(self.ranker.device)
        users, allowed = users.to(self.ranker.device), allowed.to(self.ranker.device)
        sortable = self.ranker.margins.sortable
        if self.shortlist is None:
            if sortable:
                return self.ranker.top(users, m, allowed, self.order, boost)
            scores = self.ranker.mean_margins(users, self.anchors, boost)
            return top_allowed(scores, allowed, self.order, m)
        if sortable:
            return self.shortlist.search(users, allowed, m, boost)
        shortlisted = self.shortlist.search(users, allowed, SHORTLIST_FACTOR * m, boost)
        scores = self._scores_of(users, shortlisted, boost)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :m]
        return shortlisted.gather(1, order)

    def _scores_of(self, users: Tensor, items: Tensor, boost: Tensor | None) -> Tensor:
        """(B, E) user vectors and (B, T) items, padded → (B, T) scores; −inf in the padding."""
        if self.ranker.device.type != "cpu":
            margins = self.ranker.margins.bind(users, boost)
            means = margins.mean_margins(self.anchors, items.clamp(min=0))
            return means.masked_fill_(items == PAD, -torch.inf)
        scores = torch.full(items.shape, -torch.inf, dtype=torch.float64)
        for row, user, own in zip(scores, torch.split(users, 1), items, strict=True):
            rows = own[own != PAD]
            means = self.ranker.bind(user, boost).margins.mean_margins(self.anchors, rows)
            row[: len(rows)] = means[0]
        return scores

    def merge(
        self, user: Tensor, rows: NDArray[np.int64], m: int, boost: Tensor | None = None
    ) -> NDArray[np.int32]:
        """The best ``m`` of some rows for one (1, E) user vector, best first."""
        items = torch.from_numpy(rows).to(self.ranker.device)
        margins = self.ranker.bind(user.to(self.ranker.device), boost).margins
        scores = margins.mean_margins(self.anchors, items)[0].cpu().numpy()
        best = np.lexsort((self.order[items].cpu().numpy(), -scores))[:m]
        return rows[best].astype(np.int32)

    def pick(self, scores: Tensor, allowed: Tensor, m: int) -> Tensor:
        """The best ``m`` allowed items by (B, n_items) scores, in ``cheap_to_rank``'s order."""
        return cheap_to_rank(top_allowed(scores, allowed.to(scores.device), self.order, m))


class CandidateRetriever:
    """Finds users' vectors, and the best ``m`` candidates of each user.

    Threads may share a retriever if its caches are thread-safe. The caches keep fitted vectors by
    ``UserState.key``, and the best ``m`` candidates with some spare ones by ``RankRequest.key``. A
    request that skips many items has more spare candidates, kept by that key and their number. The
    depth of a search depends on the request alone, and not on earlier requests.
    """

    def __init__(
        self,
        model: PairwiseRanker,
        generator: CandidateGenerator,
        fold_in: FoldIn,
        m: int,
        *,
        trained_items: int | None = None,
        vectors: Cache[Hashable, NDArray[np.float32]] | None = None,
        lists: Cache[Hashable, CandidateList] | None = None,
    ) -> None:
        self._model = model
        self._trained_items = model.n_items if trained_items is None else trained_items
        self._generator = generator
        self._fold_in = fold_in
        self._m = m
        self._mean_vector = fold_in.newcomer.numpy()
        # In memory, wherever the model is; on a CPU these are the model's own tables.
        self._user_tables = [part.weight.detach().cpu().numpy() for part in model.user_parts()]
        self._vectors = NoCache() if vectors is None else vectors
        self._lists = NoCache() if lists is None else lists
        self.precomputed: CandidateSource | None = None
        """Candidates that were computed elsewhere; None before there are any."""

    @property
    def capacity(self) -> int:
        """The number of candidates in a full kept list: the best ``m`` and the usual spare ones."""
        return min(self._m + SPARE_CANDIDATES, self._model.n_items)

    def is_ready(self, request: RankRequest) -> bool:
        """Whether the request needs neither a fit of a vector nor a search for candidates."""
        if not self.has_vector(request.user):
            return False
        spare = _spare(request)
        if self._lists.has(_kept_key(request)):
            return True
        few = request.items.few
        if few is not None and len(few) <= min(self._m + spare, self._model.n_items):
            return True
        return spare == SPARE_CANDIDATES and (
            (request.trained_key is not None and self._lists.has(request.trained_key))
            or self._find_precomputed(request) is not None
        )

    def has_vector(self, user: UserState) -> bool:
        """Whether the user's vector needs no fit."""
        return user.evidence is None or self._vectors.has(user.key)

    def vectors(self, users: Sequence[UserState]) -> Tensor:
        """(B, E) vectors of B users, in float32 on the CPU."""
        rows = [user.row or 0 for user in users]
        vectors = np.concatenate([table[rows] for table in self._user_tables], axis=1)
        to_fit: dict[Hashable, list[int]] = {}
        for position, user in enumerate(users):
            if user.row is None:
                prior = user.prior
                vectors[position] = self._mean_vector if prior is None else prior
            if user.evidence is None:
                continue
            fitted = None if user.key is None else self._vectors.get(user.key)
            if fitted is None:
                key = position if user.key is None else user.key
                to_fit.setdefault(key, []).append(position)
            else:
                vectors[position] = fitted
        if to_fit:
            self._fit(users, vectors, to_fit)
        known = torch.from_numpy(vectors)
        if not any(user.gap_class for user in users):
            return known
        classes = torch.tensor([user.gap_class for user in users], device=self._model.device)
        return self._model.after_gap(known.to(self._model.device), classes).cpu()

    def candidates(self, requests: Sequence[RankRequest], vectors: Tensor) -> Tensor:
        """(B, E) user vectors → (B, ≤ m) candidates in an order that is cheap to rank, padded.

        If candidates are in the order of the model, only the first can be in a list.
        """
        most = self._m
        if self._generator.is_exact:
            depth = max(request.depth for request in requests)
            most = min(most, depth + SPARE_CANDIDATES)
        rows = []
        for request, kept in zip(requests, self.retrieve(requests, vectors), strict=True):
            items = kept.items
            if len(request.skipped):
                items = items[~np.isin(items, request.skipped)]
            rows.append(items[:most])
        width = max(len(items) for items in rows)
        padded = np.full((len(rows), width), PAD, dtype=np.int64)
        for row, items in zip(padded, rows, strict=True):
            last = items[:BEST_LAST]  # as ``cheap_to_rank`` does it for batches
            row[: len(items)] = np.concatenate([items[BEST_LAST:], last[::-1]])
        return torch.from_numpy(padded)

    def retrieve(
        self, requests: Sequence[RankRequest], vectors: Tensor | None = None
    ) -> list[CandidateList]:
        """The candidates of each request, best first; (B, E) ``vectors`` are the users'.

        The lists include spare candidates. All requests have the same boost, or none.
        """
        if vectors is None:
            vectors = self.vectors([request.user for request in requests])
        found = [
            self._find(request, vector)
            for request, vector in zip(requests, torch.split(vectors, 1), strict=True)
        ]
        missing: dict[int, dict[Hashable, int]] = {}
        for position, (request, candidates) in enumerate(zip(requests, found, strict=True)):
            if candidates is None and request.items.few is not None:
                found[position] = self._all_of_few(request, vectors[position][None])
            elif candidates is None:
                missing.setdefault(_spare(request), {})[_key(request, position)] = position
        searched: dict[Hashable, CandidateList] = {}
        most = MAX_SCORES if self._model.device.type == "cpu" else MAX_GPU_SCORES
        size = max(1, most // max(1, self._model.n_items))
        for spare, of_depth in missing.items():
            positions = list(of_depth.values())
            for start in range(0, len(positions), size):
                part = positions[start : start + size]
                lists = self._searched([requests[p] for p in part], vectors[part], spare)
                searched |= {
                    _key(requests[position], position): candidates
                    for position, candidates in zip(part, lists, strict=True)
                }
        return [
            candidates or searched[_key(request, position)]
            for position, (request, candidates) in enumerate(zip(requests, found, strict=True))
        ]

    def _searched(
        self, requests: Sequence[RankRequest], vectors: Tensor, spare: int
    ) -> list[CandidateList]:
        """The best ``m + spare`` candidates of each request, from a search; kept in the cache."""
        is_deep = spare > SPARE_CANDIDATES
        masks = np.stack(
            [request.items.mask() if is_deep else self._mask(request) for request in requests]
        )
        lists = []
        for request, vector, mask, items in zip(
            requests,
            torch.split(vectors, 1),
            masks,
            self._search(vectors, masks, self._m + spare, requests[0].boost),
            strict=True,
        ):
            candidates = CandidateList(items, len(items) == int(mask.sum()))
            if is_deep:
                self._keep(_kept_key(request), candidates, request)
            else:
                self._keep(request.trained_key or request.key, candidates, request)
                if request.trained_key is not None:
                    candidates = self._with_newer(request, candidates, vector)
            lists.append(candidates)
        return lists

    def rest(self, request: RankRequest, vector: Tensor, candidates: Tensor, n: int) -> Tensor:
        """The next ``n`` rows by score behind the candidates, for lists with more items."""
        best = self._search_one(request, vector, n, candidates.numpy())
        return torch.from_numpy(best.astype(np.int64))

    def _search_one(
        self, request: RankRequest, vector: Tensor, n: int, but: IntArray = _NO_ROWS
    ) -> NDArray[np.int32]:
        """The best ``n`` rows that may be in the list, without the rows ``but``, best first."""
        few = request.items.few_rows()
        if few is not None:
            rows = few[~np.isin(few, np.concatenate([request.skipped, but]))]
            return self._generator.merge(vector[None], rows, n, _tensor(request.boost))
        mask = request.mask()
        mask[but] = False
        return self._search(vector[None], mask[None], n, request.boost)[0]

    def _all_of_few(self, request: RankRequest, vector: Tensor) -> CandidateList:
        """The best of the few rows that a filter leaves, after scoring each; kept in the cache."""
        rows = request.items.few_rows()
        assert rows is not None  # noqa: S101 - the caller looked
        n, boost = self._m + _spare(request), _tensor(request.boost)
        items = self._generator.merge(vector, rows, n, boost)
        candidates = CandidateList(items, len(items) == len(rows))
        self._keep(_kept_key(request), candidates, request)
        return candidates

    def _fit(
        self,
        users: Sequence[UserState],
        vectors: NDArray[np.float32],
        to_fit: dict[Hashable, list[int]],
    ) -> None:
        """Fits each vector once and writes it to all of its positions."""
        first = [positions[-1] for positions in to_fit.values()]
        evidence = [state for p in first if (state := users[p].evidence) is not None]
        priors = None
        if any(users[p].prior is not None for p in first):
            priors = np.full((len(first), vectors.shape[1]), np.nan, dtype=np.float32)
            for prior, position in zip(priors, first, strict=True):
                if (own := users[position].prior) is not None:
                    prior[:] = own
        fitted = self._fold_in(
            evidence,
            torch.from_numpy(vectors[first]),
            None if priors is None else torch.from_numpy(priors),
        ).numpy()
        for positions, vector in zip(to_fit.values(), fitted, strict=True):
            key = users[positions[0]].key
            if key is not None:
                self._vectors.put(key, vector.copy(), vector.nbytes)
            vectors[positions] = vector

    def _find(self, request: RankRequest, vector: Tensor) -> CandidateList | None:
        if request.key is None:
            return None
        kept = self._lists.get(_kept_key(request))
        if _spare(request) > SPARE_CANDIDATES:
            return kept
        if kept is not None or request.trained_key is None:
            return kept or self._find_precomputed(request)
        trained = self._lists.get(request.trained_key) or self._find_precomputed(request)
        return None if trained is None else self._with_newer(request, trained, vector)

    def _keep(self, key: Hashable, candidates: CandidateList, request: RankRequest) -> None:
        if key is not None:
            self._lists.put(key, candidates, candidates.items.nbytes + request.key_bytes)

    def _mask(self, request: RankRequest) -> BoolArray:
        """(n_items,) items to search for candidates; `_with_newer` adds the newer items later."""
        mask = request.items.mask()
        if request.trained_key is not None:
            mask[self._trained_items :] = False
        return mask

    def _with_newer(
        self, request: RankRequest, trained: CandidateList, vector: Tensor
    ) -> CandidateList:
        """The best of the training's candidates and the newer items, kept in the cache."""
        newer = np.flatnonzero(request.items.mask()[self._trained_items :]) + self._trained_items
        rows = np.concatenate([trained.items.astype(np.int64), newer])
        items = self._generator.merge(vector, rows, self._m + SPARE_CANDIDATES)
        merged = CandidateList(items, trained.complete and len(items) == len(rows))
        self._keep(request.key, merged, request)
        return merged

    def _find_precomputed(self, request: RankRequest) -> CandidateList | None:
        found = None if self.precomputed is None else self.precomputed.find(request)
        if found is None or (len(found.items) < self.capacity and not found.complete):
            return None  # computed with fewer candidates than are wanted here
        return found

    def _search(
        self,
        vectors: Tensor,
        masks: BoolArray,
        n: int,
        boost: NDArray[np.float64] | None = None,
    ) -> list[NDArray[np.int32]]:
        allowed = torch.from_numpy(masks).to(self._model.device)
        best = self._generator.search(vectors, allowed, n, _tensor(boost))
        rows = best.to(torch.int32).cpu().numpy()
        return [row[row != PAD].copy() for row in rows]


def _tensor(array: NDArray[np.float64] | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)


def _spare(request: RankRequest) -> int:
    """The number of candidates beyond M for a request, at least the number of skipped items."""
    spare = SPARE_CANDIDATES
    while spare < len(request.skipped):
        spare *= 2
    return spare


def _kept_key(request: RankRequest) -> Hashable:
    """The key of the request's candidates in the cache; the key of a deep list has its depth."""
    spare = _spare(request)
    return request.key if request.key is None or spare == SPARE_CANDIDATES else (request.key, spare)


def _key(request: RankRequest, position: int) -> Hashable:
    """The key of the request in a search, or its position among the requests if it has none."""
    return position if request.key is None else _kept_key(request)
