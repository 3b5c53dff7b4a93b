"""A small synthetic catalogue with something to learn, for a first try without any data.

Users like a few of the genres and, within them, one of several styles; items have a genre, a style
and a popularity with a long tail. Interactions follow taste and popularity together, so that a
personal model can beat the popularity list by a clear margin and still has noise to live with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GENRES = (
    "Adventure", "Animation", "Comedy", "Crime", "Documentary", "Drama",
    "Fantasy", "History", "Horror", "Mystery", "Romance", "Science Fiction",
)  # fmt: skip
_FIRST = (
    "Silent", "Crimson", "Hidden", "Golden", "Broken", "Distant", "Electric", "Frozen", "Gentle",
    "Hollow", "Iron", "Jade", "Last", "Midnight", "Northern", "Paper", "Quiet", "Restless",
    "Scarlet", "Velvet", "Wandering", "Winter", "Burning", "Lonely",
)  # fmt: skip
_SECOND = (
    "Harbour", "Garden", "River", "Letter", "Mountain", "Mirror", "Orchard", "Station", "Shadow",
    "Lantern", "Island", "Kingdom", "Machine", "Bridge", "Voyage", "Forest", "Archive", "Comet",
    "Market", "Tower", "Sparrow", "Summer", "Tide", "Window",
)  # fmt: skip
STYLES = 4


@dataclass(frozen=True)
class SyntheticItem:
    """An item of the synthetic catalogue."""

    id: str
    title: str
    genre: str


@dataclass(frozen=True)
class SyntheticData:
    """``interactions`` are (user, item, order) rows, oldest first within a user."""

    items: list[SyntheticItem]
    interactions: list[tuple[str, str, int]]


def synthetic_catalogue(
    n_users: int = 1_000, n_items: int = 480, mean_length: int = 40, seed: int = 7
) -> SyntheticData:
    """Make the catalogue and its interactions; the same seed gives the same data."""
    rng = np.random.default_rng(seed)
    genre = rng.integers(len(GENRES), size=n_items)
    style = rng.integers(STYLES, size=n_items)
    popularity = rng.permutation(1.0 / np.arange(2, n_items + 2) ** 0.6)
    titles = rng.permutation([f"{a} {b}" for a in _FIRST for b in _SECOND])
    items = [
        SyntheticItem(f"film-{i + 1}", f"The {titles[i % len(titles)]}", GENRES[genre[i]])
        for i in range(n_items)
    ]
    rows: list[tuple[str, str, int]] = []
    for user in range(n_users):
        tastes = rng.choice(len(GENRES), size=3, replace=False)
        preferred_style = rng.integers(STYLES, size=len(GENRES))
        liking = np.full(len(GENRES), 0.02)
        liking[tastes] = (1.0, 0.7, 0.5)
        weight = popularity * liking[genre] * np.where(style == preferred_style[genre], 1.0, 0.15)
        length = int(np.clip(rng.poisson(mean_length), 5, n_items // 4))
        chosen = rng.choice(n_items, size=length, replace=False, p=weight / weight.sum())
        # The likely come first in such a draw; real histories have no such order.
        rng.shuffle(chosen)
        rows += [(f"user-{user + 1}", items[i].id, order) for order, i in enumerate(chosen)]
    return SyntheticData(items, rows)
