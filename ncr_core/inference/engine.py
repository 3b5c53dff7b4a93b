"""The second stage of a list, and all other tasks of a loaded model, on arrays of rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from threading import Lock
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ncr_core.checkpoint import Checkpoint
from ncr_core.errors import lacks_device_memory
from ncr_core.explain.elicitation import QuestionPool
from ncr_core.explain.influence import InfluenceExplainer
from ncr_core.fold_in import Evidence, FoldIn
from ncr_core.fold_in.prior import Prior
from ncr_core.inference.retrieval import (
    Cache,
    CandidateGenerator,
    CandidateList,
    CandidateRetriever,
    IntArray,
    ItemFilter,
    RankRequest,
    UserState,
)
from ncr_core.inference.shared_tables import SharedTables
from ncr_core.models import PairwiseRanker, build_model
from ncr_core.models.user_embeddings import gap_class
from ncr_core.ranking import PAD, BoundRanker, ExactRanker, anchors_of, shortlist_for
from ncr_core.ranking.candidates import BEST_LAST
from ncr_core.ranking.similarity import ItemSpace, diversified

CANDIDATE_SEED = 20_181_022
SAMPLED_USERS = 256  # trained users whose answers stand for those of anyone
MAX_REASONS = 3
MAX_EXACT_ITEMS = 200  # of those that a caller names; 19,900 pairs in the worst order

Request = TypeVar("Request")
Boosted = TypeVar("Boosted", RankRequest, "RerankRequest")
Result = TypeVar("Result")


class Reason(NamedTuple):
    """One of the user's own items, and its effect on the place of another item."""

    row: int
    effect: float
    """The decrease of the listed item's log-odds against the other listed items without the own
    item."""


class RankedItem(NamedTuple):
    """One item of a ranked list."""

    row: int
    score: float
    """The mean probability that the user prefers the item to the reference items."""
    preferred_over_next: float | None
    """The probability that the user prefers the item to the next item of the list; None for the
    last."""
    because: Sequence[Reason] = ()
    """The user's own items with the largest effects, if the request asks for reasons."""


class PairwiseComparison(NamedTuple):
    """Items compared pair by pair. Positions are the places of the items in the request."""

    probability: NDArray[np.float64]
    """(M, M) the probability that the user prefers the item of the row to the item of the
    column."""
    order: list[int]
    """The positions, best first, by Algorithm 1."""


@dataclass(frozen=True, slots=True, eq=False)
class RerankRequest:
    """Items that are ranked or compared for a user."""

    user: UserState
    rows: IntArray
    """(M,) item rows, each once, in the order that decides ties."""
    boost: NDArray[np.float64] | None = None
    """(n_items,) b, see `RankRequest`."""


def _within_memory(
    run: Callable[[InferenceEngine, Sequence[Request]], list[Result]],
) -> Callable[[InferenceEngine, Sequence[Request]], list[Result]]:
    """Makes a pass continue in halves, and for one request on the CPU, if a device lacks memory."""

    @wraps(run)
    def within_memory(engine: InferenceEngine, requests: Sequence[Request]) -> list[Result]:
        try:
            with torch.inference_mode():
                return run(engine, requests)
        except RuntimeError as error:
            if not lacks_device_memory(error):
                raise
            # What the pass held is let go of when this block ends.
        engine.ranker.free_graphs()
        torch.cuda.empty_cache()
        if len(requests) > 1:
            engine._on_fallback("half")
            half = len(requests) // 2
            first, second = requests[:half], requests[half:]
            return within_memory(engine, first) + within_memory(engine, second)
        engine._on_fallback("cpu")
        on_cpu = engine._cpu_engine()  # made like the first, outside of inference mode
        with torch.inference_mode():
            return run(on_cpu, requests)

    return within_memory


def _by_boost(
    run: Callable[[InferenceEngine, Sequence[Boosted]], list[Result]],
) -> Callable[[InferenceEngine, Sequence[Boosted]], list[Result]]:
    """Makes one pass for each boost of the requests: all users of a pass share the boost."""

    @wraps(run)
    def by_boost(engine: InferenceEngine, requests: Sequence[Boosted]) -> list[Result]:
        groups: dict[int, list[int]] = {}
        for position, request in enumerate(requests):
            groups.setdefault(id(request.boost), []).append(position)
        if len(groups) == 1:
            return run(engine, requests)
        results: dict[int, Result] = {}
        for positions in groups.values():
            found = run(engine, [requests[position] for position in positions])
            results.update(zip(positions, found, strict=True))
        return [results[position] for position in range(len(requests))]

    return by_boost


