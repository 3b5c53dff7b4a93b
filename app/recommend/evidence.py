"""What a user's vector is fitted to, from what is known of the user."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from app.catalog.view import Catalogue
from app.events.profile import Profile
from app.recommend.catalogue_rows import CatalogueRows
from ncr_core.fold_in import Evidence

MOST = 1_000


def told(evidence: Evidence | None, rows: CatalogueRows, catalogue: Catalogue) -> Evidence:
    """The evidence without items that were deleted: nobody is to hear of those."""
    if evidence is None or not catalogue.deleted:
        return evidence or Evidence()
    deleted = np.fromiter(catalogue.deleted, np.int64, len(catalogue.deleted))
    kept = ~np.isin(rows.internal[evidence.items], deleted)
    weights = None if evidence.weights is None else evidence.weights[kept]
    return replace(evidence, items=evidence.items[kept], weights=weights)


def evidence_of(profile: Profile, rows: CatalogueRows, after: int) -> Evidence | None:
    """The user's verdicts after a seq, in the model's rows; None where there are none.

    After 0 for a vector that is made of nothing else; for one that was trained, and is held to,
    what it has not been trained on. Of dislikes and statements it is the latest ``MOST``: they are
    fitted while others wait.
    """
    # What only shows that an item was seen tells nothing of it, whatever was told of it before.
    recent = profile.seen[(profile.seqs > after) & (profile.weights != 0)]
    liked = np.isin(profile.positives, recent)
    unwanted = np.flatnonzero(np.isin(profile.disliked, recent))[-MOST:]
    items, weights = rows.at(profile.positives[liked]), profile.positive_weights[liked]
    disliked = rows.at(profile.disliked[unwanted])
    disliked_weights = profile.disliked_weights[unwanted]
    stated = profile.pairs[profile.pair_seqs > after][-MOST:]
    pairs = rows.at(stated.reshape(-1)).reshape(-1, 2)
    found = Evidence(
        items=items[items >= 0],
        weights=weights[items >= 0],
        disliked=disliked[disliked >= 0],
        disliked_weights=disliked_weights[disliked >= 0],
        pairs=pairs[(pairs >= 0).all(axis=1)],
    )
    return found if len(found) else None
