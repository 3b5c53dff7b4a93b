"""How good fold-in is: users beside a retraining with them, and items that training did not see."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ncr_core.checkpoint import load_checkpoint, save_checkpoint
from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.data.splits import Split, leave_latest_out
from ncr_core.evaluation.metrics import held_out_ranks, hit_ratio, ndcg
from ncr_core.evaluation.protocols import (
    NEGATIVES,
    CandidateSet,
    K,
    ModelRanks,
    Ranks,
    full_candidates,
    ranks_of,
    sampled_candidates,
)
from ncr_core.fold_in import Evidence, FoldIn, FoldInConfig, ItemFoldIn, extended
from ncr_core.manifest import read_manifest
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.ranking import ExactRanker
from ncr_core.recipes import WINDOWS, auto_recipes, recipe
from ncr_core.reproduction.baselines.scoring import Popularity
from ncr_core.reproduction.datasets import fingerprint
from ncr_core.training import TrainConfig, train_model

FREE = (ModelConfig(kind="neupr", factors=8), TrainConfig(device="cpu"))
HISTORY = (
    ModelConfig(kind="neupr", factors=8, users="history", windows=WINDOWS, item_bias=True),
    TrainConfig(
        loss="listwise",
        start="spectral",
        shared_negatives=512,
        epochs=6,
        learning_rate=5e-3,
        fine_tune_epochs=2,
        device="cpu",
    ),
)
"""The service's usual size with the service's settings, and with users made of their items."""
KINDS = {"free": FREE, "history": HISTORY}
_CHOSEN = recipe("next-item-nbpr").with_(device="cpu")
"""What the recipe `auto` chooses on MovieLens 1M."""
ITEM_KINDS = {**KINDS, _CHOSEN.name: (_CHOSEN.model, _CHOSEN.training)}


def trained(kind: str, name: str, split: Split, work: Path) -> tuple[PairwiseRanker, float]:
    """A frozen model and the seconds of one core that its training took.

    A model that ``work`` has of the same settings and data is not trained again.
    """
    shape, config = ITEM_KINDS[kind]
    folder = work / f"{kind}-{name}"
    made_of = {
        "model": shape.as_dict(),
        "config": config.as_dict(),
        "fingerprint": fingerprint(split),
    }
    made_of = json.loads(json.dumps(made_of))
    if folder.exists():
        manifest = read_manifest(folder)
        if manifest["training"]["made_of"] == made_of:
            return load_checkpoint(folder).model, manifest["training"]["seconds"]
        raise SystemExit(f"{folder} was made of other data or settings: remove it")
    started = time.process_time()
    model = train_model(shape, config, split).model
    seconds = time.process_time() - started
    save_checkpoint(
        folder,
        model,
        user_ids=split.train.user_ids,
        item_ids=split.train.item_ids,
        item_counts=split.train.item_counts(),
        training={"made_of": made_of, "seconds": seconds},
    )
    print(f"{folder.name}: {seconds:,.0f} s", flush=True)
    return model.requires_grad_(False), seconds


LEFT_OUT, RETURNING = 0.2, 0.1  # of the users
LATER = 5  # events of returning users that training did not see
SEEDS = (0, 1, 2)  # of the sampled candidates
EVENT_COUNTS = (1, 3, 5, 10)  # events
USER_COLUMNS = [
    "model", "users", "way", "HR@10", "NDCG@10", "full HR@10", "full NDCG@10", "of retrained",
]  # fmt: skip
CURVE_COLUMNS = ["model", "which events", "events", "HR@10", "NDCG@10", "popular HR@10", "NDCG@10 "]


@dataclass(frozen=True)
class UserSetting:
    """``full`` has everyone's events but the held-out ones; ``base`` lacks all of those of
    ``left_out`` users and the last ``LATER`` of ``returning`` ones, and has no rows for the former.

    The latest item is held out of everyone, the second latest, for validation, of the others.
    """

    full: Split
    base: Split
    left_out: IntArray
    returning: IntArray
    every: Interactions

    @classmethod
    def of(cls, every: Interactions) -> UserSetting:
        split = leave_latest_out(every)
        order = np.random.default_rng(0).permutation(np.flatnonzero(split.test >= 0))
        n = round(LEFT_OUT * len(order))
        m = n + round(RETURNING * len(order))
        left_out, returning = np.sort(order[:n]), np.sort(order[n:m])
        new = np.concatenate([left_out, returning])
        validation = split.validation.copy()
        validation[new] = -1
        ends = every.indptr[1:]
        mask = np.ones(every.nnz, dtype=np.bool_)
        mask[ends[split.test >= 0] - 1] = False
        mask[ends[validation >= 0] - 2] = False
        full = Split(every.select(mask), validation, split.test)
        for user in returning:
            mask[max(every.indptr[user], ends[user] - 1 - LATER) : ends[user]] = False
        known = np.setdiff1d(np.arange(every.n_users), left_out)
        base = Split(
            every.select(mask).reindex([every.user_ids[u] for u in known], every.item_ids),
            validation[known],
            split.test[known],
        )
        return cls(full, base, left_out, returning, every)

    @cached_property
    def base_row(self) -> IntArray:
        """(n_users,) the rows of ``base``, −1 for those who are left out."""
        rows = np.full(self.every.n_users, -1, dtype=np.int64)
        known = np.setdiff1d(np.arange(self.every.n_users), self.left_out)
        rows[known] = np.arange(len(known))
        return rows

    def held_out(self, users: IntArray) -> IntArray:
        """(n_users,) the test items of these users alone."""
        held = np.full(self.every.n_users, -1, dtype=np.int64)
        held[users] = self.full.test[users]
        return held

    def candidates(self, users: IntArray) -> list[CandidateSet]:
        held = self.held_out(users)
        return [sampled_candidates(self.full, held, seed) for seed in SEEDS]


class Vectors:
    """Users by given vectors, as the protocols take a model."""

    def __init__(self, model: PairwiseRanker, users: IntArray, vectors: torch.Tensor) -> None:
        self._ranker = ExactRanker(model)
        self._vectors = vectors
        self._row = {int(user): row for row, user in enumerate(users)}

    @torch.inference_mode()
    def rank(self, users: IntArray, candidates: IntArray, k: int) -> IntArray:
        rows = torch.tensor([self._row[int(user)] for user in users])
        vectors = self._vectors[rows]
        ranked: IntArray = self._ranker.rank(vectors, torch.from_numpy(candidates), k).numpy()
        return ranked


def measure(ranks: Ranks, sets: list[CandidateSet]) -> tuple[float, float]:
    """HR@10 and NDCG@10, the mean over the sets of candidates."""
    values = [ranks_of(ranks, candidates, K) for candidates in sets]
    means = [np.mean([metric(each, K) for each in values]) for metric in (hit_ratio, ndcg)]
    return float(means[0]), float(means[1])


def compare_users(every: Interactions, work: Path) -> tuple[list[list[Any]], list[list[Any]]]:
    """Rows of the comparison with a retraining, and of the curve by the number of events."""
    setting = UserSetting.of(every)
    rows: list[list[Any]] = []
    curve: list[list[Any]] = []
    for kind in KINDS:
        base, _ = trained(kind, "base", setting.base, work)
        full, _ = trained(kind, "full", setting.full, work)
        rows += _beside_retraining(kind, setting, base, full)
        curve += _by_events(kind, setting, FoldIn(base))
    return rows, curve


def _beside_retraining(
    kind: str, setting: UserSetting, base: PairwiseRanker, full: PairwiseRanker
) -> list[list[Any]]:
    rows: list[list[Any]] = []
    popular = Popularity(setting.base.train)
    ways: dict[str, FoldIn] = {"fold-in": FoldIn(base)}
    if base.config.users == "free":
        ways["fold-in, all events alike"] = FoldIn(base, FoldInConfig(half_life=0.0))
    for name, users in (("left out", setting.left_out), ("returning", setting.returning)):
        sets = setting.candidates(users)
        whole = list(full_candidates(setting.full, setting.held_out(users), 0))
        base_rows = setting.base_row[users]
        before = base.user_vectors(torch.from_numpy(np.maximum(base_rows, 0)))
        known = torch.where(
            torch.from_numpy(base_rows >= 0).unsqueeze(1), before, ways["fold-in"].newcomer
        )
        evidence = [Evidence(setting.full.train.items_of(user)) for user in users]
        rankings: dict[str, Ranks] = {"retrained": ModelRanks(full), "popularity": popular}
        if name == "returning":
            rankings["vector of before"] = Vectors(base, users, before)
        for way, fold_in in ways.items():
            rankings[way] = Vectors(base, users, fold_in(evidence, known))
        best = 0.0
        for way, ranks in rankings.items():
            sampled = measure(ranks, sets)
            in_full = [ranks_of(ranks, block, K) for block in whole]
            every = np.concatenate(in_full)
            best = best or sampled[0]
            rows.append(
                [kind, name, way, *sampled, hit_ratio(every, K), ndcg(every, K), sampled[0] / best]
            )
            print(rows[-1], flush=True)
    return rows


def _by_events(kind: str, setting: UserSetting, fold_in: FoldIn) -> list[list[Any]]:
    """After so many events: the latest before the held-out one, as of a user who did no more; and
    the first, where the next one is asked for, or, as of someone who never told more, the held-out
    one, 150 events later."""
    popular = Popularity(setting.base.train)
    rows: list[list[Any]] = []
    for which in ("latest", "first, for the next one", "first, for the latest one"):
        for count in EVENT_COUNTS:
            histories = {int(u): setting.full.train.items_of(u) for u in setting.left_out}
            held_out = setting.held_out(setting.left_out)
            if which == "first, for the next one":
                held_out = np.full_like(held_out, -1)
                for user in histories:
                    whole = setting.every.items_of(user)
                    if len(whole) > count:
                        held_out[user] = whole[count]
            sets = [sampled_candidates(setting.full, held_out, seed) for seed in SEEDS]
            users = sets[0].users
            part = slice(-count, None) if which == "latest" else slice(count)
            evidence = [Evidence(histories[int(user)][part]) for user in users]
            ranks = Vectors(fold_in.model, users, fold_in(evidence))
            rows.append([kind, which, count, *measure(ranks, sets), *measure(popular, sets)])
            print(rows[-1], flush=True)
    return rows


NEWCOMER_COLUMNS = [
    "model", "first events", "HR@10", "NDCG@10", "full HR@10", "full NDCG@10", "users",
]  # fmt: skip


def compare_newcomers(every: Interactions) -> list[list[Any]]:
    """Rows of the popularity list, the free model and what `auto` chooses for sequences.

    A fifth of the users is left out of training. After their first events the next one is asked
    for, among sampled items and among the whole catalogue.
    """
    setting = UserSetting.of(every)
    base = setting.base
    closed = auto_recipes(base.train.n_users, base.train.n_items, base.train.nnz)[1]
    chosen = closed.with_(device="cpu")
    models = {"free": FREE, chosen.name: (chosen.model, chosen.training)}
    fold_ins: dict[str, FoldIn] = {}
    for name, (shape, config) in models.items():
        started = time.perf_counter()
        fold_ins[name] = FoldIn(train_model(shape, config, base).model.requires_grad_(False))
        print(f"{name}: {time.perf_counter() - started:,.0f} s", flush=True)
    rows: list[list[Any]] = []
    for count in EVENT_COUNTS:
        held_out = np.full(every.n_users, -1, dtype=np.int64)
        for user in setting.left_out:
            if len(items := every.items_of(user)) > count:
                held_out[user] = items[count]
        users = np.flatnonzero(held_out >= 0)
        sets = [sampled_candidates(setting.full, held_out, seed) for seed in SEEDS]
        evidence = [Evidence(every.items_of(user)[:count]) for user in users]
        rankings: dict[str, Ranks] = {"popularity": Popularity(base.train)}
        for name, fold_in in fold_ins.items():
            rankings[name] = Vectors(fold_in.model, users, fold_in(evidence))
        # What the user does later is no rival of the next item.
        whole = list(full_candidates(setting.full, held_out, 0))
        for name, ranks in rankings.items():
            full = np.concatenate([ranks_of(ranks, block, K) for block in whole])
            figures = *measure(ranks, sets), hit_ratio(full, K), ndcg(full, K)
            rows.append([name, count, *figures, len(users)])
            print(rows[-1], flush=True)
    return rows


LEFT_OUT_ITEMS, MIN_USERS = 100, 60  # that are left out, and of how many users each, at least
TAKER_COUNTS = (5, 20)  # users that an item is fitted to
MAX_ASKED = 100  # of its other users, and as many who never took it, at most
ITEM_COLUMNS = [
    "model", "users of the item", "users' vectors", "found by others HR@10",
    "shown to strangers", "of",
]  # fmt: skip


@dataclass(frozen=True)
class ItemSetting:
    """Items that are left out of training, and who is asked for them.

    ``items`` (m,) are rows of ``every``, the last m of them; ``takers[m]`` who took an item up, in
    random order, ``askers[m]`` whose interaction with it is held out, ``strangers[m]`` who had
    nothing to do with it.
    """

    every: Interactions
    items: IntArray
    takers: list[IntArray]
    askers: list[IntArray]
    strangers: list[IntArray]

    @classmethod
    def of(cls, interactions: Interactions) -> ItemSetting:
        rng = np.random.default_rng(0)
        enough = np.flatnonzero(interactions.item_counts() >= MIN_USERS)
        chosen = np.sort(rng.permutation(enough)[:LEFT_OUT_ITEMS])
        rest = np.setdiff1d(np.arange(interactions.n_items), chosen)
        names = [interactions.item_ids[i] for i in np.concatenate([rest, chosen])]
        every = interactions.reindex(interactions.user_ids, names)
        items = np.arange(len(rest), len(names))
        takers, askers, strangers = [], [], []
        for item in items:
            users = rng.permutation(every.users[every.items == item])
            takers.append(users[: max(TAKER_COUNTS)])
            askers.append(users[max(TAKER_COUNTS) :][:MAX_ASKED])
            others = np.setdiff1d(np.arange(every.n_users), users)
            strangers.append(rng.permutation(others)[:MAX_ASKED])
        return cls(every, items, takers, askers, strangers)

    def split(self) -> Split:
        """Without the left-out items; everyone's latest of the others is for validation."""
        every, first = self.every, int(self.items[0])
        mask = every.items < first
        latest = np.full(every.n_users, -1, dtype=np.int64)
        np.maximum.at(latest, every.users[mask], np.flatnonzero(mask))
        latest = latest[latest >= 0]
        validation = np.full(every.n_users, -1, dtype=np.int64)
        validation[every.users[latest]] = every.items[latest]
        mask[latest] = False
        train = every.select(mask).reindex(every.user_ids, every.item_ids[:first])
        return Split(train, validation, np.full_like(validation, -1))

    def candidates(self, users: list[IntArray]) -> list[CandidateSet]:
        """Each left-out item for each of its ``users``, among items that are not left out and that
        the user had nothing to do with, at a random place."""
        rng, first = np.random.default_rng(1), int(self.items[0])
        sets = []
        for item, own in zip(self.items, users, strict=True):
            rows = np.empty((len(own), NEGATIVES + 1), dtype=np.int64)
            for row, user in zip(rows, own, strict=True):
                unseen = np.setdiff1d(np.arange(first), self.every.items_of(user))
                row[:] = rng.permutation(np.append(rng.permutation(unseen)[:NEGATIVES], item))
            sets.append(CandidateSet(own, np.full(len(own), item), rows))
        return sets

    def histories(self, users: list[IntArray]) -> list[list[Evidence]]:
        """What each left-out item's ``users`` had done before they took it up.

        Of strangers, what they had done before one of their items, which is drawn. The left-out
        items are not in it.
        """
        rng, first = np.random.default_rng(2), int(self.items[0])
        histories = []
        for item, own in zip(self.items, users, strict=True):
            evidence = []
            for user in own:
                items = self.every.items_of(user)
                at = np.flatnonzero(items == item)
                before = items[: at[0] if len(at) else rng.integers(len(items))]
                evidence.append(Evidence(before[before < first]))
            histories.append(evidence)
        return histories


