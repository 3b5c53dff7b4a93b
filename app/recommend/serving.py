"""A loaded model, ready to answer: everything about one version that requests need."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.catalog.view import Catalogue
from app.models.schemas import ModelRow
from ncr_core.checkpoint import Checkpoint
from ncr_core.ranking import PAD, CandidateGenerator, ExactRanker, anchors_of
from ncr_core.training.fold_in import fold_in, mean_user

CANDIDATE_SEED = 20_181_022
SCORES_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class RankRequest:
    """What the ranker is asked for one user. Rows are the model's own."""

    row: int | None
    """The user's row in the model; None for one who was not trained on."""
    fold_in_items: NDArray[np.int64] | None
    """Item rows to fit the user's vector to; None: the trained vector is up to date."""
    key: tuple[str, int]
    """User and last seq: what the user's vector depends on."""
    allowed: NDArray[np.bool_]
    """(n_items,) what may be recommended."""
    n: int


class RankedItem(NamedTuple):
    """One place of a ranked list."""

    row: int
    score: float
    preferred_over_next: float | None


class ServingModel:
    """One version of the model. Not changed by requests, but for a bounded cache of scores.

    ``rank`` is called from the one inference thread only.
    """

    def __init__(self, row: ModelRow, checkpoint: Checkpoint, candidates: int) -> None:
        self.version = row.version
        self.trained_seq = row.trained_seq
        self.item_ids: Sequence[str] = checkpoint.item_ids
        self.user_rows = {user: i for i, user in enumerate(checkpoint.user_ids)}
        self._model = checkpoint.model
        self._ranker = ExactRanker(self._model)
        self._references = torch.tensor(checkpoint.reference_items, device=self._ranker.device)
        self._generator = CandidateGenerator(
            self._ranker, anchors_of(checkpoint.reference_items), CANDIDATE_SEED
        )
        self._mean_user = mean_user(self._model)
        self._candidates = candidates
        self._scores: OrderedDict[tuple[str, int], tuple[Tensor, Tensor]] = OrderedDict()
        self._kept = max(1, SCORES_BYTES // (8 * max(1, self._model.n_items)))
        self._rows_at: tuple[int, NDArray[np.int64]] | None = None

    @property
    def n_items(self) -> int:
        return self._model.n_items

    def internal_ids(self, catalogue: Catalogue) -> NDArray[np.int64]:
        """(n_items,) the catalogue's id of each item row, −1 for items it does not have."""
        if self._rows_at is None or self._rows_at[0] != catalogue.seq:
            ids = catalogue.internal_ids
            rows = np.array([ids.get(item, -1) for item in self.item_ids], dtype=np.int64)
            self._rows_at = (catalogue.seq, rows)
        return self._rows_at[1]

    def warm_up(self) -> None:
        """Runs everything once, so that the first request does not pay for it."""
        allowed = np.ones(self.n_items, dtype=np.bool_)
        self.rank([RankRequest(0, np.array([0]), ("", 0), allowed, 10)])
        self._scores.clear()

    @torch.inference_mode()
    def rank(self, requests: Sequence[RankRequest]) -> list[list[RankedItem]]:
        """The top n of each request, all in one pass of the ranker."""
        vectors, scores = self._vectors_and_scores(requests)
        allowed = torch.from_numpy(np.stack([r.allowed for r in requests])).to(scores.device)
        n = max(r.n for r in requests)
        # As many candidates for everyone, whatever n: a list must not depend on its company. What
        # is asked for beyond them follows in the order of the cheap score.
        candidates = self._generator.pick(scores, allowed, self._candidates)
        ranked = self._ranker.rank(vectors, candidates, n)
        if n > ranked.shape[1]:
            rest = allowed.clone()
            of, at = (candidates != PAD).nonzero(as_tuple=True)
            rest[of, candidates[of, at]] = False
            ranked = torch.cat([ranked, _best(scores, rest, n - ranked.shape[1])], dim=1)
        probability = self._mean_probability(vectors, ranked)
        ahead = self._preferred_over_next(vectors, ranked)
        return [
            _places(rows[: r.n], of_scores, of_next)
            for r, rows, of_scores, of_next in zip(
                requests, ranked.tolist(), probability.tolist(), ahead.tolist(), strict=True
            )
        ]

    def _vectors_and_scores(self, requests: Sequence[RankRequest]) -> tuple[Tensor, Tensor]:
        missing = {r.key: r for r in requests if r.key not in self._scores}
        if missing:
            self._add_scores(list(missing.values()))
        found = []
        for request in requests:
            self._scores.move_to_end(request.key)
            found.append(self._scores[request.key])
        while len(self._scores) > self._kept:
            self._scores.popitem(last=False)
        return torch.stack([v for v, _ in found]), torch.stack([s for _, s in found])

    def _add_scores(self, requests: Sequence[RankRequest]) -> None:
        rows = torch.tensor([r.row or 0 for r in requests], device=self._ranker.device)
        known = torch.tensor([r.row is not None for r in requests], device=self._ranker.device)
        vectors = torch.where(known.unsqueeze(1), self._model.user_vectors(rows), self._mean_user)
        to_fit = [i for i, r in enumerate(requests) if r.fold_in_items is not None]
        if to_fit:
            items = [torch.from_numpy(requests[i].fold_in_items) for i in to_fit]
            with torch.inference_mode(False):
                start = vectors[to_fit].clone()
                fitted = fold_in(self._model, start, items, self._mean_user)
            vectors[to_fit] = fitted
        for request, vector, scores in zip(
            requests, vectors, self._generator.scores(vectors), strict=True
        ):
            self._scores[request.key] = (vector, scores)

    def _mean_probability(self, vectors: Tensor, ranked: Tensor) -> Tensor:
        """(B, k) items → (B, k) mean probabilities to be preferred to the reference items."""
        n, references = ranked.shape[1], len(self._references)
        i = ranked.clamp(min=0).repeat_interleave(references, dim=1)
        j = self._references.repeat(n).expand(len(ranked), -1)
        margins = self._ranker.compare(vectors, i, j)
        return torch.sigmoid(margins / 2).view(len(ranked), n, references).mean(dim=2)

    def _preferred_over_next(self, vectors: Tensor, ranked: Tensor) -> Tensor:
        """(B, k) items → (B, k − 1) σ((z_ij − z_ji) / 2) of each against the one below it."""
        items = ranked.clamp(min=0)
        return torch.sigmoid(self._ranker.compare(vectors, items[:, :-1], items[:, 1:]) / 2)


def _best(scores: Tensor, allowed: Tensor, n: int) -> Tensor:
    """(B, n_items) scores → the best allowed items, padded: (B, ≤ n)."""
    found = scores.masked_fill(~allowed, -torch.inf).sort(dim=1, descending=True, stable=True)
    return torch.where(found.values == -torch.inf, PAD, found.indices)[:, :n]


def _places(
    rows: Sequence[int], scores: Sequence[float], ahead: Sequence[float]
) -> list[RankedItem]:
    rows = [row for row in rows if row != PAD]
    last = len(rows) - 1
    return [
        RankedItem(row, scores[at], ahead[at] if at < last else None) for at, row in enumerate(rows)
    ]
