"""Algorithm 1 beside Copeland's and Borda's orders: quality, cost, and how intransitive a model is.

    python -m benchmarks.strategies CHECKPOINT DATA [ml-1m | ncf-ml-1m]

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

from benchmarks.report import publish
from ncr_core.checkpoint import load_checkpoint
from ncr_core.data.interactions import IntArray
from ncr_core.evaluation.protocols import K, ranks_of
from ncr_core.evaluation.significance import Evaluation
from ncr_core.experiments.datasets import load_data_set
from ncr_core.models import PairwiseRanker
from ncr_core.ranking import STRATEGIES, ExactRanker, Strategy
from ncr_core.ranking.tournament import certified, cyclic_share, wins

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


def main(folder: Path, root: Path, name: str) -> None:
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(folder)
    model, data = checkpoint.model, load_data_set(name, root)
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "ml-1m")