def _boost_of(requests: Sequence[Boosted]) -> Tensor | None:
    """The boost that requests share."""
    boost = requests[0].boost
    return None if boost is None else torch.from_numpy(boost)


class InferenceEngine:
    """A loaded checkpoint that answers requests.

    Requests change only the caches. Threads may share an engine if its caches are thread-safe. A
    pass that exceeds a GPU's memory continues in halves, and for a single request on the CPU.
    ``on_fallback`` is called with `half` or `cpu`.

    Args:
        checkpoint: the model with its ids.
        candidates: the number of a user's items that are ranked exactly.
        trained_items: the number of item rows that training has seen, if items were added since.
        space: the similarity of items of an engine with the same trained items, if the caller has
            it.
        prior: `prior_of` the trained users' vectors, if the caller has it.
        vectors: a cache of fitted vectors.
        lists: a cache of candidate lists.
        on_pairs: called with the number of pairs that a pass compared.
        on_fallback: called when a device has too little memory.
        shared: the folder of the tables that several servers share, for a model on a CPU.
        shared_key: the name of the model's tables there: the SHA-256 of its checkpoint's manifest.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        candidates: int,
        *,
        trained_items: int | None = None,
        space: ItemSpace | None = None,
        prior: Prior | None = None,
        vectors: Cache[Hashable, NDArray[np.float32]] | None = None,
        lists: Cache[Hashable, CandidateList] | None = None,
        on_pairs: Callable[[int], None] | None = None,
        on_fallback: Callable[[str], None] = lambda device: None,
        shared: SharedTables | None = None,
        shared_key: str = "",
    ) -> None:
        self.n_candidates = candidates
        self.temperature = checkpoint.temperature
        self._checkpoint = checkpoint
        self._trained_items = trained_items
        self._on_pairs, self._vectors, self._lists = on_pairs, vectors, lists
        self._on_fallback = on_fallback
        self._on_cpu: InferenceEngine | None = None
        self.model = checkpoint.model
        margins = index_file = None
        if shared is not None and self.model.device.type == "cpu":
            margins = shared.margins(self.model, shared_key)
            index_file = shared.path(shared_key, "faiss")
        self.ranker = ExactRanker(self.model, on_pairs=on_pairs, margins=margins)
        self.references = torch.tensor(checkpoint.reference_items, device=self.ranker.device)
        n_users, device = self.model.n_users, self.ranker.device
        sample = torch.arange(0, n_users, max(1, n_users // 64), device=device)
        generator = CandidateGenerator(
            self.ranker,
            anchors_of(checkpoint.reference_items),
            CANDIDATE_SEED,
            shortlist_for(self.ranker.margins, self.model.user_vectors(sample), index_file),
        )
        by_attributes = checkpoint.content.users
        self.fold_in = FoldIn(
            self.model,
            tables=self.ranker.margins.single,
            trained_items=trained_items,
            prior=prior,
            residual=None if by_attributes is None else by_attributes.residual,
        )
        self.retriever = CandidateRetriever(
            self.model,
            generator,
            self.fold_in,
            candidates,
            trained_items=trained_items,
            vectors=vectors,
            lists=lists,
        )
        self._anchors = generator.anchors
        self.influence = InfluenceExplainer(self.fold_in, self.ranker, self._anchors)
        self._fitted_gaps = self.model.fitted_gaps
        self.latest_time = self.model.latest_time
        self._trained_space = space
        self._space: ItemSpace | None = None
        self._space_lock, self._cpu_lock = Lock(), Lock()  # what is made when it is asked for

    @property
    def n_items(self) -> int:
        """The number of item rows."""
        return self.model.n_items

    @property
    def pools_users(self) -> bool:
        """Whether users' vectors are pooled from their items."""
        return self.model.config.users == "history"

    @property
    def knows_gaps(self) -> bool:
        """Whether the time since a user's last interaction changes the list."""
        return bool(self._fitted_gaps)

    def gap_class(self, seconds: float) -> int:
        """The gap class ``seconds`` after a user's last interaction; 0 for one without effect."""
        number = gap_class(seconds)
        return number if number in self._fitted_gaps else 0

    @property
    def item_space(self) -> ItemSpace:
        """The similarity of items, made at the first use."""
        with self._space_lock:
            if self._space is None:
                tables, trained = self.ranker.margins.double, self._trained_items
                if self._trained_space is None or trained is None:
                    self._space = ItemSpace(tables, self.n_items, trained)
                else:
                    self._space = self._trained_space.with_others(trained, tables, self.n_items)
                    self._trained_space = None  # as large as the new one
            return self._space

    @property
    def ranker_name(self) -> str:
        """The class of the ranker's backend, or "none" before a list was made."""
        backend = vars(self.ranker).get("backend")
        return "none" if backend is None else type(backend).__name__

    def warm_up(self) -> None:
        """Makes one list, so that the set-up of all parts does not delay the first request."""
        everything = ItemFilter(np.ones(self.n_items, dtype=np.bool_))
        user = UserState(0, Evidence(np.array([0])))
        self.rank([RankRequest(user, 10, everything, diversity=0.5)])

    def trained_vectors(self, rows: Sequence[int]) -> Tensor:
        """(k, E) vectors of these trained users."""
        with torch.no_grad():
            return self.model.user_vectors(torch.tensor(rows, device=self.model.device))

    @torch.inference_mode()
    def user_vectors(self, users: Sequence[UserState]) -> list[NDArray[np.float32]]:
        """The (E,) vector of each user."""
        return list(self.retriever.vectors(users).cpu().numpy())

    @_by_boost
    @_within_memory
    def rank(self, requests: Sequence[RankRequest]) -> list[list[RankedItem]]:
        """The best ``n`` items of each request, in one pass of the ranker for each boost.

        A boost also changes the scores, and the probabilities that the user prefers an item to the
        next one.
        """
        vectors = self.retriever.vectors([request.user for request in requests])
        candidates = self.retriever.candidates(requests, vectors)
        depth = max(request.depth for request in requests)
        # A list must not depend on its company: the candidates are as many for everyone, or
        # in the order of the model. What is asked for beyond them follows in the order of the cheap
        # score.
        bound = self.ranker.bind(vectors, _boost_of(requests))
        ranked = bound.rank(candidates, depth)
        missing = depth - ranked.shape[1]
        if missing > 0:
            rest = [
                self.retriever.rest(request, vector, items[items != PAD], missing)
                for request, vector, items in zip(requests, vectors, candidates, strict=True)
            ]
            more = pad_sequence(rest, batch_first=True, padding_value=PAD)
            ranked = _left_filled(torch.cat([ranked, more.to(ranked.device)], dim=1))
        if any(request.diversity for request in requests):
            ranked = self._diversified(requests, ranked)
        margins = bound.margins.list_margins(ranked, self.references)
        lists = self._described(ranked, margins, [request.n for request in requests])
        return [
            items if request.explain_by is None else self._explained(request, vector, items)
            for request, vector, items in zip(requests, vectors, lists, strict=True)
        ]

    @_by_boost
    @_within_memory
    def rerank(self, requests: Sequence[RerankRequest]) -> list[list[RankedItem]]:
        """All items of each request, by Algorithm 1 over the items in the given order.

        With a tower, Algorithm 1 ranks at most ``MAX_EXACT_ITEMS`` items: the best by the mean
        margin over the anchors. The other items follow in the order of that margin, as the items
        beyond the candidates do in a list.
        """
        bound, items = self._bound(requests)
        width = items.shape[1]
        if width <= MAX_EXACT_ITEMS or self.ranker.margins.additive:
            ranked = bound.rank(items, width)
        else:
            best, rest = self._split(requests)
            ranked = _left_filled(torch.cat([bound.rank(best, width), rest], dim=1))
        margins = bound.margins.list_margins(ranked, self.references)
        return self._described(ranked, margins, [width] * len(requests))

    @_within_memory
    def compare(self, requests: Sequence[RerankRequest]) -> list[PairwiseComparison]:
        """The items of each request, compared each with each."""
        bound, items = self._bound(requests)
        margins = bound.margins.all_margins(items).cpu()
        ranked = bound.rank(items, items.shape[1]).cpu()
        comparisons = []
        for request, of_request, rows in zip(requests, margins, ranked, strict=True):
            m = len(request.rows)
            position = {int(row): i for i, row in enumerate(request.rows)}
            order = [position[row] for row in rows[:m].tolist()]
            probability = preference_probability(of_request[:m, :m], self.temperature)
            comparisons.append(PairwiseComparison(probability, order))
        return comparisons

    def pairs_to_rank(self, request: RankRequest) -> int:
        """The most pairs that ``rank`` compares for a request, if the preferences are transitive.

        0 for an additive model, which is sorted. The same holds for ``pairs_to_rerank`` and
        ``pairs_to_compare``.
        """
        m, k = min(self.n_candidates, self.n_items), request.depth
        best = min(m, BEST_LAST)  # `cheap_to_rank`: all meet once, and the best each other
        return self._pairs(m + _pairs_within(best) + _scan_pairs(m - best, k - best), k)

    def pairs_to_rerank(self, request: RerankRequest) -> int:
        """The most pairs that ``rerank`` compares for a request."""
        m = len(request.rows)
        found = len(self._anchors) * m if m > MAX_EXACT_ITEMS else 0
        return self._pairs(found + _pairs_within(min(m, MAX_EXACT_ITEMS)), m)

    def pairs_to_compare(self, request: RerankRequest) -> int:
        """The most pairs that ``compare`` compares for a request."""
        m = len(request.rows)
        return self._pairs(m * m + _pairs_within(m), 0)

    def _pairs(self, ranked: int, described: int) -> int:
        """The pairs that rank a list, and the pairs of its scores; 0 for an additive model."""
        if self.ranker.margins.additive:
            return 0
        return ranked + described * (len(self.references) + 1)

    def question_pool(self, rows: IntArray) -> QuestionPool:
        """Questions about pairs of these (M,) items, by the answers of some trained users."""
        step = max(1, self.model.n_users // SAMPLED_USERS)
        users = torch.arange(0, self.model.n_users, step, device=self.model.device)
        with torch.inference_mode():
            vectors = self.model.user_vectors(users[:SAMPLED_USERS])
        return QuestionPool(self.ranker, vectors, rows, self.temperature)

    def _cpu_engine(self) -> InferenceEngine:
        """The same engine on the CPU, made when a device first has too little memory."""
        with self._cpu_lock:
            if self._on_cpu is None:
                self._on_cpu = InferenceEngine(
                    replace(self._checkpoint, model=_cpu_copy(self.model)),
                    self.n_candidates,
                    trained_items=self._trained_items,
                    prior=self.fold_in.prior,
                    vectors=self._vectors,
                    lists=self._lists,
                    on_pairs=self._on_pairs,
                )
                self._on_cpu._space = self._space
            return self._on_cpu

    def _split(self, requests: Sequence[RerankRequest]) -> tuple[Tensor, Tensor]:
        """Each request's items that are ranked exactly, in the given order, and the others.

        Returns:
            (B, ≤ MAX_EXACT_ITEMS) and (B, L) item rows, padded; the other items are best first.
        """
        best, rest = [], []
        vectors = self.retriever.vectors([request.user for request in requests])
        for request, vector in zip(requests, torch.split(vectors, 1), strict=True):
            rows = torch.from_numpy(request.rows).to(self.ranker.device)
            bound = self.ranker.bind(vector, _boost_of([request]))
            margins = bound.margins.mean_margins(self._anchors, rows)[0]
            order = margins.sort(descending=True, stable=True).indices
            best.append(rows[order[:MAX_EXACT_ITEMS].sort().values])
            rest.append(rows[order[MAX_EXACT_ITEMS:]])
        return pad_sequence(best, True, PAD), pad_sequence(rest, True, PAD)

    def _bound(self, requests: Sequence[RerankRequest]) -> tuple[BoundRanker, Tensor]:
        """The ranker for the users of the requests, and the requests' items (B, M), padded."""
        vectors = self.retriever.vectors([request.user for request in requests])
        rows = [torch.from_numpy(request.rows) for request in requests]
        return self.ranker.bind(vectors, _boost_of(requests)), pad_sequence(rows, True, PAD)

    def _diversified(self, requests: Sequence[RankRequest], ranked: Tensor) -> Tensor:
        """(B, depth) lists → (B, n) lists; `diversified` chooses the items of diverse lists."""
        lists = []
        for request, of_request in zip(requests, ranked.cpu(), strict=True):
            rows = of_request[: request.depth]
            rows = rows[rows != PAD]
            if request.diversity:
                vectors = self.item_space.vectors[rows.numpy()]
                rows = rows[torch.from_numpy(_in_pools(vectors, request))]
            lists.append(rows[: request.n])
        return pad_sequence(lists, batch_first=True, padding_value=PAD).to(ranked.device)

    def _described(
        self, ranked: Tensor, margins: tuple[Tensor, Tensor], lengths: Sequence[int]
    ) -> list[list[RankedItem]]:
        """(B, k) ranked rows → lists with scores and probabilities, of at most ``lengths``.

        ``margins`` are the results of `UserMargins.list_margins` over the reference items.
        """
        over_references, over_next = margins
        scores = preference_probability(over_references, self.temperature).mean(axis=2)
        ahead = preference_probability(over_next, self.temperature)
        lists = []
        for n, rows, of_scores, of_next in zip(
            lengths, ranked.tolist(), scores.tolist(), ahead.tolist(), strict=True
        ):
            rows = [row for row in rows[:n] if row != PAD]
            last = len(rows) - 1
            lists.append(
                [
                    RankedItem(row, of_scores[i], of_next[i] if i < last else None)
                    for i, row in enumerate(rows)
                ]
            )
        return lists

    def _explained(
        self, request: RankRequest, vector: Tensor, items: Sequence[RankedItem]
    ) -> list[RankedItem]:
        """The items with the reasons for each; see `InfluenceExplainer.effects`."""
        assert request.explain_by is not None  # noqa: S101 - the caller looked
        shown = np.array([item.row for item in items], dtype=np.int64)
        own, effects = self.influence.effects(
            vector, request.explain_by, shown, trained=request.user.row is not None
        )
        effects = effects * self.model.gap_scale(request.user.gap_class)
        log_odds = effects / (2.0 * self.temperature)  # P = σ(margin / 2T)
        return [
            item._replace(because=_largest(own, of_item))
            for item, of_item in zip(items, log_odds, strict=True)
        ]


def preference_probability(margins: Tensor, temperature: float) -> NDArray[np.float64]:
    """P(i preferred to j) = σ((z_ij − z_ji) / 2T) of margins z_ij − z_ji."""
    probability: NDArray[np.float64] = 0.5 + 0.5 * np.tanh(
        margins.cpu().numpy() / (4.0 * temperature)
    )
    return probability


def _pairs_within(m: int) -> int:
    return m * (m - 1) // 2


def _scan_pairs(m: int, k: int) -> int:
    """The most pairs that Algorithm 1 compares for the top ``k`` of ``m`` items."""
    k = max(0, min(k, m))
    return _pairs_within(m) - _pairs_within(m - k)


def _left_filled(ranked: Tensor) -> Tensor:
    """(B, k) item rows with −1 anywhere → the same with all −1 at the end."""
    order = (ranked == PAD).to(torch.int8).argsort(dim=1, stable=True)
    return ranked.gather(1, order)


def _in_pools(vectors: NDArray[np.float32], request: RankRequest) -> NDArray[np.int64]:
    """The places of a diverse list, from the (P, D) vectors of the ranked list.

    With pages, the list consists of pools of ranked items, each in its own diverse order. The list
    therefore begins as a list of the first page alone.
    """
    if request.page is None:
        return diversified(vectors, request.n, request.diversity)
    starts = range(0, len(vectors), request.pool)
    pools = [vectors[start : start + request.pool] for start in starts]
    places = [
        start + diversified(pool, len(pool), request.diversity)
        for start, pool in zip(starts, pools, strict=True)
    ]
    return np.concatenate(places) if places else np.zeros(0, dtype=np.int64)


def _largest(own: IntArray, effects: NDArray[np.float64]) -> tuple[Reason, ...]:
    """The own items with the largest effects above 0."""
    best = np.argsort(-effects, kind="stable")[:MAX_REASONS]
    return tuple(Reason(int(own[i]), float(effects[i])) for i in best if effects[i] > 0.0)


def _cpu_copy(model: PairwiseRanker) -> PairwiseRanker:
    """A frozen copy on the CPU, made without memory of the model's own device."""
    copy = build_model(model.config, model.n_users, model.n_items)
    copy.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    return copy.requires_grad_(False).eval()
