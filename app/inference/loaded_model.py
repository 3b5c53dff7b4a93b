"""A version of the model in memory: its engine, its caches, and its items in the catalogue."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from app.catalog.attributes import attributes_of
from app.catalog.snapshot import Catalogue
from app.core.cache import ByteCache
from app.registry.schemas import ModelRow
from ncr_core.checkpoint import Checkpoint
from ncr_core.fold_in import ItemFoldIn, extended
from ncr_core.fold_in.prior import Prior, prior_of
from ncr_core.inference.engine import InferenceEngine
from ncr_core.inference.retrieval import CandidateList, CandidateSource
from ncr_core.inference.shared_tables import SharedTables
from ncr_core.ranking.similarity import ItemSpace

Caches = tuple[ByteCache[Hashable, NDArray[np.float32]], ByteCache[Hashable, CandidateList]]
ARCHIVE_SECONDS = 30 * 86_400.0
"""The age from which a training's interactions are an archive to users without newer events."""
MAX_HIDDEN = 16  # items that candidates were searched with and that are left out of lists
VECTOR_SHARE = 8  # an eighth of the cache is for users' vectors, the rest for candidates


@dataclass(frozen=True, slots=True, eq=False)
class SearchedItems:
    """The items that were visible when candidates were searched for."""

    mask: NDArray[np.bool_]
    """(n_items,) whether an item was visible."""
    digest: str
    """A digest of the mask."""

    @classmethod
    def of(cls, mask: NDArray[np.bool_]) -> SearchedItems:
        """The searched items of a mask."""
        return cls(mask, digest_of_mask(mask))

    def hidden(self, visible: NDArray[np.bool_]) -> NDArray[np.int64] | None:
        """The rows that are no longer visible; None where candidates must be searched anew.

        The best of the visible items are the best of all searched items without the hidden items.
        """
        if len(visible) != len(self.mask) or (visible & ~self.mask).any():
            return None
        rows = np.flatnonzero(self.mask & ~visible)
        return rows if len(rows) <= MAX_HIDDEN else None


