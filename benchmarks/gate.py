"""Retrainings on MovieLens, judged beside the model before: the gate, and warm starts.

    python -m benchmarks.gate DATA/ml-100k [TRIES [RECIPE [NAME]]]
    python -m benchmarks.gate warm_start DATA/ml-1m [NEWEST [FACTORS [NAME [MODEL ...]]]]

The gate: does it refuse models trained on corrupted data, and let equal ones pass? Models are
trained as the service does it: the latest items of the held-out users are left out. By each seed
two challengers are trained and judged beside the model of the seed before, as one retraining
follows the other:

* ``equal``: the same data with another seed. It should pass, and is the next seed's incumbent.
* ``corrupted``: half of the rows, drawn at random, have their items shuffled among them. It should
  be refused on the frozen hold-out, which is the incumbent's own.

The corrupted one is judged once more on a hold-out that is ``corrupted too``, as where an importer
has spoilt the table of events itself. That says how far the gate can see then, and no more: half of
what is held out is noise, and on noise a model that has learned noise is none the worse. Every
training is a real one by the recipe, and without one by the choice that the service makes by
default; every decision is by the functions that a
training job calls. All figures of each try go into the result, and from the ends of the intervals
what other margins would have decided.

Warm start: the newest tenth of the interactions comes in after a first training. Then a model is
trained on everything, from scratch and from the first one's parameters, with one split for both:
the users of the service's hold-out, their latest items. Beside them stands the first model itself,
with the users' vectors fitted to what came in, as it would be served. P1 is the mean over 5 draws
of negatives; ``full`` is over the whole catalogue, for 1,000 of the users.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.core.settings import Settings
from benchmarks.harness import publish, run_command
from ncr_core.checkpoint import EvaluationSnapshot
from ncr_core.comparison import Incumbent, evaluate_both, fair_hold_out
from ncr_core.data import Interactions, build_interactions, leave_latest_out
from ncr_core.data.readers import open_source
from ncr_core.data.splits import Split, hold_out_users
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.recipes import AUTO_RECIPE, recipe
from ncr_core.training import TrainConfig, train_model
from ncr_core.training.selection import select_recipe
from ncr_core.training.warm_start import StartingPoint, train_warm

MARGINS = (0.02, 0.03, 0.05, 0.1)
WARM_MARGIN = 0.05
COLUMNS = [
    "challenger", "hold-out", "seed", "users", "left out", "NDCG@10", "incumbent", "difference",
    "low", "high", "p", "full NDCG@10", "full, incumbent", "vectors fitted", "finding",
    "passed", "as it should be", "gate s",
]  # fmt: skip
WARM_COLUMNS = [
    "model", "start", "training s", "of scratch", "epochs", "P1 NDCG@10", "P1 HR@10",
    "full NDCG@10", "difference", "low", "high", "p", "users", "first model",
]  # fmt: skip


@dataclass(frozen=True)
class Try:
    """A challenger, and what the gate decided about it."""

    challenger: str
    hold_out: str
    seed: int
    expected: bool
    figures: dict[str, Any]

    def row(self) -> list[Any]:
        f = self.figures
        low, high = f["interval"]
        return [
            self.challenger, self.hold_out, self.seed, f["users"], f["left_out"], f["challenger"],
            f["incumbent"], f["difference"], low, high, f["p"], f["full_challenger"],
            f["full_incumbent"], f["followed"], f["finding"], f["passed"],
            f["passed"] == self.expected, f["seconds"],
        ]  # fmt: skip


def main(
    data: Path, tries: int = 20, recipe_name: str = AUTO_RECIPE, name: str = "gate-auto"
) -> None:
    margin = Settings.model_fields["gate_margin"].default
    interactions = build_interactions((user, item, time) for time, user, item in _rows(data))
    held_out = _held_out(interactions)
    split = leave_latest_out(interactions, held_out)
    incumbent = _train(recipe_name, split, 0)
    judged: list[Try] = []
    for seed in range(1, tries + 1):
        before = _incumbent(incumbent, split, interactions)
        incumbent = _train(recipe_name, split, seed)
        bad_split = leave_latest_out(corrupted(interactions, seed), held_out)
        bad = _train(recipe_name, bad_split, seed)
        for challenger, hold_out, expected, model_, split_ in (
            ("equal", "frozen", True, incumbent, split),
            ("corrupted", "frozen", False, bad, split),
            ("corrupted", "corrupted too", False, bad, bad_split),
        ):
            figures = _judge(model_, split_, before, margin)
            judged.append(Try(challenger, hold_out, seed, expected, figures))
            print(judged[-1], flush=True)
    publish(
        name,
        COLUMNS,
        [one.row() for one in judged],
        data=data.name,
        recipe=recipe_name,
        relative_margin=margin,
        interactions=interactions.nnz,
        summary=_summary(judged),
    )


def corrupted(interactions: Interactions, seed: int) -> Interactions:
    """The same rows, in half of which the items are shuffled."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(interactions.nnz)[: interactions.nnz // 2]
    items = interactions.items.copy()
    items[rows] = items[rng.permutation(rows)]
    return Interactions.from_arrays(
        interactions.users, items, user_ids=interactions.user_ids, item_ids=interactions.item_ids
    )


