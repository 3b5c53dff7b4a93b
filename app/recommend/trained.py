"""A version as it was trained: what models with newer items are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from torch import Tensor

from app.models.schemas import ModelRow
from ncr_core.checkpoint import Checkpoint
from ncr_core.fold_in import ItemFoldIn, extended
from ncr_core.fold_in.prior import Prior, prior_of


class Trained:
    """The row and the checkpoint of a version, and nothing of what ranking takes: it stays while
    models that were made of it come and go."""

    def __init__(self, row: ModelRow, checkpoint: Checkpoint) -> None:
        self.row = row
        self.checkpoint = checkpoint
        self.version = row.version
        self.trained_seq = row.trained_seq
        self.n_items = checkpoint.model.n_items
        self.user_rows = {user: i for i, user in enumerate(checkpoint.user_ids)}

    @cached_property
    def item_fold_in(self) -> ItemFoldIn:
        """What fits the vectors of new items; made when it is first asked for, in a moment."""
        return ItemFoldIn(self.checkpoint.model)

    @cached_property
    def prior(self) -> Prior:
        """Where users' vectors are expected to lie."""
        model = self.checkpoint.model
        return prior_of(model.n_users, lambda rows: model.user_vectors(rows.to(model.device)))

    def extended(self, items: Sequence[str], vectors: Tensor) -> Checkpoint:
        """The checkpoint with more items, whose vectors (m, F) were fitted."""
        own = self.checkpoint
        if not items:
            return own
        return replace(
            own,
            model=extended(own.model, vectors),
            item_ids=[*own.item_ids, *items],
            item_counts=np.concatenate([own.item_counts, np.zeros(len(items), np.int64)]),
        )
