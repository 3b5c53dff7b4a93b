"""Algorithm 1 beside Copeland's and Borda's orders: quality, cost, and how intransitive a model is.

    python -m benchmarks.ranking_strategies CHECKPOINT DATA [ml-1m | ncf-ml-1m]

CHECKPOINT was trained by `ncr reproduce` on this data set of the folder DATA. HR@10 and NDCG@10 are
of the test items among the sampled ones of the protocol. Certified users have the same best ten in
any order of the candidates; cycles are the share of triples that are intransitive. One thread.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import publish, run_command
from ncr_core.checkpoint import load_checkpoint
from ncr_core.data.interactions import IntArray
from ncr_core.evaluation.protocols import K, ranks_of
from ncr_core.evaluation.significance import Evaluation
from ncr_core.models import PairwiseRanker
from ncr_core.ranking import STRATEGIES, ExactRanker, Strategy
from ncr_core.ranking.algorithm1 import wins
from ncr_core.reproduction.datasets import load_dataset

SEEDS = (0, 1, 2)
AT_ONCE = 256


class Ranked:
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


def main(folder: Path, root: Path, name: str = "ml-1m") -> None:
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(folder)
    model, data = checkpoint.model, load_dataset(name, root)
    if list(checkpoint.item_ids) != list(data.split.train.item_ids):
        sys.exit("the checkpoint was trained on other data")
    ranker = ExactRanker(model)
    sets = [data.sampled(seed) for seed in SEEDS]
    rows: list[list[object]] = []
    for strategy in STRATEGIES:
        ranks = Ranked(model, ranker, strategy)
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
    for start in range(0, len(users), AT_ONCE):
        part = slice(start, start + AT_ONCE)
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
    run_command(main)
