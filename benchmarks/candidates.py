"""How many of the best ten of the whole catalogue are among the candidates, and at what cost.

    python -m benchmarks.candidates CHECKPOINT DATA

CHECKPOINT was trained by `ncr reproduce` on MovieLens 1M (P1) of the folder DATA. For some hundred
users the answer is that of Algorithm 1 over all items that they have not seen; the candidates are
the best M of these by a cheap score: the mean margin over a few anchor items, or the additive part
of the model. One thread.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import publish
from ncr_core.checkpoint import load_checkpoint
from ncr_core.experiments.datasets import load_data_set
from ncr_core.ranking import CandidateGenerator, ExactRanker, spread_over_popularity

K = 10
USERS = 512
AT_ONCE = 32
SIZES = (20, 50, 100, 200, 500, 1000)
ANCHORS = (1, 2, 4, 8, 16, 32)


@torch.inference_mode()
def main(folder: Path, data: Path) -> None:
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(folder)
    model, train = checkpoint.model, load_data_set("ml-1m", data).split.train
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
        found = dict.fromkeys(SIZES, 0)
        seconds = 0.0
        for at, (part, free) in enumerate(_parts(vectors, allowed)):
            started = time.perf_counter()
            if picker is None:
                scores = ranker.linear_scores(part, every_item.expand(len(part), -1))
            else:
                scores = picker.scores(part)
            seconds += time.perf_counter() - started
            wanted = best[at * AT_ONCE : (at + 1) * AT_ONCE]
            for m in SIZES:
                picked = usual.pick(scores, free, m)
                found[m] += int((wanted.unsqueeze(2) == picked.unsqueeze(1)).any(dim=2).sum())
        shares = [found[m] / best.numel() for m in SIZES]
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
