"""What dislikes and stated preferences are worth, in worlds whose users' tastes are known.

    python -m benchmarks.simulation [SEEDS [KIND ...]]

A world (`Tastes`) has 1,000 users and 400 items. Users take, dislike or pass over
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

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.harness import publish, run_command
from ncr_core.data import Interactions, Split
from ncr_core.data.interactions import UserFeedback
from ncr_core.evaluation.protocols import ModelRanks, Ranks
from ncr_core.evaluation.significance import student_t_quantile
from ncr_core.explain.elicitation import QuestionPool
from ncr_core.fold_in import Evidence, FoldIn
from ncr_core.model_config import Kind
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.ranking import ExactRanker
from ncr_core.reproduction.baselines.scoring import Popularity
from ncr_core.training import TrainConfig, train_model

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FACTORS = 6
SCALE = 1.6  # of utilities: how much tastes differ beside the chance of each choice
SHOWN = 40
SAID = 10


@dataclass(frozen=True)
class Tastes:
    """A world of users and items.

    A user takes an item that is shown with probability σ(utility); what is not taken may be
    disliked, the more likely the less it is liked, or is only seen. Of two items a user says to
    prefer the first with probability σ(difference of the utilities) (Bradley & Terry 1952).
    """

    utility: Floats
    """(n_users, n_items)"""
    popularity: Floats
    """(n_items,) what items are shown by."""

    @classmethod
    def draw(cls, n_users: int, n_items: int, seed: int) -> Tastes:
        """Utilities from latent factors, and what all users have in common."""
        rng = np.random.default_rng(seed)
        users = rng.standard_normal((n_users, FACTORS))
        items = rng.standard_normal((n_items, FACTORS))
        quality = 0.5 * rng.standard_normal(n_items)
        utility = SCALE * (users @ items.T) / np.sqrt(FACTORS) + quality - 1.0
        # Items are shown for many reasons, and quality is one.
        popularity = np.exp(quality + 0.8 * rng.standard_normal(n_items))
        return cls(utility, popularity)

    def acted(self, seed: int, shown: int = SHOWN, said: int = SAID) -> Interactions:
        """What users took of what they were shown, in random order, and all else that is known."""
        rng = np.random.default_rng([seed, 1])
        n_users, n_items = self.utility.shape
        positives: list[tuple[int, int]] = []
        seen: list[tuple[int, int]] = []
        disliked: list[tuple[int, int]] = []
        preferences: list[tuple[int, int, int]] = []
        share = self.popularity / self.popularity.sum()
        for user, utility in enumerate(self.utility):
            items = rng.choice(n_items, size=shown, replace=False, p=share)
            takes = rng.random(shown) < sigmoid(utility[items])
            dislikes = ~takes & (rng.random(shown) < 0.6 * sigmoid(-utility[items] - 1.0))
            positives += [(user, i) for i in items[takes].tolist()]
            disliked += [(user, i) for i in items[dislikes].tolist()]
            seen += [(user, i) for i in items[~(takes | dislikes)].tolist()]
            pairs = rng.choice(n_items, size=(said, 2), p=share)
            pairs = pairs[pairs[:, 0] != pairs[:, 1]]
            preferences += [(user, *pair) for pair in self.answers(user, pairs, rng).tolist()]
        users, items = np.array(positives, dtype=np.int64).T
        return Interactions.from_arrays(
            users,
            items,
            user_ids=[str(u) for u in range(n_users)],
            item_ids=[str(i) for i in range(n_items)],
            feedback=UserFeedback(
                np.array(seen, dtype=np.int64).reshape(-1, 2),
                np.array(disliked, dtype=np.int64).reshape(-1, 2),
                np.ones(len(disliked), np.float32),
                np.array(preferences, dtype=np.int64).reshape(-1, 3),
                np.ones(len(preferences), np.float32),
            ),
        )

    def answers(self, user: int, pairs: Ints, rng: np.random.Generator) -> Ints:
        """(P, 2) pairs that the user is asked about → the same, the preferred one first."""
        utility = self.utility[user][pairs]
        first = rng.random(len(pairs)) < sigmoid(utility[:, 0] - utility[:, 1])
        return np.where(first[:, None], pairs, pairs[:, ::-1])

    def ndcg(self, users: Ints, ranked: Ints, candidates: Ints) -> Floats:
        """(n,) NDCG of (n, k) lists of (n, M) candidates, padded −1, against the known tastes.

        The gain of an item is the probability that the user takes it, and the ideal list is that of
        the candidates with the highest.
        """
        gains = np.where(candidates >= 0, self._probability(users, candidates), 0.0)
        k = ranked.shape[1]
        ideal = -np.sort(-gains, axis=1)[:, :k]
        discount = 1 / np.log2(np.arange(2, k + 2))
        gains = np.where(ranked >= 0, self._probability(users, ranked), 0.0)
        quotient: Floats = (gains @ discount) / (ideal @ discount)
        return quotient

    def _probability(self, users: Ints, items: Ints) -> Floats:
        return sigmoid(self.utility[users[:, None], np.maximum(items, 0)])


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + e^−x), without overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def untouched(matrix: Interactions, feedback: UserFeedback, seed: int) -> Ints:
    """(n_users, M) the items of which a user has neither done nor said anything, in one random
    order for all, padded −1."""
    free = np.ones((matrix.n_users, matrix.n_items), dtype=np.bool_)
    free[matrix.users, matrix.items] = False
    for rows in (
        feedback.seen,
        feedback.disliked,
        feedback.pairs[:, :2],
        feedback.pairs[:, [0, 2]],
    ):
        free[rows[:, 0], rows[:, 1]] = False
    order = np.random.default_rng([seed, 2]).permutation(matrix.n_items)
    free = free[:, order]
    rows = np.full(free.shape, -1, dtype=np.int64)
    rows[np.arange(free.shape[1]) < free.sum(axis=1)[:, None]] = np.broadcast_to(order, free.shape)[
        free
    ]
    return rows[:, : int(free.sum(axis=1).max())]


USERS, ITEMS, NEWCOMERS = 1_000, 400, 200
K = 10
POOL = 48
ASKED = (0, 1, 2, 3, 5, 7, 10)
AT_ONCE = 256
BASE, ALL = "positives alone", "positives, dislikes and statements"


def arms(every: Interactions) -> Iterator[tuple[str, Interactions]]:
    """The same positives, with what else is known of the users."""
    feedback = every.feedback or UserFeedback()
    none = UserFeedback()
    dislikes = replace(none, disliked=feedback.disliked, disliked_weights=feedback.disliked_weights)
    statements = replace(none, pairs=feedback.pairs, pair_weights=feedback.pair_weights)
    yield BASE, replace(every, feedback=None)
    yield "and what was passed over", replace(every, feedback=replace(none, seen=feedback.seen))
    yield "and dislikes", replace(every, feedback=dislikes)
    yield "and stated preferences", replace(every, feedback=statements)
    yield ALL, replace(every, feedback=replace(feedback, seen=none.seen))
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
    users, candidates = np.arange(USERS), untouched(every, every.feedback or UserFeedback(), seed)
    values = {"the popularity list": ndcg_of(world, Popularity(every), users, candidates)}
    for name, data in arms(every):
        model = trained(kind, data, seed)
        values[name] = ndcg_of(world, ModelRanks(model), users, candidates)
    return values


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
        answers = np.concatenate(before) if before else np.zeros((0, 2), dtype=np.int64)
        plausible = pool.plausible(answers) if len(answers) else None
        known = [(int(a), int(b)) for a, b in answers]
        chosen = pool.choose(n, every, known, plausible, seed=user)
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
    curves: dict[str, list[float]] = {}
    for name, (ask, at_once) in ways.items():
        answered = []
        for user in users:
            # The same chances of an answer for every way of asking.
            rng = np.random.default_rng([seed, int(user), 99])
            answers: list[Ints] = []
            for _ in range(1 if at_once else ASKED[-1]):
                pairs = ask(int(user), ASKED[-1] if at_once else 1, answers)
                answers.append(world.answers(int(user), pairs, rng))
            answered.append(np.concatenate(answers))
        curves[name] = []
        for n in ASKED:
            vectors = fold_in([Evidence(pairs=pairs[:n]) for pairs in answered])
            curves[name].append(ndcg_of(world, Fitted(model, vectors), users, candidates))
    return curves


def interval(differences: Floats) -> tuple[float, float]:
    """The mean, and half of Student's interval of 95 %."""
    n = len(differences)
    half = student_t_quantile(0.975, n - 1) * float(differences.std(ddof=1)) / math.sqrt(n)
    return float(differences.mean()), half


def main(seeds: int = 10, kinds: tuple[str, ...] = ("nbpr", "neupr")) -> None:
    if seeds < 2:
        sys.exit("an interval takes at least two seeds")
    torch.set_num_threads(1)
    rows: list[list[object]] = []
    curves: list[list[object]] = []
    for kind in cast(tuple[Kind, ...], kinds):
        worlds = [compare_trainings(kind, seed) for seed in range(seeds)]
        for name in worlds[0]:
            values = np.array([world[name] for world in worlds])
            more, half = interval(values - np.array([world[BASE] for world in worlds]))
            wins = int(sum(world[name] > world[BASE] for world in worlds))
            rows.append([kind, name, float(values.mean()), more, half, wins])
        curves_by_seed = [compare_questions(kind, seed) for seed in range(seeds)]
        random_pairs = np.array([each["random pairs"][-1] for each in curves_by_seed])
        for name in curves_by_seed[0]:
            by_seed = np.array([each[name] for each in curves_by_seed])
            gain = interval(by_seed[:, -1] - random_pairs)
            curves.append([kind, name, *by_seed.mean(axis=0).tolist(), *gain])
    about = {
        "seeds": seeds,
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
    run_command(main)
