"""The context of a request about a user, and its translation into a request to the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from app.catalog.snapshot import Catalogue
from app.events.profile import Profile
from app.inference.batcher import IsGone
from app.inference.loaded_model import ItemIndex, LoadedModel
from app.recommend.basket import subject_of
from app.recommend.left_out import LeftOut
from app.recommend.schemas import RecommendationQuery, Source
from app.recommend.selection import Selection
from ncr_core.fold_in import Evidence
from ncr_core.inference.retrieval import ItemFilter, RankRequest, UserState

MAX_EVIDENCE = 1_000  # dislikes and stated preferences of a user, the latest
NEWCOMER: Hashable = None  # in the place of a user and seq: nothing is known of them


@dataclass(slots=True, eq=False)  # not frozen: there is one for each request, and that costs more
class RecommendationContext:
    """A request about a user, with the state of the service that the answer depends on."""

    user: str
    query: RecommendationQuery
    profile: Profile
    catalogue: Catalogue
    is_gone: IsGone | None = None
    """Tells whether the client has disconnected."""
    on_slow: Callable[[], None] | None = None
    """Called when the answer has to wait in the slow queue."""
    at_us: int = 0
    """The time of the request, in microseconds since 1970."""
    selection: Selection | None = None
    """The query's filter and boosts, looked up; None: the query has neither."""

    left_out: LeftOut | None = None
    """The items that rules leave out; None: all seen items, and no shown items."""

    @property
    def query_key(self) -> Hashable:
        """The key of the query, of the attributes that the query names, and of rules."""
        selection, left = self.selection, self.left_out
        key = self.query.key if selection is None else (self.query.key, selection.state)
        state = None if left is None else left.state
        return key if state is None else (key, "left out", state)

    @property
    def is_kept(self) -> bool:
        """Whether caches keep the list: a list that leaves out shown items differs each time."""
        return self.left_out is None or not len(self.left_out.hidden)

    basket: bytes = b""
    """The key of the items that ``profile`` has beside the user's own events, see `with_basket`."""

    @property
    def user_key(self) -> Hashable:
        """The key of the user for an answer without a model."""
        return self.user_key_by(None)

    def user_key_by(self, model: LoadedModel | None) -> Hashable:
        """The key of the user for an answer by a model; `NEWCOMER` for an unknown user."""
        profile = self.profile
        key: Hashable = (self.user, profile.last_seq)
        if self.basket:
            key = (self.user, profile.last_seq, self.basket)
        is_newcomer = profile.is_newcomer and not self.basket
        if (
            model is not None
            and model.places_users
            and profile.is_described
            # Attributes of which the model knows nothing say nothing of a newcomer.
            and not (is_newcomer and model.user_prior(profile.attributes) is None)
        ):
            return (key, profile.attributes_seq)
        return NEWCOMER if is_newcomer else key

    @property
    def subject(self) -> bytes:
        """The subject of the list's cursors, see `subject_of`."""
        return subject_of(self.user, self.basket)


def user_state(context: RecommendationContext, model: LoadedModel) -> UserState | None:
    """The user's state for the model; None where the model knows nothing of the user."""
    profile, items = context.profile, model.items(context.catalogue)
    # A user who was erased and came back is new, though the model may still have their row.
    was_trained = 0 < profile.first_seq <= model.trained_seq
    row = model.user_rows.get(context.user) if was_trained else None
    evidence = None
    if row is None or profile.latest_seq > model.trained_seq:
        # A trained vector is held to, and fitted to what came since.
        after = 0 if row is None or model.engine.pools_users else model.trained_seq
        evidence = fold_in_evidence(profile, items, after)
    # A model that stores the vectors of some users was trained on the others too.
    has_items = evidence is not None and len(evidence.items) > 0
    is_pooled = was_trained and has_items and not model.names_all_users
    prior = None
    if row is None and not is_pooled and model.places_users and profile.is_described:
        prior = model.user_prior(profile.attributes)
    if row is None and evidence is None and prior is None:
        return None
    key: Hashable = (context.user, profile.last_seq)
    if prior is not None:
        key = context.user_key_by(model)
    if evidence is not None:
        if context.basket:
            key = context.user_key_by(model)
        if _is_about_newer(evidence, model.trained.n_items):
            key = (key, model.revision)
    gap_class = model.gap_class(profile.timestamps, context.at_us)
    return UserState(row, evidence, key, gap_class, prior)


