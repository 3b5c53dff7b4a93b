"""The quality of lists by the time since the user's last interaction.

python -m benchmarks.gaps DATA [CUT]

DATA is a file with timestamps that `ncr import` takes, or `synthetic` for sittings with a topic
each. CUT says what is held out. `return`, the default: the first item after the user's latest break
of more than an hour, and all that follows is left out; of users without such a break, and with the
CUT `latest` of all users, the latest item. A model "by gap" is told the time since the user's last
interaction, as the service is. HR@10 and NDCG@10 are over the whole catalogue, with
standard errors over users. The result is gaps-CUT-DATA.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import publish, run_command
from benchmarks.served import EASE_L2
from ncr_core.data import build_interactions
from ncr_core.data.dataset import load_interactions
from ncr_core.data.interactions import Interactions, TimeArray
from ncr_core.data.splits import MIN_ITEMS, Split
from ncr_core.data.synthetic import synthetic_sittings
from ncr_core.errors import ConfigError, DataError
from ncr_core.evaluation.metrics import hit_of_each, ndcg_of_each
from ncr_core.evaluation.protocols import K, ModelRanks, Ranks, full_ranks
from ncr_core.models.user_embeddings import GAPS_SECONDS
from ncr_core.recipes import auto_recipes
from ncr_core.reproduction.baselines.scoring import Popularity, fit_ease, fit_linear_next_item
from ncr_core.training import train_model
from ncr_core.training.gaps import learn_gaps

HOUR, DAY = GAPS_SECONDS
RECIPES = ("next-item", "next-item-nbpr", "als-nbpr")
COLUMNS = ["method", "gap", "users", "hr@10", "hr_error", "ndcg@10", "ndcg_error"]
COLUMNS += ["hr_over_popularity", "hr_over_popularity_error", "hr_over_ease", "hr_over_ease_error"]

Floats = NDArray[np.float64]


def main(data: str, cut: str = "return") -> None:
    if data == "synthetic":
        interactions = build_interactions(synthetic_sittings(), timed=True)
    else:
        interactions = load_interactions(Path(data)).interactions
    split, gaps = held_out_by(interactions, cut)
    train = split.train
    publish(
        f"gaps-{cut}-{Path(data).name.partition('.')[0].lower()}",
        COLUMNS,
        [*rows(split, gaps)],
        users=train.n_users,
        items=train.n_items,
        interactions=train.nnz,
    )


def held_out_by(interactions: Interactions, cut: str) -> tuple[Split, TimeArray]:
    """The split, and (n,) the gap in seconds before the test item of each user who has one."""
    gaps = interactions.gaps()
    if gaps is None:
        raise DataError("the data has no timestamps")
    if cut not in ("latest", "return"):
        raise ConfigError(f"the cut is latest or return, not {cut!r}")
    test = np.full(interactions.n_users, -1, dtype=np.int64)
    mask = np.ones(interactions.nnz, dtype=np.bool_)
    before = []
    for user, (start, end) in enumerate(
        zip(interactions.indptr[:-1], interactions.indptr[1:], strict=True)
    ):
        if end - start < MIN_ITEMS:
            continue
        at = end - 1
        returns = np.flatnonzero(gaps[start + 2 : end] > HOUR)
        if cut == "return" and len(returns):
            at = start + 2 + returns[-1]
        test[user] = interactions.items[at]
        mask[at:end] = False
        before.append(gaps[at])
    nothing = np.full_like(test, -1)
    return Split(interactions.select(mask), nothing, test), np.array(before)


def rows(split: Split, gaps: TimeArray) -> Iterator[list[Any]]:
    """The figures of each method for short and long gaps."""
    groups = {"<= 1 h": gaps <= HOUR, "> 1 h": gaps > HOUR, "> 1 day": gaps > DAY}
    hits: dict[str, Floats] = {}
    for name, ranks in methods(split, gaps):
        ranked, _ = full_ranks(ranks, split, split.test, seed=0)
        hits[name], ndcg = hit_of_each(ranked, K).astype(np.float64), ndcg_of_each(ranked, K)
        for group, mask in groups.items():
            if not mask.any():
                continue
            own, over = hits[name][mask], []
            for other in ("popularity", "EASE"):
                if other in hits:
                    over += with_error(own - hits[other][mask])
            missing = [None] * (4 - len(over))
            figures = [*with_error(own), *with_error(ndcg[mask]), *over, *missing]
            yield [name, group, len(own), *figures]


def methods(split: Split, gaps: TimeArray) -> Iterator[tuple[str, Ranks]]:
    """What ranks, each fitted to the training items; some of it also told of the gap."""
    train = split.train
    classes = np.zeros(train.n_users, dtype=np.int64)
    classes[split.test >= 0] = np.searchsorted(GAPS_SECONDS, gaps)
    yield "popularity", Popularity(train)
    yield "EASE", fit_ease(train, EASE_L2)
    yield "linear next-item", fit_linear_next_item(train)
    for recipe in auto_recipes(train.n_users, train.n_items, train.nnz):
        if recipe.name in RECIPES:
            model = train_model(recipe.model, recipe.training, split).model
            yield recipe.name, ModelRanks(model)
            learn_gaps(model, train, seed=0)
            if model.fitted_gaps:
                yield f"{recipe.name}, by gap", ModelRanks(model, classes)


def with_error(of_each: Floats) -> list[float]:
    """The mean and its standard error."""
    return [
        round(float(of_each.mean()), 5),
        round(float(of_each.std(ddof=1)) / len(of_each) ** 0.5 if len(of_each) > 1 else 0.0, 5),
    ]


if __name__ == "__main__":
    run_command(main)
