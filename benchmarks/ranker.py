"""How long does a list take: the batched exact ranker beside the literal Algorithm 1.

    python -m benchmarks.ranker CHECKPOINT

Needs a checkpoint of `ncr train`: the preferences of a random model are far more intransitive than
those of a trained one. Both give the same lists, which is checked; the literal algorithm makes one
network call a comparison.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from benchmarks.report import publish
from ncr_core.checkpoint import load_checkpoint
from ncr_core.ranking import ExactRanker, algorithm1

K = 10
CASES = [(100, 1), (100, 32), (200, 1), (200, 32), (1000, 1), (1000, 32)]
REPEATS = 5


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(folder)
    model, ranker = checkpoint.model, ExactRanker(checkpoint.model)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for m, batch in CASES:
        if m > model.n_items:
            continue
        users = torch.randint(model.n_users, (batch,), generator=generator)
        candidates = torch.stack(
            [torch.randperm(model.n_items, generator=generator)[:m] for _ in range(batch)]
        )
        vectors = model.user_vectors(users)
        ranked = ranker.rank(vectors, candidates, K)
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            ranker.rank(vectors, candidates, K)
            times.append(time.perf_counter() - started)
        own = sorted(times)[REPEATS // 2] / batch
        started = time.perf_counter()
        calls, expected = _literal(ranker, vectors[:1], candidates[0].tolist())
        literal = time.perf_counter() - started
        assert expected == ranked[0].tolist(), "the ranker differs from Algorithm 1"
        rows.append([m, batch, own * 1e3, literal * 1e3, calls, literal / own])
    publish(
        "ranker",
        ["M", "batch", "ms a user", "literal ms a user", "literal calls", "times faster"],
        rows,
        model=model.config.as_dict(),
        k=K,
        threads=1,
    )


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
