"""Which users are held out from, in every training the same: by a hash of their ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ncr_core.data.interactions import BoolArray, Interactions
from ncr_core.data.splits import MIN_ITEMS

HashArray = npt.NDArray[np.uint64]


def hashes_of(user_ids: Sequence[str]) -> HashArray:
    """(n,) hashes of ids, the same wherever and whenever they are computed."""
    digests = b"".join(hashlib.blake2b(i.encode(), digest_size=8).digest() for i in user_ids)
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


def hold_out_users(
    interactions: Interactions, share: float, at_least: int, at_most: int
) -> tuple[BoolArray, BoolArray]:
    """The users with the smallest hashes: those to hold out from, and all below the same bound.

    Of the users that have enough items, ``share``, and between ``at_least`` and ``at_most`` of
    them. A user stays on one side of the bound from training to training but where it moves: it
    falls where only as many users as before are taken of more. The second (n_users,) mask holds,
    beside the first, users with too few items as yet.
    """
    eligible = np.flatnonzero(np.diff(interactions.indptr) >= MIN_ITEMS)
    n = min(len(eligible), at_most, max(at_least, round(share * len(eligible))))
    chosen = np.zeros(interactions.n_users, dtype=np.bool_)
    hashes = hashes_of(interactions.user_ids)
    chosen[eligible[np.argsort(hashes[eligible], kind="stable")[:n]]] = True
    if n == len(eligible):
        return chosen, np.ones_like(chosen)
    bound = hashes[chosen].max() if n else np.uint64(0)
    return chosen, hashes <= bound
