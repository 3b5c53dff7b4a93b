"""Tests on what users click: interleaving beside an A/B test, and the automatic return.

    python -m benchmarks.online [RUNS]
    python -m benchmarks.online auto_rollback [RUNS]

How many requests interleaving takes to find the better of two versions. Simulated users (`World`)
click lists that the service's own code drafts from two versions of which one is better by a known
difference; the service's own report judges. Found: the report calls the better one better. Needed:
the fewest requests, of a ladder by √2, with which it is found in 95 of 100 runs or more, and again
in 100 other runs. Each run is looked at once, at its end; for equal versions also at every rung, to
show what that does. Beside it an A/B test on the same users: a half of them is given each version's
lists, and the share of lists clicked is compared, with its variance between users, at the same
level of 5 %.

How often the automatic return is wrong, and how long a worse version lasts. Two weeks of hours are
simulated: lists and clicks that swing between night and day, by weekdays, and, as given, from day
to day and hour to hour by themselves. In the second a new version is served, and the service's own
test looks every hour, as a worker does. Wrong: it returned though the click-through is the same.
Beside it an ordinary test of two shares, one-sided at p < 0.01, looked at as often. Of worse
versions: the share returned within the week, and after how many hours and lists, by the median.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.ab_tests.auto_rollback import WINDOW_HOURS, significant_drop
from app.ab_tests.impressions import ClickCounts
from app.core.settings import Settings
from benchmarks.harness import publish, run_command
from ncr_core.online import InterleavingResult, credit, interleaving_result, team_draft

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

USERS, ITEMS, FACTORS, SHOWN = 2_000, 400, 8, 10


class World:
    """2,000 users and 400 items; a user's utility of an item is a product of 8 factors, of variance
    1, and what the item is to everyone.

    A user looks from the top, clicks an item in view with a probability that grows with its
    utility, and goes on with 0.85 after an item left alone and with 0.5 after a click: the
    dependent click model (Guo, Liu & Wang, WSDM 2009), so that low places are seldom seen.
    """

    ON, AFTER_CLICK = 0.85, 0.5

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        users = rng.normal(size=(USERS, FACTORS))
        items = rng.normal(size=(ITEMS, FACTORS))
        taste = users @ items.T / np.sqrt(FACTORS)
        self.utility: FloatArray = taste + 0.5 * rng.normal(size=ITEMS)
        # The best items are clicked by one in twelve who look at them: about a fifth of the lists.
        self.attraction: FloatArray = 0.0875 / (1 + np.exp(-2 * (self.utility - 2.0)))
        # A tenth of the users make about half of the requests.
        activity = rng.lognormal(0, 1.3, USERS)
        self.activity: FloatArray = activity / activity.sum()

    def version(self, error: float, seed: int) -> IntArray:
        """(USERS, SHOWN) lists of a model that knows utilities up to errors of this deviation."""
        rng = np.random.default_rng(seed)
        scores = self.utility + error * rng.normal(size=self.utility.shape)
        order: IntArray = np.argsort(-scores, axis=1)[:, :SHOWN]
        return order

    def ndcg(self, lists: IntArray) -> float:
        """NDCG of the lists, with the attractions as gains."""
        discount = 1 / np.log2(np.arange(SHOWN) + 2)
        gains = np.take_along_axis(self.attraction, lists, axis=1) @ discount
        best = -np.sort(-self.attraction, axis=1)[:, :SHOWN] @ discount
        return float((gains / best).mean())

    def requests(self, n: int, rng: np.random.Generator) -> IntArray:
        """The users of n requests."""
        return rng.choice(USERS, size=n, p=self.activity)

    def clicks(
        self, users: IntArray, lists: IntArray, rng: np.random.Generator
    ) -> NDArray[np.bool_]:
        """(n, SHOWN) what users (n,) click of lists (n, SHOWN)."""
        likes = rng.random(lists.shape) < self.attraction[users[:, None], lists]
        goes_on = rng.random(lists.shape) < np.where(likes, self.AFTER_CLICK, self.ON)
        seen = np.ones(lists.shape, dtype=np.bool_)
        seen[:, 1:] = np.logical_and.accumulate(goes_on[:, :-1], axis=1)
        clicks: NDArray[np.bool_] = likes & seen
        return clicks


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
) -> dict[int, InterleavingResult]:
    """One run of requests, each a draft, clicks and credit, looked at after some of them."""
    rng = np.random.default_rng(seed)
    coin = random.Random(seed)
    users = world.requests(looks[-1], rng)
    drafts = [team_draft(a[u].tolist(), b[u].tolist(), SHOWN, coin) for u in users.tolist()]
    shown = np.array([draft.merged for draft in drafts])
    clicked = world.clicks(users, shown, rng)
    tallies = np.zeros((USERS, 3), dtype=np.int64)
    seen: dict[int, InterleavingResult] = {}
    start = 0
    for end in looks:
        for position in start + np.flatnonzero(clicked[start:end].any(axis=1)):
            credit_a, credit_b = credit(
                set(shown[position][clicked[position]].tolist()), drafts[position].teams
            )
            tallies[
                users[position], 0 if credit_a > credit_b else 1 if credit_b > credit_a else 2
            ] += 1
        seen[end] = interleaving_result(tallies)
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
            times_found = sum(one == "b" for one in others)
            if times_found >= ENOUGH * OTHER_RUNS:  # else the rung was the first by luck
                return n, times_found
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


def interleaving(runs: int = 100) -> None:
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


DAY = 24
Z = 2.326348  # one-sided 1 %


@dataclass(frozen=True)
class Site:
    """What is simulated."""

    name: str
    rate: float
    """Of lists that are clicked."""
    lists: int
    """An hour, on average over the day."""
    days: float
    """By how much days differ by themselves: a standard deviation, relative to the rate."""
    hours: float
    """As much of hours."""
    known_days: int = 7
    """For how long the version before was served; others were before it."""
    all_days: int = 7
    """For how long anything was served."""


SITES = (
    Site("steady", 0.1, 200, 0.0, 0.0),
    Site("busy, steady", 0.03, 5_000, 0.0, 0.0),
    Site("usual", 0.1, 200, 0.03, 0.05),
    Site("busy, usual", 0.05, 2_000, 0.03, 0.05),
    Site("restless", 0.1, 200, 0.1, 0.1),
    Site("busy, restless", 0.05, 2_000, 0.1, 0.1),
    Site("busy, usual, new version daily", 0.05, 2_000, 0.03, 0.05, 1),
    Site("busy, restless, new version daily", 0.05, 2_000, 0.1, 0.1, 1),
    Site("busy, usual, first day", 0.05, 2_000, 0.03, 0.05, 1, 1),
)
DROPS = (0.1, 0.2, 0.3, 0.5)


def simulate(
    site: Site, drop: float, rng: np.random.Generator
) -> tuple[dict[int, ClickCounts], dict[int, ClickCounts]]:
    """Clicks by hour before and after a version that is clicked less by ``drop`` was published."""
    began = 20_000 * DAY + int(rng.integers(7 * DAY))
    hours = np.arange(began - WINDOW_HOURS, began + WINDOW_HOURS)
    of_day = 2 * np.pi * (hours % DAY) / DAY
    weekend = (hours // DAY % 7 >= 5).astype(float)
    lists = rng.poisson(site.lists * (1 + 0.8 * np.sin(of_day)) * (1 + 0.3 * weekend))
    days, day = np.unique(hours // DAY, return_inverse=True)
    rate = site.rate * (1 + 0.3 * np.sin(of_day + 1)) * (1 + 0.05 * weekend)
    rate = rate * np.exp(rng.normal(0, site.days, len(days)))[day]
    rate = rate * np.exp(rng.normal(0, site.hours, len(hours)))
    rate[hours >= began] *= 1 - drop
    clicked = rng.binomial(lists, np.minimum(rate, 1))
    counts = {
        int(hour): ClickCounts(int(n), int(k))
        for hour, n, k in zip(hours, lists, clicked, strict=True)
        if n
    }
    first = began - DAY * site.all_days
    return (
        {hour: each for hour, each in counts.items() if first <= hour < began},
        {hour: each for hour, each in counts.items() if hour >= began},
    )


def watched(
    site: Site, drop: float, settings: Settings, rng: np.random.Generator
) -> tuple[tuple[int, int] | None, bool]:
    """After how many hours and lists the service returned, if it did; whether a test that knows
    nothing of looking again, of hours and of days would have.
    """
    usual, after = simulate(site, drop, rng)
    began = min(after)
    before = {h: each for h, each in usual.items() if h >= began - DAY * site.known_days}
    since: dict[int, ClickCounts] = {}
    returned: tuple[int, int] | None = None
    naive = False
    total = _total(before)
    for hour, each in sorted(after.items()):
        since[hour] = each
        now = _total(since)
        naive = naive or _naive(total, now, settings)
        if returned is None and significant_drop(before, since, usual, settings) is not None:
            returned = (hour - began + 1, now.lists)
        if returned is not None and naive:
            break
    return returned, naive


def _total(hours: Mapping[int, ClickCounts]) -> ClickCounts:
    counts: NDArray[np.int64] = np.array(list(hours.values()), dtype=np.int64)
    return ClickCounts(*counts.sum(axis=0).tolist())


def _naive(before: ClickCounts, now: ClickCounts, settings: Settings) -> bool:
    if min(before.lists, now.lists) < settings.return_lists:
        return False
    both = before.plus(now)
    share = both.clicked / both.lists
    error = np.sqrt(share * (1 - share) * (1 / before.lists + 1 / now.lists))
    gap = before.clicked / before.lists - now.clicked / now.lists
    # By as much as the service asks for, too.
    return bool(gap > Z * error and gap >= settings.return_drop * before.clicked / before.lists)


def auto_rollback(runs: int = 500) -> None:
    settings = Settings()
    rows: list[list[Any]] = []
    for number, site in enumerate(SITES):
        for drop in (0.0, *DROPS):
            # Of what should be rare more runs are needed.
            n = runs if drop == 0 else max(runs // 5, 1)
            rng = np.random.default_rng([number, int(100 * drop)])
            seen = [watched(site, drop, settings, rng) for _ in range(n)]
            ended = [each for each, _ in seen if each is not None]
            rows.append(
                [
                    site.name,
                    drop,
                    n,
                    len(ended) / n,
                    median(each[0] for each in ended) if ended and drop else None,
                    median(each[1] for each in ended) if ended and drop else None,
                    sum(naive for _, naive in seen) / n,
                ]
            )
            print(rows[-1], flush=True)
    publish(
        "returning",
        ["site", "fall", "runs", "returned", "hours", "lists", "returned by an ordinary test"],
        rows,
        drop=settings.return_drop,
        least_lists=settings.return_lists,
        sites=[asdict(site) for site in SITES],
    )


if __name__ == "__main__":
    run_command(interleaving, auto_rollback=auto_rollback)
