"""What dislikes and stated preferences are worth, in worlds whose users' tastes are known.

    python -m benchmarks.simulation [--models nbpr,neupr] [--seeds 10]

A world (`benchmarks/tastes.py`) has 1,000 users and 400 items. Users take, dislike or pass over
what they are shown, and say of some pairs which they would rather have, all at random by their
known tastes. The same model is trained on the positives alone and on what else is known, and ranks,
for every user, the items of which that user has neither done nor said anything; NDCG@10 is against
the tastes. Differences are between trainings of one world and seed; the intervals are Student's
over the worlds.

The second table asks 200 newcomers, of whom nothing is known, about pairs of popular items: those
that the service would ask about, one by one or all at once, or random ones; their vectors are
fitted to the answers. One thread.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from benchmarks.report import publish
from benchmarks.tastes import FACTORS, SAID, SCALE, SHOWN, Floats, Ints, Tastes, untouched
from ncr_core.data import Interactions, Split
from ncr_core.data.stated import Stated
from ncr_core.evaluation.distributions import student_t_quantile
from ncr_core.evaluation.protocols import ModelRanks, Ranks
from ncr_core.fold_in import Evidence, FoldIn
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.models.baselines.popularity import Popularity
from ncr_core.models.config import Kind
from ncr_core.ranking import ExactRanker
from ncr_core.ranking.questions import QuestionPool
from ncr_core.training import TrainConfig, train_model

USERS, ITEMS, NEWCOMERS = 1_000, 400, 200
K = 10
POOL = 48
ASKED = (0, 1, 2, 3, 5, 7, 10)
AT_ONCE = 256
BASE, ALL = "positives alone", "positives, dislikes and statements"


def arms(every: Interactions) -> Iterator[tuple[str, Interactions]]:
    """The same positives, with what else is known of the users."""
    stated = every.stated or Stated()
    none = Stated()
    dislikes = replace(none, disliked=stated.disliked, disliked_weights=stated.disliked_weights)
    statements = replace(none, pairs=stated.pairs, pair_weights=stated.pair_weights)
    yield BASE, replace(every, stated=None)
    yield "and what was passed over", replace(every, stated=replace(none, seen=stated.seen))
    yield "and dislikes", replace(every, stated=dislikes)
    yield "and stated preferences", replace(every, stated=statements)
    yield ALL, replace(every, stated=replace(stated, seen=none.seen))
    yield "all of it", every


def trained(kind: Kind, data: Interactions, seed: int) -> PairwiseRanker:
    """At the defaults, for a set number of epochs: nothing is held out."""
    config = TrainConfig(epochs=10, fine_tune_epochs=4, seed=seed, device="cpu")
    none = np.full(data.n_users, -1)
    return train_model(ModelConfig(kind=kind, factors=8), config, Split(data, none, none)).model


def ndcg_of(world: Tastes, ranks: Ranks, users: Ints, candidates: Ints) -> float:
    """The mean over the users (n,), of lists of their candidates (n, M)."""
    parts = []
    for start in range(0, len(users), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        ranked = ranks.rank(users[part], candidates[part], K)
        parts.append(world.ndcg(users[part], ranked, candidates[part]))
    return float(np.concatenate(parts).mean())


class Fitted:
    """Vectors of users, as a protocol sees a model."""

    def __init__(self, model: PairwiseRanker, vectors: torch.Tensor) -> None:
        self._ranker = ExactRanker(model)
        self._vectors = vectors

    def rank(self, users: Ints, candidates: Ints, k: int) -> Ints:
        rows = torch.from_numpy(users - users.min())
        ranked: Ints = self._ranker.rank(
            self._vectors[rows], torch.from_numpy(candidates), k
        ).numpy()
        return ranked


def compare_trainings(kind: Kind, seed: int) -> dict[str, float]:
    """NDCG@10 of each arm in one world."""
    world = Tastes.draw(USERS, ITEMS, seed)
    every = world.acted(seed)
    users, candidates = np.arange(USERS), untouched(every, every.stated or Stated(), seed)
    found = {"the popularity list": ndcg_of(world, Popularity(every), users, candidates)}
    for name, data in arms(every):
        model = trained(kind, data, seed)
        found[name] = ndcg_of(world, ModelRanks(model), users, candidates)
    return found


Ask = Callable[[int, int, list[Ints]], Ints]
"""A newcomer, how many questions more, and the answers so far → (n, 2) pairs to ask about."""


def compare_questions(kind: Kind, seed: int) -> dict[str, list[float]]:
    """NDCG@10 of newcomers after so many answers, by how they are asked.

    The candidates are the same for all: the items that nobody is asked about.
    """
    world = Tastes.draw(USERS + NEWCOMERS, ITEMS, seed)
    known = Tastes(world.utility[:USERS], world.popularity)
    model = trained(kind, known.acted(seed), seed)
    fold_in = FoldIn(model)
    items = np.argsort(-world.popularity)[:POOL].copy()
    sample = model.user_vectors(torch.arange(0, USERS, USERS // 256)[:256])
    pool = QuestionPool(ExactRanker(model), sample.detach(), items)
    every = np.ones(POOL, dtype=np.bool_)

    def best(user: int, n: int, before: list[Ints]) -> Ints:
        told = np.concatenate(before) if before else np.zeros((0, 2), dtype=np.int64)
        plausible = None
        if len(told):
            plausible = pool.plausible(told)
        asked = [(int(a), int(b)) for a, b in told]
        chosen = pool.choose(n, every, asked, plausible, seed=user)
        return np.array([(q.a, q.b) for q in chosen], dtype=np.int64)

    def random(user: int, n: int, before: list[Ints]) -> Ints:
        rng = np.random.default_rng([seed, user, len(before)])
        return np.stack([rng.choice(items, 2, replace=False) for _ in range(n)])

    users = np.arange(USERS, USERS + NEWCOMERS)
    rest = np.random.default_rng(seed).permutation(np.setdiff1d(np.arange(ITEMS), items))
    candidates = np.tile(rest, (NEWCOMERS, 1))
    ways: dict[str, tuple[Ask, bool]] = {
        "random pairs": (random, True),
        "the service's, at once": (best, True),
        "the service's, one by one": (best, False),
    }
    found: dict[str, list[float]] = {}
    for name, (ask, at_once) in ways.items():
        told = []
        for user in users:
            # The same chances of an answer for every way of asking.
            rng = np.random.default_rng([seed, int(user), 99])
            answers: list[Ints] = []
            for _ in range(1 if at_once else ASKED[-1]):
                pairs = ask(int(user), ASKED[-1] if at_once else 1, answers)
                answers.append(world.answers(int(user), pairs, rng))
            told.append(np.concatenate(answers))
        found[name] = [
            ndcg_of(
                world,
                Fitted(model, fold_in([Evidence(pairs=own[:n]) for own in told])),
                users,
                candidates,
            )
            for n in ASKED
        ]
    return found


def interval(differences: Floats) -> tuple[float, float]:
    """The mean, and half of Student's interval of 95 %."""
    n = len(differences)
    half = student_t_quantile(0.975, n - 1) * float(differences.std(ddof=1)) / math.sqrt(n)
    return float(differences.mean()), half


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="nbpr,neupr")
    parser.add_argument("--seeds", type=int, default=10)
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error("an interval takes at least two seeds")
    torch.set_num_threads(1)
    kinds: list[Kind] = given.models.split(",")
    rows: list[list[object]] = []
    curves: list[list[object]] = []
    for kind in kinds:
        worlds = [compare_trainings(kind, seed) for seed in range(given.seeds)]
        for name in worlds[0]:
            values = np.array([world[name] for world in worlds])
            more, half = interval(values - np.array([world[BASE] for world in worlds]))
            wins = int(sum(world[name] > world[BASE] for world in worlds))
            rows.append([kind, name, float(values.mean()), more, half, wins])
        asked = [compare_questions(kind, seed) for seed in range(given.seeds)]
        for name in asked[0]:
            of_seeds = np.array([each[name] for each in asked])
            curves.append([kind, name, *of_seeds.mean(axis=0).tolist()])
            more, half = interval(
                of_seeds[:, -1] - np.array([e["random pairs"][-1] for e in asked])
            )
            curves[-1] += [more, half]
    about = {
        "seeds": given.seeds,
        "users": USERS,
        "items": ITEMS,
        "factors": FACTORS,
        "scale": SCALE,
        "shown": SHOWN,
        "said": SAID,
        "threads": 1,
    }
    publish(
        "simulation",
        ["model", "learned from", "NDCG@10", "more", "±95 %", "better in"],
        rows,
        **about,
    )
    publish(
        "questions",
        ["model", "asked", *(f"after {n}" for n in ASKED), "more than random", "±95 %"],
        curves,
        newcomers=NEWCOMERS,
        pool=POOL,
        **about,
    )


if __name__ == "__main__":
    main()
