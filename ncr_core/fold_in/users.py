"""Fold-in: vectors of users with evidence that training has not seen.

The fold-in fits a free vector to the user's evidence, with the network frozen. The loss is Σ
w·softplus(−m) over pairs, with the half margin m = (z_uij − z_uji)/2 that the order rests on. The
prior is the distribution of the trained users' vectors. A vector of the user's items is pooled, and
fitted only to dislikes and stated preferences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from ncr_core.data.array_storage import table_storage
from ncr_core.errors import DataError
from ncr_core.fold_in.evidence import Evidence, FoldInConfig, PairSampler, WeightedPairs
from ncr_core.fold_in.prior import Floats, Prior, basis_of, known_priors, newton, prior_of
from ncr_core.models.base import PairwiseRanker
from ncr_core.models.scoring_tables import LinearTable, PairTables, TowerTable
from ncr_core.optional_imports import numba_kernel
from ncr_core.ranking.backends.numba_ranker import UNROLLED
from ncr_core.ranking.table_blocks import margins_of


@dataclass(frozen=True, slots=True, eq=False)
class FitArrays:
    """The arrays of the compiled fit, in float32, or in another type for tests.

    A user's vector u becomes t = to_tables·u + offset. t consists of the user's part of s_ui, one
    number a column of ``linear``, and of C_u.
    """

    to_tables: npt.NDArray[np.float64]
    """(n, E)"""
    offset: npt.NDArray[np.float64]
    """(n,)"""
    tables: tuple[Any, ...]
    """linear (n_items, d), bias (n_items or 0,), first and second (n_items, h)."""
    tower: tuple[Any, ...]
    """widths, weights, transposed weights, biases, w."""


def fit_arrays(tables: PairTables, size: int, dtype: torch.dtype) -> FitArrays | None:
    """The arrays for user vectors of this size; None for a model without a compiled fit.

    The compiled fit supports neither towers over one item nor products that join the last layer
    (eq. 24).
    """
    tower, linear = tables.tower, tables.linear
    if tables.points or (tower is not None and tower.items is not None):
        return None
    maps, offsets = [], []
    if linear is not None:
        maps.append(_columns(torch.eye(linear.items.shape[1]), linear.columns, size))
        offsets.append(torch.zeros(linear.items.shape[1]))
    if tower is not None:
        weight, bias = (_padded_rows(x) for x in (tower.user_weight, tower.user_bias))
        maps.append(_columns(weight, tower.columns, size))
        offsets.append(bias)
    n_items = len(linear.items) if linear is not None else len(tower.first) if tower else 0
    return FitArrays(
        torch.cat([to_table.double().cpu() for to_table in maps]).numpy(),
        torch.cat([offset.double().cpu() for offset in offsets]).numpy(),
        (*_linear(linear, n_items, dtype), *_items(tower, n_items, dtype)),
        _tower(tower, dtype),
    )


def _columns(weight: Tensor, columns: slice, size: int) -> Tensor:
    """A map of a part of a vector, extended to a map of the whole vector."""
    start = columns.start or 0
    return pad(weight, (start, size - start - weight.shape[1]))


def _linear(table: LinearTable | None, n_items: int, dtype: torch.dtype) -> tuple[Any, Any]:
    if table is None:
        return _array(torch.zeros(n_items, 0), dtype), _array(torch.zeros(0), dtype)
    bias = torch.zeros(0) if table.bias is None else table.bias
    return _array(table.items, dtype), _array(bias, dtype)


def _items(tower: TowerTable | None, n_items: int, dtype: torch.dtype) -> tuple[Any, Any]:
    if tower is None:
        none = _array(torch.zeros(n_items, 0), dtype)
        return none, none
    first, second = (_padded_rows(x.T).T for x in (tower.first, tower.second))
    return _array(first, dtype), _array(second, dtype)


def _tower(tower: TowerTable | None, dtype: torch.dtype) -> tuple[Any, ...]:
    """The layers one after the other. A padded unit has no inputs, and gives act(0) = 0."""
    none = torch.zeros(0)
    if tower is None:
        return (np.zeros(1, dtype=np.int64), *[_array(none, dtype)] * 4)
    layers = [(_padded_rows(_padded_rows(w).T).T, _padded_rows(b)) for w, b in tower.layers]
    widths = [_up(tower.first.shape[1]), *(len(bias) for _, bias in layers)]
    return (
        np.array(widths, dtype=np.int64),
        _array(torch.cat([w.flatten().cpu() for w, _ in layers] or [none]), dtype),
        _array(torch.cat([w.T.flatten().cpu() for w, _ in layers] or [none]), dtype),
        _array(torch.cat([b.cpu() for _, b in layers] or [none]), dtype),
        _array(_padded_rows(tower.weight), dtype),
    )


def _padded_rows(x: Tensor) -> Tensor:
    missing = _up(len(x)) - len(x)
    return x if not missing else torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])


def _up(n: int) -> int:
    return -(-n // UNROLLED) * UNROLLED


def _array(x: Tensor, dtype: torch.dtype) -> npt.NDArray[Any]:
    """A numpy array of a tensor in this type, without a copy if possible."""
    return np.ascontiguousarray(x.detach().to(dtype).cpu().numpy())


def fit_kernel() -> ModuleType | None:
    """The compiled code of the fit; None without numba, or if compilation fails."""
    return numba_kernel("ncr_core.fold_in.numba_kernel")


class FoldIn:
    """Fits users' vectors for one model with frozen parameters; made once a model.

    A vector depends on the user's own evidence alone, bit by bit, and not on other users of the
    batch; on a GPU pooled vectors may differ by a rounding error. ``tables`` are the model's in
    float32, if the caller has them (``Margins.single``). With numba compiled code fits the vectors
    on a CPU, wherever the model is; ``compiled=False`` turns the compiled code off.

    ``trained_items`` is the number of item rows that training has seen, if items were added since.
    The fold-in draws no later rows for pairs and pools none, so that added items do not change
    vectors.

    ``prior`` is the model's `prior_of` its users, if the caller has it. ``residual`` (E, E) is the
    covariance of trained vectors about the vectors that attributes predict
    (`ContentPlacement.residual`). This covariance is for users with such a prediction. Raises
    DataError for a ``residual`` of another size.
    """

    def __init__(
        self,
        model: PairwiseRanker,
        config: FoldInConfig | None = None,
        tables: PairTables | None = None,
        *,
        compiled: bool = True,
        trained_items: int | None = None,
        prior: Prior | None = None,
        residual: Tensor | None = None,
    ) -> None:
        self.config = config or FoldInConfig()
        self.model = model
        self.trained_items = model.n_items if trained_items is None else trained_items
        self._pooled = model.config.users == "history"
        self._sampler = PairSampler(self.trained_items, self.config)
        device = model.device
        self._prior = prior or prior_of(
            model.n_users, lambda rows: model.user_vectors(rows.to(device))
        )
        self._own = self._prior  # of users with a prior of their own
        if residual is not None:
            basis = basis_of(residual.double().cpu().numpy())
            if len(basis) != len(self._prior.mean):
                raise DataError(
                    f"the model's users are {len(self._prior.mean)} numbers each, "
                    f"not {len(basis)} as the residual says"
                )
            self._own = Prior(self._prior.mean, basis)
        self._tables = tables
        self._may_compile = compiled

    @property
    def prior(self) -> Prior:
        """The prior of users' vectors."""
        return self._prior

    @property
    def newcomer(self) -> Tensor:
        """(E,) the vector of a newcomer: the mean of the trained users' vectors."""
        return torch.from_numpy(self._prior.mean).float()

    def __call__(
        self,
        users: Sequence[Evidence],
        known: Tensor | None = None,
        priors: Tensor | None = None,
    ) -> Tensor:
        """Vectors (B, E) of B users by their evidence, in float32 on the CPU.

        Args:
            users: The evidence of each user.
            known: (B, E) the means of the users' priors: the trained vector of a user with events
                since the training, and ``newcomer`` for other users. The default is ``newcomer``
                for all users. A user without evidence gets this vector.
            priors: (B, E) the vectors that attributes predict, as `ContentPlacement.predict` gives
                them, in place of ``known``; NaN in the whole row for a user without attributes. A
                pooled vector gets the share ``FoldInConfig.prior_items`` /
                (``FoldInConfig.prior_items`` + items) of the prediction's difference from the mean.

        Raises:
            IndexError: The model does not have an item.
            DataError: Weights or pairs are malformed, see ``Evidence.check``, or priors are.
        """
        for evidence in users:
            evidence.check(self.model.n_items)
        centres = self.newcomer.expand(len(users), -1) if known is None else known.cpu()
        vectors = np.empty((len(users), len(self._prior.mean)), dtype=np.float32)
        own = known_priors(priors, vectors.shape)
        pooled = self._pool(users)
        with torch.inference_mode(False):  # where there is no kernel, gradients are asked for
            for row, evidence, centre, prior, of_items in zip(
                vectors, users, centres.numpy(), own, pooled, strict=True
            ):
                row[:] = self._fit(evidence, centre, prior, of_items)
        return torch.from_numpy(vectors)

    def _fit(
        self,
        evidence: Evidence,
        centre: npt.NDArray[np.floating],
        own: Floats | None,
        pooled: npt.NDArray[np.float32] | None,
    ) -> npt.NDArray[np.floating]:
        distribution = self._prior
        if own is not None:
            centre, distribution = own, self._own
        if pooled is not None:
            centre = pooled
            if own is not None:
                least = self.config.prior_items
                share = least / (least + len(evidence.of_first(self.trained_items).items))
                centre = centre + share * (own - self._prior.mean)
        pairs = self._sampler.sample(evidence, likes=not self._pooled)
        if not len(pairs.weights):
            return centre
        prior = replace(distribution, mean=centre.astype(np.float64))
        kernel = fit_kernel() if self._may_compile else None
        if kernel is None or self._arrays is None:
            margins = UserMargins(self.model, pairs)
            return newton(margins, pairs.weights, prior, self.config.steps, self.config.tolerance)
        arrays, tanh = self._arrays, self._tanh
        v = kernel.fit(
            (pairs.winners, pairs.losers, pairs.weights),
            arrays.to_tables @ prior.mean + arrays.offset,
            self._bases[own is not None],
            arrays.tables,
            arrays.tower,
            kernel.TANH if tanh else kernel.RELU,
            self.config.steps,
            self.config.tolerance,
        )
        vector: Floats = prior.mean + prior.basis @ v
        return vector

    @torch.no_grad()
    def _pool(self, users: Sequence[Evidence]) -> list[npt.NDArray[np.float32] | None]:
        """The vector that is pooled from each user's trained items; None without such items.

        On a CPU a vector does not depend on the other users, bit by bit. A GPU pools all users at
        once, and the vectors may differ by a rounding error.
        """
        pooled: list[npt.NDArray[np.float32] | None] = [None] * len(users)
        if not self._pooled:
            return pooled
        known = [evidence.of_first(self.trained_items) for evidence in users]
        some = [place for place, evidence in enumerate(known) if len(evidence.items)]
        items = [torch.from_numpy(known[place].items) for place in some]
        weights = [known[place].weights for place in some]
        if self.model.device.type == "cpu":
            for place, own, counts in zip(some, items, weights, strict=True):
                of_items = None if counts is None else torch.from_numpy(counts).float()
                pooled[place] = self.model.pooled_vector(own, of_items).numpy()
        elif some:
            every = None
            if any(counts is not None for counts in weights):
                every = [
                    torch.ones(len(own)) if counts is None else torch.from_numpy(counts)
                    for own, counts in zip(items, weights, strict=True)
                ]
            vectors = self.model.pooled_vectors(items, every).cpu().numpy()
            for place, vector in zip(some, vectors, strict=True):
                pooled[place] = vector
        return pooled

    @cached_property
    def _arrays(self) -> FitArrays | None:
        """The arrays of the compiled fit, made at the first use."""
        tables = self._tables
        if tables is None and table_storage().in_files:
            tables = margins_of(self.model).single
        elif tables is None:
            tables = self.model.tables().to(torch.float32)
        return fit_arrays(tables, len(self._prior.mean), torch.float32)

    @cached_property
    def _bases(self) -> tuple[Floats, Floats]:
        """The bases of the common prior and of users' own priors, mapped to the tables."""
        assert self._arrays is not None  # noqa: S101 - asked for with them only
        to_tables = self._arrays.to_tables
        of_anybody = np.ascontiguousarray(to_tables @ self._prior.basis)
        if self._own is self._prior:
            return of_anybody, of_anybody
        return of_anybody, np.ascontiguousarray(to_tables @ self._own.basis)

    @property
    def _tanh(self) -> bool:
        return self.model.config.activation == "tanh"


class UserMargins:
    """Half margins of pairs by the network itself, and their gradients in the user's vector."""

    def __init__(self, model: PairwiseRanker, pairs: WeightedPairs) -> None:
        self._model = model
        self._winners, self._losers = (
            torch.from_numpy(rows).to(model.device) for rows in (pairs.winners, pairs.losers)
        )

    def __call__(self, vector: Floats) -> tuple[Floats, Floats]:
        """(E,) a vector → (P,) half margins and (P, E) their gradients."""
        parameter = next(self._model.parameters())
        user = torch.from_numpy(vector).to(parameter.device, parameter.dtype)
        with torch.enable_grad():
            # A copy a pair: one backward pass gives the gradient of every pair.
            users = user.expand(len(self._winners), -1).clone().requires_grad_(True)
            z_uij = self._model.logits(users, self._winners, self._losers)
            z_uji = self._model.logits(users, self._losers, self._winners)
            half = (z_uij - z_uji) / 2
            (gradients,) = torch.autograd.grad(half.sum(), users)
        return half.detach().double().cpu().numpy(), gradients.double().cpu().numpy()
