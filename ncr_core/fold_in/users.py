"""Fold-in: vectors of users whom training has not seen, or not all of.

A free vector is fitted to what is known of the user against the frozen network, by the loss that
the order rests on: Σ w·softplus(−m) over pairs, with m = (z_uij − z_uji)/2, and held to where the
trained users' vectors lie. A vector that comes from the user's items is pooled from them, and
fitted only to dislikes and stated preferences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ncr_core.fold_in.arrays import FitArrays, fit_arrays
from ncr_core.fold_in.evidence import Evidence, of_first
from ncr_core.fold_in.loader import fit_kernel_or_none
from ncr_core.fold_in.newton import Floats, newton
from ncr_core.fold_in.pairs import PairMaker, Pairs
from ncr_core.fold_in.prior import Prior, prior_of
from ncr_core.fold_in.settings import FoldInConfig
from ncr_core.models.ranker import PairwiseRanker
from ncr_core.models.tables import PairTables


class FoldIn:
    """Gives users' vectors for one model, whose parameters must be frozen. Made once a model.

    A vector depends on the user's own evidence alone, bit by bit, and not on who else is in the
    batch. ``tables`` are the model's in float32, where they are at hand (``Margins.single``).
    Compiled code does it where numba is there (``compiled=False`` does without): on a CPU, wherever
    the model is.

    ``trained_items`` are the rows that training has seen, where items were added since: nothing is
    compared with those beyond or pooled from them, so that vectors stay what they are without them.
    ``prior`` is the model's `prior_of` its users, where it is at hand.
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
    ) -> None:
        self.config = config or FoldInConfig()
        self.model = model
        self.trained_items = model.n_items if trained_items is None else trained_items
        self._pooled = model.config.users == "history"
        self._make = PairMaker(self.trained_items, self.config)
        device = model.device
        self._prior = prior or prior_of(
            model.n_users, lambda rows: model.user_vectors(rows.to(device))
        )
        self._tables = tables
        self._may_compile = compiled

    @property
    def prior(self) -> Prior:
        """Where users' vectors are expected to lie."""
        return self._prior

    @property
    def newcomer(self) -> Tensor:
        """(E,) the vector of a user of whom nothing is known: the mean of the trained ones."""
        return torch.from_numpy(self._prior.mean).float()

    def __call__(self, users: Sequence[Evidence], known: Tensor | None = None) -> Tensor:
        """Vectors (B, E) in float32 on the CPU, by what is known of each of B users.

        ``known`` (B, E) are vectors to which they are held: the trained ones of users who have
        done something since, ``newcomer`` for the others. A user of whom nothing is known keeps it.
        Raises IndexError or DataError for evidence that does not fit, see `Evidence.check`.
        """
        for evidence in users:
            evidence.check(self.model.n_items)
        centres = self.newcomer.expand(len(users), -1) if known is None else known.cpu()
        vectors = np.empty((len(users), len(self._prior.mean)), dtype=np.float32)
        with torch.inference_mode(False):  # where there is no kernel, gradients are asked for
            for row, evidence, centre in zip(vectors, users, centres.numpy(), strict=True):
                row[:] = self._of(evidence, centre)
        return torch.from_numpy(vectors)

    def _of(self, evidence: Evidence, centre: npt.NDArray[np.float32]) -> npt.NDArray[np.floating]:
        if self._pooled:
            known = of_first(evidence, self.trained_items)
            if len(known.items):
                centre = self._pool(known)
        pairs = self._make.of(evidence, likes=not self._pooled)
        if not len(pairs.weights):
            return centre
        prior = replace(self._prior, mean=centre.astype(np.float64))
        kernel = fit_kernel_or_none() if self._may_compile else None
        if kernel is None or self._arrays is None:
            margins = UserMargins(self.model, pairs)
            return newton(margins, pairs.weights, prior, self.config.steps, self.config.tolerance)
        arrays, tanh = self._arrays, self._tanh
        v = kernel.fit(
            (pairs.winners, pairs.losers, pairs.weights),
            arrays.to_tables @ prior.mean + arrays.offset,
            self._basis,
            arrays.tables,
            arrays.tower,
            kernel.TANH if tanh else kernel.RELU,
            self.config.steps,
            self.config.tolerance,
        )
        vector: Floats = prior.mean + prior.basis @ v
        return vector

    @torch.no_grad()
    def _pool(self, evidence: Evidence) -> npt.NDArray[np.float32]:
        device = self.model.device
        weights = None
        if evidence.weights is not None:
            weights = torch.from_numpy(evidence.weights).float().to(device)
        items = torch.from_numpy(evidence.items).to(device)
        vector: npt.NDArray[np.float32] = self.model.vector_of(items, weights).cpu().numpy()
        return vector

    @cached_property
    def _arrays(self) -> FitArrays | None:
        """What compiled code takes; made when it is first needed."""
        tables = self._tables or self.model.tables().to(torch.float32)
        return fit_arrays(tables, len(self._prior.mean), torch.float32)

    @cached_property
    def _basis(self) -> Floats:
        """The prior's directions as the tables see them."""
        assert self._arrays is not None  # noqa: S101 - asked for with them only
        return np.ascontiguousarray(self._arrays.to_tables @ self._prior.basis)

    @property
    def _tanh(self) -> bool:
        return self.model.config.activation == "tanh"


class UserMargins:
    """Half margins of pairs by the network itself, and their gradients in the user's vector."""

    def __init__(self, model: PairwiseRanker, pairs: Pairs) -> None:
        self._model = model
        self._winners, self._losers = (
            torch.from_numpy(rows).to(model.device) for rows in (pairs.winners, pairs.losers)
        )

    def __call__(self, vector: Floats) -> tuple[Floats, Floats]:
        parameter = next(self._model.parameters())
        own = torch.from_numpy(vector).to(parameter.device, parameter.dtype)
        with torch.enable_grad():
            # A copy a pair: one backward pass gives the gradient of every pair.
            users = own.expand(len(self._winners), -1).clone().requires_grad_(True)
            z_uij = self._model.logits(users, self._winners, self._losers)
            z_uji = self._model.logits(users, self._losers, self._winners)
            half = (z_uij - z_uji) / 2
            (gradients,) = torch.autograd.grad(half.sum(), users)
        return half.detach().double().cpu().numpy(), gradients.double().cpu().numpy()
