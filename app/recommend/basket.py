"""Baskets: items that count as a user's latest events in one list, and are not stored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from app.catalog.snapshot import Catalogue
from app.events.profile import Profile

NOBODY = ""  # in the place of a user: no user's id is empty
FIRST_SEQ = 2**53  # above every seq: no model was trained on it
HOUR_US = 3_600_000_000
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Basket:
    """The items that a request names beside the user, by the client's ids."""

    items: tuple[str, ...] = ()
    """A basket or a session, the latest item last."""
    item: str | None = None
    """The item that the user looks at."""

    def resolve(self, catalogue: Catalogue) -> tuple[list[int], list[str]]:
        """The internal ids, the latest last, and the ids that no item has, each once.

        A repeated item counts at its last place. ``item`` is the latest.
        """
        names = self.items if self.item is None else (*self.items, self.item)
        known, unknown = [], []
        for name in _last_of_each(names):
            internal_id = catalogue.internal_ids.get(name)
            if internal_id is None:
                unknown.append(name)
            else:
                known.append(internal_id)
        return known, unknown


def with_basket(profile: Profile, items: Sequence[int], at_us: int) -> tuple[Profile, bytes]:
    """The profile with one more event of weight 1 for each item, and the key of these events.

    The key is a digest of the items. Where weights decay, the hour follows the digest.

    The events come after all others of the user, in the order of the items. Their times begin
    with the hour, or after the user's last event where that is later. Where weights decay, the
    list thus stays the same for an hour.

    Args:
        profile: the user's own profile.
        items: internal ids, each once.
        at_us: the time of the request, in microseconds since 1970.
    """
    if not items:
        return profile, b""
    ids, n = np.array(items, dtype=np.int64), len(items)
    start = at_us - at_us % HOUR_US
    key = hashlib.blake2b(ids.tobytes(), digest_size=DIGEST_BYTES).digest()
    if profile.event_weights.half_life_days is not None:
        key += start.to_bytes(8)
    first = max(start, int(profile.timestamps.max(initial=0)) + 1)
    extended = replace(
        profile,
        seen=np.concatenate([profile.seen, ids]),
        seqs=np.concatenate([profile.seqs, FIRST_SEQ + np.arange(n)]),
        weights=np.concatenate([profile.weights, np.ones(n, dtype=np.float32)]),
        timestamps=np.concatenate([profile.timestamps, first + np.arange(n)]),
        _resolved=[],
    )
    return extended, key


def subject_of(user: str, basket: bytes) -> bytes:
    """The subject of a list's cursors: the user, and the digest of the basket.

    The subject leaves out the hour in the basket's key, because cursors outlive the hour.
    """
    if not basket:
        return user.encode()
    return user.encode() + b" " + basket[:DIGEST_BYTES].hex().encode()


def _last_of_each(names: Sequence[str]) -> Iterable[str]:
    return reversed(dict.fromkeys(reversed(names)))
