"""Snapshots: the Interactions matrix as Parquet parts by hash of the user, with a manifest.

A row of a part is one user with all of the user's feedback, so histories and held-out items need no
shuffle. User rows are numbered part after part: some parts are some rows of the matrix, and all
parts are the matrix. The manifest is written last. It holds the SHA-256 sums of the files, which
every reader verifies.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ncr_core.atomic_files import atomic_folder
from ncr_core.data.array_storage import IN_MEMORY, ArrayStorage
from ncr_core.data.interactions import IntArray, Interactions, UserFeedback, ids_of_rows
from ncr_core.errors import DataError

FORMAT = "ncr-snapshot/1"
MANIFEST = "manifest.json"
ITEMS = "items.parquet"
MIN_PARTS, MAX_PARTS = 16, 4_096
PART_EVENTS = 2**20
MAX_MANIFEST_BYTES = 4 * 2**20
MAX_FILE_BYTES = 4 * 2**30
MAX_PIECES = 64  # of the feedback: an array in a file holds a descriptor
GROUP_USERS = 2**15  # of a row group
COMPRESSION_LEVEL = 1  # of zstd: higher ones take a third of the size away at thrice the time

Array = npt.NDArray[Any]

_INTS, _FLOATS, _TIMES = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.float64())
SCHEMA = pa.schema(
    [
        pa.field("user", pa.string(), nullable=False),
        ("items", _INTS),  # item rows, oldest first, each once
        ("times", _TIMES),  # seconds since 1970 of each of them; null where only order is known
        ("weights", _FLOATS),  # of each of them; null where all count the same
        ("seen", _INTS),  # of `UserFeedback`, as all that follow
        ("disliked", _INTS),
        ("disliked_weights", _FLOATS),
        ("winners", _INTS),
        ("losers", _INTS),
        ("pair_weights", _FLOATS),
    ]
)


@dataclass(frozen=True)
class SnapshotFile:
    """The entry of a file in the manifest."""

    file: str
    rows: int
    """The number of users of a part, or of items."""
    bytes: int
    sha256: str
    interactions: int = 0
    """The number of interactions of a part."""


@dataclass(frozen=True)
class SnapshotManifest:
    """The files and sizes of a snapshot."""

    parts: tuple[SnapshotFile, ...]
    items: SnapshotFile
    """The file of the items' ids, in the order of their rows."""
    n_users: int
    n_items: int
    n_interactions: int
    last_seq: int
    """The seq of the last event in the snapshot; 0 for data without seqs."""
    timed: bool
    """Whether the times of interactions are known."""
    weighted: bool
    """Whether interactions differ in weight."""
    hash_seed: int
    """The seed of `part_of`."""

    @property
    def first_users(self) -> list[int]:
        """The row of the first user of each part, and the number of users at the end."""
        return [0, *np.cumsum([part.rows for part in self.parts]).tolist()]

    def share(self, rank: int, ranks: int) -> range:
        """The parts of one of several readers; each part has one reader.

        Raises:
            DataError: There are fewer parts than readers.
        """
        n = len(self.parts)
        if ranks > n:
            raise DataError(f"a snapshot of {n} parts cannot be shared by {ranks} readers")
        return range(rank * n // ranks, (rank + 1) * n // ranks)

    def as_json(self) -> bytes:
        """The content of the manifest's file."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=1).encode()

    @classmethod
    def parse(cls, content: bytes) -> SnapshotManifest:
        """The manifest from the content of its file.

        Raises:
            DataError: The content is not a manifest of this format.
        """
        try:
            values = json.loads(content)
            if values.pop("format") != FORMAT:
                raise ValueError
            parts = tuple(SnapshotFile(**entry) for entry in values.pop("parts"))
            manifest = cls(parts=parts, items=SnapshotFile(**values.pop("items")), **values)
            manifest._check()
        except (ValueError, TypeError, KeyError, AttributeError):
            raise DataError(f"{MANIFEST} is not a snapshot manifest of {FORMAT}") from None
        return manifest

    def _check(self) -> None:
        """Checks that names, types and sums are those of a snapshot. Raises ValueError."""
        files = [part_name(number) for number in range(len(self.parts))] + [ITEMS]
        entries = [*self.parts, self.items]
        counts = [self.n_users, self.n_items, self.n_interactions, self.last_seq, self.hash_seed]
        counts += [n for entry in entries for n in (entry.rows, entry.bytes, entry.interactions)]
        fits = (
            all(type(count) is int and count >= 0 for count in counts)
            and [entry.file for entry in entries] == files
            and 0 < len(self.parts) <= MAX_PARTS
            and max(entry.bytes for entry in entries) <= MAX_FILE_BYTES
            and all(isinstance(entry.sha256, str) for entry in entries)
            and sum(part.rows for part in self.parts) == self.n_users
            and sum(part.interactions for part in self.parts) == self.n_interactions
            and self.items.rows == self.n_items
            and isinstance(self.timed, bool)
            and isinstance(self.weighted, bool)
        )
        if not fits:
            raise ValueError


def part_name(number: int) -> str:
    """The name of a part's file."""
    return f"part-{number:05d}.parquet"


def suitable_parts(events: int, at_least: int = MIN_PARTS) -> int:
    """The number of parts of some hundred thousand events: a power of two of at most 4,096.

    At most as many readers can share the parts. The memory of a part is some hundred MB.
    """
    parts = at_least
    while parts * PART_EVENTS < events and parts < MAX_PARTS:
        parts *= 2
    return parts


def part_of(users: IntArray, parts: int, seed: int = 0) -> IntArray:
    """(n,) the part of each user, by splitmix64 of the user's number (Steele et al. 2014).

    Args:
        users: (n,) numbers that stay the same while the users are written.
        parts: The number of parts.
        seed: Another seed gives another division.
    """
    z = users.astype(np.uint64)
    with np.errstate(over="ignore"):
        z += np.uint64(seed % 2**32 + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z % np.uint64(parts)).astype(np.int64)


class SnapshotFiles(Protocol):
    """The place of a snapshot's files."""

    def read(self, name: str, limit: int) -> bytes:
        """The content of a file of at most ``limit`` bytes.

        Raises:
            DataError: The file is missing, larger, or cannot be read.
        """


class LocalSnapshotFiles:
    """Files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str, limit: int) -> bytes:
        """See `SnapshotFiles.read`."""
        path = self._folder / name
        try:
            with path.open("rb") as file:
                content = file.read(limit + 1)
        except FileNotFoundError:
            raise DataError(f"{path} is missing") from None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        if len(content) > limit:
            raise DataError(f"{path} is larger than {limit:,} bytes")
        return content


class ObjectSnapshotFiles:
    """Files in object storage, below a URL."""

    def __init__(self, url: str) -> None:
        # Only here: it takes a third of a second.
        from ncr_core.object_files import ObjectFiles

        self._url, self._files = url, ObjectFiles(url)

    def read(self, name: str, limit: int) -> bytes:
        """See `SnapshotFiles.read`.

        Raises:
            StoreUnavailable: The store cannot be used; another try may succeed.
        """
        from ncr_core.object_files import store_errors

        content = io.BytesIO()
        with store_errors(f"{name} of {self._url} cannot be read"):
            size = self._files.size(name)
            if size is None:
                raise DataError(f"{name} of {self._url} is missing")
            if size > limit:
                raise DataError(f"{name} of {self._url} is larger than {limit:,} bytes")
            self._files.get(name, content, size)
        return content.getvalue()


class Ids(Sequence[str]):
    """Ids in Arrow's memory: some bytes an id, where a list of strings takes over 60 bytes."""

    def __init__(self, ids: pa.Array) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            return Ids(self._ids.slice(start, max(0, stop - start)))
        value: str = self._ids[index].as_py()
        return value

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), GROUP_USERS):
            yield from self._ids.slice(start, GROUP_USERS).to_pylist()

    def take(self, rows: IntArray) -> Ids:
        """The ids of some rows."""
        return Ids(self._ids.take(pa.array(rows)))

    def __repr__(self) -> str:
        return f"<{len(self):,} ids>"


