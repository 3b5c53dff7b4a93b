"""A loaded model, ready to answer: everything about one version that requests need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from app.catalog.view import Catalogue
from app.models.schemas import ModelRow
from app.recommend.candidates import RankRequest, UserCandidates
from app.recommend.catalogue_rows import CatalogueRows, rows_in
from app.recommend.explain import explained
from app.recommend.given import Comparison, GivenItems
from app.recommend.places import RankedItem, left_filled, places, probability
from app.recommend.trained import Trained
from ncr_core.checkpoint import Checkpoint
from ncr_core.fold_in import Evidence, FoldIn
from ncr_core.models import PairwiseRanker, build_model
from ncr_core.ranking import PAD, CandidateGenerator, ExactRanker, anchors_of, shortlist_for
from ncr_core.ranking.attribution import Attribution
from ncr_core.ranking.bound import BoundRanker
from ncr_core.ranking.diversity import diversified
from ncr_core.ranking.questions import QuestionPool
from ncr_core.ranking.similarity import ItemSpace

CANDIDATE_SEED = 20_181_022
ASKED_USERS = 256  # whose answers stand for those of anyone

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class ServingModel:
    """One version of the model. Not changed by requests, but for a bounded cache of candidates.

    ``rank``, ``rank_given`` and ``compare`` are called from the one inference thread only.
    """

    def __init__(
        self,
        row: ModelRow,
        checkpoint: Checkpoint,
        candidates: int,
        cache_bytes: int = 2**26,
        on_pairs: Callable[[int], None] | None = None,
        on_fallback: Callable[[str], None] = lambda to: None,
        *,
        base: Trained | None = None,
        revision: str = "",
    ) -> None:
        self._made_of = (row, checkpoint, candidates, cache_bytes, on_pairs)
        self.base = base or Trained(row, checkpoint)
        """The version as it was trained, where this one has newer items too."""
        self.revision = revision
        """Names the items that this one has beyond those of the version."""
        self._on_fallback = on_fallback
        self._on_cpu: ServingModel | None = None
        self.row = row
        self.n_candidates = candidates
        self.version = row.version
        self.trained_seq = row.trained_seq
        self.temperature = checkpoint.temperature
        self.item_ids: Sequence[str] = checkpoint.item_ids
        self.user_rows = self.base.user_rows
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
        fold_in = FoldIn(
            self._model,
            tables=self._ranker.margins.single,
            trained_items=self.base.n_items,
            prior=self.base.prior,
        )
        self.candidates = UserCandidates(self._model, generator, fold_in, candidates, cache_bytes)
        self._attribution = Attribution(fold_in, self._ranker, generator.anchors)
        self._rows: CatalogueRows | None = None
        self._space: ItemSpace | None = None
        self._making_space = Lock()

    @property
    def n_items(self) -> int:
        return self._model.n_items

    @property
    def key(self) -> tuple[str, str]:
        """What lists depend on of the model."""
        return self.version, self.revision

    def extended(self, items: Sequence[str], vectors: Tensor, revision: str) -> ServingModel:
        """The version as it was trained, with more items, whose vectors (m, F) were fitted."""
        row, _, candidates, cache_bytes, on_pairs = self._made_of
        return ServingModel(
            row,
            self.base.extended(items, vectors),
            candidates,
            cache_bytes,
            on_pairs,
            self._on_fallback,
            base=self.base,
            revision=revision,
        )

    def vectors_of_rows(self, rows: Sequence[int]) -> Tensor:
        """(k, E) the trained vectors of these users."""
        with torch.no_grad():
            return self._model.user_vectors(torch.tensor(rows, device=self._model.device))

    @property
    def pools_users(self) -> bool:
        """Whether users' vectors are made of their items."""
        return self._model.config.users == "history"

    def rows(self, catalogue: Catalogue) -> CatalogueRows:
        """The model's items in this state of the catalogue."""
        before = self._rows
        if before is None or before.seq != catalogue.seq:
            self._rows = before = rows_in(catalogue, self.item_ids, before)
        return before

    @property
    def space(self) -> ItemSpace:
        """How alike items are; there once the model is warm. For any thread."""
        with self._making_space:
            if self._space is None:
                self._space = ItemSpace(self._ranker.margins.double, self.n_items)
            return self._space

    def warm_up(self) -> None:
        """Runs everything once, so that the first request does not pay for it, nor all those that
        the inference thread would let wait meanwhile."""
        allowed = np.ones(self.n_items, dtype=np.bool_)
        request = RankRequest(0, Evidence(np.array([0])), ("", 0), "", lambda: allowed, 10)
        self.rank([replace(request, diversity=0.5)])
        self.candidates.clear()

    def at_hand(self, request: RankRequest) -> bool:
        """Whether only the candidates remain to be ranked, which is quick. For any thread."""
        return self.candidates.at_hand(request)

    def has_vector(self, request: RankRequest) -> bool:
        """Whether the user's vector is known, so that all else is quick. For any thread."""
        return self.candidates.has_vector(request)

    def rank(self, requests: Sequence[RankRequest]) -> list[list[RankedItem]]:
        """The top n of each request, all in one pass of the ranker."""
        return self._within_memory(lambda model, some: model._rank(some), requests)

    def rank_given(self, requests: Sequence[GivenItems]) -> list[list[RankedItem]]:
        """All the items of each request, by Algorithm 1 over them in the order given."""
        return self._within_memory(lambda model, some: model._rank_given(some), requests)

    def compare(self, requests: Sequence[GivenItems]) -> list[Comparison]:
        """The items of each request, each with each."""
        return self._within_memory(lambda model, some: model._compare(some), requests)

    @torch.inference_mode()
    def user_vectors(self, requests: Sequence[RankRequest]) -> list[NDArray[np.float32]]:
        """The (E,) vector of each request's user."""
        return list(self.candidates.vectors(requests).cpu().numpy())

    def question_pool(self, rows: NDArray[np.int64]) -> QuestionPool:
        """What trained users would answer about pairs of these (M,) items. For any thread."""
        step = max(1, self._model.n_users // ASKED_USERS)
        some = torch.arange(0, self._model.n_users, step, device=self._model.device)
        with torch.inference_mode():
            sample = self._model.user_vectors(some[:ASKED_USERS])
        return QuestionPool(self._ranker, sample, rows, self.temperature)

    def _within_memory(
        self,
        run: Callable[[ServingModel, Sequence[Request]], list[Answer]],
        requests: Sequence[Request],
    ) -> list[Answer]:
        """Where a GPU has too little memory for all of them, in halves, and one that is too large
        by itself on the CPU.
        """
        try:
            return run(self, requests)
        except torch.OutOfMemoryError:
            pass  # what the pass held is let go of when this block ends
        torch.cuda.empty_cache()
        if len(requests) > 1:
            self._on_fallback("half")
            half = len(requests) // 2
            return self._within_memory(run, requests[:half]) + self._within_memory(
                run, requests[half:]
            )
        self._on_fallback("cpu")
        if self._on_cpu is None:
            row, checkpoint, candidates, cache_bytes, on_pairs = self._made_of
            checkpoint = replace(checkpoint, model=_on_cpu(self._model))
            self._on_cpu = ServingModel(
                row, checkpoint, candidates, cache_bytes, on_pairs, base=self.base
            )
            self._on_cpu._space = self._space
        return run(self._on_cpu, requests)

    @torch.inference_mode()
    def _rank(self, requests: Sequence[RankRequest]) -> list[list[RankedItem]]:
        vectors = self.candidates.vectors(requests)
        candidates = self.candidates.candidates(requests, vectors)
        n = max(r.depth for r in requests)
        # As many candidates for everyone, whatever n: a list must not depend on its company. What
        # is asked for beyond them follows in the order of the cheap score.
        bound = self._ranker.bind(vectors)
        ranked = bound.rank(candidates, n)
        if n > ranked.shape[1]:
            rest = [
                self.candidates.rest(request, vector, items[items != PAD], n - ranked.shape[1])
                for request, vector, items in zip(requests, vectors, candidates, strict=True)
            ]
            more = pad_sequence(rest, batch_first=True, padding_value=PAD)
            ranked = left_filled(torch.cat([ranked, more.to(ranked.device)], dim=1))
        if any(r.diversity for r in requests):
            ranked = self._varied(requests, ranked)
        lists = self._placed(bound, ranked, [r.n for r in requests])
        return [
            own
            if request.explain_by is None
            else explained(
                self._attribution,
                vector,
                request.explain_by,
                own,
                self.temperature,
                trained=request.row is not None,
            )
            for request, vector, own in zip(requests, vectors, lists, strict=True)
        ]

    def _varied(self, requests: Sequence[RankRequest], ranked: Tensor) -> Tensor:
        """(B, depth) lists → (B, n), those that are to have more variety chosen from."""
        device, lists = ranked.device, []
        for request, own in zip(requests, ranked.cpu(), strict=True):
            rows = own[: request.depth]
            rows = rows[rows != PAD]
            if request.diversity:
                vectors = self.space.vectors[rows.numpy()]
                rows = rows[torch.from_numpy(diversified(vectors, request.n, request.diversity))]
            lists.append(rows[: request.n])
        return pad_sequence(lists, batch_first=True, padding_value=PAD).to(device)

    @torch.inference_mode()
    def _rank_given(self, requests: Sequence[GivenItems]) -> list[list[RankedItem]]:
        bound, items = self._bound(requests)
        ranked = bound.rank(items, items.shape[1])
        return self._placed(bound, ranked, [items.shape[1]] * len(requests))

    @torch.inference_mode()
    def _compare(self, requests: Sequence[GivenItems]) -> list[Comparison]:
        bound, items = self._bound(requests)
        margins = bound.all_margins(items).cpu()
        ranked = bound.rank(items, items.shape[1]).cpu()
        found = []
        for request, own, rows in zip(requests, margins, ranked, strict=True):
            m = len(request.rows)
            position = {int(row): at for at, row in enumerate(request.rows)}
            order = [position[row] for row in rows[:m].tolist()]
            found.append(Comparison(probability(own[:m, :m], self.temperature), order))
        return found

    def _bound(self, requests: Sequence[GivenItems]) -> tuple[BoundRanker, Tensor]:
        """The ranker for the users of these, and their items, (B, M) padded."""
        vectors = self.candidates.vectors([r.whose for r in requests])
        rows = [torch.from_numpy(r.rows) for r in requests]
        return self._ranker.bind(vectors), pad_sequence(rows, True, PAD)

    def _placed(
        self, bound: BoundRanker, ranked: Tensor, lengths: Sequence[int]
    ) -> list[list[RankedItem]]:
        """(B, k) lists as answers, of at most so many places each."""
        over_references, over_next = bound.against(ranked, self._references)
        scores = probability(over_references, self.temperature).mean(axis=2)
        ahead = probability(over_next, self.temperature)
        return [
            places(rows[:n], of_scores, of_next)
            for n, rows, of_scores, of_next in zip(
                lengths, ranked.tolist(), scores.tolist(), ahead.tolist(), strict=True
            )
        ]


def _on_cpu(model: PairwiseRanker) -> PairwiseRanker:
    """A copy, of which nothing is made on the model's own device."""
    copy = build_model(model.config, model.n_users, model.n_items)
    copy.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    return copy.requires_grad_(False).eval()
