"""Snapshots: parts that divide the users, and readers that refuse what was not written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ncr_core.data.snapshot as snapshot_module
from ncr_core.data import Interactions
from ncr_core.data.interactions import UserFeedback
from ncr_core.data.snapshot import (
    ITEMS,
    MANIFEST,
    Snapshot,
    SnapshotFile,
    SnapshotManifest,
    part_name,
    part_of,
    write_snapshot,
)
from ncr_core.errors import DataError

N_ITEMS = 7


def matrix(n_users: int, seed: int, *, timed: bool, weighted: bool, feedback: bool) -> Interactions:
    rng = np.random.default_rng(seed)
    n = 6 * n_users
    users, items = rng.integers(n_users, size=n), rng.integers(N_ITEMS - 2, size=n)
    # The two last items are never positive.
    losers = np.full(n_users, N_ITEMS - 1)
    every = rng.permutation(n_users)  # feedback need not be in the order of the users
    return Interactions.from_arrays(
        users,
        items,
        rng.integers(50, size=n),
        user_ids=[f"käufer {row}" for row in range(n_users)],
        item_ids=[f"item-{row}" for row in range(N_ITEMS)],
        weights=rng.random(n, dtype=np.float32) + 0.1 if weighted else None,
        times=rng.random(n) * 1e9 if timed else None,
        feedback=UserFeedback(
            np.stack([every, losers - 1], axis=1),
            np.stack([every, losers], axis=1)[::2],
            rng.random(len(every[::2]), dtype=np.float32) + 0.1,
            np.stack([every, losers, losers - 1], axis=1)[1::2],
            rng.random(len(every[1::2]), dtype=np.float32) + 0.1,
        )
        if feedback
        else None,
    )


def everything_of(data: Interactions) -> dict[str, tuple[Any, ...]]:
    """All that is known of each user, by ids."""
    feedback = data.feedback or UserFeedback()
    known = {}
    for row, user in enumerate(data.user_ids):
        span = slice(int(data.indptr[row]), int(data.indptr[row + 1]))
        disliked, pairs = feedback.disliked[:, 0] == row, feedback.pairs[:, 0] == row
        known[user] = (
            [data.item_ids[item] for item in data.items[span]],
            None if data.times is None else data.times[span].tolist(),
            None if data.weights is None else data.weights[span].tolist(),
            feedback.seen[feedback.seen[:, 0] == row, 1].tolist(),
            feedback.disliked[disliked, 1].tolist(),
            feedback.disliked_weights[disliked].tolist(),
            feedback.pairs[pairs, 1:].tolist(),
            feedback.pair_weights[pairs].tolist(),
        )
    assert len(known) == data.n_users
    return known


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    n_users=st.integers(1, 40),
    parts=st.integers(1, 12),
    hash_seed=st.integers(0, 2**40),
    seed=st.integers(0, 99),
    timed=st.booleans(),
    weighted=st.booleans(),
    feedback=st.booleans(),
)
def test_each_user_is_in_one_part_with_everything_that_is_known_of_them(
    tmp_path_factory: pytest.TempPathFactory,
    n_users: int,
    parts: int,
    hash_seed: int,
    seed: int,
    timed: bool,
    weighted: bool,
    feedback: bool,
) -> None:
    data = matrix(n_users, seed, timed=timed, weighted=weighted, feedback=feedback)
    folder = tmp_path_factory.mktemp("parts") / "snapshot"
    manifest = write_snapshot(folder, data, parts, hash_seed=hash_seed)
    snapshot = Snapshot.open(folder)
    assert snapshot.manifest == manifest
    assert [part.rows for part in manifest.parts] == np.bincount(
        part_of(np.arange(n_users), parts, hash_seed), minlength=parts
    ).tolist()

    pieces = [everything_of(snapshot.read([number])) for number in range(parts)]
    expected = everything_of(data)
    assert sum(map(len, pieces)) == n_users  # none twice
    assert {user: known for piece in pieces for user, known in piece.items()} == expected
    whole = snapshot.read()
    assert everything_of(whole) == expected
    assert list(whole.item_ids) == list(data.item_ids)
    for number, piece in enumerate(pieces):  # rows are numbered part after part
        first, stop = manifest.first_users[number : number + 2]
        assert list(whole.user_ids[first:stop]) == list(piece)


@given(parts=st.integers(1, 64), data=st.data())
def test_readers_share_all_parts(parts: int, data: st.DataObject) -> None:
    entry = {"rows": 1, "bytes": 1, "sha256": "0", "interactions": 1}
    files = tuple(SnapshotFile(file=part_name(number), **entry) for number in range(parts))  # type: ignore[arg-type]
    manifest = SnapshotManifest(files, files[0], parts, 1, parts, 0, False, False, 0)
    ranks = data.draw(st.integers(1, parts))
    shares = [manifest.share(rank, ranks) for rank in range(ranks)]
    assert [number for share in shares for number in share] == list(range(parts))
    assert all(shares)
    with pytest.raises(DataError, match="cannot be shared by"):
        manifest.share(0, parts + 1)


def test_users_are_divided_evenly_by_any_seed() -> None:
    users = np.arange(100_000) * 16  # numbers with a pattern
    for seed in (0, 1, 2**31):
        counts = np.bincount(part_of(users, 64, seed), minlength=64)
        assert abs(counts - len(users) / 64).max() < 6 * np.sqrt(len(users) / 64)
    assert (part_of(users, 64, 0) != part_of(users, 64, 1)).mean() > 0.9


@pytest.fixture
def written(tmp_path: Path) -> Path:
    folder = tmp_path / "snapshot"
    write_snapshot(folder, matrix(30, 1, timed=True, weighted=True, feedback=True), 3)
    return folder


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def shift_count(manifest: dict[str, Any]) -> None:
    manifest["parts"][0]["interactions"] -= 1
    manifest["parts"][1]["interactions"] += 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / part_name(1)).unlink(), "part-00001.parquet is missing"),
        (lambda f: flip(f / part_name(1)), "part-00001.parquet is damaged: its SHA-256"),
        (lambda f: os.truncate(f / part_name(1), 100), "part-00001.parquet is damaged"),
        (lambda f: (f / part_name(2)).replace(f / part_name(1)), "part-00001.parquet is"),
        (lambda f: flip(f / ITEMS), "items.parquet is damaged"),
        (lambda f: (f / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda f: (f / MANIFEST).write_text("{}"), "is not a snapshot manifest"),
        (lambda f: (f / MANIFEST).write_text("[1]"), "is not a snapshot manifest"),
        (lambda f: rewrite(f, lambda m: m.update(n_users=29)), "is not a snapshot manifest"),
        (lambda f: rewrite(f, shift_count), "part-00000.parquet does not fit its snapshot"),
        (
            lambda f: rewrite(f, lambda m: m["parts"][0].update(file="../part-00000.parquet")),
            "is not a snapshot manifest",
        ),
        (lambda f: rewrite(f, lambda m: m.update(extra=1)), "is not a snapshot manifest"),
    ],
)
def test_what_was_not_written_is_refused_in_one_sentence(
    written: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(written)
    with pytest.raises(DataError, match=message) as caught:
        Snapshot.open(written).read()
    assert "\n" not in str(caught.value)


def test_a_snapshot_is_never_overwritten(written: Path) -> None:
    with pytest.raises(DataError, match="exists already"):
        write_snapshot(written, matrix(3, 1, timed=False, weighted=False, feedback=False), 1)


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot_module.pq, "write_table", full)
    data = matrix(3, 1, timed=False, weighted=False, feedback=False)
    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        write_snapshot(tmp_path / "snapshot", data, 1)
    assert list(tmp_path.iterdir()) == []
