"""Training snapshot as Parquet parts by a hash of the user, written in bounded memory.

One pass over the database divides the rows by user into files of fixed-length records, on the disk
of the snapshot. A part has all rows of its users, so each part is sorted and resolved alone. The
largest part, and some ten bytes an item, bound the memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from app.core.settings import Settings
from app.core.tables import now_us
from app.events.event_weights import EventWeights
from app.events.resolved_events import (
    NO_EVENTS,
    NONE_AVAILABLE,
    NONE_POSITIVE,
    ResolvedEvents,
    resolve_events,
)
from app.events.snapshot_query import (
    CHUNK_IDS,
    EVENT,
    Named,
    SnapshotQuery,
    snapshot_query,
)
from ncr_core.data.interactions import BoolArray, IntArray
from ncr_core.data.snapshot import (
    Ids,
    SnapshotManifest,
    SnapshotWriter,
    part_of,
    snapshot_folder,
    suitable_parts,
)
from ncr_core.errors import DataError

Report = Callable[[str, int, int], None]
"""Called with the name of a step, the number of finished units, and the number of all units."""

_PREFERENCE_COLUMNS = 5
_NAMES = pa.schema([("id", pa.int64()), ("name", pa.string())])


def write_parts(
    settings: Settings,
    folder: Path,
    *,
    parts: int | None = None,
    hash_seed: int = 0,
    report: Report = lambda *_: None,
) -> SnapshotManifest:
    """Writes the snapshot into a new folder, which appears whole or not at all.

    The function blocks. The matrix is that of `EventSnapshot.interactions`, with the users in the
    order of the parts.

    Args:
        settings: The settings of the database and of the event weights.
        folder: The folder of the snapshot. Its disk needs some 40 bytes an event meanwhile.
        parts: The number of parts; by default `suitable_parts` of the events.
        hash_seed: The seed of the hash that divides the users.
        report: Called with the progress.

    Raises:
        DataError: No user likes an available item, or the folder exists or cannot be written.
    """
    with (
        snapshot_folder(folder) as staging,
        tempfile.TemporaryDirectory(prefix=f".{folder.name[:50]}-", dir=folder.parent) as spilled,
    ):
        with snapshot_query(settings) as query:
            n_events = query.sizes()[0]
            if n_events == 0:
                raise DataError(NO_EVENTS)
            division = _Division(Path(spilled), parts or suitable_parts(n_events), hash_seed)
            division.fill(query, n_events, report)
        division.resolve(EventWeights.from_settings(settings), report)
        return division.write(staging, report)


class _Division:
    """Temporary files with the rows of each part of a snapshot."""

    def __init__(self, folder: Path, parts: int, hash_seed: int) -> None:
        self._folder, self._parts, self._hash_seed = folder, parts, hash_seed
        self._last_seq, self._latest = 0, 0
        self._used: BoolArray = np.zeros(0, dtype=np.bool_)  # items by internal id
        self._weights: set[float] = set()

    def fill(self, query: SnapshotQuery, n_events: int, report: Report) -> None:
        """Reads the database in chunks, and divides the rows into files."""
        self._last_seq = query.max_seq()
        done = 0
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
                stream.write_batch(_batch(ids, pa.array(names, pa.string())))

    def resolve(self, event_weights: EventWeights, report: Report) -> None:
        """Resolves the events and preferences of each part, see `resolve_events`."""
        # Not after the present: an event in the future would make all others old.
        now = min(now_us(), self._latest)
        available = self._available()
        self._used = np.zeros_like(available)
        any_available = any_liked = False
        for part in range(self._parts):
            events = self._rows("events", part, EVENT)
            events = events[_among(available, events["item_id"])]
            users = np.sort(self._names_of(part)["id"].to_numpy())
            events = events[np.isin(events["user_id"], users)]
            # Sorted here: the database would spill a sort of this size to disk.
            order = np.lexsort((events["seq"], events["timestamp"], events["user_id"]))
            events = events[order]
            any_available |= len(events) > 0
            stated = self._rows("preferences", part, np.dtype("i8")).reshape(
                -1, _PREFERENCE_COLUMNS
            )
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
            any_liked |= len(resolved.liked) > 0
            if len(resolved.liked):
                low, high = resolved.liked_weights.min(), resolved.liked_weights.max()
                self._weights |= {float(low), float(high)}
            np.savez(
                self._path("resolved", part),
                **{field.name: getattr(resolved, field.name) for field in fields(resolved)},
            )
            for name in ("events", "preferences"):
                self._path(name, part).unlink(missing_ok=True)
            report("resolve parts", part + 1, self._parts)
        if not any_available:
            raise DataError(NONE_AVAILABLE)
        if not any_liked:
            raise DataError(NONE_POSITIVE)

    def write(self, folder: Path, report: Report) -> SnapshotManifest:
        """Writes the parts."""
        items = np.flatnonzero(self._used)
        item_ids = self._item_ids(items)
        weighted = len(self._weights) > 1
        writer = SnapshotWriter(
            folder,
            len(items),
            timed=True,
            weighted=weighted,
            hash_seed=self._hash_seed,
            last_seq=self._last_seq,
        )
        for part in range(self._parts):
            path = self._path("resolved", part)
            with np.load(path, allow_pickle=False) as arrays:
                resolved = ResolvedEvents(**{name: arrays[name] for name in arrays.files})
            users, names = resolved.users, self._names_of(part)
            user_ids = _ids_of(users, names)
            writer.add_part(
                resolved.interactions(users, items, user_ids, item_ids, weighted=weighted)
            )
            for each in (path, self._path("users", part)):
                each.unlink(missing_ok=True)
            report("write parts", part + 1, self._parts)
        return writer.finish(item_ids)

    def _path(self, kind: str, part: int) -> Path:
        return self._folder / f"{kind}-{part}{'.npz' if kind == 'resolved' else ''}"

    def _append(self, kind: str, users: IntArray, rows: NDArray[Any]) -> None:
        """Appends rows to the files of their users' parts."""
        for part, mine in self._divided(users):
            with self._path(kind, part).open("ab") as file:
                file.write(rows[mine].tobytes())

    def _append_names(self, users: Iterator[Named]) -> None:
        for ids, names in _chunks(users):
            strings = pa.array(names, pa.string())
            for part, mine in self._divided(ids):
                batch = _batch(ids[mine], strings.take(pa.array(mine)))
                path = self._path("users", part)
                with path.open("ab") as file, pa.ipc.new_stream(file, _NAMES) as stream:
                    stream.write_batch(batch)

    def _divided(self, users: IntArray) -> Iterator[tuple[int, IntArray]]:
        """Each part with some of the users, and the positions of these users."""
        division = part_of(users, self._parts, self._hash_seed)
        order = np.argsort(division, kind="stable")
        stops = np.cumsum(np.bincount(division, minlength=self._parts))
        for part, mine in enumerate(np.split(order, stops[:-1])):
            if len(mine):
                yield part, mine

    def _rows(self, kind: str, part: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        path = self._path(kind, part)
        return np.fromfile(path, dtype) if path.exists() else np.empty(0, dtype)

    def _names_of(self, part: int) -> pa.Table:
        """Internal ids and names of the users of a part."""
        return _read_names(self._path("users", part))

    def _available(self) -> BoolArray:
        """Whether an item may be recommended, by its internal id."""
        ids = _read_names(self._folder / "items")["id"].to_numpy()
        available = np.zeros(int(ids.max(initial=-1)) + 1, dtype=np.bool_)
        available[ids] = True
        return available

    def _item_ids(self, items: IntArray) -> Ids:
        return _ids_of(items, _read_names(self._folder / "items"))


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
    if not path.exists():
        return _NAMES.empty_table()
    batches, size = [], path.stat().st_size
    with pa.memory_map(str(path)) as file:
        while file.tell() < size:
            with pa.ipc.open_stream(file) as stream:
                batches += list(stream)
    return pa.Table.from_batches(batches, _NAMES)
