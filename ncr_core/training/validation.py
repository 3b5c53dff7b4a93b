"""The validation of a model in training: which users are measured, and how."""

from __future__ import annotations

import numpy as np
import torch

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.data.splits import Split
from ncr_core.evaluation.metrics import hit_ratio, ndcg
from ncr_core.evaluation.protocols import (
    CandidateSet,
    K,
    ModelRanks,
    full_ranks,
    of_random_users,
    sampled_candidates,
)
from ncr_core.models.base import PairwiseRanker
from ncr_core.train_config import TrainConfig

VALIDATION_USERS = 10_000
FULL_VALIDATION_USERS = 2_000
MAX_RANKED_CELLS, MIN_RANKED_USERS = 2**23, 100  # of towers: a microsecond an item or two
USERS_AT_ONCE = 1024


class ValidationPositions:
    """Measures a model in training on the validation items of some users."""

    def __init__(
        self,
        split: Split,
        config: TrainConfig,
        users: IntArray | None = None,
        *,
        by_rows: bool = False,
    ) -> None:
        """Draws the candidates, if the configuration has sampled ones.

        Args:
            split: The split that the model is trained on.
            config: The training configuration.
            users: (n,) the users to measure, ascending; None: all users.
            by_rows: Whether the model to measure has vectors of these users alone, in their order.
        """
        self._split = split
        self._users = np.arange(split.train.n_users) if users is None else users
        self._rows = np.arange(len(self._users)) if by_rows else self._users
        self._held_out: CandidateSet | None = None
        if config.validation == "sampled" and (split.validation >= 0).any():
            self._held_out = validation_candidates(split, config.seed)
        self._own = split
        if by_rows:
            validation, test = split.validation[self._users], split.test[self._users]
            self._own = Split(split.train.of_rows(self._users), validation, test)

    @property
    def train(self) -> Interactions:
        """The interactions of the users that the model to measure has vectors of."""
        return self._own.train

    def __call__(self, model: PairwiseRanker) -> IntArray:
        """(n,) positions from 1 of the validated users' items, and 0 of users not to measure."""
        model.eval()
        if self._held_out is not None:
            every = self._held_out
            row = np.full(self._split.train.n_users, -1)
            row[self._users] = self._rows
            rows = row[every.users]
            own = rows >= 0
            some = CandidateSet(rows[own], every.held_out[own], every.candidates[own])
            positions = np.zeros(len(rows), np.int64)
            positions[own] = 1 + candidate_positions(model, some)
            return positions
        ranks = ModelRanks(model)
        held_out = _ranked_items(ranks, self._split, FULL_VALIDATION_USERS)
        users = np.flatnonzero(held_out >= 0)
        own = np.isin(users, self._users)
        positions = np.zeros(len(users), np.int64)
        if own.any():
            theirs = np.full(self._own.train.n_users, -1)
            theirs[self._rows] = held_out[self._users]
            ranked, _ = full_ranks(ranks, self._own, theirs, seed=0)
            positions[own] = 1 + np.where(ranked < 0, K, ranked)
        return positions


def figures_of(positions: IntArray) -> tuple[float, float]:
    """NDCG@10 and HR@10 of (n,) positions from 1."""
    ranks = positions - 1
    return ndcg(ranks, K), hit_ratio(ranks, K)


def validation_figures(
    model: PairwiseRanker, split: Split, config: TrainConfig
) -> tuple[float, float]:
    """NDCG@10 and HR@10 of a model on the validation items, of which there are some."""
    return figures_of(ValidationPositions(split, config)(model))


def of_validated(split: Split, config: TrainConfig) -> Split:
    """The split of the users alone whose validation items choose the epoch; at least one user."""
    held_out = split.validation
    if config.validation == "full":
        held_out = of_random_users(held_out, FULL_VALIDATION_USERS)
    users = np.flatnonzero(held_out >= 0)
    users = users if len(users) else np.zeros(1, np.int64)
    return Split(split.train.of_rows(users), held_out[users], split.test[users])


def validation_ranks(
    model: ModelRanks, split: Split, most: int = FULL_VALIDATION_USERS
) -> tuple[IntArray, IntArray]:
    """Ranks of validation items among the whole catalogue.

    Args:
        model: the model to measure.
        split: the split that the model was trained on.
        most: the largest number of users. A smaller number takes some of the users of a larger
            number. Models whose comparisons are not transitive rank at most ``MAX_RANKED_CELLS``
            items in all, or ``MIN_RANKED_USERS`` users.

    Returns:
        (n,) the users, ascending, and (n,) ranks from 0, −1 outside the first ten.
    """
    held_out = _ranked_items(model, split, most)
    users = np.flatnonzero(held_out >= 0)
    return users, full_ranks(model, split, held_out, seed=0)[0]


def _ranked_items(model: ModelRanks, split: Split, most: int) -> IntArray:
    """(n_users,) the validation items of the users of `validation_ranks`, −1 for all others."""
    if not model.ranks_catalogue:
        most = min(most, max(MIN_RANKED_USERS, MAX_RANKED_CELLS // split.train.n_items))
    return of_random_users(split.validation, most)


def validation_candidates(split: Split, seed: int) -> CandidateSet:
    """Sampled candidates of the validation items, of at most ``VALIDATION_USERS`` users."""
    every = sampled_candidates(split, split.validation, seed)
    if len(every.users) <= VALIDATION_USERS:
        return every
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(every.users), generator=generator)[:VALIDATION_USERS].numpy()
    return CandidateSet(every.users[rows], every.held_out[rows], every.candidates[rows])


def candidate_positions(model: PairwiseRanker, held_out: CandidateSet) -> IntArray:
    """(n,) numbers of the candidates that beat each held-out item."""
    ranks = ModelRanks(model)
    blocks = (
        slice(start, start + USERS_AT_ONCE)
        for start in range(0, len(held_out.users), USERS_AT_ONCE)
    )
    places = [
        ranks.places(held_out.users[b], held_out.held_out[b], held_out.candidates[b])
        for b in blocks
    ]
    return np.concatenate(places) if places else np.zeros(0, np.int64)
