"""Lists of a model for users whose vectors are given, over the items of a split."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ncr_core.data.interactions import BoolArray, IntArray
from ncr_core.evaluation.protocols import MAX_BLOCK_CELLS
from ncr_core.models.base import PairwiseRanker
from ncr_core.ranking.margins import Margins
from ncr_core.ranking.ranker import PAD, ExactRanker


class VectorRanks:
    """Ranks by one vector for each of some users, and the model's rows of a split's items.

    See `CatalogueRanks`; users without a vector cannot be ranked for.
    """

    def __init__(
        self,
        model: PairwiseRanker,
        users: IntArray,
        vectors: Tensor,
        item_rows: IntArray,
        margins: Margins | None = None,
    ) -> None:
        """Stores the arguments.

        Args:
            model: the model, whose own vectors of users are not used.
            users: (n,) rows of the users in the split, ascending.
            vectors: (n, E) their vectors.
            item_rows: (n_items,) the model's row of each item of the split.
            margins: the margins of the model, if the caller has them.
        """
        self.model, self.users, self.vectors = model, users, vectors
        self.item_rows = item_rows
        self._margins = margins
        self._is_same = np.array_equal(item_rows, np.arange(model.n_items))
        if not self._is_same:
            self._rows = np.append(item_rows, PAD)  # an index of −1 takes the last
            self._columns = np.full(model.n_items + 1, PAD, dtype=np.int64)
            self._columns[item_rows] = np.arange(len(item_rows))

    @cached_property
    def _ranker(self) -> ExactRanker:
        """Made at the first use, as its tables take three times the memory of the items'."""
        return ExactRanker(self.model, margins=self._margins)

    @classmethod
    @torch.inference_mode()
    def as_trained(cls, model: PairwiseRanker, users: IntArray) -> VectorRanks:
        """Ranks by the model's own vectors of these users, over all of its items."""
        vectors = model.user_vectors(torch.from_numpy(users).to(model.device))
        return cls(model, users, vectors, np.arange(model.n_items))

    @torch.inference_mode()
    def rank(self, users: IntArray, candidates: IntArray, k: int) -> IntArray:
        """See `Ranks.rank`."""
        rows = candidates if self._is_same else self._rows[candidates]
        return self._in_split(self._ranker.rank(self._vectors_of(users), torch.from_numpy(rows), k))

    @property
    def ranks_catalogue(self) -> bool:
        """See `CatalogueRanks.ranks_catalogue`."""
        return self._ranker.margins.sortable

    @torch.inference_mode()
    def rank_catalogue(
        self, users: IntArray, allowed: BoolArray, tie_places: IntArray, k: int
    ) -> IntArray:
        """See `CatalogueRanks.rank_catalogue`."""
        rows, n_items = self.item_rows, self.model.n_items
        at_once = max(1, MAX_BLOCK_CELLS // n_items)  # of all items of the model
        if len(users) > at_once:
            blocks = (slice(i, i + at_once) for i in range(0, len(users), at_once))
            return np.concatenate(
                [self.rank_catalogue(users[b], allowed[b], tie_places, k) for b in blocks]
            )
        if not self._is_same:
            in_model = np.zeros((len(users), n_items), dtype=np.bool_)
            in_model[:, rows] = allowed
            allowed = in_model
            in_split = tie_places
            tie_places = len(rows) + np.arange(n_items)  # of items that are never allowed
            tie_places[rows] = in_split
        top = self._ranker.top(
            self._vectors_of(users), k, torch.from_numpy(allowed), torch.from_numpy(tie_places)
        )
        return self._in_split(top)

    def _vectors_of(self, users: IntArray) -> Tensor:
        at = torch.from_numpy(np.searchsorted(self.users, users))
        return self.vectors[at.to(self.vectors.device)]

    def _in_split(self, ranked: Tensor) -> IntArray:
        items: IntArray = ranked.cpu().numpy()
        return items if self._is_same else self._columns[items]
