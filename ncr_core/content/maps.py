"""The placements of a model's items and of its users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ncr_core.content.encoder import AttributeEncoder, Objects
from ncr_core.content.placement import ContentPlacement
from ncr_core.content.selection import select_attributes
from ncr_core.data.interactions import IntArray
from ncr_core.errors import DataError
from ncr_core.fold_in.items import item_rows
from ncr_core.models import PairwiseRanker

MIN_OBJECTS = 20  # that somebody took up, or that took something up: of fewer nothing is learned


@dataclass(frozen=True, eq=False)
class ContentMaps:
    """The placements of a model's items and users by their attributes."""

    items: ContentPlacement | None = None
    """Predicts item vectors (m, F) for `ncr_core.fold_in.extended`; None if no attribute predicts
    them."""
    users: ContentPlacement | None = None
    """Predicts user vectors (m, E), which `ncr_core.fold_in.FoldIn` takes as priors."""

    def __bool__(self) -> bool:
        return self.items is not None or self.users is not None


def map_items(
    model: PairwiseRanker,
    objects: Objects,
    item_counts: IntArray,
    names: Sequence[str] | None = None,
) -> ContentPlacement | None:
    """The placement of a trained model's items by their attributes.

    Args:
        model: the model.
        objects: the attributes of the model's items, in the order of the rows; empty for an item
            without attributes.
        item_counts: (n_items,) how many users took each item up in training.
        names: the attributes to use; None: the attributes that reduce the error on items left out.

    Returns:
        The placement; None if no attribute reduces that error, or if users took up fewer than
        ``MIN_OBJECTS`` items.

    Raises:
        DataError: sizes do not fit.
    """
    vectors = item_rows(model, torch.arange(model.n_items, device=model.device))
    # An item that many took up has a vector that is known better, and few of them have most.
    return _placement(objects, vectors, np.sqrt(item_counts), names)


@torch.no_grad()
def map_users(
    model: PairwiseRanker,
    objects: Objects,
    user_counts: IntArray,
    names: Sequence[str] | None = None,
) -> ContentPlacement | None:
    """The placement of a trained model's users by their attributes, as `map_items`.

    ``user_counts`` (n_users,) are how many items each user took up in training.
    """
    vectors = model.user_vectors(torch.arange(model.n_users, device=model.device))
    return _placement(objects, vectors, np.asarray(user_counts > 0, np.float64), names)


def _placement(
    objects: Objects, vectors: Tensor, counts: NDArray[np.float64], names: Sequence[str] | None
) -> ContentPlacement | None:
    weights = torch.from_numpy(counts)
    if counts.shape == (len(objects),) and np.count_nonzero(counts) < MIN_OBJECTS:
        return None
    if names is None:
        names = select_attributes(objects, vectors, weights)
    encoder = AttributeEncoder.fit(objects, names)
    if not encoder.n_features:
        return None
    placement = ContentPlacement.fit(encoder, objects, vectors, weights)
    return placement if placement.explained > 0 else None


def pack_maps(maps: ContentMaps) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON and the tensors of the maps that a checkpoint keeps."""
    parts = {"items": maps.items, "users": maps.users}
    config = {name: part.config() for name, part in parts.items() if part is not None}
    arrays = {
        f"{name}.{array}": value.contiguous()
        for name, part in parts.items()
        if part is not None
        for array, value in part.arrays().items()
    }
    return config, arrays


def unpack_maps(
    config: Mapping[str, Any], arrays: Mapping[str, Tensor], model: PairwiseRanker
) -> ContentMaps:
    """The maps of `pack_maps`. Raises DataError if the parts do not fit together or the model."""
    first = torch.zeros(1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        widths = {
            "items": item_rows(model, first).shape[1],
            "users": model.user_vectors(first).shape[1],
        }
    parts: dict[str, ContentPlacement] = {}
    for name in config:
        if name not in widths:
            raise DataError(f"{name!r:.40} is neither items nor users")
        own = {
            key.removeprefix(f"{name}."): value
            for key, value in arrays.items()
            if key.startswith(f"{name}.")
        }
        parts[name] = ContentPlacement.load(config[name], own)
        if parts[name].size != widths[name]:
            raise DataError(
                f"the vectors of {name} are {widths[name]} numbers each, "
                f"not {parts[name].size} as their placement says"
            )
    return ContentMaps(parts.get("items"), parts.get("users"))