class Snapshot:
    """Reads the parts of a snapshot."""

    def __init__(self, files: SnapshotFiles) -> None:
        """Reads the manifest and the items' ids.

        Raises:
            DataError: One of the two files is missing, damaged, or cannot be read.
        """
        self._files = files
        self.manifest = SnapshotManifest.parse(files.read(MANIFEST, MAX_MANIFEST_BYTES))
        table = self._table(self.manifest.items)
        if table.column_names != ["item"] or table.num_rows != self.manifest.n_items:
            raise DataError(f"{ITEMS} does not hold the ids of {self.manifest.n_items:,} items")
        self.item_ids: Sequence[str] = Ids(_combined(table["item"]))

    @classmethod
    def open(cls, address: str | Path) -> Snapshot:
        """A snapshot in a folder or, by a URL, in object storage; see `Snapshot`.

        Raises:
            StoreUnavailable: The store cannot be used.
            ConfigError: The URL cannot be used.
        """
        if is_url(address):
            return cls(ObjectSnapshotFiles(str(address)))
        return cls(LocalSnapshotFiles(Path(address)))

    def read(self, parts: Sequence[int] | None = None) -> Interactions:
        """The matrix of the users of some parts, in the order given; by default of all parts.

        The rows of items do not depend on the parts.

        Raises:
            DataError: A part is missing, damaged, or not of this snapshot.
            StoreUnavailable: The store cannot be used.
        """
        numbers = range(len(self.manifest.parts)) if parts is None else parts
        entries = [self.manifest.parts[number] for number in numbers]
        n_interactions = sum(entry.interactions for entry in entries)
        return concatenated(map(self._read_part, numbers), n_interactions, self.item_ids)

    def _read_part(self, number: int) -> Interactions:
        entry = self.manifest.parts[number]
        table = self._table(entry)
        if not table.schema.equals(SCHEMA) or table.num_rows != entry.rows:
            raise DataError(f"{entry.file} is not a part of this snapshot")
        part = _interactions(table, self.manifest, self.item_ids)
        if part is None or part.nnz != entry.interactions:
            raise DataError(f"{entry.file} does not fit its snapshot")
        return part

    def _table(self, entry: SnapshotFile) -> pa.Table:
        content = self._files.read(entry.file, entry.bytes)
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise DataError(f"{entry.file} is damaged: its SHA-256 is not the manifest's")
        try:
            return pq.read_table(pa.BufferReader(content), use_threads=False)
        except pa.ArrowException:
            raise DataError(f"{entry.file} is not a Parquet file") from None


