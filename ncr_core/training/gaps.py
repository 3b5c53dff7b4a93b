"""The effect of the time since a user's last interaction, fitted to the breaks in training.

In the middle of a sitting the next item is similar to the last items. After a break the next item
is less similar and more often popular. Two numbers for each gap class then give the scores of the
model less weight and popularity more weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ncr_core.data.array_storage import table_storage
from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.evaluation.metrics import K
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.models.user_embeddings import GAPS_SECONDS, PooledUsers
from ncr_core.ranking.table_blocks import BLOCK_ITEMS, model_of_items
from ncr_core.training.initializers import next_item_start

MIN_RETURNS, MAX_RETURNS = 200, 2_000  # of a class that is fitted
MAX_HELD_SHARE = 0.05  # of the interactions, for each class
MAX_ITEMS = 4_096  # that a returning user's next item is compared with; of more a sample
SEEN = -1e9  # the logit of an item that the user has had
POPULARITY_RIDGE = 1e-3
FIT_STEPS = 100
ROWS_AT_ONCE = 256  # breaks whose logits are in memory at once
MAX_FACTORS = 64  # of the start that breaks are predicted with
BLOCK = 2**20  # interactions whose gaps are in memory at once


@torch.no_grad()
def learn_gaps(model: PairwiseRanker, train: Interactions, seed: int) -> None:
    """Fits the ranking of a model with ``by_gap`` for users who come back after a break.

    A next-item start predicts the items after the breaks from the items before them. The start is
    made without the steps over these breaks. The model itself has learned the items after the
    breaks, so the fit would trust its scores too much.

    Half of the breaks give the weights of the scores and of the logarithm of popularity. If the
    weights improve NDCG@10 on the other half, all breaks give the weights. Popularity then becomes
    a vector of the model.

    Without times the model does not change. A class with fewer than ``MIN_RETURNS`` breaks gets
    scale 1 and offset 0.

    Args:
        model: a model that was trained on ``train``. It gets a new ``gap_scale``, ``gap_offset``
            and ``latest_time``.
        train: the interactions with their times.
        seed: draws the breaks, and the items to compare with.
    """
    if not model.config.by_gap or train.times is None:
        return
    users = model.user_parts()[0]
    assert isinstance(users, PooledUsers)  # noqa: S101 - `by_gap` says so
    users.gap_scale.fill_(1.0)
    users.gap_offset.zero_()
    rng = np.random.default_rng(seed)
    some = train.times  # of which the quantile makes a copy
    if train.nnz > BLOCK:
        some = some[np.sort(rng.integers(train.nnz, size=BLOCK))]
    # A few events with a wrong time, or after the end of an archive, do not move it.
    users.latest_time.fill_(float(np.quantile(some, 0.99)) if train.nnz else 0.0)
    returns = {k: at for k, at in _breaks(train, rng).items() if len(at) >= MIN_RETURNS}
    if not returns:
        return
    start = _start_within_breaks(model.config, train, np.concatenate([*returns.values()]), seed)
    counts = torch.from_numpy(train.item_counts()).float()
    popular = popularity_vector(item_vectors(model), counts.to(model.device))
    for number, at in returns.items():
        breaks = _break_scores(start, train, at, counts, rng)
        half = np.arange(len(at)) % 2 == 0
        if breaks.ndcg(breaks.fit(half), ~half) > breaks.ndcg((1.0, 0.0), ~half):
            by_score, by_popularity = breaks.fit(np.ones_like(half))
            offset = by_popularity * popular
            if math.isfinite(by_score) and bool(offset.isfinite().all()):
                users.gap_scale[number] = max(0.0, by_score)
                users.gap_offset[number] = offset


def _breaks(train: Interactions, rng: np.random.Generator) -> dict[int, IntArray]:
    """For each gap class above 0, the places of the interactions after such a gap."""
    numbers = range(1, len(GAPS_SECONDS) + 1)
    counts = np.zeros(len(GAPS_SECONDS) + 1, dtype=np.int64)
    for _, classes in _gap_classes(train):
        counts += np.bincount(classes, minlength=len(counts))
    most = min(MAX_RETURNS, int(MAX_HELD_SHARE * train.nnz))
    wanted = {
        k: np.sort(rng.choice(counts[k], min(most, counts[k]), replace=False)) for k in numbers
    }
    returns = {k: np.empty(0, dtype=np.int64) for k in numbers}
    passed = np.zeros_like(counts)
    for first, classes in _gap_classes(train):
        for k in numbers:
            places = first + np.flatnonzero(classes == k)
            own = wanted[k] - passed[k]
            picked = places[own[(own >= 0) & (own < len(places))]]
            returns[k] = np.concatenate([returns[k], picked])
            passed[k] += len(places)
    return returns


def _gap_classes(train: Interactions) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """The place of the first interaction of each block, and the gap class before each of the block.

    The class of a user's first interaction is 0. The blocks take turns in memory.
    """
    times = train.times
    assert times is not None  # noqa: S101 - the caller looked
    firsts = train.indptr[:-1][np.diff(train.indptr) > 0]
    for first in range(0, train.nnz, BLOCK):
        part = times[first : first + BLOCK]
        before = times[max(first - 1, 0)]
        classes = np.searchsorted(GAPS_SECONDS, np.diff(part, prepend=before))
        begin, end = np.searchsorted(firsts, [first, first + len(part)])
        classes[firsts[begin:end] - first] = 0
        yield first, classes


def _start_within_breaks(
    config: ModelConfig, train: Interactions, at: IntArray, seed: int
) -> PairwiseRanker:
    """The next-item start on sequences that end where a break begins."""
    indptr = np.union1d(train.indptr, at)
    sequences = Interactions(indptr, train.items, [""] * (len(indptr) - 1), train.item_ids)
    factors = min(config.factors, MAX_FACTORS)
    config = replace(config, factors=factors, start_factors=0, attention_layers=0)
    with torch.random.fork_rng(devices=[]):
        model = build_model(config, 1, train.n_items)  # only lists of items will be asked for
    next_item_start(model, sequences, seed)
    return model


def _break_scores(
    start: PairwiseRanker,
    train: Interactions,
    at: IntArray,
    counts: Tensor,
    rng: np.random.Generator,
) -> _BreakScores:
    """The start's scores of the items at these places and of other items, by the items before."""
    targets = train.items[at]
    compared = np.union1d(targets, rng.permutation(train.n_items)[:MAX_ITEMS])
    column = np.full(train.n_items, -1, dtype=np.int64)
    column[compared] = np.arange(len(compared))
    first = train.indptr[np.searchsorted(train.indptr, at, "right") - 1]
    before = [train.items[begin:end] for begin, end in zip(first, at, strict=True)]
    seen = np.zeros((len(at), len(compared)), dtype=np.bool_)
    for row, items in zip(seen, before, strict=True):
        columns = column[items]
        row[columns[columns >= 0]] = True
    vectors = start.pooled_vectors([torch.from_numpy(items) for items in before])
    return _BreakScores(
        vectors @ item_vectors(start)[compared].T,
        torch.log1p(counts[compared]),
        torch.from_numpy(seen),
        torch.from_numpy(column[targets]),
    )


