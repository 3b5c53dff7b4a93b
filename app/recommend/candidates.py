"""Whom a list is for and what may be in it: users' vectors and candidates, kept per state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.core.cache import ByteCache
from ncr_core.fold_in import Evidence, FoldIn
from ncr_core.models.ranker import PairwiseRanker
from ncr_core.ranking import PAD, CandidateGenerator
from ncr_core.ranking.candidates import BEST_LAST

SPARE = 56  # candidates kept beyond M, so that a few exclusions need no new search
SCORES_AT_ONCE = 2**22  # of users by items: 32 MiB
CHOICE, LEAST_CHOICE = 5, 50  # a varied list is chosen from one so many times, or so, long

_NONE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class RankRequest:
    """What the ranker is asked for one user. Rows are the model's own."""

    row: int | None
    """The user's row in the model; None for one who was not trained on."""
    evidence: Evidence | None
    """What the user's vector is fitted to; None: the trained vector is up to date."""
    state: tuple[str, int]
    """User and last seq: what the user's vector depends on."""
    filters: Hashable
    """What ``allowed`` depends on beside ``state``."""
    allowed: Callable[[], NDArray[np.bool_]]
    """Gives the (n_items,) items that may be recommended; called in the inference thread."""
    n: int
    excluded: NDArray[np.int64] = field(default_factory=lambda: _NONE)
    """Rows that this request alone leaves out."""
    key_bytes: int = 0
    """What the strings in ``filters`` take."""
    diversity: float = 0.0
    """How much of the list's order is given up for variety, see `diversified`."""
    explain_by: Evidence | None = None
    """All that is known of the user, for each place to be explained by; None: they are not."""

    @property
    def depth(self) -> int:
        """How long a list it takes to choose ``n`` items from."""
        return max(LEAST_CHOICE, CHOICE * self.n) if self.diversity else self.n

    @property
    def key(self) -> Hashable:
        """What its candidates depend on."""
        return self.state, self.filters

    def mask(self) -> NDArray[np.bool_]:
        """``allowed`` without what is excluded."""
        mask = self.allowed()
        if len(self.excluded):
            mask = mask.copy()
            mask[self.excluded] = False
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What is kept of a user's candidates."""

    items: NDArray[np.int32]
    """The best allowed rows, best first."""
    complete: bool
    """Whether these are all that are allowed."""


class Source(Protocol):
    """Candidates that somebody else has computed."""

    def find(self, request: RankRequest) -> Kept | None: ...


