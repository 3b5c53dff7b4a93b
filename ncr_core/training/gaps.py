"""What the time since a user's last interaction changes, fitted to the breaks in training.

In the middle of a sitting the next item is much like the last ones. After a break it is less so,
and more often a popular one: the scores of the model count less and popularity more, by two numbers
for each class of gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.evaluation.metrics import K
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.models.user_embeddings import GAPS_SECONDS, PooledUsers
from ncr_core.training.initializers import next_item_start

MIN_RETURNS, MAX_RETURNS = 200, 2_000  # of a class that is fitted
MAX_HELD_SHARE = 0.05  # of the interactions, for each class
MAX_ITEMS = 4_096  # that a returning user's next item is compared with; of more a sample
SEEN = -1e9  # the logit of an item that the user has had
POPULARITY_RIDGE = 1e-3
FIT_STEPS = 100
MAX_FACTORS = 64  # of the start that breaks are predicted with


@torch.no_grad()
def learn_gaps(model: PairwiseRanker, train: Interactions, seed: int) -> None:
    """Fits how a model with ``by_gap`` ranks for users who come back after a break.

    Items that were taken up after a break are predicted from those before it by the next-item start
    of such a model, made without what leads over these breaks: the model itself has learned what
    came next, and would be trusted too much. Half of the breaks give how much the scores and the
    logarithm of popularity count. Where that makes NDCG@10 of the other half better, all breaks
    give the two numbers, and popularity becomes a vector of the model's own.

    Nothing happens without times, and for classes of fewer than ``MIN_RETURNS`` breaks.

    Args:
        model: it was trained on ``train``, and gets new ``gap_scale`` and ``gap_offset``.
        train: the interactions with their times.
        seed: draws the breaks, and the items that they are compared on.
    """
    if not model.config.by_gap or train.times is None:
        return
    users = model.user_parts()[0]
    assert isinstance(users, PooledUsers)  # noqa: S101 - `by_gap` says so
    users.gap_scale.fill_(1.0)
    users.gap_offset.zero_()
    # A few events with a wrong time, or after the end of an archive, do not move it.
    users.latest_time.fill_(float(np.quantile(train.times, 0.99)) if train.nnz else 0.0)
    rng = np.random.default_rng(seed)
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
    """For each gap class above 0 the places of items that were taken up after such a gap."""
    gaps = train.gaps()
    assert gaps is not None  # noqa: S101 - the caller looked
    classes = np.searchsorted(GAPS_SECONDS, gaps)
    most = min(MAX_RETURNS, int(MAX_HELD_SHARE * train.nnz))
    return {
        number: np.sort(rng.permutation(np.flatnonzero(classes == number))[:most])
        for number in range(1, len(GAPS_SECONDS) + 1)
    }


def _start_within_breaks(
    config: ModelConfig, train: Interactions, at: IntArray, seed: int
) -> PairwiseRanker:
    """The next-item start on sequences that end where a break begins."""
    indptr = np.union1d(train.indptr, at)
    sequences = Interactions(indptr, train.items, [""] * (len(indptr) - 1), train.item_ids)
    config = replace(config, factors=min(config.factors, MAX_FACTORS), attention_layers=0)
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
    """The start's scores of the items at these places, and of others, by the items before them."""
    targets = train.items[at]
    compared = np.union1d(targets, rng.permutation(train.n_items)[:MAX_ITEMS])
    column = np.full(train.n_items, -1, dtype=np.int64)
    column[compared] = np.arange(len(compared))
    first = train.indptr[train.users[at]]
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
    """What users took up after n breaks, among m items."""

    scores: Tensor
    """(n, m)"""
    popularity: Tensor
    """(m,) logarithms."""
    seen: Tensor
    """(n, m) what each user has had."""
    targets: Tensor
    """(n,) the columns of what they took up."""

    def fit(self, rows: npt.NDArray[np.bool_]) -> tuple[float, float]:
        """What scores and popularity count where the targets of these rows are likeliest."""
        part = torch.from_numpy(rows)

        def loss(weights: Tensor) -> Tensor:
            return cross_entropy(self._logits(weights[0], weights[1], part), self.targets[part])

        by_score, by_popularity = _minimum(loss, torch.tensor([1.0, 0.0])).tolist()
        return by_score, by_popularity

    def ndcg(self, weights: tuple[float, float], rows: npt.NDArray[np.bool_]) -> float:
        """NDCG@10 of the targets of these rows."""
        part = torch.from_numpy(rows)
        logits = self._logits(*weights, part)
        own = logits.gather(1, self.targets[part].unsqueeze(1))
        places = (~(logits < own)).sum(dim=1) - 1  # ties and what is no number are above
        gains = torch.where(places < K, 1.0 / torch.log2(places + 2.0), 0.0)
        return float(gains.mean())

    def _logits(
        self, by_score: Tensor | float, by_popularity: Tensor | float, part: Tensor
    ) -> Tensor:
        logits = by_score * self.scores[part] + by_popularity * self.popularity
        return logits.masked_fill(self.seen[part], SEEN)


def item_vectors(model: PairwiseRanker) -> Tensor:
    """(n_items, d) whose product with a user's vector is the part of the score beside the bias."""
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

    return _minimum(loss, torch.zeros_like(items[0]))


def _minimum(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Where a smooth loss is least, by L-BFGS."""
    point = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([point], max_iter=FIT_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            value = loss(point)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return point.detach()
