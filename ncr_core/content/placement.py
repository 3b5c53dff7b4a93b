"""Vectors from content by ridge regression: the placement by attributes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from torch import Tensor

from ncr_core.content.encoder import AttributeEncoder, Objects
from ncr_core.errors import DataError

Floats = npt.NDArray[np.float64]

PENALTIES: Floats = np.logspace(-1, 5, 19)
"""Values of λ, in objects of mean weight; each coordinate of the vectors takes one value."""
MAX_LEFT_OUT = 20_000  # objects whose errors choose the penalties: those of more are drawn
MAX_CELLS = 2**22  # of a matrix at once: 32 MiB
_ARRAYS = ("mean", "centre", "weights", "residual")


class ContentPlacement:
    """The ridge regression from attributes to trained vectors.

    v = mean + Σ_a (x_a − c_a) W_a, where a runs over the attributes that an object has and c_a is
    the mean of x_a over the objects that have a. An attribute that an object does not have adds 0,
    so an object without attributes lies at the mean.

    Each coordinate of the vectors has the penalty with the least squared leave-one-out error, which
    the hat matrix gives in closed form (Allen 1974).
    """

    def __init__(
        self,
        encoder: AttributeEncoder,
        *,
        mean: Floats,
        centre: Floats,
        weights: Floats,
        residual: Floats,
        explained: float,
    ) -> None:
        self.encoder = encoder
        self._mean, self._centre, self._weights = mean, centre, weights
        self._residual = residual
        self.explained = explained
        """The share of the vectors' variance that attributes explain for objects left out; below 0
        if attributes predict worse than the mean."""

    @classmethod
    def fit(
        cls,
        encoder: AttributeEncoder,
        objects: Objects,
        vectors: Tensor,
        weights: Tensor | None = None,
    ) -> Self:
        """Fits attributes to the vectors of the same objects.

        Args:
            encoder: the encoder of these attributes.
            objects: the attributes of m objects.
            vectors: (m, F) the objects' trained vectors.
            weights: (m,) the objects' weights, 0 or more; None: 1 each.

        Raises:
            DataError: sizes do not fit, fewer than two objects have a weight above 0, a number is
                not finite, or a weight is negative.
        """
        targets, counts = _checked(objects, vectors, weights)
        design = _Design.of(encoder.encode(objects), encoder.groups, counts)
        mean = counts @ targets / counts.sum()
        ridge = _Ridge(design, targets - mean, counts)
        chosen, errors = ridge.leave_one_out()
        total = float(counts @ np.square(targets - mean).sum(1))
        left = counts[errors.rows, None]
        residual = (errors.values * left).T @ errors.values / left.sum()
        return cls(
            encoder,
            mean=mean,
            centre=design.centre,
            weights=ridge.weights(chosen),
            residual=residual,
            explained=1.0 - float(np.trace(residual)) * counts.sum() / total if total > 0 else 0.0,
        )

    @property
    def residual(self) -> Tensor:
        """(F, F) the covariance of trained vectors about their predictions, in float64.

        Each prediction leaves its object out. A fold-in takes the prior's covariance from here.
        """
        return torch.from_numpy(self._residual)

    @property
    def size(self) -> int:
        """F, the number of coordinates of a vector."""
        return len(self._mean)

    def predict(self, objects: Objects) -> Tensor:
        """(m, F) the predicted vectors of objects with these attributes, in float32."""
        features = self.encoder.encode(objects)
        shift = _by_group(self.encoder.groups, self._centre) @ self._weights
        moved = features @ self._weights - _presence(features, self.encoder.groups) @ shift
        return torch.from_numpy((self._mean + moved).astype(np.float32))

    def arrays(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint keeps."""
        return {name: torch.from_numpy(getattr(self, f"_{name}")) for name in _ARRAYS}

    def config(self) -> dict[str, Any]:
        """The JSON that a checkpoint keeps beside the tensors."""
        return {"encoder": self.encoder.to_json(), "explained": self.explained}

    @classmethod
    def load(cls, config: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> Self:
        """The placement of `config` and `arrays`. Raises DataError if they do not fit together."""
        try:
            encoder = AttributeEncoder.from_json(config["encoder"])
            explained = float(config["explained"])
            parts = {name: arrays[name].double().cpu().numpy() for name in _ARRAYS}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"the content is not a placement: {error!r}") from None
        n, size = encoder.n_features, parts["mean"].shape[0] if parts["mean"].ndim == 1 else -1
        shapes = {"mean": (size,), "centre": (n,), "weights": (n, size), "residual": (size, size)}
        for name, shape in shapes.items():
            if parts[name].shape != shape or not np.isfinite(parts[name]).all():
                raise DataError(f"{name!r} of this placement by content does not fit the others")
        return cls(encoder, explained=explained, **parts)