def rank_request(
    context: RecommendationContext, model: LoadedModel, items: ItemIndex | None = None
) -> RankRequest | None:
    """The request for the model's list; None where the model knows nothing of the user.

    ``items`` is the index of the model's items in the context's state of the catalogue, if at hand.
    """
    user = user_state(context, model)
    if user is None:
        return None
    catalogue, profile, query = context.catalogue, context.profile, context.query
    items = items or model.items(catalogue)
    withheld, left = withheld_items(context), context.left_out
    skipped = items.hidden
    if left is not None and len(left.hidden):
        shown = items.rows(left.hidden)
        skipped = np.concatenate([skipped, shown[shown >= 0]])
    if query.exclude:
        excluded = items.rows(np.array(internal_ids(catalogue, query.exclude), dtype=np.int64))
        skipped = np.concatenate([skipped, excluded[excluded >= 0]])
    selection = context.selection
    selected = None if selection is None else selection.rows(items.internal)
    # Where a trial's arm shows what was seen, the rule of the request decides nothing.
    rule = None if left is None or not query.exclude_seen else left.rule_state
    about = (
        query.exclude_seen if rule is None else rule,
        query.categories,
        None if selection is None else selection.state,
    )
    key = (user.key, user.gap_class, items.candidates_key(*about))
    among = items.trained_key(*about)
    return RankRequest(
        user,
        query.n,
        ItemFilter(
            items.searched.mask,
            withheld,
            catalogue.members(query.categories) if query.categories else None,
            items.row_of,
            None if selected is None else selected.mask,
            None if selected is None else selected.few,
        ),
        skipped,
        query.diversity,
        _explainable(fold_in_evidence(profile, items, 0), items, catalogue)
        if query.explain
        else None,
        key if not model.revision else (*key, model.revision),
        None if among is None else (user.key, user.gap_class, among),
        query.key_bytes,
        None if selection is None else selection.boost(items.internal, model.engine.temperature),
        query.page,
    )


def withheld_items(context: RecommendationContext) -> NDArray[np.int64]:
    """Internal ids of the seen and disliked items that stay out of the list."""
    profile, left = context.profile, context.left_out
    if not context.query.exclude_seen:
        return profile.disliked
    if left is None or left.withheld is None:
        disliked = profile.disliked
        return np.concatenate([profile.seen, disliked]) if len(disliked) else profile.seen
    # A basket's items came after all events of the user's own: they are seen, whatever their age.
    basket = profile.seen[profile.seqs > left.last_seq]
    return np.concatenate([left.withheld, basket])


def _is_about_newer(evidence: Evidence, trained_items: int) -> bool:
    """Whether a vector that is fitted to the evidence depends on items newer than the training."""
    parts = (evidence.items, evidence.disliked, evidence.pairs)
    return any(int(part.max(initial=-1)) >= trained_items for part in parts)


def source_of(user: UserState | None) -> Source:
    """The source of a list, as answers name it."""
    if user is None:
        return "popular"
    is_trained = user.evidence is None and user.prior is None
    return "model" if is_trained else "fold_in"


def allowed_items(context: RecommendationContext) -> NDArray[np.bool_]:
    """(size,) by internal id: whether an item may be in the list.

    An allowed item is visible, passes the filter, is in the categories, and is not left out.
    """
    catalogue, query = context.catalogue, context.query
    allowed = catalogue.visible.copy()
    if query.categories:
        allowed &= catalogue.mask(query.categories)
    if context.selection is not None:
        selected = context.selection.allowed(len(allowed))
        if selected is not None:
            allowed &= selected
    withheld = withheld_items(context)
    allowed[withheld[withheld < len(allowed)]] = False
    if context.left_out is not None:
        hidden = context.left_out.hidden
        allowed[hidden[hidden < len(allowed)]] = False
    return allowed


def internal_ids(catalogue: Catalogue, items: Sequence[str]) -> list[int]:
    """The internal ids of the known items among the client's ids."""
    ids = (catalogue.internal_ids.get(item) for item in items)
    return [internal_id for internal_id in ids if internal_id is not None]


def fold_in_evidence(profile: Profile, items: ItemIndex, after: int) -> Evidence | None:
    """The user's feedback after a seq, in the model's rows; None without feedback.

    ``after`` is 0 for a vector from evidence alone, and the seq of the training for a trained
    vector. The evidence has at most ``MAX_EVIDENCE`` dislikes and as many preferences, the latest
    ones, because other requests wait for the fit.
    """
    # An event that only shows that an item was seen is no news, whatever earlier events say.
    recent = profile.seen[(profile.seqs > after) & (profile.weights != 0)]
    liked = np.isin(profile.positives, recent)
    unwanted = np.flatnonzero(np.isin(profile.disliked, recent))[-MAX_EVIDENCE:]
    rows, weights = items.rows(profile.positives[liked]), profile.positive_weights[liked]
    disliked = items.rows(profile.disliked[unwanted])
    disliked_weights = profile.disliked_weights[unwanted]
    stated = profile.pairs[profile.pair_seqs > after][-MAX_EVIDENCE:]
    pairs = items.rows(stated.reshape(-1)).reshape(-1, 2)
    evidence = Evidence(
        items=rows[rows >= 0],
        weights=weights[rows >= 0],
        disliked=disliked[disliked >= 0],
        disliked_weights=disliked_weights[disliked >= 0],
        pairs=pairs[(pairs >= 0).all(axis=1)],
    )
    return evidence if len(evidence) else None


def _explainable(evidence: Evidence | None, items: ItemIndex, catalogue: Catalogue) -> Evidence:
    """The evidence without deleted items, because no answer names deleted items."""
    if evidence is None or not catalogue.deleted:
        return evidence or Evidence()
    deleted = np.fromiter(catalogue.deleted, np.int64, len(catalogue.deleted))
    kept = ~np.isin(items.internal[evidence.items], deleted)
    weights = None if evidence.weights is None else evidence.weights[kept]
    return replace(evidence, items=evidence.items[kept], weights=weights)
