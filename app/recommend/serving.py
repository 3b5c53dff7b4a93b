"""A loaded model, ready to answer: everything about one version that requests need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.catalog.view import Catalogue
from app.models.schemas import ModelRow
from app.recommend.candidates import RankRequest, UserCandidates
from app.recommend.precomputed import digest, usual_filters
from ncr_core.checkpoint import Checkpoint
from ncr_core.models import PairwiseRanker, build_model
from ncr_core.ranking import PAD, CandidateGenerator, ExactRanker, anchors_of, shortlist_for

CANDIDATE_SEED = 20_181_022


class RankedItem(NamedTuple):
    """One place of a ranked list."""

    row: int
    score: float
    preferred_over_next: float | None


@dataclass(frozen=True, slots=True, eq=False)
class CatalogueRows:
    """The model's items as the catalogue has them at one moment."""

    seq: int
    internal: NDArray[np.int64]
    """(n_items,) the catalogue's id of each item row, −1 for items it does not have."""
    visible: NDArray[np.bool_]
    """(n_items,) what may be recommended at all."""
    epoch: str
    """A name that stays while ``visible`` does."""


class ServingModel:
    """One version of the model. Not changed by requests, but for a bounded cache of candidates.

    ``rank`` is called from the one inference thread only.
    """

    def __init__(
        self,
        row: ModelRow,
        checkpoint: Checkpoint,
        candidates: int,
        cache_bytes: int = 2**26,
        on_pairs: Callable[[int], None] | None = None,
        on_fallback: Callable[[str], None] = lambda to: None,
    ) -> None:
        self._made_of = (row, checkpoint, candidates, cache_bytes, on_pairs)
        self._on_fallback = on_fallback
        self._on_cpu: ServingModel | None = None
        self.row = row
        self.n_candidates = candidates
        self.version = row.version
        self.trained_seq = row.trained_seq
        self.item_ids: Sequence[str] = checkpoint.item_ids
        self.user_rows = {user: i for i, user in enumerate(checkpoint.user_ids)}
        self._model = checkpoint.model
        self._ranker = ExactRanker(self._model, on_pairs=on_pairs)
        self._references = torch.tensor(checkpoint.reference_items, device=self._ranker.device)
        n_users, device = self._model.n_users, self._ranker.device
        some = torch.arange(0, n_users, max(1, n_users // 64), device=device)
        generator = CandidateGenerator(
            self._ranker,
            anchors_of(checkpoint.reference_items),
            CANDIDATE_SEED,
            shortlist_for(self._ranker.margins, self._model.user_vectors(some)),
        )
        self.candidates = UserCandidates(self._model, generator, candidates, cache_bytes)
        self._rows: CatalogueRows | None = None

    @property
    def n_items(self) -> int:
        return self._model.n_items

    def rows(self, catalogue: Catalogue) -> CatalogueRows:
        """The model's items in this state of the catalogue."""
        before = self._rows
        if before is not None and before.seq == catalogue.seq:
            return before
        ids = catalogue.internal_ids
        if before is None:
            internal = np.array([ids.get(item, -1) for item in self.item_ids], dtype=np.int64)
        else:  # an id is for good: only what was not there can have changed
            internal = before.internal
            new = {
                row: found
                for row in np.flatnonzero(internal < 0).tolist()
                if (found := ids.get(self.item_ids[row])) is not None
            }
            if new:
                internal = internal.copy()
                internal[list(new)] = list(new.values())
        visible = np.zeros(len(internal), dtype=np.bool_)
        there = internal >= 0
        visible[there] = catalogue.visible[internal[there]]
        self._rows = CatalogueRows(catalogue.seq, internal, visible, digest(visible))
        return self._rows

    def warm_up(self) -> None:
        """Runs everything once, so that the first request does not pay for it."""
        allowed = np.ones(self.n_items, dtype=np.bool_)
        self.rank([RankRequest(0, np.array([0]), ("", 0), "", lambda: allowed, 10)])
        self.candidates.clear()

    def at_hand(self, request: RankRequest) -> bool:
        """Whether only the candidates remain to be ranked, which is quick. For any thread."""
        return self.candidates.at_hand(request)

    def rank(self, requests: Sequence[RankRequest]) -> list[list[RankedItem]]:
        """The top n of each request, all in one pass of the ranker.

        Where a GPU has too little memory for that, in halves, and one that is too large by itself
        on the CPU.
        """
        try:
            return self._rank(requests)
        except torch.OutOfMemoryError:
            pass  # what the pass held is let go of when this block ends
        torch.cuda.empty_cache()
        if len(requests) > 1:
            self._on_fallback("half")
            half = len(requests) // 2
            return self.rank(requests[:half]) + self.rank(requests[half:])
        self._on_fallback("cpu")
        if self._on_cpu is None:
            row, checkpoint, candidates, cache_bytes, on_pairs = self._made_of
            checkpoint = replace(checkpoint, model=_on_cpu(self._model))
            self._on_cpu = ServingModel(row, checkpoint, candidates, cache_bytes, on_pairs)
        return self._on_cpu.rank(requests)

    @torch.inference_mode()
    def _rank(self, requests: Sequence[RankRequest]) -> list[list[RankedItem]]:
        vectors = self.candidates.vectors(requests)
        candidates = self.candidates.candidates(requests, vectors)
        n = max(r.n for r in requests)
        # As many candidates for everyone, whatever n: a list must not depend on its company. What
        # is asked for beyond them follows in the order of the cheap score.
        bound = self._ranker.bind(vectors)
        ranked = bound.rank(candidates, n)
        if n > ranked.shape[1]:
            rest = [
                self.candidates.rest(request, vector, items[items != PAD], n - ranked.shape[1])
                for request, vector, items in zip(requests, vectors, candidates, strict=True)
            ]
            more = torch.nn.utils.rnn.pad_sequence(rest, batch_first=True, padding_value=PAD)
            ranked = _left_filled(torch.cat([ranked, more.to(ranked.device)], dim=1))
        over_references, over_next = bound.against(ranked, self._references)
        probability = _probability(over_references).mean(axis=2)
        ahead = _probability(over_next)
        return [
            _places(rows[: r.n], of_scores, of_next)
            for r, rows, of_scores, of_next in zip(
                requests, ranked.tolist(), probability.tolist(), ahead.tolist(), strict=True
            )
        ]


def _on_cpu(model: PairwiseRanker) -> PairwiseRanker:
    """A copy, of which nothing is made on the model's own device."""
    copy = build_model(model.config, model.n_users, model.n_items)
    copy.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    return copy.requires_grad_(False).eval()


def _probability(margins: Tensor) -> NDArray[np.float64]:
    """P(i preferred to j) = σ((z_ij − z_ji) / 2) of margins z_ij − z_ji."""
    found: NDArray[np.float64] = 0.5 + 0.5 * np.tanh(margins.cpu().numpy() / 4.0)
    return found


def _left_filled(ranked: Tensor) -> Tensor:
    order = (ranked == PAD).to(torch.int8).argsort(dim=1, stable=True)
    return ranked.gather(1, order)


def _places(
    rows: Sequence[int], scores: Sequence[float], ahead: Sequence[float]
) -> list[RankedItem]:
    rows = [row for row in rows if row != PAD]
    last = len(rows) - 1
    return [
        RankedItem(row, scores[at], ahead[at] if at < last else None) for at, row in enumerate(rows)
    ]


def filters_key(rows: CatalogueRows, exclude_seen: bool, categories: tuple[str, ...]) -> Hashable:
    """What decides which of the model's items a user's candidates may be taken from."""
    # A change of the catalogue that hides and shows nothing leaves candidates as they are.
    if not categories:
        return usual_filters(rows.epoch) if exclude_seen else (False, rows.epoch)
    return (exclude_seen, categories, rows.seq)