def concatenated(
    parts: Iterable[Interactions],
    n_interactions: int,
    item_ids: Sequence[str],
    storage: ArrayStorage = IN_MEMORY,
) -> Interactions:
    """One matrix of several with the same items, with their users one after the other.

    Args:
        parts: The matrices. They take turns in memory, if they come from a generator. All of them
            have times or none, and all have weights or none.
        n_interactions: The number of interactions of all parts, or more.
        item_ids: The ids of the items.
        storage: Makes the arrays of the matrix.
    """
    arrays: dict[str, Array] = {}
    lengths: list[IntArray] = []
    users: list[pa.Array] = []
    feedback: list[UserFeedback] = []
    n = first = 0
    for part in parts:
        for name, values in _of_interactions(part).items():
            if name not in arrays:
                arrays[name] = storage.zeros(n_interactions, values.dtype)
            arrays[name][n : n + part.nnz] = values
        if part.feedback is not None:
            feedback.append(_joined([_of_users_from(part.feedback, first)], storage))
            if len(feedback) == MAX_PIECES:
                feedback = [_joined(feedback, storage)]
        lengths.append(np.diff(part.indptr))
        users.append(_arrow_ids(part.user_ids))
        n, first = n + part.nnz, first + part.n_users
    arrays = {name: values[:n] for name, values in arrays.items()}
    return Interactions(
        np.concatenate([[0], np.cumsum(np.concatenate([[], *lengths]))]).astype(np.int64),
        arrays.get("items", np.zeros(0, np.int64)),
        Ids(pa.concat_arrays(users) if users else pa.array([], pa.large_string())),
        item_ids,
        arrays.get("weights"),
        _joined(feedback, storage) if feedback else None,
        arrays.get("times"),
        storage,
    )