def errors_left_out(
    encoder: AttributeEncoder, objects: Objects, vectors: Tensor, weights: Tensor | None = None
) -> Floats:
    """(k,) the weighted squared leave-one-out error of each object with a weight above 0.

    Of more than ``MAX_LEFT_OUT`` objects, ``MAX_LEFT_OUT`` are drawn, the same for each encoder.
    Arguments and errors are those of `ContentPlacement.fit`.
    """
    targets, counts = _checked(objects, vectors, weights)
    design = _Design.of(encoder.encode(objects), encoder.groups, counts)
    ridge = _Ridge(design, targets - counts @ targets / counts.sum(), counts)
    _, errors = ridge.leave_one_out()
    squared: Floats = counts[errors.rows] * np.square(errors.values).sum(1)
    return squared


def _checked(objects: Objects, vectors: Tensor, weights: Tensor | None) -> tuple[Floats, Floats]:
    """The vectors, and the weights with a mean of 1."""
    targets = vectors.detach().double().cpu().numpy()
    counts = np.ones(len(targets)) if weights is None else weights.double().cpu().numpy()
    _check(objects, targets, counts)
    return targets, counts / counts.mean()


def _check(objects: Objects, targets: Floats, counts: Floats) -> None:
    if targets.ndim != 2 or len(targets) != len(objects):
        raise DataError(f"{len(objects):,} objects, but vectors of shape {targets.shape}")
    if counts.shape != (len(objects),):
        raise DataError(f"{len(objects):,} objects, but weights of shape {counts.shape}")
    if not np.isfinite(targets).all():
        raise DataError("vectors must be finite")
    if not (np.isfinite(counts) & (counts >= 0)).all():
        raise DataError("weights must be finite and 0 or more")
    if (counts > 0).sum() < 2:
        raise DataError("a regression needs two objects with a weight above 0")


def _by_group(groups: npt.NDArray[np.int64], centre: Floats) -> sparse.csr_matrix:
    """(A, n) each column's centre, in the row of its attribute."""
    n = len(groups)
    n_groups = int(groups.max(initial=-1)) + 1
    return sparse.csr_matrix((centre, (groups, np.arange(n))), shape=(n_groups, n))