def compare_items(interactions: Interactions, work: Path) -> list[list[Any]]:
    """Rows: how often an item is in the top 10 of 101 for those of its users that were held out,
    and for users who had nothing to do with it, of whom a tenth would meet it by chance.

    None of those who are asked is among the users that the item is fitted to. Of users' vectors as
    of `before`, each is of what the user had done before they took the item up, which is what a
    service has when it decides whether to show them the item. An item is fitted to free users by
    their trained vectors, as a service does; only pooled ones can be had as of before. The vectors
    `trained` are of all that a user did, before and after. To pooled ones the events after the item
    count most, and who took it up is no longer where they were. They are what was measured at
    first, and tell how much of a figure is due to the measure. The model does not know the item:
    no vector is pooled from it. The network learned from all other events, also from later ones.
    """
    setting = ItemSetting.of(interactions)
    users = {"takers": setting.takers, "askers": setting.askers, "strangers": setting.strangers}
    histories = {name: setting.histories(of_items) for name, of_items in users.items()}
    sets = {name: setting.candidates(users[name]) for name in ("askers", "strangers")}
    n_asked = sum(len(each.users) for each in sets["askers"])
    rows: list[list[Any]] = []
    for kind in ITEM_KINDS:
        base, _ = trained(kind, "items", setting.split(), work)
        as_trained = {name: _trained_vectors(base, of_items) for name, of_items in users.items()}
        fold_in, item_fold_in = FoldIn(base), ItemFoldIn(base)
        before = {name: [fold_in(each) for each in own] for name, own in histories.items()}
        if base.config.users == "free":
            before["takers"] = as_trained["takers"]
        for count in TAKER_COUNTS:
            for measure_of, vectors in (("before", before), ("trained", as_trained)):
                fitted = item_fold_in([own[:count] for own in vectors["takers"]])
                rates = _rates(extended(base, fitted), vectors, sets)
                rows.append([kind, count, measure_of, *rates, n_asked])
                print(rows[-1], flush=True)
    return rows


def _trained_vectors(model: PairwiseRanker, users: list[IntArray]) -> list[torch.Tensor]:
    """For each item the vectors (n, E) of its users."""
    return [model.user_vectors(torch.from_numpy(own)) for own in users]


@torch.inference_mode()
def _rates(
    model: PairwiseRanker,
    vectors: dict[str, list[torch.Tensor]],
    sets: dict[str, list[CandidateSet]],
) -> list[float]:
    """HR@10 of each kind of users, the mean over the items."""
    ranker = ExactRanker(model)
    rates = []
    for name, of_users in sets.items():
        ratios = []
        for own, each in zip(vectors[name], of_users, strict=True):
            ranked = ranker.rank(own, torch.from_numpy(each.candidates), K).numpy()
            ratios.append(hit_ratio(held_out_ranks(ranked, each.held_out), K))
        rates.append(float(np.mean(ratios)))
    return rates
