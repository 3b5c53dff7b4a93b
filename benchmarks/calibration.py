"""How far probabilities of preference can be taken at their word, before and after the temperature.

    python -m benchmarks.calibration ROOT [KIND ...]

ROOT holds ml-1m. The latest item of every user is kept from all that follows; on the rest models of
d = 8 are trained as the service trains them, which fits the temperature on its held-out users and
then learns their items too. ``manifest`` are the figures that the service publishes itself. All
others are of the model as it is served, on the items that were kept: ``as P1`` with rivals drawn
evenly from what the user has not seen; ``both popular`` and ``both best`` are those of such pairs
whose two items are among the most popular ones, or the user's own best (for every user whose item
is); ``rivals by popularity`` are no even draw: they answer another question, see
`ncr_core.evaluation.calibration`. ``T there`` is the temperature that would fit best.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.jobs.schemas import TrainParams
from app.training.pipeline import train_and_evaluate
from benchmarks.harness import publish, run_command
from ncr_core.checkpoint import Checkpoint, load_checkpoint
from ncr_core.data import Interactions
from ncr_core.data.interactions import IntArray
from ncr_core.data.splits import Split
from ncr_core.evaluation.calibration import (
    DecidedPairs,
    calibration_error,
    decided_pairs,
    fit_temperature,
    reliability,
)
from ncr_core.evaluation.protocols import NEGATIVES, CandidateSet, sampled_candidates
from ncr_core.inference.retrieval import CandidateGenerator
from ncr_core.ranking import PAD, ExactRanker, anchors_of
from ncr_core.reproduction.datasets import load_dataset

FACTORS = 8
POPULAR = (1000, 200)
BEST = (50, 10)
USERS_AT_ONCE = 256
REDRAWS = 32


def main(root: Path, kinds: tuple[str, ...] = ("nbpr", "neupr")) -> None:
    torch.set_num_threads(1)
    every = load_dataset("ml-1m", root).split.all_seen
    before = np.ones(every.nnz, dtype=np.bool_)
    before[every.indptr[1:] - 1] = False
    later = Split(
        every.select(before),
        np.full(every.n_users, -1, dtype=np.int64),
        every.items[every.indptr[1:] - 1],
    )
    rows: list[list[Any]] = []
    bins: dict[str, Any] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint, seconds = _trained(kind, later.train, Path(folder) / "checkpoint")
        published = checkpoint.manifest["calibration"]
        name, temperature = f"{kind}-{FACTORS}", checkpoint.temperature
        rows.append(
            [
                name,
                "manifest",
                None,
                published["pairs"],
                published["ece_before"],
                published["ece"],
                temperature,
            ]
        )
        bins[name] = {"manifest": published["bins"]}
        print(f"{name}: T = {temperature:.4f}, trained in {seconds:,.0f} s", flush=True)
        for what, candidates in _questions(checkpoint, later).items():
            pairs = decided_pairs(checkpoint.model, candidates)
            rows.append([name, what, len(candidates.users), *_errors(pairs, temperature)])
            bins[name][what] = [
                {"pairs": one.pairs, "probability": one.probability, "share": one.share}
                for one in reliability(pairs.margins, temperature)
            ]
    publish(
        "calibration",
        ["model", "pairs", "users", "number", "ECE at T = 1", "ECE", "T there"],
        rows,
        data="ml-1m",
        users=every.n_users,
        items=every.n_items,
        bins=bins,
        threads=1,
    )


def _trained(kind: str, interactions: Interactions, folder: Path) -> tuple[Checkpoint, float]:
    started = time.perf_counter()
    params = TrainParams.model_validate({"model": kind, "factors": FACTORS})
    train_and_evaluate(interactions, params, "cpu", folder, lambda progress: None)
    return load_checkpoint(folder), time.perf_counter() - started


def _errors(pairs: DecidedPairs, temperature: float) -> list[Any]:
    margins = pairs.margins
    errors = [calibration_error(reliability(margins, t)) for t in (1.0, temperature)]
    return [len(margins), *errors, fit_temperature(margins)]


def _questions(checkpoint: Checkpoint, later: Split) -> dict[str, CandidateSet]:
    sets = {"as P1": sampled_candidates(later, later.test, seed=1)}
    ranked = np.argsort(-later.train.item_counts(), kind="stable")
    for n in POPULAR:
        of_these = np.zeros(later.train.n_items, dtype=np.bool_)
        of_these[ranked[:n]] = True
        users = np.flatnonzero(of_these[later.test])
        sets[f"both popular: {n}"] = _drawn(later, users, ranked[:n])
    for n in BEST:
        sets[f"both best: {n}"] = _best(checkpoint, later, n)
    everyone = np.arange(later.train.n_users)
    sets["rivals by popularity"] = _drawn(later, everyone, later.train.items)
    return sets


def _drawn(later: Split, users: IntArray, among: IntArray) -> CandidateSet:
    """Rivals drawn evenly from ``among``, where an item may stand often; none that was seen."""
    rng, seen = np.random.default_rng(1), later.all_seen
    rivals = rng.choice(among, (len(users), NEGATIVES))
    of_row = np.broadcast_to(users[:, None], rivals.shape)
    for _ in range(REDRAWS):
        again = seen.contains(of_row, rivals)
        rivals[again] = rng.choice(among, int(again.sum()))
    rivals[seen.contains(of_row, rivals)] = PAD
    return CandidateSet(users, later.test[users], rivals)


@torch.inference_mode()
def _best(checkpoint: Checkpoint, later: Split, n: int) -> CandidateSet:
    """The user's best n by the cheap score that candidates are chosen by, where the item is there.

    All other items among them are rivals.
    """
    model = checkpoint.model
    generator = CandidateGenerator(ExactRanker(model), anchors_of(checkpoint.reference_items), 0)
    parts = []
    for start in range(0, model.n_users, USERS_AT_ONCE):
        users = np.arange(start, min(start + USERS_AT_ONCE, model.n_users))
        allowed = np.ones((len(users), model.n_items), dtype=np.bool_)
        for row, user in enumerate(users):
            allowed[row, later.train.items_of(user)] = False
        vectors = model.user_vectors(torch.from_numpy(users))
        best = generator.search(vectors, torch.from_numpy(allowed), n).numpy()
        there = (best == later.test[users][:, None]).any(axis=1)
        parts.append(CandidateSet(users[there], later.test[users][there], best[there]))
    return CandidateSet(
        np.concatenate([part.users for part in parts]),
        np.concatenate([part.held_out for part in parts]),
        np.concatenate([part.candidates for part in parts]),
    )


if __name__ == "__main__":
    run_command(main)
