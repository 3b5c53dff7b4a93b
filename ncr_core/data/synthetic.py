"""Synthetic data: a small catalogue for a first try, and interactions in sittings.

Items of the catalogue have a genre, a style and a popularity with a long tail. Users like a few of
the genres and, within each genre, one of several styles. Interactions follow taste and popularity
together. So a personal model can beat the popularity list by a clear margin, but not without noise.

In the other data a user's interactions come in sittings. Each sitting has one topic, drawn from the
user's taste. The latest item tells the next one within a sitting, and says little after a break.
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
    """A catalogue with its ``interactions``: (user, item, order) rows, oldest first by user."""

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


TOPICS = 30
OFF_TOPIC = 0.01  # the weight of an item of another topic than the sitting's
BREAKS_SECONDS = (2 * 3_600.0, 3 * 86_400.0)  # up to twice as long, one or the other at random


def synthetic_sittings(
    n_users: int = 1_500,
    n_items: int = 600,
    sittings: int = 4,
    mean_length: int = 8,
    seed: int = 7,
) -> list[tuple[str, str, float]]:
    """Make (user, item, seconds) rows, oldest first within a user; a seed gives the same rows.

    A user has ``sittings`` on average, with ``mean_length`` items on average. Within a sitting 10
    to 119 seconds pass between two items. A taste is a share of each topic. Topics and items have a
    popularity with a long tail.
    """
    rng = np.random.default_rng(seed)
    topic = rng.integers(TOPICS, size=n_items)
    popularity = rng.permutation(1.0 / np.arange(2, n_items + 2) ** 0.8)
    topic_popularity = 1.0 / np.arange(1, TOPICS + 1) ** 0.5
    topic_popularity /= topic_popularity.sum()
    rows: list[tuple[str, str, float]] = []
    for user in range(n_users):
        taste = 0.8 * rng.dirichlet(0.15 * TOPICS * topic_popularity) + 0.2 * topic_popularity
        seconds = float(rng.integers(10**6))
        weight = popularity.copy()
        for _ in range(1 + rng.poisson(sittings - 1)):
            on_topic = np.where(topic == rng.choice(TOPICS, p=taste), 1.0, OFF_TOPIC)
            for _ in range(1 + rng.poisson(mean_length - 1)):
                share = weight * on_topic
                item = rng.choice(n_items, p=share / share.sum())
                weight[item] = 0.0  # nobody takes up an item twice
                rows.append((f"user-{user + 1}", f"item-{item + 1}", seconds))
                seconds += float(rng.integers(10, 120))
            seconds += float(rng.choice(BREAKS_SECONDS) * (1 + rng.random()))
    return rows