def _of_interactions(part: Interactions) -> dict[str, Array]:
    """The arrays with an entry for each interaction."""
    arrays = {"items": part.items, "weights": part.weights, "times": part.times}
    return {name: values for name, values in arrays.items() if values is not None}


def _arrow_ids(ids: Sequence[str]) -> pa.Array:
    """Ids with offsets of 64 bits: all ids together may have over 2 GB."""
    strings = ids._ids if isinstance(ids, Ids) else pa.array(list(ids), pa.string())
    return strings.cast(pa.large_string())


class SnapshotWriter:
    """Writes a snapshot into an empty folder, a part at a time.

    Args:
        folder: Where the files go.
        n_items: The number of items of the snapshot.
        timed: Whether the parts have times.
        weighted: Whether the parts have weights.
        hash_seed: The seed of `part_of` by which the caller has divided the users.
        last_seq: The seq of the last event in the snapshot.
    """

    def __init__(
        self,
        folder: Path,
        n_items: int,
        *,
        timed: bool,
        weighted: bool,
        hash_seed: int = 0,
        last_seq: int = 0,
    ) -> None:
        self._folder = folder
        self._n_items = n_items
        self._timed, self._weighted = timed, weighted
        self._hash_seed, self._last_seq = hash_seed, last_seq
        self._parts: list[SnapshotFile] = []

    def add_part(self, part: Interactions) -> None:
        """Writes the next part: some users, with the item rows of the whole snapshot."""
        name = part_name(len(self._parts))
        table = _table_of(part, timed=self._timed, weighted=self._weighted)
        self._parts.append(_written(self._folder / name, table, part.nnz))

    def finish(self, item_ids: Sequence[str]) -> SnapshotManifest:
        """Writes the items' ids, and the manifest last."""
        ids = _arrow_ids(item_ids).cast(pa.string())
        items = _written(self._folder / ITEMS, pa.table({"item": ids}))
        manifest = SnapshotManifest(
            parts=tuple(self._parts),
            items=items,
            n_users=sum(part.rows for part in self._parts),
            n_items=self._n_items,
            n_interactions=sum(part.interactions for part in self._parts),
            last_seq=self._last_seq,
            timed=self._timed,
            weighted=self._weighted,
            hash_seed=self._hash_seed,
        )
        (self._folder / MANIFEST).write_bytes(manifest.as_json())
        return manifest


def write_snapshot(
    folder: Path, interactions: Interactions, parts: int, *, hash_seed: int = 0
) -> SnapshotManifest:
    """Writes a matrix that is in memory; the folder appears whole or not at all.

    Raises:
        DataError: The folder exists, or cannot be written.
    """
    division = part_of(np.arange(interactions.n_users), parts, hash_seed)
    with snapshot_folder(folder) as staging:
        writer = SnapshotWriter(
            staging,
            interactions.n_items,
            timed=interactions.times is not None,
            weighted=interactions.weights is not None,
            hash_seed=hash_seed,
        )
        for number in range(parts):
            writer.add_part(of_users(interactions, np.flatnonzero(division == number)))
        return writer.finish(interactions.item_ids)


def is_url(address: str | Path) -> bool:
    """Whether an address is a URL of object storage, not a path."""
    return isinstance(address, str) and "://" in address


def is_snapshot(folder: Path) -> bool:
    """Whether a folder holds a snapshot, whole or damaged."""
    return (folder / part_name(0)).is_file() and (folder / MANIFEST).is_file()


