"""How long does a list take, and by which code.

    python -m benchmarks.ranker CHECKPOINT
    python -m benchmarks.ranker additive_topk CHECKPOINT
    python -m benchmarks.ranker additive_candidates ITEMS
    python -m benchmarks.ranker strategies CHECKPOINT DATA [ml-1m | ncf-ml-1m]

CHECKPOINT is one of `ncr train` or `ncr reproduce`: the preferences of a random model are far more
intransitive than those of a trained one. One thread.

The first compares the compiled ranker, the one in torch, and the literal Algorithm 1 with one
network call a comparison. Candidates are those of the service, in its order, and all give the same
lists, which is checked. The floor is the multiply-adds above the first layer and the tanh of the
pairs that were looked at, at the rates that numpy and torch reach in the same run.

The second takes the best of the whole catalogue for an additive model, beside numpy (a product of
matrices, argpartition, and a sort of what it leaves) and ``recommend`` of implicit's matrix
factorisation with the same vectors: the fastest of several runs, in turns whose order is drawn.

The third ranks 200 candidates of an NBPR of random vectors, whose number of factors is that of the
recipes: compiled, which scores each candidate where it lies, and in torch, which copies its vector.
It also searches for as many candidates as the service does, in the same two ways.

The fourth sets Algorithm 1 beside Copeland's and Borda's orders: quality, cost, and how
intransitive a model is. CHECKPOINT was trained by `ncr reproduce` on this data set of the folder
DATA. HR@10 and NDCG@10 are of the test items among the sampled ones of the protocol. Certified
users have the same best ten in any order of the candidates; cycles are the share of triples that
are intransitive.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from benchmarks.harness import in_turns, publish, run_command
from ncr_core.checkpoint import load_checkpoint
from ncr_core.data.interactions import IntArray
from ncr_core.evaluation.protocols import K, ranks_of
from ncr_core.evaluation.significance import Evaluation
from ncr_core.inference.retrieval import CandidateGenerator
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.ranking import STRATEGIES, ExactRanker, Strategy, algorithm1, anchors_of
from ncr_core.ranking.algorithm1 import wins
from ncr_core.ranking.backends.numba_ranker import NumbaRanker
from ncr_core.recipes import WINDOWS
from ncr_core.reproduction.datasets import load_dataset

CASES = [(100, 1), (100, 32), (200, 1), (200, 32), (1000, 1), (1000, 32)]
REPEATS = 7
HEAD = [
    "M",
    "batch",
    "compiled ms a user",
    "torch ms a user",
    "full matrix ms",
    "floor ms",
    "literal ms",
    "pairs a user",
    "blocks a user",
    "literal calls",
    "literal / compiled",
]


@torch.inference_mode()
def main(folder: Path) -> None:
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(folder)
    model = checkpoint.model
    compiled, in_torch = ExactRanker(model), ExactRanker(model, compiled=False)
    picker = CandidateGenerator(compiled, anchors_of(checkpoint.reference_items), 0)
    generator = torch.Generator().manual_seed(0)
    rows = []
    rates = _rates()
    for m, batch in CASES:
        if m > model.n_items:
            continue
        users = model.user_vectors(torch.randint(model.n_users, (batch,), generator=generator))
        scores = picker.scores(users)
        candidates = picker.pick(scores, torch.ones_like(scores, dtype=torch.bool), m)
        ranked = compiled.rank(users, candidates, K)
        if not in_torch.rank(users, candidates, K).equal(ranked):
            raise AssertionError("the compiled ranker differs from the one in torch")
        fast, slow = (
            _fastest(partial(ranker.rank, users, candidates, K)) / batch
            for ranker in (compiled, in_torch)
        )
        started = time.perf_counter()
        calls, expected = _literal(in_torch, users[:1], candidates[0].tolist())
        literal = time.perf_counter() - started
        if expected != ranked[0].tolist():
            raise AssertionError("the ranker differs from Algorithm 1")
        pairs = blocks = floor = None  # an additive model is sorted
        if isinstance(compiled.backend, NumbaRanker):
            batch_ranker = compiled.backend.bind(compiled.margins.bind(users))
            _, work = batch_ranker.scan(candidates.numpy(), K)
            pairs, blocks = float(work.pairs.mean()), float(work.blocks.mean())
            floor = (
                pairs * 2 * sum(n / rate for n, rate in zip(_work(compiled), rates, strict=True))
            )
        matrix = None
        if batch == 1:
            matrix = _fastest(partial(compiled.all_margins, users, candidates)) * 1e3
        times = [fast * 1e3, slow * 1e3, matrix, floor and floor * 1e3, literal * 1e3]
        rows.append([m, batch, *times, pairs, blocks, calls, literal / fast])
    name = f"ranker-{model.config.kind}-{model.config.factors}"
    publish(
        name,
        HEAD,
        rows,
        model=model.config.as_dict(),
        k=K,
        threads=1,
        multiply_adds_per_s=rates[0],
        tanh_per_s=rates[1],
        work_of_a_pair_in_one_order=_work(compiled) if compiled.margins.double.tower else None,
    )


def _work(ranker: ExactRanker) -> tuple[int, int]:
    """Multiply-adds and tanh of one pair in one order, with the first layer in tables."""
    tower = ranker.margins.single.tower
    assert tower is not None
    widths = [tower.first.shape[1], *(len(bias) for _, bias in tower.layers)]
    products = sum(weight.numel() for weight, _ in tower.layers) + widths[-1]
    return products, sum(widths)


def _rates() -> tuple[float, float]:
    """Multiply-adds and tanh a second, in float32, as numpy and torch have them on one core."""
    n = 512
    a = np.ones((n, n), dtype=np.float32)
    x = torch.linspace(-3, 3, 8_192)
    out = torch.empty_like(x)
    loops = 100

    def tanh() -> None:
        for _ in range(loops):
            torch.tanh(x, out=out)

    return n**3 / _fastest(lambda: a @ a), loops * len(x) / _fastest(tanh)


def _fastest(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of several calls: what else the machine does only makes one slower."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def _literal(
    ranker: ExactRanker, vector: torch.Tensor, candidates: list[int]
) -> tuple[int, list[int]]:
    calls = 0

    def beats(i: int, j: int) -> bool:
        nonlocal calls
        calls += 1
        return bool(ranker.compare(vector, torch.tensor([[i]]), torch.tensor([[j]])) > 0)

    ranked = algorithm1(candidates, beats, K)
    return calls, ranked


BATCHES = (1, 64)
ADDITIVE_REPEATS = 200
SEARCH_REPEATS = 50
SEARCHED = 256  # candidates that the service searches for by default, for a user


def additive_topk(folder: Path) -> None:
    from implicit.cpu.als import AlternatingLeastSquares

    torch.set_num_threads(1)
    model = load_checkpoint(folder).model
    ranker = ExactRanker(model)
    table = ranker.margins.single.linear
    if table is None or not ranker.margins.sortable:
        sys.exit("this model is no product of vectors")
    items = table.items.numpy()
    rows: list[list[Any]] = []
    for batch in BATCHES:
        users = model.user_vectors(torch.arange(batch))
        user_table = users[:, table.columns].numpy()
        als = AlternatingLeastSquares(factors=items.shape[1], num_threads=1)
        als.user_factors, als.item_factors = user_table, items
        seen = csr_matrix((batch, len(items)), dtype=np.float32)
        calls: dict[str, Callable[[], Any]] = {
            "ours": partial(_ours, ranker, users),
            "numpy": partial(_numpy, user_table, items),
            "implicit": partial(_implicit, als, seen),
        }
        lists = [call() for call in calls.values()]
        if table.bias is None and not all(np.array_equal(lists[0], other) for other in lists):
            raise AssertionError("the lists differ")
        times = in_turns(calls, ADDITIVE_REPEATS)
        milliseconds = [min(times[name]) * 1e3 for name in calls]
        rows.append(
            [batch, *milliseconds, *(other / milliseconds[0] for other in milliseconds[1:])]
        )
    publish(
        f"catalogue-{model.config.kind}-{model.config.factors}",
        ["batch", "ours ms", "numpy ms", "implicit ms", "numpy / ours", "implicit / ours"],
        rows,
        model=model.config.as_dict(),
        items=len(items),
        k=K,
        threads=1,
    )


@torch.inference_mode()
def additive_candidates(items: int) -> None:
    torch.set_num_threads(1)
    rows: list[list[Any]] = []
    for factors, start_factors in ((64, 0), (128, 0), (128, 512), (128, 1_024)):
        config = ModelConfig(
            kind="nbpr",
            factors=factors,
            start_factors=start_factors,
            users="history",
            windows=WINDOWS,
            item_bias=True,
        )
        model = build_model(config, 1, items)
        compiled, in_torch = ExactRanker(model), ExactRanker(model, compiled=False)
        for batch in (1, 32):
            users = torch.randn(batch, config.width)
            candidates = torch.stack([torch.randperm(items)[:200] for _ in range(batch)])
            row: list[Any] = [config.width, batch]
            for both in (
                [partial(ranker.rank, users, candidates, K) for ranker in (compiled, in_torch)],
                [partial(ranker.top, users, SEARCHED) for ranker in (compiled, in_torch)],
            ):
                calls: dict[str, Callable[[], Any]] = dict(
                    zip(("compiled", "torch"), both, strict=True)
                )
                if not calls["compiled"]().equal(calls["torch"]()):
                    raise AssertionError("the lists differ")
                times = in_turns(calls, SEARCH_REPEATS)
                a_user = [min(times[name]) * 1e3 / batch for name in calls]
                row += [*a_user, a_user[1] / a_user[0]]
            rows.append(row)
    publish(
        f"candidates-nbpr-{items}",
        [
            "factors",
            "batch",
            "list, compiled ms a user",
            "list, torch ms a user",
            "list, torch / compiled",
            "search, compiled ms a user",
            "search, torch ms a user",
            "search, torch / compiled",
        ],
        rows,
        items=items,
        candidates=200,
        searched=SEARCHED,
        k=K,
        threads=1,
    )


def _ours(ranker: ExactRanker, users: torch.Tensor) -> Any:
    return ranker.top(users, K).numpy()


def _numpy(users: Any, items: Any) -> Any:
    scores = users @ items.T
    some = np.argpartition(-scores, K, axis=1)[:, :K]
    order = np.argsort(-np.take_along_axis(scores, some, 1), axis=1)
    return np.take_along_axis(some, order, 1)


def _implicit(als: Any, seen: Any) -> Any:
    users = np.arange(seen.shape[0])
    return als.recommend(users, seen, N=K, filter_already_liked_items=False)[0]


SEEDS = (0, 1, 2)
USERS_AT_ONCE = 256


class RankedByStrategy:
    """A model that ranks by one strategy, and what that took."""

    def __init__(self, model: PairwiseRanker, ranker: ExactRanker, strategy: Strategy) -> None:
        self.seconds, self.users = 0.0, 0
        self._model, self._ranker, self._strategy = model, ranker, strategy

    @torch.inference_mode()
    def rank(self, users: IntArray, candidates: IntArray, k: int) -> IntArray:
        vectors = self._model.user_vectors(torch.from_numpy(users))
        started = time.perf_counter()
        ranked = self._ranker.rank(vectors, torch.from_numpy(candidates), k, self._strategy)
        self.seconds += time.perf_counter() - started
        self.users += len(users)
        rows: IntArray = ranked.numpy()
        return rows


def strategies(folder: Path, root: Path, name: str = "ml-1m") -> None:
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(folder)
    model, data = checkpoint.model, load_dataset(name, root)
    if list(checkpoint.item_ids) != list(data.split.train.item_ids):
        sys.exit("the checkpoint was trained on other data")
    ranker = ExactRanker(model)
    sets = [data.sampled(seed) for seed in SEEDS]
    rows: list[list[object]] = []
    for strategy in STRATEGIES:
        ranks = RankedByStrategy(model, ranker, strategy)
        every = Evaluation.of([ranks_of(ranks, candidates, K) for candidates in sets], K)
        cost = ranks.seconds / ranks.users * 1e3
        rows.append([strategy, float(every.mean_hr), float(every.mean_ndcg), cost])
    sure, cycles = _intransitivity(model, ranker, sets[0].users, sets[0].candidates)
    print(f"certified users {sure:.4f}, cyclic triples {cycles:.6f}")
    publish(
        f"strategies-{name}-{model.config.kind}-{model.config.factors}",
        ["strategy", "HR@10", "NDCG@10", "ms a user"],
        rows,
        model=model.config.as_dict(),
        candidates=int(sets[0].candidates.shape[1]),
        certified_users=sure,
        cyclic_triples=cycles,
        threads=1,
    )


@torch.inference_mode()
def _intransitivity(
    model: PairwiseRanker, ranker: ExactRanker, users: IntArray, candidates: IntArray
) -> tuple[float, float]:
    """The share of certified users, and of cycles among all triples."""
    sure, cycles = [], []
    for start in range(0, len(users), USERS_AT_ONCE):
        part = slice(start, start + USERS_AT_ONCE)
        items = torch.from_numpy(candidates[part])
        lengths = (items >= 0).sum(dim=1)
        vectors = model.user_vectors(torch.from_numpy(users[part]))
        won = wins(ranker.all_margins(vectors, items), lengths)
        sure.append(certified(won, lengths, K).numpy())
        cycles.append(cyclic_share(won, lengths).numpy())
    return float(np.concatenate(sure).mean()), float(np.concatenate(cycles).mean())


def certified(won: Tensor, lengths: Tensor, k: int) -> Tensor:
    """Whether the K largest numbers of wins are m − 1, m − 2, …, m − K: (B, M), (B,) → (B,).

    That order is then Algorithm 1's, whatever the order of the candidates: the first beats all, the
    second all but the first, and so on.
    """
    best = torch.sort(won, dim=1, descending=True).values[:, :k]
    ranks = torch.arange(best.shape[1], device=won.device)
    expected = lengths.unsqueeze(1) - 1 - ranks
    return ((best == expected) | (ranks >= lengths.unsqueeze(1))).all(dim=1)


def cyclic_share(won: Tensor, lengths: Tensor) -> Tensor:
    """The share of triples of candidates that are cycles, i beats j beats l beats i: (B,) float64.

    A triple that is no cycle has a candidate that beats both others, so cycles are
    C(m, 3) − Σ C(w, 2) (Kendall and Babington Smith 1940). Only where nothing ties.
    """
    m = lengths.double()
    triples = m * (m - 1) * (m - 2) / 6
    w = won.clamp(min=0).double()
    cycles = triples - (w * (w - 1) / 2).sum(dim=1)
    return torch.where(triples > 0, cycles / triples.clamp(min=1), 0.0)


if __name__ == "__main__":
    run_command(
        main,
        additive_topk=additive_topk,
        additive_candidates=additive_candidates,
        strategies=strategies,
    )
