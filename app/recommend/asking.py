"""From a question about a user to what the model is asked."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.catalog.view import Catalogue
from app.events.profile import Profile
from app.recommend.batcher import IsGone
from app.recommend.candidates import RankRequest
from app.recommend.catalogue_rows import filters_key
from app.recommend.evidence import evidence_of, told
from app.recommend.filters import Filters
from app.recommend.serving import ServingModel

NEWCOMER: Hashable = None  # in the place of a user and seq: nothing is known of them
_NONE: NDArray[np.int64] = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)  # not frozen: there is one for each request, and that costs more
class Asked:
    """A request about a user, with what it is to be answered from."""

    user: str
    filters: Filters
    profile: Profile
    catalogue: Catalogue
    gone: IsGone | None = None
    on_slow: Callable[[], None] | None = None

    @property
    def state(self) -> Hashable:
        """What an answer depends on of the user."""
        profile = self.profile
        return NEWCOMER if profile.is_newcomer else (self.user, profile.last_seq)


def request_of(asked: Asked, model: ServingModel) -> RankRequest | None:
    """What the model is asked; None where it knows nothing of the user."""
    user, profile = asked.user, asked.profile
    catalogue, filters = asked.catalogue, asked.filters
    rows = model.rows(catalogue)
    # Someone who was erased and came back is new, though the model may still have their row.
    was_there = 0 < profile.first_seq <= model.trained_seq
    row = model.user_rows.get(user) if was_there else None
    later = profile.latest_seq > model.trained_seq
    evidence = None
    if row is None or later:
        # A vector that was trained is held to, and fitted to what came since.
        after = 0 if row is None or model.pools_users else model.trained_seq
        evidence = evidence_of(profile, rows, after)
    if row is None and evidence is None:
        return None

    def allowed() -> NDArray[np.bool_]:
        return rows.visible & allowed_items(asked)[rows.internal]

    excluded = _NONE
    if filters.exclude:
        excluded = np.flatnonzero(np.isin(rows.internal, ids_of(catalogue, filters.exclude)))
    key = filters_key(rows, filters.exclude_seen, filters.categories)
    state = (user, profile.last_seq)
    return RankRequest(
        row,
        evidence,
        state,
        key,
        allowed,
        filters.n,
        excluded,
        filters.key_bytes,
        filters.diversity,
        told(evidence_of(profile, rows, 0), rows, catalogue) if filters.explain else None,
    )


def source_of(request: RankRequest | None) -> str:
    """What a list is made from, as clients are told."""
    if request is None:
        return "popular"
    return "model" if request.evidence is None else "fold_in"


def mean_request(asked: Asked) -> RankRequest:
    """In the place of a request for someone of whom nothing is known: the mean of all users."""
    state = (asked.user, asked.profile.last_seq)
    return RankRequest(None, None, state, None, lambda: np.zeros(0, np.bool_), 1)


def allowed_items(asked: Asked) -> NDArray[np.bool_]:
    """By internal id: visible, in the categories, not disliked, not seen."""
    catalogue, profile, filters = asked.catalogue, asked.profile, asked.filters
    allowed = catalogue.visible.copy()
    if filters.categories:
        allowed &= catalogue.mask(filters.categories)
    if filters.exclude_seen:
        allowed[profile.seen[profile.seen < len(allowed)]] = False
    disliked = profile.disliked
    if len(disliked):
        allowed[disliked[disliked < len(allowed)]] = False
    return allowed


def ids_of(catalogue: Catalogue, items: Sequence[str]) -> list[int]:
    """The internal ids of those of the client's ids that there are."""
    return [found for item in items if (found := catalogue.internal_ids.get(item)) is not None]
