"""Why an item is in a list: how far the answer agrees with leaving items out, and what it costs.

    python -m benchmarks.explain DATA_DIR ROOT

DATA_DIR is the data folder of a service that has trained on MovieLens 1M, as `make demo` leaves it
in var/demo/NAME; ROOT holds ml-1m. One thread. Users are drawn from those with 20 to 200 items.

Agreement: what `InfluenceExplainer` tells in one step beside the loss that it is of, minimised:
over all items that the user does not have, once with everything and once without each of twelve of
the user's.
``from the minimum`` starts where the first of these ended, ``as served`` from the vector that lists
come from, which was fitted to a few drawn items; ``another fold-in`` is what leaving the item out
of the evidence gives: it compares the rest with other items, which moves margins more than the
item that is left out. Correlations are over the twelve, the mean over ten shown items.

Cost: effects on ten shown items for users with 100 to 200 items; and whole requests over HTTP, one
after the other, with no list kept.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch

from app.core.settings import load_settings
from app.wiring import build_services
from benchmarks.harness import publish, run_command
from benchmarks.load import server
from ncr_core.checkpoint import Checkpoint, load_checkpoint
from ncr_core.data import Interactions
from ncr_core.explain.influence import Floats, InfluenceExplainer, IntArray
from ncr_core.fold_in import Evidence, FoldIn
from ncr_core.fold_in.evidence import PairSampler, WeightedPairs
from ncr_core.fold_in.users import UserMargins
from ncr_core.inference.retrieval import CandidateGenerator
from ncr_core.ranking import ExactRanker, anchors_of
from ncr_core.reproduction.datasets import load_dataset

SHOWN = 10
CANDIDATES = 200
USERS = 12
LEFT_OUT = 12
TIMED = 200
REQUESTS = 300
MAX_STEPS, PROMISE, SHORTEST = 200, 1e-5, 1e-3


class Users:
    """Users of a model, with their items, lists and vectors."""

    def __init__(self, checkpoint: Checkpoint, interactions: Interactions) -> None:
        self.model, self.interactions = checkpoint.model, interactions
        self.ranker = ExactRanker(self.model)
        self.fold_in = FoldIn(self.model, tables=self.ranker.margins.single)
        anchors = anchors_of(checkpoint.reference_items)
        self._generator = CandidateGenerator(self.ranker, anchors, 0)
        self.attribution = InfluenceExplainer(self.fold_in, self.ranker, self._generator.anchors)

    def drawn(self, least: int, most: int, n: int) -> IntArray:
        lengths = np.diff(self.interactions.indptr)
        fitting = np.flatnonzero((lengths >= least) & (lengths <= most))
        return np.random.default_rng(0).permutation(fitting)[:n]

    def shown(self, vector: Floats, items: IntArray) -> IntArray:
        allowed = torch.ones((1, self.model.n_items), dtype=torch.bool)
        allowed[0, torch.from_numpy(items)] = False
        user = torch.from_numpy(vector).float().unsqueeze(0)
        candidates = self._generator.search(user, allowed, CANDIDATES)
        rows: IntArray = self.ranker.rank(user, candidates, SHOWN)[0].numpy()
        return rows

    def margins(self, vectors: list[Floats], shown: IntArray) -> Floats:
        """(V, n) mean margins of the shown items over the others."""
        rows = torch.from_numpy(shown).expand(len(vectors), -1)
        users = torch.from_numpy(np.stack(vectors)).float()
        every = self.ranker.all_margins(users, rows).sum(dim=2) / (len(shown) - 1)
        found: Floats = every.double().numpy()
        return found


def effects_of(users: Users, user: int) -> dict[str, tuple[Floats, Floats]]:
    """Of one user: by name, effects (n, m) and what they are to agree with."""
    items = users.interactions.items_of(user)
    evidence = Evidence(items)
    counted, weights = PairSampler(users.model.n_items, users.fold_in.config).weighted_items(
        evidence
    )
    pairs = _all_pairs(users, items, counted, weights)
    chosen = np.sort(np.random.default_rng(user).permutation(len(counted))[:LEFT_OUT])
    fitted = users.fold_in([evidence])[0].double().numpy()
    minimum = _minimum(users, pairs, fitted)
    without = [_minimum(users, _but(pairs, counted[position]), minimum) for position in chosen]
    shown = users.shown(fitted, items)
    margins = users.margins([minimum, *without], shown)
    exact = (margins[:1] - margins[1:]).T
    refitted = users.fold_in([Evidence(items[items != counted[position]]) for position in chosen])
    refitted_margins = users.margins([fitted, *refitted.double().numpy()], shown)

    def effects_from(vector: Floats) -> Floats:
        user = torch.from_numpy(vector)
        of_items, effects = users.attribution.effects(user, evidence, shown, trained=False)
        return effects[:, np.searchsorted(of_items, counted[chosen])]

    return {
        "from the minimum": (effects_from(minimum), exact),
        "as served": (effects_from(fitted), exact),
        "another fold-in": ((refitted_margins[:1] - refitted_margins[1:]).T, exact),
    }


def _all_pairs(users: Users, items: IntArray, counted: IntArray, weights: Floats) -> WeightedPairs:
    """Each item that counts over all that the user does not have."""
    others = np.setdiff1d(np.arange(users.model.n_items), items)
    each = weights * users.fold_in.config.strength / len(others)
    return WeightedPairs(
        counted.repeat(len(others)), np.tile(others, len(counted)), each.repeat(len(others))
    )


def _minimum(users: Users, pairs: WeightedPairs, start: Floats) -> Floats:
    """What minimises the loss of these pairs, next to where it starts: by many small looks."""
    prior, margins = users.fold_in.prior, UserMargins(users.model, pairs)
    v: Floats = np.linalg.pinv(prior.basis) @ (start - prior.mean)

    def loss_at(v: Floats) -> tuple[float, Floats, Floats]:
        half, slopes = margins(prior.mean + prior.basis @ v)
        return float(pairs.weights @ np.logaddexp(0.0, -half) + v @ v / 2), half, slopes

    loss, half, slopes = loss_at(v)
    for _ in range(MAX_STEPS):
        slopes = slopes @ prior.basis
        wrong = 1.0 / (1.0 + np.exp(np.minimum(half, 700.0)))
        slope = v - slopes.T @ (pairs.weights * wrong)
        bend = (slopes * (pairs.weights * wrong * (1.0 - wrong))[:, None]).T @ slopes
        step = -np.linalg.solve(bend + np.eye(len(v)), slope)
        if -(slope @ step) / 2 < PROMISE:
            break
        size = 1.0
        while (tried := loss_at(v + size * step))[0] > loss and size > SHORTEST:
            size /= 2
        if size <= SHORTEST:
            break
        v, (loss, half, slopes) = v + size * step, tried
    vector: Floats = prior.mean + prior.basis @ v
    return vector


def _but(pairs: WeightedPairs, item: int) -> WeightedPairs:
    others = pairs.winners != item
    return WeightedPairs(pairs.winners[others], pairs.losers[others], pairs.weights[others])


def agreement(effects: Floats, exact: Floats) -> list[float]:
    """Means over the shown items: rank correlation, the same item first, how many of the first
    three; and what all effects are off by, as a share of their size."""
    by_rank = [np.argsort(np.argsort(x, axis=1), axis=1) for x in (effects, exact)]
    ranks = [np.corrcoef(a, b)[0, 1] for a, b in zip(*by_rank, strict=True)]
    first = (effects.argmax(axis=1) == exact.argmax(axis=1)).mean()
    best = [np.argsort(-x, axis=1)[:, :3] for x in (effects, exact)]
    of_three = [len(np.intersect1d(a, b)) / 3 for a, b in zip(*best, strict=True)]
    off = np.abs(effects - exact).sum() / np.abs(exact).sum()
    return [float(np.mean(ranks)), float(first), float(np.mean(of_three)), float(off)]


def agreements(users: Users) -> list[list[Any]]:
    """A row for each way of telling the effects."""
    values: dict[str, list[list[float]]] = {}
    for number, user in enumerate(users.drawn(20, 200, USERS), 1):
        for name, (effects, exact) in effects_of(users, int(user)).items():
            values.setdefault(name, []).append(agreement(effects, exact))
        print(f"{number} of {USERS} users", flush=True)
    return [[name, *np.mean(rows, axis=0).tolist()] for name, rows in values.items()]


def cost(users: Users) -> list[list[Any]]:
    """Milliseconds of effects alone, on one thread."""
    some = users.drawn(100, 200, TIMED)
    evidence = [Evidence(users.interactions.items_of(user)) for user in some]
    known = users.model.user_vectors(torch.from_numpy(some)).double().numpy()
    fitted = users.fold_in(evidence).double().numpy()
    rows: list[list[Any]] = []
    for name, vectors, trained in (("folded in", fitted, False), ("trained", known, True)):
        arguments = [
            (torch.from_numpy(vector), one, users.shown(vector, one.items))
            for vector, one in zip(vectors, evidence, strict=True)
        ]
        explain = partial(users.attribution.effects, trained=trained)
        explain(*arguments[0])
        rows.append([f"effects, {name}", *_timed([partial(explain, *one) for one in arguments])])
    return rows


def requests(data_dir: Path, names: list[str]) -> list[list[Any]]:
    """Milliseconds of requests, one after the other, with no list kept."""
    rows: list[list[Any]] = []
    with (
        server(data_dir, list_cache_bytes=0) as running,
        httpx2.Client(base_url=running.url, timeout=60) as client,
    ):
        for explain in ("none", "pairwise"):
            paths = [f"/recommend/{name}?n={SHOWN}&explain={explain}" for name in names]
            answers = [client.get(path).raise_for_status().json() for path in paths]
            if explain == "pairwise" and not all(x["items"][0]["because"] for x in answers):
                sys.exit("a list is not explained")
            runs = [partial(client.get, path) for path in paths]
            rows.append([f"request, explain={explain}", *_timed(runs)])
    return rows


def _timed(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Median, 95th percentile and maximum, in ms."""
    took = []
    for run in runs:
        started = time.perf_counter()
        run()
        took.append((time.perf_counter() - started) * 1e3)
    return [float(x) for x in np.quantile(took, [0.5, 0.95, 1.0])]


