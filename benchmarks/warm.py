"""Warm start beside training from scratch: the time it takes, and what it gives.

    python -m benchmarks.warm DATA/ml-1m [--newest 0.1]

On MovieLens 1M the newest tenth of the interactions comes in after a first training. Then a model
is trained on everything, from scratch and from the first one's parameters, with one split for both:
the users of the service's hold-out, their latest items. Beside them stands the first model itself,
with the users' vectors fitted to what came in, as it would be served. P1 is the mean over 5 draws
of negatives; ``full`` is over the whole catalogue, for 1,000 of the users.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from app.jobs.training import HELD_OUT_AT_LEAST, HELD_OUT_AT_MOST, HELD_OUT_SHARE
from benchmarks.report import publish
from ncr_core.data import Interactions, leave_latest_out
from ncr_core.data.hold_out import hold_out_users
from ncr_core.data.readers import open_source
from ncr_core.evaluated import Evaluated
from ncr_core.evaluation.frozen import Incumbent, frozen_hold_out
from ncr_core.evaluation.gate import judge, measure
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.training import TrainConfig, train_model
from ncr_core.training.warm import Base, train_warm

MARGIN = 0.05


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--newest", type=float, default=0.1)
    parser.add_argument("--models", nargs="+", default=["nbpr", "neupr"])
    parser.add_argument("--factors", type=int, default=8)
    parser.add_argument("--name", default="warm")
    args = parser.parse_args()
    before, every = _read(args.data, args.newest)
    rows: list[list[Any]] = []
    for kind in args.models:
        rows += _compared(ModelConfig(kind=kind, factors=args.factors), before, every)
    columns = [
        "model", "start", "training s", "of scratch", "epochs", "P1 NDCG@10", "P1 HR@10",
        "full NDCG@10", "difference", "low", "high", "p", "users", "first model",
    ]  # fmt: skip
    known = len(set(before.user_ids))
    publish(
        args.name,
        columns,
        rows,
        data=args.data.name,
        factors=args.factors,
        newest=args.newest,
        interactions={"before": before.nnz, "all": every.nnz},
        users={"before": known, "all": every.n_users},
        items={"before": before.n_items, "all": every.n_items},
    )


def _compared(config: ModelConfig, before: Interactions, every: Interactions) -> list[list[Any]]:
    training = TrainConfig(device="cpu")
    held_out = hold_out_users(before, HELD_OUT_SHARE, HELD_OUT_AT_LEAST, HELD_OUT_AT_MOST)[0]
    old_split = leave_latest_out(before, held_out)
    first = train_model(config, training, old_split).model.requires_grad_(False).eval()
    now_held_out = hold_out_users(every, HELD_OUT_SHARE, HELD_OUT_AT_LEAST, HELD_OUT_AT_MOST)[0]
    copy = Evaluated(
        first,
        np.arange(before.n_users),
        np.stack([old_split.test, old_split.validation], axis=1),
    )
    earlier = before.reindex(every.user_ids, every.item_ids)
    incumbent = Incumbent(copy, before.user_ids, before.item_ids, earlier)
    split = leave_latest_out(every, now_held_out)
    fair = frozen_hold_out(split, incumbent)

    found: list[list[Any]] = []
    scratch_s = 0.0
    for start in ("scratch", "warm"):
        began = time.perf_counter()
        if start == "scratch":
            trained = train_model(config, training, split)
        else:
            base = Base(first, before.user_ids, before.item_ids)
            trained = train_warm(base, training, split)
        seconds = time.perf_counter() - began
        scratch_s = scratch_s or seconds
        model: PairwiseRanker = trained.model.requires_grad_(False).eval()
        measured = measure(fair, model, incumbent)
        verdict = judge(measured.challenger.ndcg, measured.incumbent.ndcg, MARGIN)
        low, high = verdict.interval or (None, None)
        found.append(
            [
                config.kind, start, round(seconds, 1), round(seconds / scratch_s, 3),
                sum(len(history.loss) for history in trained.history),
                measured.challenger.mean_ndcg, measured.challenger.mean_hr,
                measured.full_challenger.mean_ndcg, verdict.difference, low, high, verdict.p,
                verdict.users, measured.incumbent.mean_ndcg,
            ]
        )  # fmt: skip
        print(found[-1], flush=True)
    return found


def _read(path: Path, newest: float) -> tuple[Interactions, Interactions]:
    """What there was before the newest share, and all of it."""
    rows = [
        (row.timestamp or 0.0, row.user, row.item)
        for chunk in open_source(path).interactions(on_bad=lambda *bad: None)
        for row in chunk
    ]
    rows.sort(key=lambda row: row[0])
    cut = round(len(rows) * (1 - newest))
    return _interactions(rows[:cut]), _interactions(rows)


def _interactions(rows: list[tuple[float, str, str]]) -> Interactions:
    users = {user: at for at, user in enumerate(dict.fromkeys(user for _, user, _ in rows))}
    items = {item: at for at, item in enumerate(dict.fromkeys(item for _, _, item in rows))}
    return Interactions.from_arrays(
        np.array([users[user] for _, user, _ in rows]),
        np.array([items[item] for _, _, item in rows]),
        user_ids=list(users),
        item_ids=list(items),
    )


if __name__ == "__main__":
    main()
