"""Candidates of the most active users, computed by a worker when a model has been published."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from app.recommend.candidates import Kept, RankRequest, UserCandidates

AT_ONCE = 64
FORMAT = "ncr-candidates-1"

Report = Callable[[int, int], None]


class Precomputed:
    """Candidates of (U,) users at the seqs they were at, for what was visible then."""

    def __init__(
        self, users: Sequence[str], seqs: NDArray[np.int64], items: NDArray[np.int32], visible: str
    ) -> None:
        self._seqs, self._items = seqs, items
        self._users = list(users)
        self._rows = {user: row for row, user in enumerate(users)}
        self.visible = visible

    def __len__(self) -> int:
        return len(self._users)

    def find(self, request: RankRequest) -> Kept | None:
        """The candidates, if they were computed for just this state and these filters."""
        user, seq = request.state
        row = self._rows.get(user)
        if (
            row is None
            or request.filters != usual_filters(self.visible)
            or request.evidence is not None
            or self._seqs[row] != seq
        ):
            return None
        items = self._items[row]
        own = items[items >= 0]
        return Kept(own, len(own) < len(items))

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        ids = np.frombuffer(json.dumps(self._users).encode(), dtype=np.uint8)
        arrays: dict[str, NDArray[Any]] = {"users": ids, "seqs": self._seqs, "items": self._items}
        content = save(arrays, {"format": FORMAT, "visible": self.visible})
        staging = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        staging.write_bytes(content)
        staging.replace(path)

    @classmethod
    def load(cls, path: Path, n_items: int) -> Precomputed:
        """Reads what ``save`` wrote. Raises ValueError for what does not fit the model."""
        try:
            with safe_open(path, framework="numpy") as file:
                about = file.metadata() or {}
                ids, seqs, items = (file.get_tensor(name) for name in ("users", "seqs", "items"))
            users = json.loads(ids.tobytes())
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{path.name} is damaged: {error}") from None
        named = isinstance(users, list) and all(isinstance(user, str) for user in users)
        typed = seqs.dtype == np.int64 and items.dtype == np.int32
        if (
            about.get("format") != FORMAT
            or not (named and typed and seqs.ndim == 1 and items.ndim == 2)
            or not len(users) == len(seqs) == len(items)
            or (items.size and (items.min() < -1 or items.max() >= n_items))
        ):
            raise ValueError(f"{path.name} does not fit its model")
        return cls(users, seqs, items, about.get("visible", ""))


def usual_filters(visible: str) -> tuple[bool, str]:
    """The filters of a request that asks for nothing special."""
    return (True, visible)


def digest(visible: NDArray[np.bool_]) -> str:
    """Names a state of what may be recommended: the same mask, the same name."""
    return hashlib.blake2b(np.packbits(visible).tobytes(), digest_size=16).hexdigest()


def compute(
    candidates: UserCandidates,
    users: Sequence[tuple[str, int, int, NDArray[np.int64]]],
    visible: NDArray[np.bool_],
    report: Report,
) -> Precomputed:
    """For users given as (id, row, last seq, rows of what they have seen)."""
    name = digest(visible)
    kept: list[NDArray[np.int32]] = []
    for start in range(0, len(users), AT_ONCE):
        part = users[start : start + AT_ONCE]
        requests = [
            RankRequest(row, None, (user, seq), usual_filters(name), _unseen(visible, seen), 1)
            for user, row, seq, seen in part
        ]
        kept += [found.items for found in candidates.find(requests)]
        report(start + len(part), len(users))
    items = np.full((len(users), candidates.n_kept), -1, dtype=np.int32)
    for row, own in zip(items, kept, strict=True):
        row[: len(own)] = own
    seqs = np.array([seq for _, _, seq, _ in users], dtype=np.int64)
    return Precomputed([user for user, *_ in users], seqs, items, name)


def _unseen(visible: NDArray[np.bool_], seen: NDArray[np.int64]) -> Callable[[], NDArray[np.bool_]]:
    def allowed() -> NDArray[np.bool_]:
        mask = visible.copy()
        mask[seen] = False
        return mask

    return allowed
