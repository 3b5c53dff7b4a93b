"""Training snapshot: all events and preferences in one consistent state, divided by user on disk.

One pass over the database divides the rows by a hash of the user into files of fixed-length
records. A part has all rows of its users, so each part is sorted and resolved alone. The matrix of
all parts is in files too. The largest part and the ids of users and items bound the memory.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from app.core.settings import Settings
from app.core.tables import now_us
from app.events.event_weights import EventWeights
from app.events.resolved_events import (
    NO_EVENTS,
    NONE_AVAILABLE,
    NONE_POSITIVE,
    ResolvedEvents,
    positions,
    resolve_events,
)
from app.events.snapshot_query import (
    CHUNK_IDS,
    EVENT,
    Named,
    SnapshotQuery,
    snapshot_query,
)
from ncr_core.atomic_files import scratch_folder
from ncr_core.data.array_storage import FileStorage
from ncr_core.data.interactions import (
    BoolArray,
    IntArray,
    Interactions,
    ids_of_rows,
    row_indices,
)
from ncr_core.data.snapshot import (
    Ids,
    SnapshotManifest,
    SnapshotWriter,
    concatenated,
    part_of,
    snapshot_folder,
    suitable_parts,
)
from ncr_core.data.splits import HashArray, hashes_of
from ncr_core.errors import DataError

Report = Callable[[str, int, int], None]
"""Called with the name of a step, the number of finished units, and the number of all units."""

CheckSizes = Callable[[int, int, int], None]

PREFIX = ".ncr-events-"
_PREFERENCE_COLUMNS = 5
_NOTHING = np.zeros((0, 3), dtype=np.int64)
_NAMES = pa.schema([("id", pa.int64()), ("name", pa.large_string())])


def take_snapshot(
    settings: Settings, parent: Path, check_sizes: CheckSizes = lambda *sizes: None
) -> TrainingSnapshot:
    """Reads the database into a snapshot, which the caller has to close. The function blocks.

    Args:
        settings: The settings of the database and of the event weights.
        parent: The parent of the snapshot's folder. Its disk needs some 65 bytes an event, and some
            15 bytes and the id for each user and item. The matrix needs up to 20 bytes more an
            event, and stays there after the snapshot is closed.
        check_sizes: Called with the numbers of events, users and items before the events are read.
            An error that the function raises ends the reading.
    """
    with ExitStack() as stack:
        with snapshot_query(settings) as query:
            sizes = query.sizes()
            # Before the check: it removes what killed trainings have left.
            snapshot = stack.enter_context(
                TrainingSnapshot(parent, suitable_parts(sizes[0], at_least=1))
            )
            check_sizes(*sizes)
            snapshot.fill(query, sizes[0])
        snapshot.resolve(EventWeights.from_settings(settings))
        stack.pop_all()
    return snapshot


def write_parts(
    settings: Settings,
    folder: Path,
    *,
    parts: int | None = None,
    hash_seed: int = 0,
    report: Report = lambda *_: None,
) -> SnapshotManifest:
    """Writes the snapshot into a new folder, which appears whole or not at all.

    The function blocks. The matrix is that of `TrainingSnapshot.interactions`, with the users in
    the order of the parts.

    Args:
        settings: The settings of the database and of the event weights.
        folder: The folder of the snapshot. Its disk needs some 40 bytes an event meanwhile.
        parts: The number of parts; by default `suitable_parts` of the events.
        hash_seed: The seed of the hash that divides the users.
        report: Called with the progress.

    Raises:
        DataError: No user likes an available item, or the folder exists or cannot be written.
    """
    with ExitStack() as stack:
        staging = stack.enter_context(snapshot_folder(folder))
        with snapshot_query(settings) as query:
            n_events = query.sizes()[0]
            number = parts or suitable_parts(n_events)
            snapshot = stack.enter_context(TrainingSnapshot(folder.parent, number, hash_seed))
            snapshot.fill(query, n_events, report)
        snapshot.resolve(EventWeights.from_settings(settings), report, keep_rows=False)
        return snapshot.write(staging, report)


@dataclass(frozen=True, slots=True)
class NamedItems:
    """The items that some users of a matrix had named, by rows and columns of the matrix."""

    events: IntArray
    """(n, 3) user, item and seq of each event of any weight."""
    preferences: IntArray
    """(p, 3) user, item and seq: two for each stated preference."""


class TrainingSnapshot(AbstractContextManager["TrainingSnapshot"]):
    """The snapshot in temporary files, with the rows of each part in files of their own.

    `fill` comes first and `resolve` second. Then either `interactions` or `write` can be called,
    once. The rows of the files have internal ids.

    All methods raise OSError if files cannot be written, or have disappeared.
    """

    def __init__(self, parent: Path, parts: int, hash_seed: int = 0) -> None:
        """Makes the folder of the files in a folder, which may not exist yet."""
        self._stack = ExitStack()
        self._parent = parent
        self._folder = self._stack.enter_context(scratch_folder(parent, PREFIX))
        self._parts, self._hash_seed = parts, hash_seed
        self._latest, self._n_liked, self._n_users = 0, 0, 0
        self._used: BoolArray = np.zeros(0, dtype=np.bool_)  # items by internal id
        self._weights: set[float] = set()
        self._sizes: Counter[Path] = Counter()  # of the files with rows, in bytes
        self.last_seq = 0
        """The highest seq of an event, a preference or a deletion."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the files."""
        self._stack.close()

    def fill(self, query: SnapshotQuery, n_events: int, report: Report = lambda *_: None) -> None:
        """Reads the ``n_events`` of the database in chunks, and divides all rows into files.

        Raises:
            DataError: The database has no events.
        """
        if n_events == 0:
            raise DataError(NO_EVENTS)
        self.last_seq, done = query.max_seq(), 0
        for events in query.events():
            self._latest = max(self._latest, int(events["timestamp"].max(initial=0)))
            self._append("events", events["user_id"], events)
            done += len(events)
            report("read events", done, n_events)
        preferences = query.preferences()
        while chunk := list(islice(preferences, CHUNK_IDS)):
            stated = np.array(chunk, dtype=np.int64)
            self._latest = max(self._latest, int(stated[:, 3].max()))
            self._append("preferences", stated[:, 0], stated)
        self._append_names(query.users())
        items = self._folder / "items"
        with items.open("wb") as file, pa.ipc.new_stream(file, _NAMES) as stream:
            for ids, names in _chunks(query.items()):
                stream.write_batch(_batch(ids, pa.array(names, pa.large_string())))
        self._sizes[items] = items.stat().st_size

    def resolve(
        self,
        event_weights: EventWeights,
        report: Report = lambda *_: None,
        *,
        keep_rows: bool = True,
    ) -> None:
        """Resolves the events and preferences of each part, see `resolve_events`.

        Args:
            event_weights: The decay of the weights.
            report: Called with the progress.
            keep_rows: Whether to keep the rows on the disk, for `named_items`.

        Raises:
            DataError: No user likes an available item.
        """
        # Not after the present: an event in the future would make all others old.
        now = min(now_us(), self._latest)
        available = self._available()
        self._used = np.zeros_like(available)
        any_available = False
        for part in range(self._parts):
            events = self._rows("events", part, EVENT)
            events = events[_among(available, events["item_id"])]
            users = np.sort(self._names_of(part)["id"].to_numpy())
            events = events[np.isin(events["user_id"], users)]
            # Sorted here: the database would spill a sort of this size to disk.
            order = np.lexsort((events["seq"], events["timestamp"], events["user_id"]))
            events = events[order]
            any_available |= len(events) > 0
            stated = self._preferences(part)
            kept = _among(available, stated[:, 1]) & _among(available, stated[:, 2])
            stated = stated[kept & np.isin(stated[:, 0], users)]
            timestamps, weights = events["timestamp"].copy(), events["weight"].copy()
            if event_weights.half_life_days is not None:
                weights *= event_weights.decay(timestamps, now)
            resolved = resolve_events(
                np.stack([events["user_id"], events["item_id"]], axis=1),
                weights,
                timestamps,
                stated[:, :3],
                event_weights.decay(stated[:, 3], now),
            )
            del events, order
            self._used[resolved.items] = True
            self._n_liked += len(resolved.liked)
            self._n_users += len(resolved.users)
            if len(resolved.liked):
                low, high = resolved.liked_weights.min(), resolved.liked_weights.max()
                self._weights |= {float(low), float(high)}
            path = self._path("resolved", part)
            np.savez(
                path, **{field.name: getattr(resolved, field.name) for field in fields(resolved)}
            )
            self._sizes[path] = path.stat().st_size
            if not keep_rows:
                for kind in ("events", "preferences"):
                    self._path(kind, part).unlink(missing_ok=True)
            report("resolve parts", part + 1, self._parts)
        if not any_available:
            raise DataError(NONE_AVAILABLE)
        if self._n_liked == 0:
            raise DataError(NONE_POSITIVE)

    def interactions(self, remembered: int | None = None) -> Interactions:
        """Builds the matrix of interactions, with the users' other feedback.

        If there are more than ``remembered`` users, those with the smallest `hashes_of` come first.
        They are a sample, whose vectors a model keeps, and have the users to hold out from.

        Of a user's events about an item, the latest with a non-zero weight counts, see
        `resolve_feedback`. The matrix leaves out users and items without a client's id, users
        without a like or a preference, and items that no user likes, dislikes or prefers to
        another. The users of a part are in the order of their internal ids.
        """
        storage = FileStorage(self._parent)  # these arrays outlive the files of the snapshot
        matrices = self._matrices()
        bound = None if remembered is None else self._hash_bound(remembered)
        if bound is not None:
            first = self._matrices(lambda hashes: hashes <= bound, are_last=False)
            matrices = chain(first, self._matrices(lambda hashes: hashes > bound))
        matrix = concatenated(matrices, self._n_liked, self._item_ids(), storage)
        return replace(matrix, remembered=None if bound is None else remembered)

    def write(self, folder: Path, report: Report = lambda *_: None) -> SnapshotManifest:
        """Writes the matrix in parts."""
        item_ids = self._item_ids()
        writer = SnapshotWriter(
            folder,
            len(item_ids),
            timed=True,
            weighted=self._is_weighted,
            hash_seed=self._hash_seed,
            last_seq=self.last_seq,
        )
        for part, matrix in enumerate(self._matrices()):
            writer.add_part(matrix)
            report("write parts", part + 1, self._parts)
        return writer.finish(item_ids)

    def named_items(self, interactions: Interactions, users: BoolArray) -> NamedItems:
        """The items that some users named, also in events that do not count in the matrix.

        Args:
            interactions: The matrix of this snapshot. It may lack users and items since.
            users: (n_users,) mask of the users.
        """
        rows = np.flatnonzero(users)
        ids = pa.array(list(ids_of_rows(interactions.user_ids, rows)), pa.large_string())
        events, preferences = [_NOTHING], [_NOTHING]
        for part in range(self._parts):
            names = self._names_of(part)
            place = pc.index_in(names["name"], ids).fill_null(-1).to_numpy()
            own = np.flatnonzero(place >= 0)
            own = own[np.argsort(names["id"].to_numpy()[own])]
            internal, row_of = names["id"].to_numpy()[own], rows[place[own]]
            of_part = self._rows("events", part, EVENT)
            columns = [of_part[name] for name in ("user_id", "item_id", "seq")]
            stated = self._preferences(part)
            for found, named in (
                (events, np.stack(columns, axis=1)),
                (preferences, stated[:, [0, 1, 4]]),
                (preferences, stated[:, [0, 2, 4]]),
            ):
                at = positions(internal, named[:, 0])
                theirs = named[at >= 0]
                theirs[:, 0] = row_of[at[at >= 0]]
                found.append(theirs)
        return NamedItems(*(self._in_matrix(each, interactions) for each in (events, preferences)))

    def _in_matrix(self, parts: Sequence[IntArray], interactions: Interactions) -> IntArray:
        """The rows of parts with the columns of their items, without items of other matrices."""
        named = np.concatenate(parts)
        items, inverse = np.unique(named[:, 1], return_inverse=True)
        names = self._items()
        place = pc.index_in(pa.array(items), names["id"].combine_chunks())
        item_ids = names["name"].combine_chunks().take(place).to_pylist()
        named[:, 1] = row_indices(item_ids, interactions.item_ids)[inverse]
        return named[named[:, 1] >= 0]

    def _hash_bound(self, n: int) -> np.uint64 | None:
        """The largest of the ``n`` smallest hashes of users; None for at most ``n`` users."""
        if self._n_users <= n:
            return None
        smallest = np.empty(0, np.uint64)
        for part in range(self._parts):
            users = self._resolved(part).users
            hashes = hashes_of(_ids_of(users, self._names_of(part)))
            smallest = np.concatenate([smallest, hashes])
            if len(smallest) > n:
                smallest = np.partition(smallest, n - 1)[:n]
        bound: np.uint64 = smallest.max()
        return bound

    def _resolved(self, part: int) -> ResolvedEvents:
        path = self._verified(self._path("resolved", part))
        with np.load(path, allow_pickle=False) as arrays:
            return ResolvedEvents(**{name: arrays[name] for name in arrays.files})

    def _matrices(
        self, choose: Callable[[HashArray], BoolArray] | None = None, *, are_last: bool = True
    ) -> Iterator[Interactions]:
        """The matrix of each part, with the same columns.

        Args:
            choose: Chooses some users by the hashes of their ids; None: all users.
            are_last: Whether nobody needs the files of a part afterwards.
        """
        items, item_ids = np.flatnonzero(self._used), self._item_ids()
        for part in range(self._parts):
            resolved = self._resolved(part)
            if are_last:
                self._path("resolved", part).unlink()
            users = resolved.users
            user_ids = _ids_of(users, self._names_of(part))
            if choose is not None:
                chosen = np.flatnonzero(choose(hashes_of(user_ids)))
                users, user_ids = users[chosen], user_ids.take(chosen)
                resolved = resolved.of_users(users)
            yield resolved.interactions(
                users, items, user_ids, item_ids, weighted=self._is_weighted
            )

    @property
    def _is_weighted(self) -> bool:
        return len(self._weights) > 1

    def _path(self, kind: str, part: int) -> Path:
        return self._folder / f"{kind}-{part}{'.npz' if kind == 'resolved' else ''}"

    def _append(self, kind: str, users: IntArray, rows: NDArray[Any]) -> None:
        """Appends rows to the files of their users' parts."""
        for part, mine in self._divided(users):
            path = self._path(kind, part)
            with path.open("ab") as file:
                self._sizes[path] += file.write(rows[mine].tobytes())

    def _append_names(self, users: Iterator[Named]) -> None:
        for ids, names in _chunks(users):
            strings = pa.array(names, pa.large_string())
            for part, mine in self._divided(ids):
                batch = _batch(ids[mine], strings.take(pa.array(mine)))
                path = self._path("users", part)
                with path.open("ab") as file:
                    with pa.ipc.new_stream(file, _NAMES) as stream:
                        stream.write_batch(batch)
                    self._sizes[path] = file.tell()

    def _divided(self, users: IntArray) -> Iterator[tuple[int, IntArray]]:
        """Each part with some of the users, and the positions of these users."""
        division = part_of(users, self._parts, self._hash_seed)
        order = np.argsort(division, kind="stable")
        stops = np.cumsum(np.bincount(division, minlength=self._parts))
        for part, mine in enumerate(np.split(order, stops[:-1])):
            if len(mine):
                yield part, mine

    def _rows(self, kind: str, part: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        path = self._file(kind, part)
        return np.empty(0, dtype) if path is None else np.fromfile(path, dtype)

    def _file(self, kind: str, part: int) -> Path | None:
        """The file with these rows of a part; None if the part has no such row."""
        path = self._path(kind, part)
        return self._verified(path) if self._sizes[path] else None

    def _verified(self, path: Path) -> Path:
        """A file of the snapshot. Raises OSError if it has disappeared, or has another size."""
        if path.stat().st_size != self._sizes[path]:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return path

    def _items(self) -> pa.Table:
        """Internal ids and names of the available items."""
        return _read_names(self._verified(self._folder / "items"))

    def _preferences(self, part: int) -> IntArray:
        """(p, 5) user, winner, loser, timestamp and seq, in the order of user, time and seq."""
        stated = self._rows("preferences", part, np.dtype("i8"))
        return stated.reshape(-1, _PREFERENCE_COLUMNS)

    def _names_of(self, part: int) -> pa.Table:
        """Internal ids and names of the users of a part."""
        path = self._file("users", part)
        return _NAMES.empty_table() if path is None else _read_names(path)

    def _available(self) -> BoolArray:
        """Whether an item may be recommended, by its internal id."""
        ids = self._items()["id"].to_numpy()
        available = np.zeros(int(ids.max(initial=-1)) + 1, dtype=np.bool_)
        available[ids] = True
        return available

    def _item_ids(self) -> Ids:
        """The ids of the items of the matrix."""
        return _ids_of(np.flatnonzero(self._used), self._items())


def _among(available: BoolArray, ids: IntArray) -> BoolArray:
    mask = ids < len(available)
    mask[mask] = available[ids[mask]]
    return mask


def _ids_of(ids: IntArray, names: pa.Table) -> Ids:
    """The names of ascending internal ids, all of which are in the table."""
    known = names["id"].to_numpy()
    order = np.argsort(known)
    rows = order[np.searchsorted(known, ids, sorter=order)]
    return Ids(names["name"].combine_chunks().take(pa.array(rows)))


def _chunks(rows: Iterator[Named]) -> Iterator[tuple[IntArray, Sequence[str]]]:
    while chunk := list(islice(rows, CHUNK_IDS)):
        ids, names = zip(*chunk, strict=True)
        yield np.array(ids, dtype=np.int64), names


def _batch(ids: IntArray, names: pa.Array) -> pa.RecordBatch:
    return pa.record_batch([pa.array(ids), names], schema=_NAMES)


def _read_names(path: Path) -> pa.Table:
    """The rows of a file with one Arrow stream after another."""
    batches, size = [], path.stat().st_size
    with pa.memory_map(str(path)) as file:
        while file.tell() < size:
            with pa.ipc.open_stream(file) as stream:
                batches += list(stream)
    return pa.Table.from_batches(batches, _NAMES)
