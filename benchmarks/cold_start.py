"""Items and users of whom nothing is known but their attributes: MovieLens 1M.

python -m benchmarks.cold_start ROOT [items|takers|users ...]

ROOT is the folder that holds ml-1m with movies.csv.gz and users.csv.gz.

Items: the protocol of warm-transfer 0.1.0 (PyPI), seed 42. A fifth of the items with five events or
more is cold, and a tenth is for validation, both drawn from fifths of the items by popularity; all
their events are left out of training. 2,000 users with cold items are drawn; each one's cold items
are ranked among the cold items. Attributes are the genres, or the genres and the title's year.

Takers: ``BLENDED`` of the validation items, fitted to 0, 1, 2 and 5 of their users, with the
prior by genres and year and without. Ranked are these items, for the users drawn who are no such
takers.

Users: a fifth of the users is new, and a fifth is for validation, both drawn with seed 42; all
their events are left out of training. Each one's items are ranked among all that was trained, by
age, sex and occupation alone.

NDCG@10, recall@10 and the area under the ROC curve are means over users, with standard errors. The
models are kept in var/cold-start. The results are cold-items-ml-1m, cold-takers-ml-1m and
cold-users-ml-1m.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from benchmarks.harness import publish, run_command
from ncr_core import Recommender
from ncr_core.checkpoint import Checkpoint
from ncr_core.content import map_items, map_users
from ncr_core.data import Interactions, build_interactions
from ncr_core.fold_in import ItemFoldIn, extended
from ncr_core.models import PairwiseRanker

RECIPES = ("als-nbpr", "next-item-nbpr", "next-item")
SEED, COLD, VALIDATION, FIFTHS, MIN_EVENTS, ASKED = 42, 0.2, 0.1, 5, 5, 2_000
BLENDED, TAKERS = 100, (0, 1, 2, 5)
K = 10
MODELS = Path("var/cold-start")
COLUMNS = ["method", "attributes", "held out", "users", "candidates"]
COLUMNS += ["ndcg@10", "ndcg_error", "recall@10", "auc", "auc_error"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Attributes = dict[str, dict[str, Any]]


def main(root: Path, parts: tuple[str, ...] = ()) -> None:
    for part in parts or ("items", "takers", "users"):
        {"items": items, "takers": takers, "users": users}[part](root / "ml-1m")


@dataclass(frozen=True)
class Events:
    """(N,) users, items and the places in the order of their users' events."""

    users: Ints
    items: Ints
    places: Ints

    @classmethod
    def read(cls, folder: Path) -> Events:
        rows = list(_rows(folder / "ratings.csv.gz"))
        columns = (np.array([int(row[name]) for row in rows]) for name in _EVENT_COLUMNS)
        return cls(*columns)

    def of(self, mask: NDArray[np.bool_]) -> Events:
        return Events(self.users[mask], self.items[mask], self.places[mask])

    def interactions(self) -> Interactions:
        order = np.lexsort((self.places, self.users))
        columns = (part[order].tolist() for part in (self.users, self.items, self.places))
        return build_interactions(
            (str(u), str(i), float(t)) for u, i, t in zip(*columns, strict=True)
        )


_EVENT_COLUMNS = ("user", "item", "position")


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def cold_items(items: Ints) -> tuple[Ints, Ints]:
    """The cold and the validation items among those of all events, as warm-transfer draws them."""
    ids, counts = np.unique(items, return_counts=True)
    ids, counts = ids[counts >= MIN_EVENTS], counts[counts >= MIN_EVENTS]
    edges = np.unique(np.quantile(counts, np.linspace(0, 1, FIFTHS + 1)))
    fifth = np.searchsorted(edges[1:-1], counts, side="left")
    groups = [ids[fifth == number] for number in range(len(edges) - 1)]
    n_cold = _shared_out([len(group) for group in groups], round(len(ids) * COLD))
    left = [len(group) - n for group, n in zip(groups, n_cold, strict=True)]
    n_validation = _shared_out(left, round(len(ids) * VALIDATION))
    generator = np.random.default_rng(SEED)
    cold, validation = [], []
    for group, n, m in zip(groups, n_cold, n_validation, strict=True):
        drawn = group[generator.permutation(len(group))]
        cold.append(drawn[:n])
        validation.append(drawn[n : n + m])
    return np.sort(np.concatenate(cold)), np.sort(np.concatenate(validation))


def _shared_out(sizes: Sequence[int], total: int) -> list[int]:
    """A total by the sizes, the largest remainders rounded up."""
    exact = [total * size / sum(sizes) for size in sizes]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: exact[i] - shares[i], reverse=True)
    for place in by_remainder[: total - sum(shares)]:
        shares[place] += 1
    return shares