class UserCandidates:
    """The vectors and the best ``m`` candidates of users. For the inference thread alone.

    Kept are the vectors that were fitted, by the user's state, and the best ``m`` and some more
    items that the filters allow; what a request excludes is left out of those.
    """

    def __init__(
        self,
        model: PairwiseRanker,
        generator: CandidateGenerator,
        fold_in: FoldIn,
        m: int,
        max_bytes: int,
    ) -> None:
        self._model = model
        self._generator = generator
        self._m = m
        self.fold_in = fold_in
        self._newcomer = self.fold_in.newcomer.numpy()
        # In memory, wherever the model is; where it is a CPU's, these are its own tables.
        self._users = [part.weight.detach().cpu().numpy() for part in model.user_parts()]
        self._vectors: ByteCache[tuple[str, int], NDArray[np.float32]] = ByteCache(max_bytes // 8)
        self.precomputed: Source | None = None
        self._lists: ByteCache[Hashable, Kept] = ByteCache(max_bytes - max_bytes // 8)

    @property
    def cache(self) -> ByteCache[Hashable, Kept]:
        return self._lists

    def clear(self) -> None:
        self._vectors.clear()
        self._lists.clear()

    @property
    def n_kept(self) -> int:
        """How many items are kept of a user, at most."""
        return min(self._m + SPARE, self._model.n_items)

    def at_hand(self, request: RankRequest) -> bool:
        """Whether neither a vector nor candidates have to be computed. For any thread."""
        return self.has_vector(request) and (
            self._lists.has(request.key) or self._find_precomputed(request) is not None
        )

    def has_vector(self, request: RankRequest) -> bool:
        """Whether the user's vector need not be fitted. For any thread."""
        return request.evidence is None or self._vectors.has(request.state)

    def find(self, requests: Sequence[RankRequest]) -> list[Kept]:
        """The candidates of each request, computed now."""
        vectors = self.vectors(requests)
        found = self._search(requests, vectors, {r.key: at for at, r in enumerate(requests)})
        return [found[request.key] for request in requests]

    def _find_precomputed(self, request: RankRequest) -> Kept | None:
        found = None if self.precomputed is None else self.precomputed.find(request)
        if found is None or (len(found.items) < self.n_kept and not found.complete):
            return None  # computed with fewer candidates than are wanted here
        return found

    def vectors(self, requests: Sequence[RankRequest]) -> Tensor:
        """(B, E) user vectors."""
        rows = [r.row or 0 for r in requests]
        vectors = np.concatenate([table[rows] for table in self._users], axis=1)
        to_fit: dict[tuple[str, int], int] = {}
        for at, request in enumerate(requests):
            if request.row is None:
                vectors[at] = self._newcomer
            if request.evidence is not None:
                kept = self._vectors.get(request.state)
                if kept is None:
                    to_fit[request.state] = at
                else:
                    vectors[at] = kept
        if to_fit:
            self._fit(requests, vectors, to_fit)
        return torch.from_numpy(vectors)

    def _fit(
        self,
        requests: Sequence[RankRequest],
        vectors: NDArray[np.float32],
        to_fit: dict[tuple[str, int], int],
    ) -> None:
        places = list(to_fit.values())
        evidence = [found for at in places if (found := requests[at].evidence) is not None]
        fitted = self.fold_in(evidence, torch.from_numpy(vectors[places])).numpy()
        of_state = dict(zip(to_fit, fitted, strict=True))
        for state, vector in of_state.items():
            self._vectors.put(state, vector.copy(), vector.nbytes)
        for at, request in enumerate(requests):
            if request.evidence is not None and request.state in of_state:
                vectors[at] = of_state[request.state]

    def candidates(self, requests: Sequence[RankRequest], vectors: Tensor) -> Tensor:
        """(B, E) user vectors → (B, ≤ m) candidates in an order that is cheap to rank, padded."""
        at_hand = [self._lists.get(r.key) or self._find_precomputed(r) for r in requests]
        missing = {
            request.key: at
            for at, (request, kept) in enumerate(zip(requests, at_hand, strict=True))
            if kept is None
        }
        fresh = self._search([requests[at] for at in missing.values()], vectors, missing)
        rows, again = [], []
        for at, (request, known) in enumerate(zip(requests, at_hand, strict=True)):
            kept = known or fresh[request.key]
            own = kept.items
            if len(request.excluded):
                own = own[~np.isin(own, request.excluded)]
            if len(own) < self._m and not kept.complete:
                again.append(at)
            rows.append(own[: self._m])
        for at in again:  # more is excluded than there is to spare
            mask = requests[at].mask()[None]
            rows[at] = self._of(vectors[at : at + 1], mask, self._m)[0]
        width = max(len(own) for own in rows)
        best = np.full((len(rows), width), PAD, dtype=np.int64)
        for row, own in zip(best, rows, strict=True):
            last = own[:BEST_LAST]  # as ``cheap_to_rank`` does it for batches
            row[: len(own)] = np.concatenate([own[BEST_LAST:], last[::-1]])
        return torch.from_numpy(best)

    def rest(self, request: RankRequest, vector: Tensor, taken: Tensor, n: int) -> Tensor:
        """What follows the candidates in a list longer than they are: the next by their score."""
        mask = request.mask().copy()
        mask[taken.numpy()] = False
        return torch.from_numpy(self._of(vector.unsqueeze(0), mask[None], n)[0].astype(np.int64))

    def _search(
        self, requests: Sequence[RankRequest], vectors: Tensor, places: dict[Hashable, int]
    ) -> dict[Hashable, Kept]:
        found: dict[Hashable, Kept] = {}
        at_once = max(1, SCORES_AT_ONCE // max(1, self._model.n_items))
        for start in range(0, len(requests), at_once):
            part = requests[start : start + at_once]
            masks = np.stack([request.allowed() for request in part])
            own = vectors[[places[request.key] for request in part]]
            lists = self._of(own, masks, self._m + SPARE)
            for request, mask, items in zip(part, masks, lists, strict=True):
                kept = Kept(items, len(items) == int(mask.sum()))
                found[request.key] = kept
                self._lists.put(request.key, kept, items.nbytes + request.key_bytes)
        return found

    def _of(self, vectors: Tensor, masks: NDArray[np.bool_], n: int) -> list[NDArray[np.int32]]:
        allowed = torch.from_numpy(masks).to(self._model.device)
        best = self._generator.search(vectors, allowed, n)
        rows = best.to(torch.int32).cpu().numpy()
        return [row[row != PAD].copy() for row in rows]
