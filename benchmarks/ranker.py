"""How long does a list take: the compiled ranker, the one in torch, and the literal Algorithm 1.

    python -m benchmarks.ranker CHECKPOINT

Needs a checkpoint of `ncr train` or `ncr reproduce`: the preferences of a random model are far more
intransitive than those of a trained one. Candidates are those of the service, in its order, and all
give the same lists, which is checked; the literal algorithm makes one network call a comparison.
The floor is the multiply-adds above the first layer and the tanh of the pairs that were looked at,
at the rates that numpy and torch reach in the same run. One thread.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import publish
from ncr_core.checkpoint import load_checkpoint
from ncr_core.ranking import CandidateGenerator, ExactRanker, algorithm1, anchors_of

K = 10
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
        if compiled.compiled is not None:
            code = compiled.compiled
            _, work = code.rank(code.bind(users.numpy()), candidates.numpy(), K)
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
        work_of_a_pair_in_one_order=_work(compiled) if compiled.compiled else None,
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
