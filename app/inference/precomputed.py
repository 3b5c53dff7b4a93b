"""Candidates and lists of the most active users, made by a worker after a model is published."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from app import __version__
from app.inference.loaded_model import ItemIndex, LoadedModel, SearchedItems, unfiltered_key
from ncr_core.atomic_files import atomic_write
from ncr_core.inference.engine import InferenceEngine, RankedItem
from ncr_core.inference.retrieval import CandidateList, ItemFilter, RankRequest, UserState

BATCH = 64  # users in one pass
FORMAT = "ncr-candidates-2"
"""The format of the file. The next model gets new files in place of files of another format."""
LIST_ITEMS = 10  # of a list: as many as a request gets that does not say how many

Report = Callable[[int, int], None]


class ActiveUser(NamedTuple):
    """A user for whom a worker finds candidates."""

    id: str
    row: int
    """The user's row in the model."""
    last_seq: int
    seen: NDArray[np.int64]
    """Rows of the items that the user has seen."""
    latest: int
    """The time of the user's last event, in microseconds since 1970."""
    gap_class: int


@dataclass(frozen=True, slots=True, eq=False)
class PrecomputedLists:
    """Plain lists of ``LIST_ITEMS`` items for (U,) users, best first."""

    made_by: str
    """The key of the ranker, see `ranked_by`."""
    latest: NDArray[np.int64]
    """(U,) the time of each user's last event, in microseconds since 1970."""
    items: NDArray[np.int32]
    """(U, n) item rows, −1 where the list is shorter."""
    scores: NDArray[np.float64]
    """(U, n) as `RankedItem.score`."""
    ahead: NDArray[np.float64]
    """(U, n) as `RankedItem.preferred_over_next`."""

    def fits(self, n_users: int, n_items: int) -> bool:
        """Whether the arrays of a file have the right types and shapes, and valid item rows."""
        arrays = (self.latest, self.items, self.scores, self.ahead)
        shapes = [(n_users,), *[(n_users, LIST_ITEMS)] * 3]
        return (
            [array.dtype for array in arrays] == [np.int64, np.int32, np.float64, np.float64]
            and [array.shape for array in arrays] == shapes
            and bool(((self.items >= -1) & (self.items < n_items)).all())
        )


def ranked_by(engine: InferenceEngine) -> str:
    """The key of the ranker: the version of the service, the number of candidates, the device.

    Servers with another version or setting may rank in another way.
    """
    return f"{__version__} {engine.n_candidates} {engine.model.device.type}"