@dataclass(frozen=True, slots=True, eq=False)
class ItemIndex:
    """The model's items as the catalogue has them at one moment."""

    seq: int
    """The catalogue's number."""
    internal: NDArray[np.int64]
    """(n_items,) the catalogue's id of each item row, −1 for items that the catalogue lacks."""
    visible: NDArray[np.bool_]
    """(n_items,) whether an item may be in a list at all."""
    trained: SearchedItems
    """The training's items that the search for candidates covers. The mask stays while at most
    ``MAX_HIDDEN`` of these items are hidden."""
    searched: SearchedItems
    """``trained`` with the items newer than the training; the same object without newer items."""
    hidden: NDArray[np.int64]
    """(h,) rows that are searched and no longer visible. Requests skip these rows."""
    shown_seq: int
    """The number of the latest change of these items that lists show; part of cache keys."""
    catalogue_shown_seq: int
    """The number of the latest change of any catalogue item that lists show."""
    moment: int
    """The time when an item of the catalogue last came or went by its times; part of cache keys."""
    row_of: NDArray[np.int64]
    """The model's row of each of the catalogue's ids, −1 for items that the model lacks."""

    def rows(self, internal: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each of the catalogue's ids, −1 where the model does not have the item."""
        rows = np.full(len(internal), -1, dtype=np.int64)
        known = (internal >= 0) & (internal < len(self.row_of))
        rows[known] = self.row_of[internal[known]]
        return rows

    def trained_key(
        self, exclude_seen: Hashable, categories: tuple[str, ...], selection: Hashable = None
    ) -> Hashable:
        """The key, without the user, of candidates among the items of the training.

        None where the model has no newer items, or the candidates depend on the catalogue.
        """
        if self.searched is self.trained or categories or selection is not None:
            return None
        return unfiltered_key(self.trained.digest, exclude_seen)

    def candidates_key(
        self, exclude_seen: Hashable, categories: tuple[str, ...], selection: Hashable = None
    ) -> Hashable:
        """The key of candidates, without the user.

        ``exclude_seen`` is true where lists leave out all seen items, and the state of a rule where
        a rule decides. ``selection`` is the key of filters and boosts by attributes; None: none.
        """
        # A change of the catalogue that hides and shows nothing leaves candidates as they are.
        key: Hashable = unfiltered_key(self.searched.digest, exclude_seen)
        if categories:
            key = (exclude_seen, categories, self.shown_seq, self.searched.digest)
        return key if selection is None else (key, selection)


def unfiltered_key(visible_digest: str, exclude_seen: Hashable = True) -> Hashable:
    """The key of candidates from all visible items."""
    return (exclude_seen, visible_digest)


def digest_of_mask(mask: NDArray[np.bool_]) -> str:
    """A digest of a mask: the same mask has the same digest."""
    return hashlib.blake2b(np.packbits(mask).tobytes(), digest_size=16).hexdigest()


def index_items(
    catalogue: Catalogue,
    item_ids: Sequence[str],
    previous: ItemIndex | None,
    trained_items: int | None = None,
    precomputed: SearchedItems | None = None,
) -> ItemIndex:
    """The index of the model's items in a state of the catalogue.

    Args:
        catalogue: the state.
        item_ids: the client's id of each of the model's rows.
        previous: an index of the same items. An index of a later state is ignored, because it has
            ids that this state may not have yet.
        trained_items: the number of rows of the training, where items were added since.
        precomputed: the training's items among which a worker searched for candidates.
    """
    ids = catalogue.internal_ids
    if (
        previous is not None
        and previous.catalogue_shown_seq == catalogue.shown_seq
        and previous.moment == catalogue.moment
    ):
        return replace(previous, seq=catalogue.seq)
    if previous is not None and previous.seq > catalogue.seq:
        previous = None
    if previous is None:
        internal = np.array([ids.get(item, -1) for item in item_ids], dtype=np.int64)
    else:  # an id is for good: only what was not there can have changed
        internal = previous.internal
        added = {
            row: internal_id
            for row in np.flatnonzero(internal < 0).tolist()
            if (internal_id := ids.get(item_ids[row])) is not None
        }
        if added:
            internal = internal.copy()
            internal[list(added)] = list(added.values())
    visible = np.zeros(len(internal), dtype=np.bool_)
    known = internal >= 0
    visible[known] = catalogue.visible[internal[known]]
    if previous is not None and internal is previous.internal:
        row_of = previous.row_of
    else:
        row_of = np.full(int(internal.max(initial=-1)) + 1, -1, dtype=np.int64)
        row_of[internal[known]] = np.flatnonzero(known)
    trained = SearchedItems.of(visible[:trained_items])
    hidden = np.zeros(0, np.int64)
    for earlier in (precomputed, None if previous is None else previous.trained):
        if earlier is not None and (since := earlier.hidden(trained.mask)) is not None:
            trained, hidden = earlier, since
            break
    searched = trained
    if trained_items is not None and trained_items < len(internal):
        searched = SearchedItems.of(np.concatenate([trained.mask, visible[trained_items:]]))
    return ItemIndex(
        seq=catalogue.seq,
        internal=internal,
        visible=visible,
        trained=trained,
        searched=searched,
        hidden=hidden,
        row_of=row_of,
        shown_seq=int(catalogue.shown[internal[known]].max(initial=0)),
        catalogue_shown_seq=catalogue.shown_seq,
        moment=catalogue.moment,
    )


class TrainedModel:
    """The checkpoint of a version as it was trained, without an engine for ranking.

    A trained model stays while loaded models that are made of it come and go.
    """

    def __init__(self, row: ModelRow, checkpoint: Checkpoint) -> None:
        self.row = row
        self.checkpoint = checkpoint
        self.version = row.version
        self.trained_seq = row.trained_seq
        self.n_items = checkpoint.model.n_items
        self.user_rows = {user: i for i, user in enumerate(checkpoint.user_ids)}

    @cached_property
    def item_fold_in(self) -> ItemFoldIn:
        """The fold-in that fits vectors of new items, made on first use."""
        content = self.checkpoint.content.items
        residual = None if content is None else content.residual
        return ItemFoldIn(self.checkpoint.model, residual=residual)

    @cached_property
    def prior(self) -> Prior:
        """The distribution of the trained users' vectors."""
        model = self.checkpoint.model
        return prior_of(model.n_users, lambda rows: model.user_vectors(rows.to(model.device)))

    def extended(self, items: Sequence[str], vectors: Tensor) -> Checkpoint:
        """The checkpoint with more items, whose vectors (m, F) were fitted."""
        checkpoint = self.checkpoint
        if not items:
            return checkpoint
        return replace(
            checkpoint,
            model=extended(checkpoint.model, vectors),
            item_ids=[*checkpoint.item_ids, *items],
            item_counts=np.concatenate([checkpoint.item_counts, np.zeros(len(items), np.int64)]),
        )


class LoadedModel:
    """One version of the model, ready to answer. Requests change nothing but its caches.

    Args:
        row: the version's row in the registry.
        checkpoint: the loaded checkpoint; with items newer than the version where ``trained`` is
            given.
        candidates: the number of items that are ranked exactly for a user.
        cache_bytes: the memory for users' vectors and candidates, in bytes.
        on_pairs: called with the number of pairs that a pass compared.
        on_fallback: called when a device has too little memory.
        trained: the version as it was trained.
        revision: names the items beyond those of the version.
        caches: the caches of users' vectors and of candidates of another model of this version.
        space: the similarity of items of another model of this version.
        shared: the tables that several servers share; each server has its own for newer items.
    """

    def __init__(
        self,
        row: ModelRow,
        checkpoint: Checkpoint,
        candidates: int,
        cache_bytes: int = 2**26,
        on_pairs: Callable[[int], None] | None = None,
        on_fallback: Callable[[str], None] = lambda device: None,
        *,
        trained: TrainedModel | None = None,
        revision: str = "",
        caches: Caches | None = None,
        space: ItemSpace | None = None,
        shared: SharedTables | None = None,
    ) -> None:
        self._options = (candidates, cache_bytes, on_pairs, on_fallback)
        self.trained = trained or TrainedModel(row, checkpoint)
        self.revision = revision
        self.row = row
        self.version = row.version
        self.trained_seq = row.trained_seq
        self.item_ids: Sequence[str] = checkpoint.item_ids
        self.user_rows = self.trained.user_rows
        vector_bytes = cache_bytes // VECTOR_SHARE
        self.vector_cache, self.candidate_cache = caches or (
            ByteCache(vector_bytes),
            ByteCache(cache_bytes - vector_bytes),
        )
        self.engine = InferenceEngine(
            checkpoint,
            candidates,
            trained_items=self.trained.n_items,
            space=space,
            prior=self.trained.prior,
            vectors=self.vector_cache,
            lists=self.candidate_cache,
            on_pairs=on_pairs,
            on_fallback=on_fallback,
            shared=shared,
            shared_key=row.checksum,
        )
        self._items: ItemIndex | None = None
        self._precomputed: SearchedItems | None = None
        self.listed: Mapping[str, int] = {}
        """The users whose lists a worker ranked, where the server may serve these lists."""

    @property
    def names_all_users(self) -> bool:
        """Whether ``user_rows`` has all users of the training, see ``Checkpoint.trained_users``."""
        return self.trained.checkpoint.names_all_users

    @property
    def places_users(self) -> bool:
        """Whether the model predicts users' vectors from their attributes."""
        return self.trained.checkpoint.content.users is not None

    def user_prior(self, attributes: str) -> NDArray[np.float32] | None:
        """(E,) the vector that a user's attributes, as JSON, predict; None without a prediction.

        A prediction takes some tenths of a millisecond. The cache of vectors keeps the result.
        """
        placement = self.trained.checkpoint.content.users
        if placement is None:
            return None
        kept = self.vector_cache.get(("attributes", attributes))
        if kept is None:
            told = [attributes_of(attributes)]
            tells = placement.encoder.encode(told).nnz > 0
            kept = placement.predict(told).numpy()[0] if tells else np.zeros(0, np.float32)
            size = kept.nbytes + len(attributes)
            self.vector_cache.put(("attributes", attributes), kept, size)
        return kept if len(kept) else None

    @property
    def key(self) -> tuple[str, str]:
        """The key of the model in the keys of lists."""
        return self.version, self.revision

    def items(self, catalogue: Catalogue) -> ItemIndex:
        """The model's items in this state of the catalogue."""
        items = self._items
        if items is None or items.seq != catalogue.seq or items.moment != catalogue.moment:
            items = index_items(
                catalogue, self.item_ids, items, self.trained.n_items, self._precomputed
            )
            self._items = items
        return items

    def gap_class(self, timestamps: NDArray[np.int64], at_us: int) -> int:
        """The gap class of a user; 0 where the model does not distinguish gap classes.

        In an archive, every user would seem to be away. The gap class is then 0, as at the end of
        the user's events.

        Args:
            timestamps: the times of the user's events, in microseconds since 1970.
            at_us: the time of the request, in microseconds since 1970.
        """
        if not self.engine.knows_gaps or not len(timestamps):
            return 0
        last, at = int(timestamps.max()) / 1e6, at_us / 1e6
        if last <= self.engine.latest_time < at - ARCHIVE_SECONDS:
            return 0
        return self.engine.gap_class(at - last)

    def use_precomputed(
        self,
        candidates: CandidateSource,
        searched: SearchedItems | None,
        listed: Mapping[str, int] | None = None,
    ) -> None:
        """Uses the candidates that a worker found among the ``searched`` items.

        The worker also ranked the lists of the ``listed`` users.
        """
        self.engine.retriever.precomputed = candidates
        self._precomputed, self._items = searched, None
        self.listed = listed or {}

    def keep_precomputed(self, other: LoadedModel) -> None:
        """Uses the candidates of another model of this version, if this model has none."""
        candidates = other.engine.retriever.precomputed
        if candidates is not None and self.engine.retriever.precomputed is None:
            self.use_precomputed(candidates, other._precomputed)

    def extended(self, items: Sequence[str], vectors: Tensor, revision: str) -> LoadedModel:
        """The version as it was trained, with more items, whose vectors (m, F) were fitted.

        Both models share their caches: entries that do not depend on the newer items stay.
        """
        checkpoint = self.trained.extended(items, vectors)
        extended = LoadedModel(
            self.row,
            checkpoint,
            *self._options,
            trained=self.trained,
            revision=revision,
            caches=(self.vector_cache, self.candidate_cache),
            space=self.engine.item_space,
        )
        extended.keep_precomputed(self)
        return extended