def _presence(features: sparse.csr_matrix, groups: npt.NDArray[np.int64]) -> sparse.csr_matrix:
    """(m, A) ones where an object has an entry of the attribute, even an entry of 0."""
    rows = np.repeat(np.arange(features.shape[0]), np.diff(features.indptr))
    n_groups = int(groups.max(initial=-1)) + 1
    pairs = np.unique(rows * max(1, n_groups) + groups[features.indices])
    return sparse.csr_matrix(
        (np.ones(len(pairs)), (pairs // max(1, n_groups), pairs % max(1, n_groups))),
        shape=(features.shape[0], n_groups),
    )


class _Design:
    """Centred features X − P·C, never made as one matrix, and their weighted Gram matrix.

    P (m, A) tells which attributes an object has, C (A, n) holds the columns' means.
    """

    def __init__(self, both: sparse.csr_matrix, centring: sparse.csr_matrix, centre: Floats):
        self._both, self._centring = both, centring
        self.centre = centre

    @classmethod
    def of(
        cls, features: sparse.csr_matrix, groups: npt.NDArray[np.int64], counts: Floats
    ) -> _Design:
        present = _presence(features, groups)
        weight = np.asarray(present.T @ counts)[groups] if len(groups) else np.zeros(0)
        total = np.asarray(features.T @ counts, dtype=np.float64)
        centre = np.divide(total, weight, out=np.zeros_like(total), where=weight > 0)
        n = features.shape[1]
        centring = sparse.vstack([sparse.identity(n), -_by_group(groups, centre)]).tocsr()
        both = sparse.hstack([features.astype(np.float64), present]).tocsr()
        return cls(both, centring, centre)

    def gram(self, counts: Floats) -> Floats:
        """(n, n) XᵀSX of the centred features."""
        weighted = sparse.diags(counts) @ self._both
        gram = self._centring.T @ (self._both.T @ weighted) @ self._centring
        return np.asarray(gram.toarray(), dtype=np.float64)

    def times(self, matrix: Floats, rows: slice | npt.NDArray[np.int64]) -> Floats:
        """Some rows of the centred features times (n, k)."""
        return np.asarray(self._both[rows] @ (self._centring @ matrix))

    def transposed(self, matrix: Floats) -> Floats:
        """The transposed centred features times (m, k) → (n, k)."""
        return np.asarray(self._centring.T @ (self._both.T @ matrix))


class _Errors:
    """(k,) rows that were left out one at a time, and (k, F) the errors of their predictions."""

    def __init__(self, rows: npt.NDArray[np.int64], values: Floats) -> None:
        self.rows, self.values = rows, values


class _Ridge:
    """(XᵀSX + λI)⁻¹ XᵀSV for any λ, by the eigenvectors of XᵀSX."""

    def __init__(self, design: _Design, targets: Floats, counts: Floats) -> None:
        self._design, self._targets, self._counts = design, targets, counts
        values, self._vectors = np.linalg.eigh(design.gram(counts))
        self._values = np.maximum(values, 0.0)
        product = design.transposed(counts[:, None] * targets)
        self._rotated: Floats = self._vectors.T @ product

    def weights(self, penalties: Floats) -> Floats:
        """(n, F) the weights with a penalty (F,) for each coordinate."""
        shrunk = self._rotated / (self._values[:, None] + penalties)
        weights: Floats = self._vectors @ shrunk
        return weights

    def leave_one_out(self) -> tuple[Floats, _Errors]:
        """The best penalty (F,) of each coordinate, and the leave-one-out errors with it."""
        rows = np.flatnonzero(self._counts > 0)
        if len(rows) > MAX_LEFT_OUT:
            rows = np.sort(np.random.default_rng(0).choice(rows, MAX_LEFT_OUT, replace=False))
        squares = np.zeros((len(PENALTIES), self._targets.shape[1]))
        parts = np.array_split(rows, -(-len(rows) * max(1, len(self._values)) // MAX_CELLS))
        for part in parts:
            rotated = self._design.times(self._vectors, part)
            for place, penalty in enumerate(PENALTIES):
                errors = self._errors(part, rotated, np.full(self._targets.shape[1], penalty))
                squares[place] += self._counts[part] @ np.square(errors)
        chosen = PENALTIES[squares.argmin(axis=0)]
        values = [
            self._errors(part, self._design.times(self._vectors, part), chosen) for part in parts
        ]
        return chosen, _Errors(rows, np.concatenate(values))

    def _errors(self, rows: npt.NDArray[np.int64], rotated: Floats, penalties: Floats) -> Floats:
        """(k, F) the leave-one-out errors of rows, from their (k, n) rotated features."""
        fitted = rotated @ (self._rotated / (self._values[:, None] + penalties))
        distinct, which = np.unique(penalties, return_inverse=True)
        counts = self._counts[rows]
        # The mean is fitted, too: without penalty, and orthogonal to the centred features.
        hat = np.square(rotated) @ (1.0 / (self._values[:, None] + distinct))
        leverage = counts[:, None] * (hat + 1.0 / self._counts.sum())
        errors: Floats = (self._targets[rows] - fitted) / np.maximum(1.0 - leverage, 1e-3)[:, which]
        return errors
