"""Influence: the effects of a user's own items on the order of a list.

The effect of own item k on shown item s is how far s would fall behind the other shown items t if
the user had not had k:

    effect[s, k] = mean over t ≠ s of  m_st(u) − m_st(u₋ₖ),    m_st = z_ust − z_uts,

where u₋ₖ is the user's vector without k. A pooled u₋ₖ is the pool without k. A free u₋ₖ is the
minimum, without k, of the loss that a fold-in estimates,

    L = Σ_k w_k·mean over j of softplus(−m_kj / 2) + … + |v|²/2,

over all items j that the user does not have, with dislikes and stated preferences as in a fold-in.
A fold-in of the other items would not do. It compares each item with a few drawn items j, and with
other items than before, which moves margins by more than k does.

A minimisation of L for each item would take a hundred times as long as the list. Instead, u₋ₖ is
one Newton step from u: an influence function (Koh & Liang, ICML'17) with the leverage of an item on
its own fit. H is the Hessian of L at u, H_k the Gauss–Newton part of k's pairs in H, and g_k the
slope of their loss. The step is d = H⁻¹g_k, times the best length without k:
d·g_k / (d·g_k − d·H_k·d). The mean over j is over the items that matter, see `_rivals`. The margins
follow to first order. `python -m benchmarks.explain` measures the effects against the minimum over
all j.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ncr_core.fold_in import Evidence, FoldIn
from ncr_core.fold_in.evidence import PairSampler, WeightedPairs
from ncr_core.fold_in.users import UserMargins
from ncr_core.models.scoring_tables import TowerTable
from ncr_core.ranking.ranker import ExactRanker

Floats = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_ITEMS = 256  # of the user's own whose effects are computed, at most: the latest
MAX_SHOWN_RIVALS = 50  # shown items that each is compared with, at most, at equal steps of the list
MAX_CATALOGUE = 4096  # items that stand for all of them, at most
MAX_PAIRS, MAX_RIVALS = 4096, 32  # of a user, of an own item
MAX_CURVATURE_PAIRS = 1024
POOLS_AT_ONCE = 32  # each is a copy of the user's history
PAIRS_AT_ONCE = 4096
MIN_CURVATURE = 0.5  # of L in any direction; the prior's alone is 1


class InfluenceExplainer:
    """Computes the effects of own items; a model needs one explainer.

    ``anchors`` are the item rows that other items are scored against, as for candidates.
    """

    def __init__(self, fold_in: FoldIn, ranker: ExactRanker, anchors: Tensor) -> None:
        self._fold_in, self._ranker, self._anchors = fold_in, ranker, anchors.to(ranker.device)
        self._model = fold_in.model
        config, n_items = fold_in.config, fold_in.trained_items
        self._as_fitted = PairSampler(n_items, config)
        # In training the old counts as much as the new.
        self._as_trained = PairSampler(n_items, replace(config, half_life=0.0))
        drawn = np.random.default_rng(config.seed).permutation(n_items)
        self._catalogue: IntArray = np.sort(drawn[:MAX_CATALOGUE])

    def effects(
        self, vector: Tensor, evidence: Evidence, shown: IntArray, *, trained: bool
    ) -> tuple[IntArray, Floats]:
        """Own items (m,), ascending, and their effects (n, m) on (n,) shown items.

        ``vector`` (E,) is the user's vector. ``trained`` tells whether training had a part in the
        vector: in training all items count alike, in a fold-in later items count more. The m items
        leave out evidence that no longer counts. The effects on a list of one item are zeros.

        Raises IndexError or DataError for evidence that does not fit, and IndexError for an unknown
        shown item.
        """
        evidence.check(self._model.n_items)
        Evidence(shown).check(self._model.n_items)
        with torch.inference_mode(False):
            user: Floats = vector.detach().cpu().double().numpy().copy()
            if self._model.config.users == "history":
                items, changes = self._pooled(evidence)
            else:
                sampler = self._as_trained if trained else self._as_fitted
                items, changes = self._free(user, evidence, sampler)
            slopes = self._slopes(user, shown)
        return items, -(slopes @ changes.T)

    def _pooled(self, evidence: Evidence) -> tuple[IntArray, Floats]:
        """(m,) own items and (m, E) the change of the pool without each item."""
        evidence = evidence.of_first(self._fold_in.trained_items)
        items = np.unique(evidence.items[-MAX_ITEMS:])
        if not len(items):
            return items, np.zeros((0, len(self._fold_in.prior.mean)))
        if (evidence.items == items[0]).all():
            return items, self._fold_in.prior.mean - self._pools([evidence])
        changes = []
        for first in range(0, len(items), POOLS_AT_ONCE):
            left_out = items[first : first + POOLS_AT_ONCE]
            others = [evidence.of(evidence.items != item) for item in left_out]
            pools = self._pools([evidence, *others])
            changes.append(pools[1:] - pools[0])
        return items, np.concatenate(changes)

    @torch.no_grad()
    def _pools(self, users: list[Evidence]) -> Floats:
        """(n, E) the pools of users with items; all users have weights, or none has."""
        items = [torch.from_numpy(each.items) for each in users]
        weights = [torch.from_numpy(each.weights) for each in users if each.weights is not None]
        vectors: Floats = self._model.pooled_vectors(items, weights or None).cpu().double().numpy()
        return vectors

    def _free(
        self, vector: Floats, evidence: Evidence, sampler: PairSampler
    ) -> tuple[IntArray, Floats]:
        """(m,) own items and (m, E) the move of the minimum of L without each item."""
        own, weights = sampler.weighted_items(evidence)
        basis = self._fold_in.prior.basis
        if not len(own):
            return own, np.zeros((0, len(vector)))
        rivals, shares = self._rivals(vector, own, evidence)
        of_own = WeightedPairs(
            own.repeat(rivals.shape[1]),
            rivals.ravel(),
            (weights[:, None] * self._fold_in.config.strength * shares).ravel(),
        )
        others = sampler.sample(evidence, likes=False)
        pairs = WeightedPairs(
            np.concatenate([of_own.winners, others.winners]),
            np.concatenate([of_own.losers, others.losers]),
            np.concatenate([of_own.weights, others.weights]),
        )
        half, slopes = UserMargins(self._model, pairs)(vector)
        slopes = slopes @ basis
        wrong = 1.0 / (1.0 + np.exp(np.minimum(half, 700.0)))
        pull = pairs.weights * wrong
        bend = pull * (1.0 - wrong)
        hessian = (slopes * bend[:, None]).T @ slopes + np.eye(basis.shape[1])
        hessian += self._curvature(vector, pairs, -pull)
        values, directions = np.linalg.eigh(hessian)
        values = np.maximum(values, MIN_CURVATURE)
        by_own = slopes[: rivals.size].reshape(*rivals.shape, -1)
        each = (len(own), 1, rivals.shape[1])
        gradients = (-pull[: rivals.size].reshape(each) @ by_own)[:, 0]
        steps = (gradients @ directions / values) @ directions.T
        along = (bend[: rivals.size].reshape(each) @ (by_own @ steps[:, :, None]) ** 2)[:, 0, 0]
        gain, square = (np.einsum("mr,mr->m", steps, x) for x in (gradients, steps))
        left = np.maximum(gain - along, MIN_CURVATURE * square)
        length = np.divide(gain, left, out=np.ones_like(gain), where=left > 0.0)
        return own, (steps * length[:, None]) @ basis.T

    def _rivals(self, vector: Floats, own: IntArray, evidence: Evidence) -> tuple[IntArray, Floats]:
        """(m, n) items that each of m own items is compared with, and their weights in the mean.

        The rivals are an importance sample, at equal steps of how much items matter. A rival's
        weight is the part of the mean over all items that the rival stands for.

        The pull on the vector is Σ_j σ(−m_kj/2)·∇m_kj. A few items that the user would like as well
        weigh more than all other items, and a few random items would miss them. The mean margins of
        items over the anchors give a cheap estimate of m_kj.
        """
        known = np.concatenate([evidence.items, evidence.disliked])
        all_items = self._catalogue[~np.isin(self._catalogue, known)]
        if not len(all_items):  # nothing else is there: they are compared with each other
            all_items = self._catalogue
        n = max(1, min(MAX_RIVALS, MAX_PAIRS // len(own)))
        if n >= len(all_items):
            every = np.broadcast_to(all_items, (len(own), len(all_items)))
            return every, np.full(every.shape, 1.0 / len(all_items))
        block = torch.from_numpy(np.concatenate([all_items, own])).to(self._ranker.device)
        user = torch.from_numpy(vector).float().unsqueeze(0)
        ahead = self._ranker.bind(user).margins.mean_margins(self._anchors, block)[0] / 2.0
        of_all, of_own = (x.cpu().numpy() for x in torch.split(ahead, [len(all_items), len(own)]))
        by_score = np.argsort(-of_all, kind="stable")
        matters = 1.0 / (1.0 + np.exp(np.clip(of_own[:, None] - of_all[by_score], -30.0, 30.0)))
        reached = matters.cumsum(axis=1)
        wanted = (np.arange(n) + 0.5) / n * reached[:, -1:]
        picked = np.stack([np.searchsorted(*both) for both in zip(reached, wanted, strict=True)])
        picked = np.minimum(picked, len(all_items) - 1)
        chance = np.take_along_axis(matters, picked, axis=1) / reached[:, -1:]
        return all_items[by_score][picked], 1.0 / (chance * n * len(all_items))

    def _curvature(self, vector: Floats, pairs: WeightedPairs, weights: Floats) -> Floats:
        """The part of the Hessian by the curvature of the margins, in the prior's directions."""
        basis = torch.from_numpy(self._fold_in.prior.basis)
        tower = self._ranker.margins.single.tower
        if tower is None or tower.items is not None:
            return np.zeros((basis.shape[1],) * 2)
        device, dtype = tower.first.device, tower.first.dtype
        # All of them are a sum; a part of them will do for it.
        step = -(-len(weights) // MAX_CURVATURE_PAIRS)
        sample = slice(step // 2, None, step)
        i, j, each = (
            torch.from_numpy(x[sample]).to(device) for x in (pairs.winners, pairs.losers, weights)
        )
        scale = float(weights.sum() / min(float(each.sum()), -1e-300))
        moves = tower.user_weight @ basis[tower.columns].to(device, dtype)
        user = torch.from_numpy(vector).to(device, dtype).unsqueeze(0)
        total = margin_curvature(tower, tower.project_user(user)[0], moves, i, j, each * scale)
        curvature: Floats = total.cpu().numpy()
        return curvature

    def _slopes(self, vector: Floats, shown: IntArray) -> Floats:
        """(n, E) the slope by the vector of each shown item's mean margin over the others."""
        n = len(shown)
        others = np.arange(n)
        if n > MAX_SHOWN_RIVALS:
            others = np.unique(np.linspace(0, n - 1, MAX_SHOWN_RIVALS).round().astype(np.int64))
        i, j = np.repeat(np.arange(n), len(others)), np.tile(others, n)
        i, j = i[i != j], j[i != j]
        total = np.zeros((n, len(vector)))
        for start in range(0, len(i), PAIRS_AT_ONCE):
            part = slice(start, start + PAIRS_AT_ONCE)
            pairs = WeightedPairs(shown[i[part]], shown[j[part]], np.ones(len(i[part])))
            _, slopes = UserMargins(self._model, pairs)(vector)
            np.add.at(total, i[part], 2.0 * slopes)
        rivals = np.maximum(np.bincount(i, minlength=n), 1)
        return total / rivals[:, None]


ROWS_AT_ONCE = 128


@torch.no_grad()
def margin_curvature(
    tower: TowerTable, projected: Tensor, basis: Tensor, i: Tensor, j: Tensor, weights: Tensor
) -> Tensor:
    """Σ_p weights_p·∇²(z_ij − z_ji)/2 over P pairs, in the directions of a basis → (r, r) float64.

    ``projected`` (h,) is the user's C_u, ``basis`` (h, r) its moves; i and j (P,) are items. The
    sum is over the tower alone, because parts that are linear in the vector have no curvature. With
    x_l = act(a_l) the layers, g_l the derivative of w·x_L by x_l and J_l = ∂a_l/∂v,
    ∇² = Σ_l J_lᵀ diag(g_l·act″(a_l)) J_l.

    Raises ValueError for a tower whose last layer the user's vector joins (eq. 24).
    """
    if tower.items is not None:
        raise ValueError("towers with shared embeddings are more than their projections")
    total = torch.zeros((basis.shape[1],) * 2, dtype=torch.float64, device=basis.device)
    if tower.activation != "tanh":
        return total  # a relu has none
    for start in range(0, len(i), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        first, other = i[part], j[part]
        inputs = torch.cat(
            [
                projected + tower.first[first] + tower.second[other],
                projected + tower.first[other] + tower.second[first],
            ]
        )
        half = weights[part].to(inputs.dtype) / 2
        total += _tower_curvature(
            tower, inputs, basis.to(inputs.dtype), torch.cat([half, -half])
        ).double()
    return total


def _tower_curvature(tower: TowerTable, inputs: Tensor, basis: Tensor, weights: Tensor) -> Tensor:
    """The curvature of w·tower at (R, h) inputs of the first activation."""
    above = [inputs.tanh()]
    for matrix, bias in tower.layers:
        above.append(torch.addmm(bias, above[-1], matrix.T).tanh())
    slopes = [1.0 - x * x for x in above]
    gradient = tower.weight * weights.unsqueeze(1)
    bends = []
    for layer in range(len(above) - 1, -1, -1):
        inner = gradient * slopes[layer]
        bends.append(-2.0 * above[layer] * inner)  # tanh″ = −2·tanh·tanh′
        if layer:
            gradient = inner @ tower.layers[layer - 1][0]
    bends.reverse()
    total = basis.T @ (basis * bends[0].sum(0).unsqueeze(1))
    moves = basis
    for layer in range(1, len(above)):
        matrix = tower.layers[layer - 1][0] * slopes[layer - 1].unsqueeze(1)
        moves = matrix @ moves  # (R, width, r)
        flat = moves.reshape(-1, moves.shape[2])
        total += flat.T @ (flat * bends[layer].reshape(-1, 1))
    return total
