"""Exports: tables and the lists of all users as JSON Lines or Parquet, in the checkpoint store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from app import __version__
from app.core.tables import now_us
from app.jobs.schemas import ExportedLists, ExportFormat, ExportParams
from app.recommend.schemas import RecommendationQuery
from app.recommend.wiring import RecommendFeature
from app.registry.exports import (
    FOLDER,
    ExportedFile,
    ExportManifest,
    ExportStore,
    described,
    write_manifest,
)
from app.registry.schemas import iso
from app.training.progress import Report, phase_progress, throttled
from app.training.reader import Features, TrainingReader
from ncr_core.errors import CheckpointError

LISTS = "lists"
CHUNK_ROWS = 5_000
LIST_CHUNK_USERS, LIST_CHUNK_ROWS = 512, 50_000
LIST_CACHE_BYTES = CANDIDATE_CACHE_BYTES = 16 * 2**20
"""The caches of the child. A small size is enough: each list is built once, and a pass ranks
candidates right after their search."""
GROUP_ROWS, GROUP_CHARACTERS = 50_000, 32 * 2**20
"""The maximum size of a group of a Parquet file, in rows, and in characters of attributes."""
NEVER_SECONDS = 1e9  # the model stays the one that the export began with

Row = dict[str, Any]
Rows = Sequence[Row]
Chunks = AsyncIterator[Rows]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME = pa.timestamp("us", tz="UTC")
_SCHEMAS: Mapping[str, pa.Schema] = {
    "events": pa.schema(
        [
            ("event_id", pa.string()),
            ("user", pa.string()),
            ("item", pa.string()),
            ("type", pa.string()),
            ("value", pa.float64()),
            ("timestamp", _TIME),
            ("recommendation_id", pa.string()),
        ]
    ),
    "items": pa.schema(
        [
            ("item", pa.string()),
            ("title", pa.string()),
            ("categories", pa.list_(pa.string())),
            ("hidden", pa.bool_()),
            # Columns have a type for all rows, and attributes are each client's own: as JSON.
            ("attributes", pa.string()),
            ("available_from", _TIME),
            ("available_until", _TIME),
            ("embedding", pa.list_(pa.float32())),
        ]
    ),
    "users": pa.schema([("user", pa.string()), ("created_at", _TIME), ("attributes", pa.string())]),
    "preferences": pa.schema(
        [
            ("user", pa.string()),
            ("winner", pa.string()),
            ("loser", pa.string()),
            ("timestamp", _TIME),
        ]
    ),
    LISTS: pa.schema(
        [
            ("user", pa.string()),
            ("rank", pa.int32()),
            ("item", pa.string()),
            ("score", pa.float64()),
            ("source", pa.string()),
            ("preferred_over_next", pa.float64()),
        ]
    ),
}


class _Table(NamedTuple):
    name: str
    rows: int
    """The expected number of rows, for the progress; 0 for an unknown number."""
    chunks: Chunks


def export(
    job_id: str, params: ExportParams, reader: TrainingReader, store: ExportStore, report: Report
) -> dict[str, Any]:
    """Writes an export whole or not at all, and returns a summary for the job's metrics.

    The export reads chunks of rows to bound its memory, and writes the files to a local disk first.
    Each table has the state at the time of its reading: events and preferences end at the last seq
    when their reading begins.

    Raises:
        CheckpointError: the store or the active model cannot be used.
    """
    reader.read(lambda features: features.models.claim_store(required=False))
    with store.staging(job_id) as folder:
        manifest = reader.read(
            lambda features: _write(job_id, params, features, reader, folder, throttled(report))
        )
        report(phase_progress("store"))
        write_manifest(folder, manifest)
        reader.retry(lambda: store.publish(job_id, folder), CheckpointError)
    return {"folder": f"{FOLDER}/{job_id}", **manifest.model_dump(exclude={"job_id", "params"})}


async def _write(
    job_id: str,
    params: ExportParams,
    features: Features,
    reader: TrainingReader,
    folder: Path,
    report: Callable[[str, int, int], None],
) -> ExportManifest:
    """Writes the files, after removing the files of an interrupted attempt."""
    for path in folder.iterdir():
        path.unlink()
    created_at, seq = now_us(), await features.events.last_seq()
    files: dict[str, ExportedFile] = {}
    without_list, version = 0, None

    async def write(table: _Table) -> None:
        path = folder / f"{table.name}.{params.format}"
        written = 0
        with _writer(path, table.name, params.format) as write_rows:
            async for rows in table.chunks:
                write_rows(rows)
                written += len(rows)
                report(table.name, written, max(written, table.rows))
        files[path.name] = described(path, written)

    for name in dict.fromkeys(params.tables):
        await write(await _table(name, features, seq))
    if params.lists is not None:
        settings = reader.settings.model_copy(
            update={
                "list_cache_bytes": LIST_CACHE_BYTES,
                "candidate_cache_bytes": CANDIDATE_CACHE_BYTES,
                "model_poll_seconds": NEVER_SECONDS,
            }
        )
        recommend = RecommendFeature(features.events, features.catalog, features.models, settings)
        await recommend.start()
        try:
            lists = await recommend.bulk_lists()
            version, query = lists.version, _query(params.lists)
            at_a_time = max(1, min(LIST_CHUNK_USERS, LIST_CHUNK_ROWS // query.n))

            async def chunks() -> Chunks:
                nonlocal without_list
                async for users in features.events.iter_users(at_a_time):
                    names = [user for user, *_ in users]
                    rows: list[Row] = []
                    ranked = await lists.build(names, query)
                    for user, entries in zip(names, ranked, strict=True):
                        rows += [_list_row(user, entry) for entry in entries.entries()]
                        without_list += not entries.ids
                    yield rows

            total = await features.events.count_users() * params.lists.n
            await write(_Table(LISTS, total, chunks()))
        finally:
            await recommend.stop()
    return ExportManifest(
        software=__version__,
        job_id=job_id,
        created_at=str(iso(created_at)),
        as_of_seq=seq,
        model_version=version,
        params=params.model_dump(),
        users_without_list=without_list,
        files=files,
    )


def _query(lists: ExportedLists) -> RecommendationQuery:
    return RecommendationQuery.canonical(
        n=lists.n,
        exclude_seen=lists.exclude_seen,
        category=lists.category,
        exclude=(),
        min_seq=None,
        model=None,
        diversity=0.0,
        explain="none",
    )


def _list_row(user: str, entry: Row) -> Row:
    return {
        "user": user,
        "rank": entry["rank"],
        "item": entry["id"],
        "score": entry["score"],
        "source": entry["source"],
        "preferred_over_next": entry["preferred_over_next"],
    }


async def _table(name: str, features: Features, seq: int) -> _Table:
    events, catalog = features.events, features.catalog

    async def event_rows() -> Chunks:
        async for chunk in events.iter_events(chunk_size=CHUNK_ROWS):
            yield [
                {
                    "event_id": event.event_id,
                    "user": user,
                    "item": item,
                    "type": event.type,
                    "value": event.value,
                    "timestamp": event.timestamp,
                    "recommendation_id": event.recommendation_id,
                }
                for event, user, item in chunk
            ]

    async def item_rows() -> Chunks:
        async for chunk in catalog.iter_items():
            yield [
                {
                    "item": item.id,
                    "title": item.title,
                    "categories": item.categories,
                    "hidden": item.hidden,
                    "attributes": item.attributes,
                    "available_from": item.available_from,
                    "available_until": item.available_until,
                    "embedding": item.as_json()["embedding"],
                }
                for item in chunk
            ]

    async def user_rows() -> Chunks:
        async for chunk in events.iter_users(CHUNK_ROWS):
            yield [
                {"user": user, "created_at": created_at, "attributes": attributes}
                for user, created_at, attributes in chunk
            ]

    async def preference_rows() -> Chunks:
        async for chunk in events.iter_preferences(chunk_size=CHUNK_ROWS):
            yield [row._asdict() for row in chunk]

    if name == "events":
        return _Table(name, seq, event_rows())
    if name == "items":
        return _Table(name, len((await catalog.catalogue()).external_ids), item_rows())
    if name == "users":
        return _Table(name, await events.count_users(), user_rows())
    return _Table(name, 0, preference_rows())


@contextmanager
def _writer(path: Path, table: str, form: ExportFormat) -> Iterator[Callable[[Rows], None]]:
    """Opens a file, and yields the function that adds rows to the file."""
    schema = _SCHEMAS[table]
    times = [field.name for field in schema if field.type == _TIME]
    if form == "jsonl":
        with path.open("xb") as file:

            def write_lines(rows: Rows) -> None:
                for row in rows:
                    shown = row | {name: _iso(row[name]) for name in times}
                    file.write(orjson.dumps(shown, option=orjson.OPT_APPEND_NEWLINE))

            yield write_lines
        return
    with pq.ParquetWriter(path, schema, compression="zstd") as parquet:
        waiting: list[Row] = []
        waiting_characters = 0

        def write_group() -> None:
            nonlocal waiting_characters
            parquet.write_table(pa.Table.from_pylist(waiting, schema))
            waiting.clear()
            waiting_characters = 0

        def write_rows(rows: Rows) -> None:
            nonlocal waiting_characters
            for row in map(_as_columns, rows):
                waiting.append(row)
                waiting_characters += len(row.get("attributes", ""))
                if len(waiting) >= GROUP_ROWS or waiting_characters >= GROUP_CHARACTERS:
                    write_group()

        yield write_rows
        if waiting:
            write_group()


def _as_columns(row: Row) -> Row:
    if "attributes" in row:
        return row | {"attributes": orjson.dumps(row["attributes"]).decode()}
    return row


def _iso(micros: int | None) -> str | None:
    if micros is None:
        return None
    moment = _EPOCH + timedelta(microseconds=micros)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