class PrecomputedCandidates:
    """Candidates of (U,) users at the users' seqs then, among the items that were visible then."""

    def __init__(
        self,
        users: Sequence[str],
        seqs: NDArray[np.int64],
        items: NDArray[np.int32],
        gaps: NDArray[np.int8],
        searched: SearchedItems,
        lists: PrecomputedLists,
    ) -> None:
        self._seqs, self._items, self._gaps = seqs, items, gaps
        self.rows = {user: row for row, user in enumerate(users)}
        """The row of each user."""
        self.lists = lists
        self.searched = searched
        """The items that were visible then."""

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, request: RankRequest) -> CandidateList | None:
        """The candidates, if computed for exactly this user state and these filters, else None."""
        state = request.user.key
        if not isinstance(state, tuple) or request.user.evidence is not None:
            return None
        user, seq = state
        row = self.rows.get(user)
        if row is None or self._seqs[row] != seq:
            return None
        key = (state, int(self._gaps[row]), unfiltered_key(self.searched.digest))
        if (request.trained_key or request.key) != key:
            return None
        items = self._items[row]
        candidates = items[items >= 0]
        return CandidateList(candidates, len(candidates) < len(items))

    def find_list(
        self, user: str, seq: int, model: LoadedModel, items: ItemIndex, at_us: int
    ) -> list[RankedItem] | None:
        """The list of a user in ``rows``, if a list ranked now would be the same, else None.

        Args:
            user: the client's id.
            seq: the user's last seq.
            model: the model that the lists were ranked with.
            items: the model's items in the current state of the catalogue.
            at_us: the time of the request, in microseconds since 1970.
        """
        row, lists = self.rows[user], self.lists
        if (
            lists.items[row, -1] < 0  # popular items are to follow
            or self._seqs[row] != seq
            or items.searched.digest != self.searched.digest
            or model.gap_class(lists.latest[row : row + 1], at_us) != self._gaps[row]
        ):
            return None
        if len(items.hidden):
            # Others take the places of hidden ones among the candidates that are ranked, and in
            # the list, which goes on with further candidates where few are ranked.
            ranked = self._items[row, : model.engine.n_candidates]
            if np.isin(np.concatenate([ranked, lists.items[row]]), items.hidden).any():
                return None
        columns = lists.items[row].tolist(), lists.scores[row].tolist(), lists.ahead[row].tolist()
        best = [RankedItem(*item) for item in zip(*columns, strict=True)]
        return [*best[:-1], best[-1]._replace(preferred_over_next=None)]

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        arrays: dict[str, NDArray[Any]] = {
            "users": np.frombuffer(json.dumps(list(self.rows)).encode(), dtype=np.uint8),
            "seqs": self._seqs,
            "items": self._items,
            "gaps": self._gaps,
            "searched": np.packbits(self.searched.mask),
        }
        arrays |= {f"list_{name}": getattr(self.lists, name) for name in _LIST_ARRAYS}
        about = {"format": FORMAT, "visible": self.searched.digest, "lists": self.lists.made_by}
        atomic_write(path, save(arrays, about), replace=True)

    @classmethod
    def load(cls, path: Path, n_items: int) -> PrecomputedCandidates:
        """Reads a file of ``save``.

        Raises:
            ValueError: the file is damaged or does not fit the model.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                about = file.metadata() or {}
                names = ("users", "seqs", "items", "gaps", "searched")
                ids, seqs, items, gaps, packed = (file.get_tensor(name) for name in names)
                arrays = (file.get_tensor(f"list_{name}") for name in _LIST_ARRAYS)
                lists = PrecomputedLists(about.get("lists", ""), *arrays)
            users = json.loads(ids.tobytes())
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{path.name} is damaged: {error}") from None
        named = isinstance(users, list) and all(isinstance(user, str) for user in users)
        typed = seqs.dtype == np.int64 and items.dtype == np.int32
        if (
            about.get("format") != FORMAT
            or not (named and typed and seqs.ndim == 1 and items.ndim == 2)
            or not len(set(users)) == len(seqs) == len(items)
            or (gaps.dtype, gaps.shape) != (np.int8, seqs.shape)
            or (packed.dtype, packed.shape) != (np.uint8, (-(-n_items // 8),))
            or not lists.fits(len(users), n_items)
            or (items.size and (items.min() < -1 or items.max() >= n_items))
        ):
            raise ValueError(f"{path.name} does not fit its model")
        searched = SearchedItems.of(np.unpackbits(packed, count=n_items).astype(np.bool_))
        if searched.digest != about.get("visible"):
            raise ValueError(f"{path.name} does not fit its model")
        return cls(users, seqs, items, gaps, searched, lists)


_LIST_ARRAYS = ("latest", "items", "scores", "ahead")


def compute(
    engine: InferenceEngine,
    users: Sequence[ActiveUser],
    visible: NDArray[np.bool_],
    report: Report,
) -> PrecomputedCandidates:
    """Candidates and lists of users; the engine keeps the candidates for the lists."""
    n, shape = len(users), (len(users), LIST_ITEMS)
    items = np.full((n, engine.retriever.capacity), -1, dtype=np.int32)
    lists = PrecomputedLists(
        ranked_by(engine),
        np.array([user.latest for user in users], dtype=np.int64),
        np.full(shape, -1, dtype=np.int32),
        np.zeros(shape),
        np.zeros(shape),
    )
    for start in range(0, n, BATCH):
        batch = users[start : start + BATCH]
        requests = [
            RankRequest(
                UserState(user.row, gap_class=user.gap_class),
                LIST_ITEMS,
                ItemFilter(visible, user.seen),
                key=user.row,
            )
            for user in batch
        ]
        found, ranked = engine.retriever.retrieve(requests), engine.rank(requests)
        for row, (candidates, best) in enumerate(zip(found, ranked, strict=True), start):
            items[row, : len(candidates.items)] = candidates.items
            for place, item in enumerate(best):
                lists.items[row, place], lists.scores[row, place] = item.row, item.score
                lists.ahead[row, place] = item.preferred_over_next or 0.0
        report(start + len(batch), n)
    seqs = np.array([user.last_seq for user in users], dtype=np.int64)
    gaps = np.array([user.gap_class for user in users], dtype=np.int8)
    names = [user.id for user in users]
    return PrecomputedCandidates(names, seqs, items, gaps, SearchedItems.of(visible), lists)