@dataclass(frozen=True)
class _BreakScores:
    """Scores of m items after n breaks, and the items that the users took up."""

    scores: Tensor
    """(n, m) scores of the start."""
    popularity: Tensor
    """(m,) logarithms of 1 + popularity."""
    seen: Tensor
    """(n, m) whether the user has had the item."""
    targets: Tensor
    """(n,) the column of the item that the user took up."""

    def fit(self, rows: npt.NDArray[np.bool_]) -> tuple[float, float]:
        """The weights of scores and popularity that make the targets of these rows likeliest."""
        every = torch.from_numpy(np.flatnonzero(rows))

        def loss_of(part: Tensor) -> Callable[[Tensor], Tensor]:
            def loss(weights: Tensor) -> Tensor:
                logits = self._logits(weights[0], weights[1], part)
                return cross_entropy(logits, self.targets[part], reduction="sum") / len(every)

            return loss

        losses = [loss_of(part) for part in torch.split(every, ROWS_AT_ONCE)]
        by_score, by_popularity = _minimum(losses, torch.tensor([1.0, 0.0])).tolist()
        return by_score, by_popularity

    def ndcg(self, weights: tuple[float, float], rows: npt.NDArray[np.bool_]) -> float:
        """NDCG@10 of the targets of these rows."""
        gains = []
        for part in torch.split(torch.from_numpy(np.flatnonzero(rows)), ROWS_AT_ONCE):
            logits = self._logits(*weights, part)
            own = logits.gather(1, self.targets[part].unsqueeze(1))
            places = (~(logits < own)).sum(dim=1) - 1  # ties and what is no number are above
            gains.append(torch.where(places < K, 1.0 / torch.log2(places + 2.0), 0.0))
        return float(torch.cat(gains).mean())

    def _logits(
        self, by_score: Tensor | float, by_popularity: Tensor | float, part: Tensor
    ) -> Tensor:
        logits = by_score * self.scores[part] + by_popularity * self.popularity
        return logits.masked_fill(self.seen[part], SEEN)


def item_vectors(model: PairwiseRanker) -> Tensor:
    """(n_items, d) vectors whose product with a user's vector is the score without the bias."""
    storage = table_storage()
    if not storage.in_files or model.device.type != "cpu":
        return _item_vectors(model)
    size = _item_vectors(model_of_items(model, slice(0, 1))).shape[1]
    vectors = storage.zeros((model.n_items, size), np.float32)
    for start in range(0, model.n_items, BLOCK_ITEMS):
        rows = slice(start, start + BLOCK_ITEMS)
        vectors[rows] = _item_vectors(model_of_items(model, rows)).numpy()
    return torch.from_numpy(vectors)


def _item_vectors(model: PairwiseRanker) -> Tensor:
    table = model.tables().linear
    assert table is not None  # noqa: S101 - `by_gap` is for nbpr
    return (table.items / 2).float()


def popularity_vector(items: Tensor, counts: Tensor) -> Tensor:
    """(d,) the vector whose softmax over (n_items, d) is nearest to the items' popularity."""
    shares = counts / counts.sum()
    size = items.norm(dim=1).mean()

    def loss(vector: Tensor) -> Tensor:
        ridge = POPULARITY_RIDGE * (vector * size).square().mean()
        total: Tensor = ridge - shares @ torch.log_softmax(items @ vector, dim=0)
        return total

    return _minimum([loss], torch.zeros_like(items[0]))


def _minimum(losses: Sequence[Callable[[Tensor], Tensor]], start: Tensor) -> Tensor:
    """The point where the sum of smooth losses is least, by L-BFGS; one loss at a time."""
    point = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([point], max_iter=FIT_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for loss in losses:
            with torch.enable_grad():
                value = loss(point)
            value.backward()  # type: ignore[no-untyped-call]
            total = total.to(value.device) + value.detach()
        return total

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return point.detach()
