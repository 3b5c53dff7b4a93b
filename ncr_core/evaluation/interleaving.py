"""Two rankers shown in one list: who is clicked more (Radlinski, Kurup & Joachims, CIKM 2008).

Every user sees both, in the same list and at the same places, so that what differs between users,
hours and pages falls out: some tens of times fewer lists are needed than when each user sees one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncr_core.evaluation.distributions import sign_test_p, student_t_quantile

T = TypeVar("T", bound=Hashable)

LEVEL = 0.95


class Coin(Protocol):
    """What tosses: `random.Random`, or a generator of NumPy's."""

    def random(self) -> float: ...


class Teams(NamedTuple, Generic[T]):
    """The items that each ranker is given credit for, in their order."""

    a: list[T]
    b: list[T]


class Draft(NamedTuple, Generic[T]):
    """A list to be shown, and which ranker put which item there."""

    merged: list[T]
    teams: Teams[T]


def team_draft(a: Sequence[T], b: Sequence[T], n: int, rng: Coin) -> Draft[T]:
    """The first ``n`` items of two rankings, drafted in turns as two captains choose teams.

    In each round a coin says who chooses first; each chooses the best of its own items that is not
    there yet. (Algorithm 2 of the paper.) Where one ranking is used up the rest of the other
    follows, as nobody's.
    """
    rankings, places = (a, b), [0, 0]
    taken: set[T] = set()
    merged: list[T] = []
    teams: tuple[list[T], list[T]] = ([], [])
    while len(merged) < n:
        for side in (0, 1):
            while places[side] < len(rankings[side]) and rankings[side][places[side]] in taken:
                places[side] += 1
        used_up = places[0] == len(a), places[1] == len(b)
        ahead = len(teams[0]) - len(teams[1])
        if ahead == 0 and any(used_up):
            break  # who chooses first would be the only one
        turn = int(rng.random() < 0.5) if ahead == 0 else int(ahead > 0)
        if used_up[turn]:
            break
        item = rankings[turn][places[turn]]
        taken.add(item)
        merged.append(item)
        teams[turn].append(item)
    for side in (0, 1):
        for item in rankings[side][places[side] :]:
            if len(merged) < n and item not in taken:
                taken.add(item)
                merged.append(item)
    return Draft(merged, Teams(*teams))


def credit(clicked: Collection[T], teams: Teams[T]) -> tuple[int, int]:
    """How many of the clicked items each ranker put there: the list is won by the one with more."""
    return sum(item in clicked for item in teams.a), sum(item in clicked for item in teams.b)


@dataclass(frozen=True)
class Preference:
    """Which of two rankers users prefer, by the lists on which some item was clicked.

    ``difference`` is Δ = (wins_b + ties/2) / (wins_a + wins_b + ties) − 1/2 (Chapelle, Joachims,
    Radlinski & Yue, TOIS 2012, eq. 1): above 0, up to 1/2, where B is preferred.
    """

    wins_a: int
    wins_b: int
    ties: int
    users: int
    difference: float | None
    """None while nothing has been clicked, as all that follows."""
    interval: tuple[float, float] | None
    """What Δ lies in with a probability of ``LEVEL``."""
    p: float | None
    """Of the sign test: the chance of so uneven a vote where users prefer either as often."""

    @property
    def better(self) -> Literal["a", "b"] | None:
        """The one that is better, where both the test and the interval say so; else None."""
        if self.interval is None or self.p is None or self.p >= 1 - LEVEL:
            return None
        if self.interval[0] > 0:
            return "b"
        return "a" if self.interval[1] < 0 else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "wins_a": self.wins_a,
            "wins_b": self.wins_b,
            "ties": self.ties,
            "users": self.users,
            "difference": self.difference,
            "interval": None if self.interval is None else list(self.interval),
            "level": LEVEL,
            "p": self.p,
        }


def preference(tallies: NDArray[np.int64]) -> Preference:
    """From (n_users, 3) lists that A won, that B won, and ties with a click, of each user.

    A user's lists are alike, so users and not lists are what is counted on:

    - p: each user has one vote, for the ranker that won more of their lists; the exact two-sided
      sign test on those votes. A user with a thousand lists does not outvote the others.
    - the interval: Wilson's of B's share of the lists (Wilson 1927), with the number of lists that
      would be as informative if they were independent (Korn & Graubard, Survey Methodology 1998):
      by the variance of the share in the jackknife over users (Efron & Stein 1981), and at most as
      many as there are. For the normal quantile stands Student's t, with as many degrees of freedom
      as users with lists of one number would have (Satterthwaite 1946). It stays within
      [−1/2, 1/2] and never has the width 0.

    Both are for one look at a number of lists that was decided on before.
    """
    if tallies.ndim != 2 or tallies.shape[1] != 3:
        raise ValueError(f"wins of A, wins of B and ties are needed, not {tallies.shape}")
    tallies = tallies[tallies.sum(axis=1) > 0]
    wins_a, wins_b, ties = (int(total) for total in tallies.sum(axis=0))
    users, lists = len(tallies), wins_a + wins_b + ties
    if lists == 0:
        return Preference(0, 0, 0, 0, None, None, None)
    share = (wins_b + ties / 2) / lists
    votes = np.sign(tallies[:, 1] - tallies[:, 0])
    p = sign_test_p(int((votes > 0).sum()), int((votes < 0).sum()))
    return Preference(wins_a, wins_b, ties, users, share - 0.5, _interval(tallies, share, lists), p)


def _interval(tallies: NDArray[np.int64], share: float, lists: int) -> tuple[float, float]:
    users = len(tallies)
    if users == 1:
        return -0.5, 0.5  # of how users differ one tells nothing
    own = tallies.sum(axis=1)
    without = (tallies[:, 1] + tallies[:, 2] / 2 - share * own) / (lists - own)
    variance = (users - 1) / users * float((without**2).sum())
    n: float = lists
    if share in (0, 1):
        n = users  # all alike: it cannot be told how much a user's other lists add
    elif variance > 0:
        n = min(share * (1 - share) / variance, lists)
    squares = own.astype(np.float64) ** 2
    degrees = max(float(squares.sum() ** 2 / (squares**2).sum()) - 1, 1.0)
    t = student_t_quantile((1 + LEVEL) / 2, degrees)
    centre = (share + t**2 / (2 * n)) / (1 + t**2 / n)
    half = t / (1 + t**2 / n) * math.sqrt(share * (1 - share) / n + t**2 / (4 * n**2))
    low, high = max(min(centre - half, share), 0.0), min(max(centre + half, share), 1.0)
    return low - 0.5, high - 0.5