def item_attributes(folder: Path) -> Attributes:
    """Genres and year of each item."""
    attributes: Attributes = {}
    for row in _rows(folder / "movies.csv.gz"):
        attributes[row["item"]] = {"genres": row["genres"].split("|")}
        if year := re.search(r"\((\d{4})\)\s*$", row["title"]):
            attributes[row["item"]]["year"] = int(year[1])
    return attributes


def user_attributes(folder: Path) -> Attributes:
    """Age, sex and occupation of each user; ages and occupations are codes."""
    return {
        row["user"]: {
            "age": int(row["age"]),
            "sex": row["gender"],
            "occupation": f"o{row['occupation']}",
        }
        for row in _rows(folder / "users.csv.gz")
    }


def trained(name: str, recipe: str, interactions: Interactions) -> Checkpoint:
    folder = MODELS / f"{name}-{recipe}"
    if not folder.exists():
        Recommender(recipe).fit(interactions).save(folder)
    return Recommender.load(folder).checkpoint


def items(folder: Path) -> None:
    events = Events.read(folder)
    cold, validation = cold_items(events.items)
    train = events.of(~np.isin(events.items, np.concatenate([cold, validation]))).interactions()
    of_users = np.unique(events.users[np.isin(events.items, cold)])
    asked = np.sort(np.random.default_rng(SEED).choice(of_users, ASKED, replace=False))
    attributes = item_attributes(folder)
    rows = []
    for held_out, ids in (("validation", validation), ("test", cold)):
        relevant = _relevant(events, asked, ids)
        popular = genre_popularity(train, asked, attributes, ids)
        row = ["personal genre popularity", "genres", held_out]
        rows.append([*row, *measure(popular, relevant)])
        for recipe in RECIPES:
            checkpoint = trained("items", recipe, train)
            for kinds in (("genres",), ("genres", "year")):
                scores = placed_scores(checkpoint, asked, attributes, ids, kinds)
                row = [recipe, " and ".join(kinds), held_out]
                rows.append([*row, *measure(scores, relevant)])
    publish(
        "cold-items-ml-1m",
        COLUMNS,
        rows,
        users=train.n_users,
        items=train.n_items,
        interactions=train.nnz,
        cold=len(cold),
        validation=len(validation),
    )


def placed_scores(
    checkpoint: Checkpoint, asked: Ints, attributes: Attributes, ids: Ints, kinds: Sequence[str]
) -> Floats:
    """(B, m) scores of new items by their attributes of these kinds for the users asked."""
    model = checkpoint.model
    objects = [attributes[item] for item in checkpoint.item_ids]
    placement = map_items(model, objects, checkpoint.item_counts, kinds)
    assert placement is not None
    larger = extended(model, placement.predict([attributes[str(item)] for item in ids]))
    rows = {user: row for row, user in enumerate(checkpoint.user_ids)}
    users = larger.user_vectors(torch.tensor([rows[str(user)] for user in asked]))
    return _scores(larger, users)[:, model.n_items :]


def takers(folder: Path) -> None:
    events = Events.read(folder)
    cold, validation = cold_items(events.items)
    train = events.of(~np.isin(events.items, np.concatenate([cold, validation]))).interactions()
    generator = np.random.default_rng(SEED)
    new = np.sort(generator.choice(validation, BLENDED, replace=False))
    attributes = item_attributes(folder)
    known = {user: row for row, user in enumerate(train.user_ids)}
    own = [generator.permutation(events.users[events.items == item]) for item in new]
    first = [each[: max(TAKERS)] for each in own]
    of_items = np.setdiff1d(events.users[np.isin(events.items, new)], np.concatenate(first))
    asked = np.sort(generator.choice(of_items, min(ASKED, len(of_items)), replace=False))
    relevant = _relevant(events, asked, new)
    rows = []
    for recipe in RECIPES[:2]:
        checkpoint = trained("items", recipe, train)
        model = checkpoint.model
        objects = [attributes[item] for item in checkpoint.item_ids]
        placement = map_items(model, objects, checkpoint.item_counts, ("genres", "year"))
        assert placement is not None
        priors = placement.predict([attributes[str(item)] for item in new])
        users = model.user_vectors(torch.tensor([known[str(user)] for user in asked]))
        for kind, residual, means in (
            ("none", None, None),
            ("genres and year", placement.residual, priors),
        ):
            fold_in = ItemFoldIn(model, residual=residual)
            for k in TAKERS:
                of_k = [
                    model.user_vectors(
                        torch.tensor([known[str(user)] for user in each[:k]], dtype=torch.long)
                    )
                    for each in first
                ]
                larger = extended(model, fold_in(of_k, priors=means))
                scores = _scores(larger, users)[:, model.n_items :]
                row = [f"{recipe}, {k} takers", kind, "validation"]
                rows.append([*row, *measure(scores, relevant)])
    publish("cold-takers-ml-1m", COLUMNS, rows, users=train.n_users, items=train.n_items)


