"""Interleaving: two rankers in one list, compared by clicks (Radlinski, Kurup & Joachims, CIKM'08).

Every user sees both rankers in the same list and at the same positions, so differences between
users, hours and pages cancel out. That takes some tens of times fewer lists than an A/B test.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncr_core.evaluation.significance import sign_test_p, student_t_quantile

T = TypeVar("T", bound=Hashable)

LEVEL = 0.95
"""The level of the interval, and 1 − the significance level of the test."""


class RandomSource(Protocol):
    """`random.Random` or a NumPy generator."""

    def random(self) -> float:
        """A number from [0, 1)."""
        ...


class Teams(NamedTuple, Generic[T]):
    """The items that each ranker put into the list, in their order."""

    a: list[T]
    b: list[T]


class Draft(NamedTuple, Generic[T]):
    """An interleaved list, and which ranker put which item there."""

    merged: list[T]
    teams: Teams[T]


def team_draft(a: Sequence[T], b: Sequence[T], n: int, rng: RandomSource) -> Draft[T]:
    """Interleave the first ``n`` items of two rankings, as two captains choose teams in turns.

    In each round a coin decides who chooses first; each ranker chooses its best item that is not in
    the list yet (algorithm 2 of the paper). Where one ranking is used up, the rest of the other
    follows and belongs to neither team.
    """
    rankings, position = (a, b), [0, 0]
    in_list: set[T] = set()
    merged: list[T] = []
    teams: tuple[list[T], list[T]] = ([], [])
    while len(merged) < n:
        for side in (0, 1):
            while (
                position[side] < len(rankings[side]) and rankings[side][position[side]] in in_list
            ):
                position[side] += 1
        used_up = position[0] == len(a), position[1] == len(b)
        lead = len(teams[0]) - len(teams[1])
        if lead == 0 and any(used_up):
            break  # the one that chooses first would be the only one
        turn = int(rng.random() < 0.5) if lead == 0 else int(lead > 0)
        if used_up[turn]:
            break
        item = rankings[turn][position[turn]]
        in_list.add(item)
        merged.append(item)
        teams[turn].append(item)
    for side in (0, 1):
        for item in rankings[side][position[side] :]:
            if len(merged) < n and item not in in_list:
                in_list.add(item)
                merged.append(item)
    return Draft(merged, Teams(*teams))


def credit(clicked: Collection[T], teams: Teams[T]) -> tuple[int, int]:
    """The number of clicked items of each team; the ranker with more wins the list."""
    return sum(item in clicked for item in teams.a), sum(item in clicked for item in teams.b)


@dataclass(frozen=True)
class InterleavingResult:
    """Which of two rankers users prefer, by the lists on which some item was clicked."""

    wins_a: int
    """Lists that A won."""
    wins_b: int
    """Lists that B won."""
    ties: int
    users: int
    """Users with a click."""
    difference: float | None
    """Δ = (wins_b + ties/2) / (wins_a + wins_b + ties) − 1/2, above 0, up to 1/2, where B is
    preferred (Chapelle, Joachims, Radlinski & Yue, TOIS 2012, eq. 1); None without a click."""
    interval: tuple[float, float] | None
    """The interval of Δ at `LEVEL`; None without a click."""
    p: float | None
    """The p of the sign test over users; None without a click."""

    @property
    def better(self) -> Literal["a", "b"] | None:
        """The better ranker, if both the test and the interval show it; else None."""
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


def interleaving_result(tallies: NDArray[np.int64]) -> InterleavingResult:
    """Compare two rankers by the lists that each won.

    A user's lists are alike, so users are counted, not lists:

    - p: each user has one vote, for the ranker that won more of their lists; the exact two-sided
      sign test on these votes. A user with a thousand lists does not outvote the others.
    - interval: Wilson's of B's share of the lists (Wilson 1927), with the number of lists that
      would be as informative if they were independent (Korn & Graubard, Survey Methodology 1998):
      by the variance of the share in the jackknife over users (Efron & Stein 1981), and at most as
      many as there are. In place of the normal quantile it has Student's t, with as many degrees of
      freedom as users with lists of one number would have (Satterthwaite 1946). It stays within
      [−1/2, 1/2] and never has the width 0.

    Both are valid for one look, after a number of lists that was fixed in advance.

    Args:
        tallies: (n_users, 3) lists that A won, that B won, and ties with a click, of each user.

    Raises:
        ValueError: ``tallies`` has another shape.
    """
    if tallies.ndim != 2 or tallies.shape[1] != 3:
        raise ValueError(f"wins of A, wins of B and ties are needed, not {tallies.shape}")
    tallies = tallies[tallies.sum(axis=1) > 0]
    wins_a, wins_b, ties = (int(total) for total in tallies.sum(axis=0))
    users, lists = len(tallies), wins_a + wins_b + ties
    if lists == 0:
        return InterleavingResult(0, 0, 0, 0, None, None, None)
    share = (wins_b + ties / 2) / lists
    votes = np.sign(tallies[:, 1] - tallies[:, 0])
    p = sign_test_p(int((votes > 0).sum()), int((votes < 0).sum()))
    return InterleavingResult(
        wins_a, wins_b, ties, users, share - 0.5, _interval(tallies, share, lists), p
    )


def _interval(tallies: NDArray[np.int64], share: float, lists: int) -> tuple[float, float]:
    users = len(tallies)
    if users == 1:
        return -0.5, 0.5  # one user says nothing of how users differ
    lists_of_user = tallies.sum(axis=1)
    share_without = (tallies[:, 1] + tallies[:, 2] / 2 - share * lists_of_user) / (
        lists - lists_of_user
    )
    variance = (users - 1) / users * float((share_without**2).sum())
    n: float = lists
    if share in (0, 1):
        n = users  # all alike: how much a user's other lists add is not known
    elif variance > 0:
        n = min(share * (1 - share) / variance, lists)
    squares = lists_of_user.astype(np.float64) ** 2
    degrees = max(float(squares.sum() ** 2 / (squares**2).sum()) - 1, 1.0)
    t = student_t_quantile((1 + LEVEL) / 2, degrees)
    centre = (share + t**2 / (2 * n)) / (1 + t**2 / n)
    half = t / (1 + t**2 / n) * math.sqrt(share * (1 - share) / n + t**2 / (4 * n**2))
    low, high = max(min(centre - half, share), 0.0), min(max(centre + half, share), 1.0)
    return low - 0.5, high - 0.5
