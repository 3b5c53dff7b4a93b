"""Candidates of the most active users, computed by a worker when a model has been published."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from app.inference.loaded_model import SearchedItems, unfiltered_key
from ncr_core.atomic_files import atomic_write
from ncr_core.inference.engine import InferenceEngine
from ncr_core.inference.retrieval import CandidateList, ItemFilter, RankRequest, UserState

BATCH = 64  # users in one search
FORMAT = "ncr-candidates-1"
NO_GAP = 0  # the gap class of users who are in the middle of a sitting

Report = Callable[[int, int], None]


class PrecomputedCandidates:
    """Candidates of (U,) users at the seqs they were at, for what was visible then."""

    def __init__(
        self,
        users: Sequence[str],
        seqs: NDArray[np.int64],
        items: NDArray[np.int32],
        visible: str,
        searched: SearchedItems | None = None,
    ) -> None:
        self._seqs, self._items = seqs, items
        self._users = list(users)
        self._rows = {user: row for row, user in enumerate(users)}
        self.visible = visible
        self.searched = searched
        """The items that were visible then; None in the files of earlier versions."""

    def __len__(self) -> int:
        return len(self._users)

    def find(self, request: RankRequest) -> CandidateList | None:
        """The candidates, if they were computed for just this state and these filters."""
        state = request.user.key
        if not isinstance(state, tuple) or request.user.evidence is not None:
            return None
        user, seq = state
        row = self._rows.get(user)
        if row is None or self._seqs[row] != seq:
            return None
        if (request.trained_key or request.key) != (state, NO_GAP, unfiltered_key(self.visible)):
            return None
        items = self._items[row]
        candidates = items[items >= 0]
        return CandidateList(candidates, len(candidates) < len(items))

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        ids = np.frombuffer(json.dumps(self._users).encode(), dtype=np.uint8)
        arrays: dict[str, NDArray[Any]] = {"users": ids, "seqs": self._seqs, "items": self._items}
        if self.searched is not None:
            arrays["searched"] = np.packbits(self.searched.mask)
        content = save(arrays, {"format": FORMAT, "visible": self.visible})
        atomic_write(path, content, replace=True)

    @classmethod
    def load(cls, path: Path, n_items: int) -> PrecomputedCandidates:
        """Reads what ``save`` wrote. Raises ValueError for what does not fit the model."""
        try:
            with safe_open(path, framework="numpy") as file:
                about = file.metadata() or {}
                ids, seqs, items = (file.get_tensor(name) for name in ("users", "seqs", "items"))
                packed = file.get_tensor("searched") if "searched" in file.keys() else None  # noqa: SIM118
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
        searched, visible = None, about.get("visible", "")
        if packed is not None and packed.dtype == np.uint8 and len(packed) == -(-n_items // 8):
            searched = SearchedItems.of(np.unpackbits(packed, count=n_items).astype(np.bool_))
        if searched is not None and searched.digest != visible:
            raise ValueError(f"{path.name} does not fit its model")
        return cls(users, seqs, items, visible, searched)


def compute(
    engine: InferenceEngine,
    users: Sequence[tuple[str, int, int, NDArray[np.int64]]],
    visible: NDArray[np.bool_],
    report: Report,
) -> PrecomputedCandidates:
    """Candidates of users, given as (id, row, last seq, rows of what they have seen)."""
    lists: list[NDArray[np.int32]] = []
    for start in range(0, len(users), BATCH):
        batch = users[start : start + BATCH]
        requests = [
            RankRequest(UserState(row), 1, ItemFilter(visible, seen)) for _, row, _, seen in batch
        ]
        lists += [candidates.items for candidates in engine.retriever.retrieve(requests)]
        report(start + len(batch), len(users))
    items = np.full((len(users), engine.retriever.capacity), -1, dtype=np.int32)
    for row, of_user in zip(items, lists, strict=True):
        row[: len(of_user)] = of_user
    seqs = np.array([seq for _, _, seq, _ in users], dtype=np.int64)
    searched = SearchedItems.of(visible)
    return PrecomputedCandidates(
        [user for user, *_ in users], seqs, items, searched.digest, searched
    )