def check_free(url: str) -> None:
    """Checks that the store can be used, and has no snapshot at the URL.

    Raises:
        StoreUnavailable: The store cannot be used.
        ConfigError: The URL cannot be used.
        DataError: The store has a snapshot at the URL already.
    """
    from ncr_core.object_files import ObjectFiles, store_errors

    files = ObjectFiles(url)
    with store_errors(f"{url} cannot be written"):
        if files.size(MANIFEST) is not None:
            raise DataError(f"{url} exists already; a snapshot is never overwritten")


def upload_snapshot(folder: Path, url: str) -> None:
    """Copies a snapshot to object storage, the manifest last; raises as `check_free`."""
    from ncr_core.object_files import ObjectFiles, store_errors

    check_free(url)
    files = ObjectFiles(url)
    with store_errors(f"{url} cannot be written"):
        names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
        for name in (*names, MANIFEST):
            files.put(folder / name, name)


def of_users(interactions: Interactions, rows: IntArray) -> Interactions:
    """Some users of a matrix, by ascending rows, with all of its items."""
    starts, lengths = interactions.indptr[rows], np.diff(interactions.indptr)[rows]
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    entries = np.arange(indptr[-1]) + np.repeat(starts - indptr[:-1], lengths)
    feedback = interactions.feedback
    if feedback is not None:
        feedback = feedback.of_rows(rows, interactions.n_users)
    return Interactions(
        indptr,
        interactions.items[entries],
        ids_of_rows(interactions.user_ids, rows),
        interactions.item_ids,
        None if interactions.weights is None else interactions.weights[entries],
        feedback,
        None if interactions.times is None else interactions.times[entries],
    )


@contextmanager
def snapshot_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, which appears under its name whole or not at all.

    Raises:
        DataError: The folder exists, or cannot be written.
    """
    try:
        with atomic_folder(folder) as staging:
            yield staging
    except FileExistsError:
        raise DataError(f"{folder} exists already; a snapshot is never overwritten") from None
    except OSError as error:  # those of Arrow have a message of several lines
        reason = os.strerror(error.errno) if error.errno else type(error).__name__
        raise DataError(f"{folder} cannot be written: {reason}") from None


def _written(path: Path, table: pa.Table, interactions: int = 0) -> SnapshotFile:
    pq.write_table(
        table,
        path,
        row_group_size=GROUP_USERS,
        compression="zstd",
        compression_level=COMPRESSION_LEVEL,
        use_dictionary=False,
    )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return SnapshotFile(path.name, table.num_rows, path.stat().st_size, digest, interactions)


def _table_of(part: Interactions, *, timed: bool, weighted: bool) -> pa.Table:
    n, feedback = part.n_users, _by_user(part.feedback or UserFeedback())
    users = pa.array(list(part.user_ids), pa.string())
    pairs = _starts(feedback.pairs[:, 0], n)
    disliked = _starts(feedback.disliked[:, 0], n)
    nothing = [pa.nulls(n, field.type) for field in SCHEMA]
    columns = [
        users,
        _lists(part.indptr, part.items, _INTS),
        _lists(part.indptr, part.times, _TIMES) if timed else nothing[2],
        _lists(part.indptr, part.weights, _FLOATS) if weighted else nothing[3],
        _lists(_starts(feedback.seen[:, 0], n), feedback.seen[:, 1], _INTS),
        _lists(disliked, feedback.disliked[:, 1], _INTS),
        _lists(disliked, feedback.disliked_weights, _FLOATS),
        _lists(pairs, feedback.pairs[:, 1], _INTS),
        _lists(pairs, feedback.pairs[:, 2], _INTS),
        _lists(pairs, feedback.pair_weights, _FLOATS),
    ]
    return pa.table(columns, schema=SCHEMA)


def _by_user(feedback: UserFeedback) -> UserFeedback:
    """The feedback in the order of the users; each user's rows stay in theirs."""
    seen, disliked, pairs = (
        np.argsort(rows[:, 0], kind="stable")
        for rows in (feedback.seen, feedback.disliked, feedback.pairs)
    )
    return UserFeedback(
        feedback.seen[seen],
        feedback.disliked[disliked],
        feedback.disliked_weights[disliked],
        feedback.pairs[pairs],
        feedback.pair_weights[pairs],
    )


