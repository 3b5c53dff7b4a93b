"""Assignment of users to trials by a hash: the same on all servers and in the whole trial."""

from __future__ import annotations

import hashlib

USER_NUMBERS = 2**63
"""The number of possible user numbers. Each number fits a signed 64-bit column."""


def user_number(trial_id: str, user: str) -> int:
    """A user's number in a trial, in [0, `USER_NUMBERS`).

    The numbers are uniform over users. A user's numbers in two trials are independent.
    """
    digest = hashlib.blake2b(
        f"{trial_id}\0{user}".encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big") >> 1


def is_in_share(number: int, share: float) -> bool:
    """Whether a user's number is in a share of the users."""
    return number < share * USER_NUMBERS