def _scores(model: PairwiseRanker, users: torch.Tensor) -> Floats:
    """(B, E) user vectors → (B, n_items) scores of an additive model."""
    table = model.tables().linear
    assert table is not None
    scores = users.double()[:, table.columns] @ table.items.T
    if table.bias is not None:
        scores = scores + table.bias
    result: Floats = scores.numpy()
    return result


def genre_popularity(train: Interactions, asked: Ints, attributes: Attributes, ids: Ints) -> Floats:
    """(B, m) how many of the user's items have each of a new item's genres, summed over these."""
    genres = sorted({genre for each in attributes.values() for genre in each["genres"]})

    def matrix(names: Sequence[str]) -> Floats:
        return np.array(
            [[g in attributes[name]["genres"] for g in genres] for name in names], float
        )

    of_train, rows = matrix(list(train.item_ids)), {u: r for r, u in enumerate(train.user_ids)}
    own = np.array([of_train[train.items_of(rows[str(user)])].sum(0) for user in asked])
    return own @ matrix([str(item) for item in ids]).T


def _relevant(events: Events, users: Ints, items: Ints) -> list[Ints]:
    """The places in ``items`` of each user's own, ascending ids both."""
    kept = np.isin(events.users, users) & np.isin(events.items, items)
    row = np.searchsorted(users, events.users[kept])
    place = np.searchsorted(items, events.items[kept])
    order = np.lexsort((place, row))
    return np.split(place[order], np.searchsorted(row[order], np.arange(1, len(users))))


def measure(scores: Floats, relevant: Sequence[Ints]) -> list[float | int]:
    """Users, candidates, NDCG@10 and its error, recall@10, and AUC and its error."""
    discounts = 1.0 / np.log2(np.arange(2, K + 2))
    ndcg, recall, auc = [], [], []
    for own, places in zip(scores, relevant, strict=True):
        n, m = len(places), len(own) - len(places)
        if n == 0:
            continue
        best = np.lexsort((np.arange(len(own)), -own))[:K]
        hits = np.isin(best, places)
        ndcg.append(hits @ discounts[: len(hits)] / discounts[: min(K, n)].sum())
        recall.append(hits.sum() / n)
        if m > 0:
            auc.append((rankdata(own)[places].sum() - n * (n + 1) / 2) / (n * m))
    return [
        len(ndcg),
        scores.shape[1],
        *_mean_and_error(ndcg),
        round(float(np.mean(recall)), 5),
        *_mean_and_error(auc),
    ]


def _mean_and_error(values: Sequence[float]) -> list[float]:
    return [
        round(float(np.mean(values)), 5),
        round(float(np.std(values, ddof=1) / np.sqrt(len(values))), 5),
    ]


def users(folder: Path) -> None:
    events = Events.read(folder)
    every = np.random.default_rng(SEED).permutation(np.unique(events.users))
    fifth = len(every) // 5
    test, validation = np.sort(every[:fifth]), np.sort(every[fifth : 2 * fifth])
    train = events.of(~np.isin(events.users, every[: 2 * fifth])).interactions()
    attributes = user_attributes(folder)
    names = ("age", "sex", "occupation")
    rows = []
    for held_out, new in (("validation", validation), ("test", test)):
        for recipe in RECIPES[:2]:
            checkpoint = trained("users", recipe, train)
            ids = np.array([int(item) for item in checkpoint.item_ids])
            order = np.argsort(ids)
            relevant = _relevant(events, new, ids[order])
            if recipe == RECIPES[0]:
                popular = np.tile(checkpoint.item_counts[order].astype(float), (len(new), 1))
                rows.append(["popularity", "", held_out, *measure(popular, relevant)])
            objects = [attributes[user] for user in checkpoint.user_ids]
            counts = np.array([len(train.items_of(row)) for row in range(train.n_users)])
            placement = map_users(checkpoint.model, objects, counts, names)
            assert placement is not None
            for kind, asked in (
                ("none", [{} for _ in new]),
                (", ".join(names), [attributes[str(user)] for user in new]),
            ):
                scores = _scores(checkpoint.model, placement.predict(asked))[:, order]
                rows.append([recipe, kind, held_out, *measure(scores, relevant)])
    publish(
        "cold-users-ml-1m",
        COLUMNS,
        rows,
        users=train.n_users,
        items=train.n_items,
        interactions=train.nnz,
    )


if __name__ == "__main__":
    run_command(main)