def _starts(users: IntArray, n: int) -> IntArray:
    """(n + 1,) the first of each user's rows, for rows ordered by user."""
    return np.searchsorted(users, np.arange(n + 1)).astype(np.int64)


def _lists(starts: IntArray, values: Array | None, kind: pa.ListType) -> pa.Array:
    if values is None:
        raise ValueError("a part has neither times nor weights unless all have")
    if starts[-1] >= 2**31:
        raise DataError("a part has too many rows: divide the users into more parts")
    flat = pa.array(values.astype(kind.value_type.to_pandas_dtype()))
    return pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), flat, type=kind)


def _interactions(
    table: pa.Table, manifest: SnapshotManifest, item_ids: Sequence[str]
) -> Interactions | None:
    """The matrix of a part; None where its columns do not fit together."""
    columns = {name: _combined(table[name]) for name in table.column_names[1:]}
    present = {"times": manifest.timed, "weights": manifest.weighted}
    if any(column.null_count for name, column in columns.items() if present.get(name, True)):
        return None
    starts, values = {}, {}
    for name, column in columns.items():
        if present.get(name, True):
            starts[name] = column.offsets.to_numpy().astype(np.int64)
            values[name] = column.flatten().to_numpy(zero_copy_only=False)
    for group in (("items", "times", "weights"), ("disliked", "disliked_weights"),
                  ("winners", "losers", "pair_weights")):  # fmt: skip
        first = starts[group[0]]
        if any(name in starts and (starts[name] != first).any() for name in group):
            return None
    rows = {name: values[name].astype(np.int64) for name in _ITEM_COLUMNS}
    if any(len(r) and not 0 <= r.min() <= r.max() < manifest.n_items for r in rows.values()):
        return None
    user_of = {
        name: np.repeat(np.arange(table.num_rows), np.diff(starts[name]))
        for name in ("seen", "disliked", "winners")
    }
    feedback = UserFeedback(
        np.stack([user_of["seen"], rows["seen"]], axis=1),
        np.stack([user_of["disliked"], rows["disliked"]], axis=1),
        values["disliked_weights"],
        np.stack([user_of["winners"], rows["winners"], rows["losers"]], axis=1),
        values["pair_weights"],
    )
    return Interactions(
        starts["items"],
        rows["items"],
        Ids(_combined(table["user"])),
        item_ids,
        values.get("weights"),
        feedback if len(feedback) else None,
        values.get("times"),
    )


_ITEM_COLUMNS = ("items", "seen", "disliked", "winners", "losers")


def _combined(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece, whose offsets begin at 0."""
    chunks = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    return chunks if isinstance(chunks, pa.Array) else pa.concat_arrays(chunks.chunks)


def _of_users_from(feedback: UserFeedback, first: int) -> UserFeedback:
    """The feedback with user rows that begin at ``first``."""
    seen, disliked, pairs = (
        rows + np.array([first, *[0] * (rows.shape[1] - 1)])
        for rows in (feedback.seen, feedback.disliked, feedback.pairs)
    )
    return UserFeedback(seen, disliked, feedback.disliked_weights, pairs, feedback.pair_weights)


def _joined(parts: Sequence[UserFeedback], storage: ArrayStorage) -> UserFeedback:
    def joined(name: str) -> Array:
        tables: list[Array] = [getattr(part, name) for part in parts]
        shape = sum(map(len, tables)), *tables[0].shape[1:]
        return np.concatenate(tables, out=storage.zeros(shape, tables[0].dtype))

    return UserFeedback(**{each.name: joined(each.name) for each in fields(UserFeedback)})