def _rows(path: Path) -> list[tuple[float, str, str]]:
    return [
        (row.timestamp or 0.0, row.user, row.item)
        for chunk in open_source(path).interactions(on_bad=lambda *bad: None)
        for row in chunk
    ]


def _held_out(interactions: Interactions) -> Any:
    return hold_out_users(interactions)[0]


def _train(name: str, split: Split, seed: int) -> PairwiseRanker:
    if name == AUTO_RECIPE:
        model = select_recipe(split, device="cpu", seed=seed).trained.model
    else:
        named = recipe(name).with_(device="cpu", seed=seed)
        model = train_model(named.model, named.training, split).model
    return model.requires_grad_(False).eval()


def _incumbent(
    model: PairwiseRanker,
    split: Split,
    interactions: Interactions,
    later: Interactions | None = None,
) -> Incumbent:
    """A model with what it was trained on, by the rows of ``later`` interactions if there are."""
    held_out = np.stack([split.test, split.validation], axis=1)
    snapshot = EvaluationSnapshot(model, np.arange(split.train.n_users), held_out)
    known = interactions
    if later is not None:
        known = interactions.reindex(later.user_ids, later.item_ids)
    return Incumbent(snapshot, interactions.user_ids, interactions.item_ids, known)


def _judge(
    challenger: PairwiseRanker, split: Split, incumbent: Incumbent, margin: float
) -> dict[str, Any]:
    started = time.perf_counter()
    hold_out = fair_hold_out(split, incumbent)
    measured = evaluate_both(hold_out, challenger, incumbent)
    decision = measured.decide(margin)
    return decision.as_dict() | {
        "full_challenger": measured.full_challenger.mean_ndcg,
        "full_incumbent": measured.full_incumbent.mean_ndcg,
        "followed": measured.folded_in,
        "left_out": sum(hold_out.excluded.values()),
        "seconds": round(time.perf_counter() - started, 1),
    }


def _summary(judged: list[Try]) -> dict[str, Any]:
    summary = {}
    for kind in dict.fromkeys((one.challenger, one.hold_out) for one in judged):
        figures = [one.figures for one in judged if (one.challenger, one.hold_out) == kind]
        summary[f"{kind[0]}, hold-out {kind[1]}"] = {
            "tries": len(figures),
            "passed": sum(f["passed"] for f in figures),
            "would_pass_at": {
                str(margin): sum(f["interval"][0] > -margin * f["incumbent"] for f in figures)
                for margin in MARGINS
            },
            "mean_difference": float(np.mean([f["difference"] for f in figures])),
        }
    print(summary)
    return summary


def warm_start(
    data: Path,
    newest: float = 0.1,
    factors: int = 8,
    name: str = "warm",
    models: tuple[str, ...] = ("nbpr", "neupr"),
) -> None:
    rows = sorted(_rows(data), key=lambda row: row[0])
    before, every = (_indexed(part) for part in (rows[: round(len(rows) * (1 - newest))], rows))
    table: list[list[Any]] = []
    for kind in models:
        config = ModelConfig.from_dict({"kind": kind, "factors": factors})
        table += _compare_starts(config, before, every)
    publish(
        name,
        WARM_COLUMNS,
        table,
        data=data.name,
        factors=factors,
        newest=newest,
        interactions={"before": before.nnz, "all": every.nnz},
        users={"before": before.n_users, "all": every.n_users},
        items={"before": before.n_items, "all": every.n_items},
    )


def _indexed(rows: list[tuple[float, str, str]]) -> Interactions:
    users = list(dict.fromkeys(user for _, user, _ in rows))
    items = list(dict.fromkeys(item for _, _, item in rows))
    user_rows, item_rows = ({name: row for row, name in enumerate(ids)} for ids in (users, items))
    return Interactions.from_arrays(
        np.array([user_rows[user] for _, user, _ in rows]),
        np.array([item_rows[item] for _, _, item in rows]),
        user_ids=users,
        item_ids=items,
    )


def _compare_starts(
    config: ModelConfig, before: Interactions, every: Interactions
) -> list[list[Any]]:
    """A row for each start."""
    training = TrainConfig(device="cpu")
    first_split = leave_latest_out(before, _held_out(before))
    first = train_model(config, training, first_split).model.requires_grad_(False).eval()
    incumbent = _incumbent(first, first_split, before, every)
    split = leave_latest_out(every, _held_out(every))
    hold_out = fair_hold_out(split, incumbent)
    rows: list[list[Any]] = []
    for start in ("scratch", "warm"):
        began = time.perf_counter()
        if start == "scratch":
            trained = train_model(config, training, split)
        else:
            base = StartingPoint(first, before.user_ids, before.item_ids)
            trained = train_warm(base, training, split)
        seconds = time.perf_counter() - began
        scratch_seconds = rows[0][2] if rows else seconds
        measured = evaluate_both(hold_out, trained.model.requires_grad_(False).eval(), incumbent)
        decision = measured.decide(WARM_MARGIN)
        low, high = decision.interval or (None, None)
        rows.append(
            [
                config.kind, start, round(seconds, 1), round(seconds / scratch_seconds, 3),
                sum(len(history.loss) for history in trained.history),
                measured.challenger.mean_ndcg, measured.challenger.mean_hr,
                measured.full_challenger.mean_ndcg, decision.difference, low, high, decision.p,
                decision.users, measured.incumbent.mean_ndcg,
            ]
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    run_command(main, warm_start=warm_start)
