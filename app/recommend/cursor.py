"""Cursors of lists: a cursor itself has all data that the next page needs.

A cursor names the version, the user's last seq and the time of its list, and every item that was
shown. Any server can thus continue the list, and no page shows an item twice. The digest of a
cursor also covers the subject of the list and the parameters: a cursor does not fit another user,
item or filter.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NoReturn

import numpy as np
from fastapi import Query
from numpy.typing import NDArray
from pydantic import Field

from app.core.errors import Unprocessable

MAX_PLACES = 1_000  # of a list, on all its pages together
MAX_CURSOR_LENGTH = 4_096  # characters; 999 of a million items take 1,970
MAX_AGE_SECONDS = 86_400
KEPT_SECONDS = 3_600  # that the first cursor of a cached list is given out for
CLOCK_SKEW_SECONDS = 300
FEW_ITEMS = 40  # whose ids are not worth packing

_FORMAT = 1
_HEAD = struct.Struct(">BIQ8sB")  # format, seconds, last seq, origin, length of the version
_PACKED = struct.Struct(">HB")  # number of ids, bits of a remainder
_DIGEST_BYTES = 8
_NO_ORIGIN = bytes(_DIGEST_BYTES)

CURSOR = "The `next_cursor` of the page before. All other parameters except `n` must stay the same."
_CursorText = Annotated[
    str, Field(max_length=MAX_CURSOR_LENGTH, json_schema_extra={"format": "list-cursor"})
]
QueryCursor = Annotated[_CursorText | None, Query(description=CURSOR)]
BodyCursor = Annotated[_CursorText | None, Field(description=CURSOR)]


@dataclass(frozen=True, slots=True, eq=False)
class ListCursor:
    """A place in a list."""

    version: str | None
    """The model version or the arm of a settings test that ranked the list; None: popularity."""
    last_seq: int
    """The user's last seq when the list was ranked."""
    at: int
    """The time of the ranking, in seconds since 1970."""
    shown: NDArray[np.int64]
    """The catalogue's ids of the items on the pages so far, ascending."""
    origin: bytes = _NO_ORIGIN
    """A value that all cursors of a list share, without other meaning."""

    def after(self, items: Sequence[int]) -> ListCursor:
        """The cursor after a page with these items."""
        shown = np.union1d(self.shown, np.array(items, dtype=np.int64))
        return replace(self, shown=shown)

    def list_key(self, subject: bytes, query_digest: bytes) -> bytes:
        """The key of the kept list; a made-up origin cannot give the key of another list."""
        return _digest(self.origin, subject, query_digest)

    def encode(self, subject: bytes, query_digest: bytes) -> str:
        """The cursor as text.

        Args:
            subject: the user or the item of the list, without NUL.
            query_digest: a digest of the parameters.
        """
        head = _head(self.at, self.last_seq, self.origin, self.version)
        return _text(head + packed_ids(self.shown), subject, query_digest)


def decode(text: str, subject: bytes, query_digest: bytes) -> ListCursor:
    """The cursor in a text; arguments as for `ListCursor.encode`.

    Raises:
        Unprocessable: ``invalid_cursor``: the cursor is not from this list, or is too old.
    """
    try:
        content = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        _refuse()
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if len(body) < _HEAD.size or _digest(body, subject, query_digest) != digest:
        _refuse()
    if base64.urlsafe_b64encode(content).rstrip(b"=") != text.encode():
        _refuse()
    number, at, last_seq, origin, length = _HEAD.unpack_from(body)
    version, ids = body[_HEAD.size :][:length], body[_HEAD.size + length :]
    if number != _FORMAT:
        _refuse()
    if not -CLOCK_SKEW_SECONDS <= time.time() - at <= MAX_AGE_SECONDS + KEPT_SECONDS:
        raise Unprocessable(
            "the cursor is older than a day; request the first page again", code="invalid_cursor"
        )
    try:
        shown = unpacked_ids(ids)
        name = version.decode() or None
    except (ValueError, IndexError, struct.error):
        _refuse()
    # The first cursor of a list names it: a cached list has the same one for everybody who asks.
    return ListCursor(name, last_seq, at, shown, digest if origin == _NO_ORIGIN else origin)


def first_cursor(
    ids: Sequence[int],
    at: int,
    last_seq: int,
    version: str | None,
    subject: bytes,
    query_digest: bytes,
) -> str:
    """The text of the cursor after the first page, for the page's item ids in any order."""
    if len(ids) <= FEW_ITEMS:
        shown = b"\0" + struct.pack(f">{len(ids)}I", *ids)
    else:
        shown = packed_ids(np.sort(np.array(ids, dtype=np.int64)))
    return _text(_head(at, last_seq, _NO_ORIGIN, version) + shown, subject, query_digest)


def packed_ids(ids: NDArray[np.int64]) -> bytes:
    """Ascending ids as bytes: plain up to ``FEW_ITEMS``, else their differences in a Rice code."""
    if len(ids) <= FEW_ITEMS:
        return b"\0" + ids.astype(">u4").tobytes()
    gaps = np.diff(ids, prepend=-1) - 1
    bits = max(0, int(gaps.mean() * 0.7).bit_length() - 1)
    quotients, remainders = gaps >> bits, gaps & ((1 << bits) - 1)
    ends = np.cumsum(quotients) + np.arange(len(ids))  # each quotient is so many 0 before a 1
    unary = np.zeros(int(ends[-1]) + 1, dtype=np.uint8)
    unary[ends] = 1
    binary = (remainders[:, None] >> np.arange(bits)) & 1
    stream = np.concatenate([binary.astype(np.uint8).reshape(-1), unary])
    return b"\1" + _PACKED.pack(len(ids), bits) + np.packbits(stream).tobytes()


def unpacked_ids(content: bytes) -> NDArray[np.int64]:
    """The ids in the bytes of `packed_ids`, ascending.

    Raises:
        ValueError: the bytes are not of `packed_ids`.
        struct.error: the bytes are cut off.
    """
    if content[:1] == b"\0":
        return np.sort(np.frombuffer(content[1:], dtype=">u4").astype(np.int64))
    if content[:1] != b"\1":
        raise ValueError("no ids")
    n, bits = _PACKED.unpack_from(content, 1)
    stream = np.unpackbits(np.frombuffer(content[1 + _PACKED.size :], dtype=np.uint8))
    if n > MAX_PLACES or bits > 32 or len(stream) < n * bits:
        raise ValueError("too many ids")
    remainders = stream[: n * bits].reshape(n, bits).astype(np.int64) @ (1 << np.arange(bits))
    ends = np.flatnonzero(stream[n * bits :])
    if len(ends) != n:
        raise ValueError("ids are missing")
    quotients = np.diff(ends, prepend=-1) - 1
    ids: NDArray[np.int64] = np.cumsum((quotients << bits) + remainders + 1) - 1
    return ids


def _head(at: int, last_seq: int, origin: bytes, version: str | None) -> bytes:
    name = (version or "").encode()
    return _HEAD.pack(_FORMAT, at, last_seq, origin, len(name)) + name


def _text(body: bytes, subject: bytes, query_digest: bytes) -> str:
    content = body + _digest(body, subject, query_digest)
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _digest(body: bytes, subject: bytes, query_digest: bytes) -> bytes:
    whole = b"%b%b\0%b" % (query_digest, subject, body)
    return hashlib.blake2b(whole, digest_size=_DIGEST_BYTES).digest()


def _refuse() -> NoReturn:
    raise Unprocessable("the cursor is not from this list", code="invalid_cursor")
