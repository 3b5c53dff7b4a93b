"""Catalogues that MovieLens does not have: memory, and what finding candidates costs and misses.

    python -m benchmarks.large CHECKPOINT

Users and items are drawn around those of a trained model with an additive part, such as NeuPR:
each is a real one's vector with a little noise. What is held is the share of the top 10 that
Algorithm 1 gives over the whole catalogue. One thread.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import publish
from ncr_core.checkpoint import load_checkpoint, save_checkpoint
from ncr_core.models import PairwiseRanker, build_model
from ncr_core.ranking import (
    CandidateGenerator,
    ExactRanker,
    FaissShortlist,
    FullShortlist,
    Shortlist,
    anchors_of,
    spread_over_popularity,
)

NOISE = 0.3  # standard deviations of a coordinate over the real ones
M, K = 200, 10
USERS, BATCH = 48, 8
SIZES = (100_000, 1_000_000)


def enlarged(model: PairwiseRanker, n_users: int, n_items: int) -> PairwiseRanker:
    """A model of so many users and items, drawn around the real ones."""
    generator = torch.Generator().manual_seed(0)
    large = build_model(model.config, n_users, n_items).requires_grad_(False)
    small = dict(model.named_parameters())
    drawn = {
        n: torch.randint(old, (n,), generator=generator)
        for n, old in ((n_users, model.n_users), (n_items, model.n_items))
    }
    for name, table in large.named_parameters():
        real = small[name]
        if table.shape == real.shape:
            table.copy_(real)
            continue
        noise = torch.randn(table.shape, generator=generator) * real.std(dim=0) * NOISE
        table.copy_(real[drawn[len(table)]] + noise)
    return large


def candidates_rows(model: PairwiseRanker, popularity: torch.Tensor) -> list[list[Any]]:
    """A row for each way to find candidates."""
    n_items = model.n_items
    ranker = ExactRanker(model)
    anchors = anchors_of(spread_over_popularity(popularity, 16).tolist())
    users = model.user_vectors(torch.arange(USERS))
    everything = torch.ones((USERS, n_items), dtype=torch.bool)
    plain = CandidateGenerator(ranker, anchors, 0)
    truth = [
        ranker.rank(one, plain.search(one, everything[:1], n_items), K)[0].tolist()
        for one in torch.split(users, 1)
    ]
    rows: list[list[Any]] = []
    some = model.user_vectors(torch.arange(USERS, USERS + 64))
    ways: dict[str, Any] = {
        "every item scored": lambda: None,
        "product, then scored": lambda: FullShortlist(ranker.margins),
        "faiss, then scored": lambda: FaissShortlist(ranker.margins, some),
    }
    for name, make in ways.items():
        started = time.perf_counter()
        shortlist: Shortlist | None = make()
        built = time.perf_counter() - started
        generator = CandidateGenerator(ranker, anchors, 0, shortlist)
        seconds, held = [], []
        for start in range(0, USERS, BATCH):
            part = slice(start, start + BATCH)
            started = time.perf_counter()
            found = generator.search(users[part], everything[part], M)
            seconds.append((time.perf_counter() - started) / BATCH)
            held += [
                len(set(best) & set(own)) / K
                for best, own in zip(truth[part], found.tolist(), strict=True)
            ]
        index = shortlist if isinstance(shortlist, FaissShortlist) else None
        rows.append(
            [
                n_items,
                name,
                float(np.median(seconds)) * 1e3,
                float(np.mean(held)),
                built,
                index and index.probes,
                index and index.recall,
            ]
        )
        print(rows[-1], flush=True)
    return rows


def memory(model: PairwiseRanker, n_users: int, n_items: int) -> dict[str, Any]:
    """What a process that serves such a model holds, as itself tells."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        large = enlarged(model, n_users, n_items)
        save_checkpoint(
            folder,
            large,
            user_ids=[str(n) for n in range(n_users)],
            item_ids=[str(n) for n in range(n_items)],
            item_counts=np.arange(n_items)[::-1].copy(),
        )
        on_disk = sum(path.stat().st_size for path in folder.iterdir())
        del large
        found = subprocess.run(
            [sys.executable, "-c", MEASURE, str(folder)], check=True, capture_output=True, text=True
        )
    values = [float(x) for x in found.stdout.split()]
    names = ("import_mib", "loaded_mib", "after_requests_mib", "load_s", "cold_ms", "warm_ms")
    return {"users": n_users, "items": n_items, "checkpoint_mib": on_disk / 2**20} | dict(
        zip(names, values, strict=True)
    )


MEASURE = """
import sys, time, numpy as np, torch
torch.set_num_threads(1)
from pathlib import Path
from app.models.schemas import ModelRow
from app.recommend.serving import ServingModel
from app.recommend.candidates import RankRequest
from ncr_core.checkpoint import load_checkpoint
def rss():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024
print(rss())
row = ModelRow("v", "published", "", 0, "", "", 9, 0, 0, 0, {}, {}, None, 0, None)
started = time.perf_counter()
model = ServingModel(row, load_checkpoint(Path(sys.argv[1])), 200)
model.warm_up()
took = time.perf_counter() - started
print(rss())
mask = np.ones(model.n_items, dtype=bool)
def ask(user): return RankRequest(user, None, (str(user), 0), "", lambda: mask, 10)
def run():
    started = time.perf_counter()
    for user in range(1000, 1200):
        model.rank([ask(user)])
    return (time.perf_counter() - started) / 200 * 1e3
cold, warm = run(), run()
print(rss(), took, cold, warm)
"""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(folder)
    held = memory(checkpoint.model, 1_000_000, 100_000)
    print(held, flush=True)
    rows = []
    for n_items in SIZES:
        model = enlarged(checkpoint.model, 1_000, n_items)
        rows += candidates_rows(model, torch.arange(n_items).flip(0))
    publish(
        f"large-{checkpoint.model.config.kind}-{checkpoint.model.config.factors}",
        ["items", "candidates", "ms a user", "held of top 10", "built s", "probes", "recall"],
        rows,
        model=checkpoint.model.config.as_dict(),
        memory=held,
        candidates=M,
        k=K,
        threads=1,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