async def _checkpoint(data_dir: Path) -> Checkpoint:
    services = await build_services(load_settings(data_dir=data_dir))
    try:
        version = (await services.models.activation()).version
        if version is None:
            sys.exit(f"{data_dir} has no model yet")
        return load_checkpoint(await services.models.local_folder(version))
    finally:
        await services.close()


def main(data_dir: Path, root: Path) -> None:
    torch.set_num_threads(1)
    checkpoint = asyncio.run(_checkpoint(data_dir))
    data = load_dataset("ml-1m", root).split.all_seen
    users = Users(checkpoint, data.reindex(checkpoint.user_ids, checkpoint.item_ids))
    name = f"{users.model.config.kind}-{users.model.config.factors}"
    about = {"model": users.model.config.as_dict(), "data": "ml-1m", "threads": 1}
    some = [checkpoint.user_ids[user] for user in users.drawn(100, 200, REQUESTS)]
    publish(
        f"explain-cost-{name}",
        ["what", "p50 ms", "p95 ms", "most ms"],
        cost(users) + requests(data_dir, some),
        shown=SHOWN,
        own="100 to 200",
        **about,
    )
    publish(
        f"explain-agreement-{name}",
        ["effects", "rank correlation", "same first", "of the first three", "off"],
        agreements(users),
        shown=SHOWN,
        own="20 to 200",
        users=USERS,
        **about,
    )


if __name__ == "__main__":
    run_command(main)
