"""What finding candidates by a cheap score costs and misses.

    python -m benchmarks.candidates CHECKPOINT DATA
    python -m benchmarks.candidates large CHECKPOINT
    python -m benchmarks.candidates index [ITEMS [FACTORS [INDEX ...]]]

The first counts how many of the best ten of the whole catalogue are among the candidates.
CHECKPOINT was trained by `ncr reproduce` on MovieLens 1M (P1) of the folder DATA. For some hundred
users the answer is that of Algorithm 1 over all items that they have not seen; the candidates are
the best M of these by a cheap score: the mean margin over a few anchor items, or the additive part
of the model.

The second measures catalogues that MovieLens does not have, and the memory of a process that serves
them. Users and items are drawn around those of a trained model with an additive part, such as
NeuPR: each is a real one's vector with a little noise. One thread.

The third compares indexes of faiss on random items around 1,000 centres, each index with the fewest
probes that find 98 % of the best 200: how long one takes to build, its bytes, and a query's time.
INDEX, such as "IVF, float32", selects some of them; HNSW of millions of items takes long.
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
from torch import Tensor

from benchmarks.harness import publish, run_command
from ncr_core.checkpoint import load_checkpoint, save_checkpoint
from ncr_core.inference.retrieval import CandidateGenerator
from ncr_core.models import PairwiseRanker, build_model
from ncr_core.ranking import (
    ExactRanker,
    ExactRetriever,
    FaissRetriever,
    Retriever,
    anchors_of,
    spread_over_popularity,
)
from ncr_core.reproduction.datasets import load_dataset

K = 10
USERS = 512
AT_ONCE = 32
SIZES = (20, 50, 100, 200, 500, 1000)
ANCHORS = (1, 2, 4, 8, 16, 32)


@torch.inference_mode()
def main(folder: Path, data: Path) -> None:
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(folder)
    model, train = checkpoint.model, load_dataset("ml-1m", data).split.train
    if list(checkpoint.item_ids) != list(train.item_ids):
        sys.exit("the checkpoint was trained on other data")
    ranker = ExactRanker(model)
    users = torch.arange(0, model.n_users, max(1, model.n_users // USERS))[:USERS]
    allowed = torch.ones((len(users), model.n_items), dtype=torch.bool)
    for row, user in enumerate(users.tolist()):
        allowed[row, torch.from_numpy(train.items_of(user).astype("int64"))] = False
    vectors = model.user_vectors(users)
    counts = torch.from_numpy(train.item_counts())
    pickers = {
        f"{n} anchors": CandidateGenerator(ranker, spread_over_popularity(counts, n).tolist(), 0)
        for n in ANCHORS
    }
    usual = pickers["4 anchors"]
    best = torch.cat(
        [
            ranker.rank(part, usual.pick(usual.scores(part), free, model.n_items), K)
            for part, free in _parts(vectors, allowed)
        ]
    )
    every_item = torch.arange(model.n_items)
    rows: list[list[object]] = []
    for name, picker in [*pickers.items(), ("additive part", None)]:
        if picker is None and model.tables().linear is None:
            continue
        hits = dict.fromkeys(SIZES, 0)
        seconds = 0.0
        for index, (part, free) in enumerate(_parts(vectors, allowed)):
            started = time.perf_counter()
            if picker is None:
                scores = ranker.linear_scores(part, every_item.expand(len(part), -1))
            else:
                scores = picker.scores(part)
            seconds += time.perf_counter() - started
            wanted = best[index * AT_ONCE : (index + 1) * AT_ONCE]
            for m in SIZES:
                picked = usual.pick(scores, free, m)
                hits[m] += int((wanted.unsqueeze(2) == picked.unsqueeze(1)).any(dim=2).sum())
        shares = [hits[m] / best.numel() for m in SIZES]
        rows.append([name, *shares, seconds / len(users) * 1e3])
    publish(
        f"candidates-{model.config.kind}-{model.config.factors}",
        ["cheap score", *(f"M = {m}" for m in SIZES), "ms a user"],
        rows,
        model=model.config.as_dict(),
        users=len(users),
        items=model.n_items,
        k=K,
        threads=1,
    )


def _parts(vectors: Tensor, allowed: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(torch.split(vectors, AT_ONCE), torch.split(allowed, AT_ONCE), strict=True))


NOISE = 0.3  # standard deviations of a coordinate over the real ones
M = 200
LARGE_USERS, BATCH = 48, 8
N_ITEMS = (100_000, 1_000_000)


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
    users = model.user_vectors(torch.arange(LARGE_USERS))
    everything = torch.ones((LARGE_USERS, n_items), dtype=torch.bool)
    plain = CandidateGenerator(ranker, anchors, 0)
    truth = [
        ranker.rank(one, plain.search(one, everything[:1], n_items), K)[0].tolist()
        for one in torch.split(users, 1)
    ]
    rows: list[list[Any]] = []
    some = model.user_vectors(torch.arange(LARGE_USERS, LARGE_USERS + 64))
    ways: dict[str, Any] = {
        "every item scored": lambda: None,
        "product, then scored": lambda: ExactRetriever(ranker.margins),
        "faiss, then scored": lambda: FaissRetriever(ranker.margins, some),
    }
    for name, make in ways.items():
        started = time.perf_counter()
        shortlist: Retriever | None = make()
        built = time.perf_counter() - started
        generator = CandidateGenerator(ranker, anchors, 0, shortlist)
        seconds, held = [], []
        for start in range(0, LARGE_USERS, BATCH):
            part = slice(start, start + BATCH)
            started = time.perf_counter()
            candidates = generator.search(users[part], everything[part], M)
            seconds.append((time.perf_counter() - started) / BATCH)
            held += [
                len(set(best) & set(picked)) / K
                for best, picked in zip(truth[part], candidates.tolist(), strict=True)
            ]
        index = shortlist if isinstance(shortlist, FaissRetriever) else None
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
        process = subprocess.run(
            [sys.executable, "-c", MEASURE, str(folder)], check=True, capture_output=True, text=True
        )
    values = [float(x) for x in process.stdout.split()]
    names = ("import_mib", "loaded_mib", "after_requests_mib", "load_s", "cold_ms", "warm_ms")
    return {"users": n_users, "items": n_items, "checkpoint_mib": on_disk / 2**20} | dict(
        zip(names, values, strict=True)
    )


MEASURE = """
import sys, time, numpy as np, torch
torch.set_num_threads(1)
from pathlib import Path
from ncr_core.checkpoint import load_checkpoint
from app.core.cache import ByteCache
from ncr_core.inference.engine import InferenceEngine
from ncr_core.inference.retrieval import ItemFilter, RankRequest, UserState
def rss():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024
print(rss())
started = time.perf_counter()
engine = InferenceEngine(load_checkpoint(Path(sys.argv[1])), 200, lists=ByteCache(2**26))
engine.warm_up()
took = time.perf_counter() - started
print(rss())
items = ItemFilter(np.ones(engine.n_items, dtype=bool))
def run():
    started = time.perf_counter()
    for user in range(1000, 1200):
        engine.rank([RankRequest(UserState(user), 10, items, key=user)])
    return (time.perf_counter() - started) / 200 * 1e3
