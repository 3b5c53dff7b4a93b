"""Users whom training did not see: fold-in beside a retraining with them, and popularity."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fold_in.trained import KINDS, trained
from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.data.splits import Split, leave_latest_out
from ncr_core.evaluation.metrics import hit_ratio, ndcg
from ncr_core.evaluation.protocols import (
    CandidateSet,
    K,
    ModelRanks,
    Ranks,
    full_candidates,
    ranks_of,
    sampled_candidates,
)
from ncr_core.fold_in import Evidence, FoldIn, FoldInConfig
from ncr_core.models import PairwiseRanker
from ncr_core.models.baselines.popularity import Popularity
from ncr_core.ranking import ExactRanker

LEFT_OUT, RETURNING = 0.2, 0.1  # of the users
LATER = 5  # events of returning users that training did not see
SEEDS = (0, 1, 2)  # of the sampled candidates
COUNTS = (1, 3, 5, 10)  # events
HEAD = ["model", "users", "way", "HR@10", "NDCG@10", "full HR@10", "full NDCG@10", "of retrained"]
CURVE_HEAD = ["model", "which events", "events", "HR@10", "NDCG@10", "popular HR@10", "NDCG@10 "]


@dataclass(frozen=True)
class Setting:
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
    def of(cls, every: Interactions) -> Setting:
        split = leave_latest_out(every)
        order = np.random.default_rng(0).permutation(np.flatnonzero(split.test >= 0))
        n = round(LEFT_OUT * len(order))
        m = n + round(RETURNING * len(order))
        left_out, returning = np.sort(order[:n]), np.sort(order[n:m])
        new = np.concatenate([left_out, returning])
        validation = split.validation.copy()
        validation[new] = -1
        ends = every.indptr[1:]
        kept = np.ones(every.nnz, dtype=np.bool_)
        kept[ends[split.test >= 0] - 1] = False
        kept[ends[validation >= 0] - 2] = False
        full = Split(every.select(kept), validation, split.test)
        for user in returning:
            kept[max(every.indptr[user], ends[user] - 1 - LATER) : ends[user]] = False
        known = np.setdiff1d(np.arange(every.n_users), left_out)
        base = Split(
            every.select(kept).reindex([every.user_ids[u] for u in known], every.item_ids),
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
        found = self._ranker.rank(self._vectors[rows], torch.from_numpy(candidates), k)
        result: IntArray = found.numpy()
        return result


def measure(ranks: Ranks, sets: list[CandidateSet]) -> tuple[float, float]:
    """HR@10 and NDCG@10, the mean over the sets of candidates."""
    found = [ranks_of(ranks, candidates, K) for candidates in sets]
    hr = float(np.mean([hit_ratio(each, K) for each in found]))
    return hr, float(np.mean([ndcg(each, K) for each in found]))


def quality(every: Interactions, work: Path) -> tuple[list[list[Any]], list[list[Any]]]:
    """Rows of the comparison with a retraining, and of the curve by the number of events."""
    setting = Setting.of(every)
    rows: list[list[Any]] = []
    curve: list[list[Any]] = []
    for kind in KINDS:
        base, _ = trained(kind, "base", setting.base, work)
        full, _ = trained(kind, "full", setting.full, work)
        rows += _beside_retraining(kind, setting, base, full)
        curve += _by_events(kind, setting, FoldIn(base))
    return rows, curve


def _beside_retraining(
    kind: str, setting: Setting, base: PairwiseRanker, full: PairwiseRanker
) -> list[list[Any]]:
    rows: list[list[Any]] = []
    popular = Popularity(setting.base.train)
    ways: dict[str, FoldIn] = {"fold-in": FoldIn(base)}
    if base.config.users == "free":
        ways["fold-in, all events alike"] = FoldIn(base, FoldInConfig(half_life=0.0))
    for name, users in (("left out", setting.left_out), ("returning", setting.returning)):
        sets = setting.candidates(users)
        whole = list(full_candidates(setting.full, setting.held_out(users), 0))
        at = setting.base_row[users]
        before = base.user_vectors(torch.from_numpy(np.maximum(at, 0)))
        known = torch.where(
            torch.from_numpy(at >= 0).unsqueeze(1), before, ways["fold-in"].newcomer
        )
        evidence = [Evidence(setting.full.train.items_of(user)) for user in users]
        asked: dict[str, Ranks] = {"retrained": ModelRanks(full), "popularity": popular}
        if name == "returning":
            asked["vector of before"] = Vectors(base, users, before)
        for way, fold_in in ways.items():
            asked[way] = Vectors(base, users, fold_in(evidence, known))
        best = 0.0
        for way, ranks in asked.items():
            sampled = measure(ranks, sets)
            in_full = [ranks_of(ranks, block, K) for block in whole]
            every = np.concatenate(in_full)
            best = best or sampled[0]
            rows.append(
                [kind, name, way, *sampled, hit_ratio(every, K), ndcg(every, K), sampled[0] / best]
            )
            print(rows[-1], flush=True)
    return rows


def _by_events(kind: str, setting: Setting, fold_in: FoldIn) -> list[list[Any]]:
    """After so many events: the latest before the held-out one, as of a user who did no more; and
    the first, where the next one is asked for, or, as of someone who never told more, the held-out
    one, 150 events later."""
    popular = Popularity(setting.base.train)
    rows: list[list[Any]] = []
    for which in ("latest", "first, for the next one", "first, for the latest one"):
        for count in COUNTS:
            own = {int(u): setting.full.train.items_of(u) for u in setting.left_out}
            held = setting.held_out(setting.left_out)
            if which == "first, for the next one":
                held = np.full_like(held, -1)
                for user in own:
                    whole = setting.every.items_of(user)
                    if len(whole) > count:
                        held[user] = whole[count]
            sets = [sampled_candidates(setting.full, held, seed) for seed in SEEDS]
            users = sets[0].users
            part = slice(-count, None) if which == "latest" else slice(count)
            evidence = [Evidence(own[int(user)][part]) for user in users]
            ranks = Vectors(fold_in.model, users, fold_in(evidence))
            rows.append([kind, which, count, *measure(ranks, sets), *measure(popular, sets)])
            print(rows[-1], flush=True)
    return rows
