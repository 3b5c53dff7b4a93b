"""The validation of a model in training: which users are measured, and how."""

from __future__ import annotations

import numpy as np
import torch

from ncr_core.data.interactions import IntArray
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
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.train_config import TrainConfig
from ncr_core.training.ranks import ONE_RANK, Ranks

VALIDATION_USERS = 10_000
FULL_VALIDATION_USERS = 2_000
MAX_RANKED_CELLS, MIN_RANKED_USERS = 2**23, 100  # of towers: a microsecond an item or two
USERS_AT_ONCE = 1024


class ValidationPositions:
    """Measures a model in training on the validation items of all users, or of a rank's share."""

    def __init__(
        self,
        model: PairwiseRanker,
        split: Split,
        config: TrainConfig,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """Chooses the users, and draws the candidates if the configuration has sampled ones.

        Args:
            model: A model of the same configuration as those to measure.
            split: The split that the model is trained on.
            config: The training configuration.
            ranks: The ranks that share out the users.
        """
        candidates = None
        if config.validation == "sampled":
            candidates = validation_candidates(split, config.seed)
            users, held_out = candidates.users, split.validation
        else:
            held_out = _ranked_items(is_product(model.config), split, FULL_VALIDATION_USERS)
            users = np.flatnonzero(held_out >= 0)
        self.n_users = len(users)
        """The number of users that all ranks measure."""
        self._own = ranks.measured(self.n_users)
        if ranks.size > 1:
            users = users[self._own]
            rows = users
            if model.config.users == "history":
                # Of several ranks, nobody reads the vectors of other users.
                split = Split(
                    split.train.of_rows(users), split.validation[users], split.test[users]
                )
                rows = np.arange(len(users))
            some = np.full(split.train.n_users, -1)
            some[rows] = split.validation[rows]
            held_out = some
            if candidates is not None:
                candidates = CandidateSet(
                    rows, candidates.held_out[self._own], candidates.candidates[self._own]
                )
        self.train = split.train
        """The interactions of the users whose vectors a model to measure has."""
        self._candidates = candidates
        self._split, self._held_out = split, held_out

    def __call__(self, model: PairwiseRanker) -> IntArray:
        """(n,) positions from 1 of the items of all ``n_users``, and 0 of users of other ranks."""
        model.eval()
        positions = np.zeros(self.n_users, np.int64)
        if not len(self._own):
            return positions
        if self._candidates is not None:
            positions[self._own] = 1 + candidates_ahead(model, self._candidates)
        else:
            ranked, _ = full_ranks(ModelRanks(model), self._split, self._held_out, seed=0)
            positions[self._own] = 1 + np.where(ranked < 0, K, ranked)
        return positions


def figures_of(positions: IntArray) -> tuple[float, float]:
    """NDCG@10 and HR@10 of (n,) positions from 1."""
    ranks = positions - 1
    return ndcg(ranks, K), hit_ratio(ranks, K)


def validation_figures(
    model: PairwiseRanker, split: Split, config: TrainConfig
) -> tuple[float, float]:
    """NDCG@10 and HR@10 of a model on the validation items, of which there are some."""
    return figures_of(ValidationPositions(model, split, config)(model))


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
    held_out = _ranked_items(model.ranks_catalogue, split, most)
    users = np.flatnonzero(held_out >= 0)
    return users, full_ranks(model, split, held_out, seed=0)[0]


def validated_users(split: Split, config: ModelConfig | None = None) -> int:
    """How many users a training measures: of sampled items, or of a model over the catalogue."""
    if config is None:
        return min(int((split.validation >= 0).sum()), VALIDATION_USERS)
    held_out = _ranked_items(is_product(config), split, FULL_VALIDATION_USERS)
    return int((held_out >= 0).sum())


def is_product(config: ModelConfig) -> bool:
    """Whether models of a configuration are products, whose whole catalogue is ranked at once."""
    with torch.random.fork_rng(devices=[]):
        return ModelRanks(build_model(config, 1, 1)).ranks_catalogue


def _ranked_items(ranks_catalogue: bool, split: Split, most: int) -> IntArray:
    """(n_users,) the validation items of the users of `validation_ranks`, −1 for all others."""
    if not ranks_catalogue:
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


def candidates_ahead(model: PairwiseRanker, held_out: CandidateSet) -> IntArray:
    """(n,) numbers of the candidates that beat each held-out item, of at least one user."""
    model.eval()
    ranks = ModelRanks(model)
    blocks = (
        slice(start, start + USERS_AT_ONCE)
        for start in range(0, len(held_out.users), USERS_AT_ONCE)
    )
    return np.concatenate(
        [
            ranks.places(held_out.users[b], held_out.held_out[b], held_out.candidates[b])
            for b in blocks
        ]
    )