cold, warm = run(), run()
print(rss(), took, cold, warm)
"""


def large(folder: Path) -> None:
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(folder)
    held = memory(checkpoint.model, 1_000_000, 100_000)
    print(held, flush=True)
    rows = []
    for n_items in N_ITEMS:
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


CENTRES, QUERIES, NEAREST, WANTED = 1_000, 64, 200, 0.98
INDEXES = {"IVF, float32": "IVF{},Flat", "IVF, 8 bits": "IVF{},SQ8", "HNSW, float32": "HNSW32"}


def index(items: int = 1_000_000, factors: int = 64, names: tuple[str, ...] = ()) -> None:
    import faiss

    faiss.omp_set_num_threads(1)
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((CENTRES, factors), np.float32)
    vectors = 0.5 * rng.standard_normal((items, factors), np.float32)
    vectors += centres[rng.integers(CENTRES, size=items)]
    queries = centres[rng.integers(CENTRES, size=QUERIES)]
    queries += rng.standard_normal((QUERIES, factors), np.float32)
    products, exact_seconds = [], []
    for query in queries:
        started = time.perf_counter()
        scores = vectors @ query
        best = np.argpartition(scores, -NEAREST)[-NEAREST:]
        exact_seconds.append(time.perf_counter() - started)
        products.append(set(best.tolist()))
    exact = 1e3 * float(np.median(exact_seconds))
    rows: list[list[Any]] = [["product", None, 0.0, vectors.nbytes / 2**20, 1.0, exact]]
    lists = int(4 * items**0.5)
    for name in names or INDEXES:
        form = INDEXES[name]
        started = time.perf_counter()
        made = faiss.index_factory(factors, form.format(lists), faiss.METRIC_INNER_PRODUCT)
        made.train(vectors[rng.permutation(items)[: 64 * lists]])
        made.add(vectors)
        built = time.perf_counter() - started
        size = faiss.serialize_index(made).nbytes / 2**20
        setting = "hnsw.efSearch" if name.startswith("HNSW") else "nprobe"
        probes, recall = NEAREST if "HNSW" in name else 1, 0.0
        while True:
            faiss.ParameterSpace().set_index_parameter(made, setting.split(".")[-1], probes)
            started = time.perf_counter()
            found = [made.search(query[None], NEAREST)[1][0] for query in queries]
            milliseconds = 1e3 * (time.perf_counter() - started) / QUERIES
            shares = [
                len(true & set(each.tolist())) / NEAREST
                for true, each in zip(products, found, strict=True)
            ]
            recall = float(np.mean(shares))
            if recall >= WANTED or probes >= lists:
                break
            probes *= 2
        rows.append([name, probes, built, size, recall, milliseconds])
        print(rows[-1], flush=True)
    publish(
        f"index-{items}",
        ["index", "probes", "built s", "MiB", "recall@200", "ms a query"],
        rows,
        items=items,
        factors=factors,
        threads=1,
    )


if __name__ == "__main__":
    run_command(main, large=large, index=index)
