"""The gate: does it refuse models trained on corrupted data, and let equal ones pass?

    python -m benchmarks.gate DATA/ml-100k [--tries 20]

Models are trained on MovieLens 100K as the service does it: the latest items of the users who are
held out from are left out. By each seed two challengers are trained and judged beside the model of
the seed before, as one retraining follows the other:

* ``equal``: the same data with another seed. It should pass, and is the next seed's incumbent.
* ``corrupted``: half of the rows, drawn at random, have their items shuffled among them. It should
  be refused on the frozen hold-out, which is the incumbent's own.

The corrupted one is judged once more on a hold-out that is ``corrupted too``, as where an importer
has spoilt the table of events itself. That says how far the gate can see then, and no more: half of
what is held out is noise, and on noise a model that has learned noise is none the worse.

Every training is a real one, by ``train_model`` with the service's defaults; every verdict is by
the functions that a training job calls. All figures of each try are kept, and from the ends of the
intervals what other margins would have decided.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.core.settings import Settings
from app.jobs.training import HELD_OUT_AT_LEAST, HELD_OUT_AT_MOST, HELD_OUT_SHARE
from benchmarks.report import publish
from ncr_core.data import Interactions, build_interactions, leave_latest_out
from ncr_core.data.hold_out import hold_out_users
from ncr_core.data.readers import open_source
from ncr_core.data.splits import Split
from ncr_core.evaluated import Evaluated
from ncr_core.evaluation.frozen import Incumbent, frozen_hold_out
from ncr_core.evaluation.gate import judge, measure
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.training import TrainConfig, train_model

MARGINS = (0.02, 0.03, 0.05, 0.1)


@dataclass(frozen=True)
class Try:
    """A judgement, and what it should have been."""

    challenger: str
    hold_out: str
    seed: int
    expected: bool
    figures: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--model", default="neupr")
    parser.add_argument("--factors", type=int, default=8)
    parser.add_argument("--name", default="gate")
    args = parser.parse_args()
    model = ModelConfig(kind=args.model, factors=args.factors)
    margin = Settings.model_fields["gate_margin"].default
    every = _read(args.data)
    held_out, _ = hold_out_users(every, HELD_OUT_SHARE, HELD_OUT_AT_LEAST, HELD_OUT_AT_MOST)
    split = leave_latest_out(every, held_out)
    incumbent = _trained(model, split, 0)
    tries: list[Try] = []
    for seed in range(1, args.tries + 1):
        served = _served(incumbent, split)
        equal = incumbent = _trained(model, split, seed)
        tries.append(_judged("equal", "frozen", seed, True, equal, split, served, every, margin))
        bad = corrupted(every, seed)
        bad_split = leave_latest_out(bad, held_out)
        worse = _trained(model, bad_split, seed)
        for name, given in (("frozen", split), ("corrupted too", bad_split)):
            tries.append(
                _judged("corrupted", name, seed, False, worse, given, served, every, margin)
            )
        for one in tries[-3:]:
            print(one, flush=True)
    _publish(args, margin, every, tries)


def corrupted(every: Interactions, seed: int) -> Interactions:
    """The same rows, in half of which the items are shuffled."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(every.nnz)[: every.nnz // 2]
    items = every.items.copy()
    items[rows] = items[rng.permutation(rows)]
    return Interactions.from_arrays(
        every.users, items, user_ids=every.user_ids, item_ids=every.item_ids
    )


def _read(path: Path) -> Interactions:
    source = open_source(path)
    return build_interactions(
        (row.user, row.item, row.timestamp or 0.0)
        for chunk in source.interactions(on_bad=lambda *bad: None)
        for row in chunk
    )


def _trained(model: ModelConfig, split: Split, seed: int) -> PairwiseRanker:
    trained = train_model(model, TrainConfig(seed=seed, device="cpu"), split).model
    return trained.requires_grad_(False).eval()


def _served(model: PairwiseRanker, split: Split) -> Evaluated:
    held_out = np.stack([split.test, split.validation], axis=1)
    return Evaluated(model, np.arange(split.train.n_users), held_out)


def _judged(
    name: str,
    given: str,
    seed: int,
    expected: bool,
    challenger: PairwiseRanker,
    split: Split,
    served: Evaluated,
    every: Interactions,
    margin: float,
) -> Try:
    """``every`` is what there was when the incumbent was trained."""
    started = time.perf_counter()
    incumbent = Incumbent(served, every.user_ids, every.item_ids, every)
    hold_out = frozen_hold_out(split, incumbent)
    measured = measure(hold_out, challenger, incumbent)
    verdict = judge(measured.challenger.ndcg, measured.incumbent.ndcg, margin)
    full = (measured.full_challenger.mean_ndcg, measured.full_incumbent.mean_ndcg)
    figures = verdict.as_dict() | {
        "full_challenger": full[0],
        "full_incumbent": full[1],
        "followed": measured.followed,
        "left_out": sum(hold_out.left_out.values()),
        "seconds": round(time.perf_counter() - started, 1),
    }
    return Try(name, given, seed, expected, figures)


def _publish(
    args: argparse.Namespace, margin: float, every: Interactions, tries: list[Try]
) -> None:
    columns = [
        "challenger", "hold-out", "seed", "users", "left out", "NDCG@10", "incumbent", "difference",
        "low", "high", "p", "full NDCG@10", "full, incumbent", "vectors fitted", "finding",
        "passed", "as it should be", "gate s",
    ]  # fmt: skip
    rows: list[list[Any]] = []
    for one in tries:
        f = one.figures
        low, high = f["interval"]
        rows.append(
            [
                one.challenger, one.hold_out, one.seed, f["users"], f["left_out"], f["challenger"],
                f["incumbent"], f["difference"], low, high, f["p"], f["full_challenger"],
                f["full_incumbent"], f["followed"], f["finding"], f["passed"],
                f["passed"] == one.expected, f["seconds"],
            ]
        )  # fmt: skip
    kinds = dict.fromkeys((one.challenger, one.hold_out) for one in tries)
    summary = {}
    for kind in kinds:
        own = [one for one in tries if (one.challenger, one.hold_out) == kind]
        summary[f"{kind[0]}, hold-out {kind[1]}"] = {
            "tries": len(own),
            "passed": sum(one.figures["passed"] for one in own),
            "would_pass_at": {
                str(m): sum(
                    one.figures["interval"][0] > -m * one.figures["incumbent"] for one in own
                )
                for m in MARGINS
            },
            "mean_difference": float(np.mean([one.figures["difference"] for one in own])),
        }
        print(kind, summary[f"{kind[0]}, hold-out {kind[1]}"])
    publish(
        args.name,
        columns,
        rows,
        data=args.data.name,
        model=args.model,
        factors=args.factors,
        relative_margin=margin,
        interactions=every.nnz,
        summary=summary,
    )


if __name__ == "__main__":
    main()
