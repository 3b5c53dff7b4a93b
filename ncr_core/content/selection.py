"""The selection of attributes that predict objects' vectors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ncr_core.content.encoder import AttributeEncoder, Objects
from ncr_core.content.placement import Floats, errors_left_out

MAX_OBJECTS = 10_000  # that a choice looks at: those of more are drawn
MAX_COORDINATES = 32  # of their vectors: the principal ones of more
MIN_STANDARD_ERRORS = 2.0  # of a gain: what is less may be chance
SEED = 0


def select_attributes(
    objects: Objects, vectors: Tensor, weights: Tensor | None = None
) -> tuple[str, ...]:
    """The attributes that reduce the error on objects left out.

    Each attribute is tried alone. Then the attributes are tried, the best first, beside those that
    were taken. An attribute is taken if the mean squared leave-one-out error falls by more than
    ``MIN_STANDARD_ERRORS`` standard errors of that difference.

    Args:
        objects: the attributes of m objects.
        vectors: (m, F) the objects' trained vectors.
        weights: (m,) the objects' weights, 0 or more; None: 1 each.

    Returns:
        Names in the order in which they were taken.

    Raises:
        DataError: as of `ContentPlacement.fit`.
    """
    ones = torch.ones(len(objects), dtype=torch.float64)
    counts = ones if weights is None else weights.double().cpu()
    vectors = vectors.detach().double().cpu()
    if len(objects) > MAX_OBJECTS:
        drawn = np.random.default_rng(SEED).permutation(len(objects))[:MAX_OBJECTS]
        objects = [objects[row] for row in drawn]
        vectors, counts = vectors[torch.from_numpy(drawn)], counts[torch.from_numpy(drawn)]
    vectors = _principal(vectors, counts)

    def errors(names: tuple[str, ...]) -> Floats:
        return errors_left_out(AttributeEncoder.fit(objects, names), objects, vectors, counts)

    least = errors(())
    alone = {name: errors((name,)) for name in AttributeEncoder.fit(objects).names}
    taken: tuple[str, ...] = ()
    for name in sorted(alone, key=lambda each: (float(alone[each].sum()), each)):
        tried = errors((*taken, name)) if taken else alone[name]
        gain = least - tried
        if gain.mean() > MIN_STANDARD_ERRORS * gain.std() / np.sqrt(len(gain)):
            taken, least = (*taken, name), tried
    return taken


def _principal(vectors: Tensor, counts: Tensor) -> Tensor:
    """(m, F) → (m, ≤ ``MAX_COORDINATES``) the vectors in their directions of largest variance."""
    if vectors.shape[1] <= MAX_COORDINATES:
        return vectors
    centred = vectors - (counts @ vectors) / counts.sum()
    _, directions = torch.linalg.eigh(centred.T @ (centred * counts.unsqueeze(1)))
    principal: Tensor = centred @ directions[:, -MAX_COORDINATES:]
    return principal
