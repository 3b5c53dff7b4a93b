"""How many requests interleaving takes to find the better of two versions; and an A/B test beside.

    python -m benchmarks.interleaving [RUNS]

Simulated users (`simulated_clicks`) click lists that the service's own code drafts from two
versions of which one is better by a known difference; the service's own report judges. Found: the
report calls the better one better. Needed: the fewest requests, of a ladder by √2, with which it is
found in 95 of 100 runs or more, and again in 100 other runs. Each run is looked at once,
at its end; for equal versions also at every rung, to show what that does.

Beside it an A/B test on the same users: a half of them is given each version's lists, and the share
of lists clicked is compared, with its variance between users, at the same level of 5 %.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.report import publish
from benchmarks.simulated_clicks import SHOWN, USERS, IntArray, World
from ncr_core.evaluation.interleaving import Preference, credit, preference, team_draft

BETTER = 0.5  # the error of version B's utilities, as a standard deviation; below: that of A's
WORSE = {"large": 1.0, "clear": 0.8, "modest": 0.65}
LADDER = [round(100 * 2 ** (step / 2)) for step in range(25)]  # up to 409,600
ENOUGH = 0.95
OTHER_RUNS = 100
LOOKS = [1_000, 2_000, 4_000, 8_000, 16_000]
LONG = 400_000

Judge = Callable[[World, IntArray, IntArray, Sequence[int], int], dict[int, str | None]]
"""Which version is better after so many requests each, in one run by a seed; None: not known."""


def interleave(
    world: World, a: IntArray, b: IntArray, looks: Sequence[int], seed: int
) -> dict[int, Preference]:
    """One run of requests, each a draft, clicks and credit, looked at after some of them."""
    rng = np.random.default_rng(seed)
    coin = random.Random(seed)
    users = world.requests(looks[-1], rng)
    drafts = [team_draft(a[u].tolist(), b[u].tolist(), SHOWN, coin) for u in users.tolist()]
    shown = np.array([draft.merged for draft in drafts])
    clicked = world.clicks(users, shown, rng)
    tallies = np.zeros((USERS, 3), dtype=np.int64)
    seen: dict[int, Preference] = {}
    start = 0
    for end in looks:
        for at in start + np.flatnonzero(clicked[start:end].any(axis=1)):
            of_a, of_b = credit(set(shown[at][clicked[at]].tolist()), drafts[at].teams)
            tallies[users[at], 0 if of_a > of_b else 1 if of_b > of_a else 2] += 1
        seen[end] = preference(tallies)
        start = end
    return seen


def by_interleaving(
    world: World, a: IntArray, b: IntArray, looks: Sequence[int], seed: int
) -> dict[int, str | None]:
    return {n: found.better for n, found in interleave(world, a, b, looks, seed).items()}


def by_ab_test(
    world: World, a: IntArray, b: IntArray, looks: Sequence[int], seed: int
) -> dict[int, str | None]:
    """By the rates of clicked lists of the users with either version."""
    rng = np.random.default_rng(seed)
    users = world.requests(looks[-1], rng)
    of_b = rng.permutation(USERS) % 2 == 1
    clicked = world.clicks(users, np.where(of_b[users, None], b[users], a[users]), rng)
    hit = np.asarray(clicked.any(axis=1))
    seen: dict[int, str | None] = {}
    for n in looks:
        lists = np.bincount(users[:n], minlength=USERS)
        won = np.bincount(users[:n], hit[:n], USERS)
        rates, variance = [], 0.0
        for half in (~of_b, of_b):
            rates.append(won[half].sum() / lists[half].sum())
            residual = won[half] - rates[-1] * lists[half]
            variance += float((residual**2).sum()) / float(lists[half].sum()) ** 2
        z = (rates[1] - rates[0]) / math.sqrt(variance)
        seen[n] = None if abs(z) < 1.959964 else "b" if z > 0 else "a"
    return seen


def needed(
    judge: Judge, world: World, a: IntArray, b: IntArray, runs: int, most: int
) -> tuple[int | None, int | None]:
    """The requests needed, and in how many other runs as many found it; None beyond ``most``."""
    for start in range(0, len(LADDER), 4):
        looks = [n for n in LADDER[start : start + 4] if n <= most]
        if not looks:
            break
        judged = [judge(world, a, b, looks, 1_000 + run) for run in range(runs)]
        for n in looks:
            if sum(run[n] == "b" for run in judged) < ENOUGH * runs:
                continue
            others = [judge(world, a, b, [n], 50_000 + run)[n] for run in range(OTHER_RUNS)]
            found = sum(one == "b" for one in others)
            if found >= ENOUGH * OTHER_RUNS:  # else the rung was the first by luck
                return n, found
    return None, None


def equal_versions(world: World, a: IntArray, b: IntArray, runs: int) -> dict[str, Any]:
    """How often one of two equal versions is called better: at one look, and at any of five."""
    judged = [by_interleaving(world, a, b, LOOKS, 90_000 + run) for run in range(runs)]
    return {
        "runs": runs,
        "looks": LOOKS,
        "ndcg": [world.ndcg(a), world.ndcg(b)],
        "called_better_at_one_look": {
            str(n): sum(run[n] is not None for run in judged) / runs for n in LOOKS
        },
        "called_better_at_any_look": sum(any(run.values()) for run in judged) / runs,
    }


def coverage(world: World, a: IntArray, b: IntArray, runs: int) -> dict[str, Any]:
    """How often the interval of 95 % holds the difference of a very long run."""
    truth = interleave(world, a, b, [LONG], 7)[LONG].difference
    held = dict.fromkeys(LOOKS, 0)
    for run in range(runs):
        for n, found in interleave(world, a, b, LOOKS, 70_000 + run).items():
            if found.interval is not None and truth is not None:
                held[n] += found.interval[0] <= truth <= found.interval[1]
    return {
        "runs": runs,
        "difference": truth,
        "held": {str(n): count / runs for n, count in held.items()},
    }


def main(runs: int) -> None:
    world = World()
    b = world.version(BETTER, 100)
    rows: list[list[Any]] = []
    for name, error in WORSE.items():
        a = world.version(error, 200)
        n, again = needed(by_interleaving, world, a, b, runs, most=150_000)
        ab, ab_again = needed(by_ab_test, world, a, b, runs, most=LADDER[-1])
        difference = interleave(world, a, b, [LONG // 10], 7)[LONG // 10].difference
        rows.append([name, world.ndcg(a), world.ndcg(b), difference, n, again, ab, ab_again])
        print(rows[-1], flush=True)
    publish(
        "interleaving",
        ["difference", "NDCG@10 A", "NDCG@10 B", "Δ", "requests needed", "found of 100 others",
         "A/B requests needed", "A/B found of 100 others"],
        rows,
        users=USERS,
        shown=SHOWN,
        runs=runs,
        level=0.05,
        most_ab_requests=LADDER[-1],
        equal=equal_versions(world, world.version(BETTER, 300), b, 4 * runs),
        interval=coverage(world, world.version(WORSE["modest"], 200), b, 2 * runs),
    )  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
