"""The training snapshot: the same matrix in parts as in one piece, on either database."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import psycopg
import pytest

from app.core.settings import Settings
from app.events import training_snapshot
from app.events.schemas import NewEvent
from app.events.snapshot_query import _copied
from app.events.training_snapshot import take_snapshot, write_parts
from app.wiring import Services, build_services
from ncr_core.data import Interactions, array_storage
from ncr_core.data.snapshot import Snapshot
from ncr_core.data.splits import hashes_of
from ncr_core.errors import DataError
from tests.conftest import ON_POSTGRESQL

DAY = 86_400 * 10**6
TYPES = ("view", "view", "buy", "dislike", "look")
FEEDBACK = '{"buy": 3, "dislike": -1, "look": "seen", "*": 1}'


async def add_history(services: Services, seed: int) -> None:
    """Repeated, disliked, seen and preferred items, ties in time, and what was deleted since."""
    rng = random.Random(seed)
    await services.events.import_rows(
        [
            NewEvent(
                f"e{n}",
                f"üser {rng.randrange(60)}",
                f"item-{rng.randrange(25)}",
                rng.choice(TYPES),
                None,
                rng.randrange(40) * DAY,
            )
            for n in range(1_500)
        ]
    )
    pairs = [
        {
            "user": f"üser {rng.randrange(50, 90)}",
            "winner": f"item-{winner}",
            "loser": f"item-{loser}",
            "timestamp": rng.randrange(40) * 86_400,
        }
        for winner, loser in (rng.sample(range(30), 2) for _ in range(300))
    ]
    await services.events.add_preferences(pairs, 0)
    await services.events.delete_user("üser 7")
    await services.catalog.delete("item-3")


def assert_same(parts: Interactions, whole: Interactions) -> None:
    """Both are the same matrix, the users in another order."""
    assert list(parts.item_ids) == list(whole.item_ids)
    assert sorted(parts.user_ids) == sorted(whole.user_ids)
    back = parts.reindex(whole.user_ids, whole.item_ids)
    for name in ("indptr", "items", "weights", "times"):
        assert np.array_equal(getattr(back, name), getattr(whole, name)), name
    assert (back.feedback is None) == (whole.feedback is None)
    if back.feedback is None or whole.feedback is None:
        return
    for rows, weights in (("seen", None), ("disliked", "disliked_weights"),
                          ("pairs", "pair_weights")):  # fmt: skip
        mine, its = getattr(back.feedback, rows), getattr(whole.feedback, rows)
        order = np.argsort(mine[:, 0], kind="stable")
        assert np.array_equal(mine[order], its), rows
        if weights is not None:
            mine, its = getattr(back.feedback, weights), getattr(whole.feedback, weights)
            assert np.array_equal(mine[order], its), weights


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("half_life", [None, 10.0])
async def test_parts_are_the_matrix_of_the_snapshot(
    settings: Settings, tmp_path: Path, half_life: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_storage, "MIN_BYTES", 0)  # the matrix is in files
    changed = settings.model_copy(
        update={"feedback": FEEDBACK, "feedback_half_life_days": half_life}
    )
    services = await build_services(changed)
    try:
        await add_history(services, seed=3)
    finally:
        await services.close()
    with await asyncio.to_thread(take_snapshot, changed, tmp_path) as taken:
        whole, last_seq = taken.interactions(), taken.last_seq
    for number in (1, 30):  # some of the 30 parts have no user
        monkeypatch.setattr(training_snapshot, "suitable_parts", lambda *_, n=number, **__: n)
        for remembered in (10_000, 3, 20, 40):
            with await asyncio.to_thread(take_snapshot, changed, tmp_path) as taken:
                matrix = taken.interactions(remembered)
            assert_same(matrix, whole)
            if remembered > whole.n_users:
                assert matrix.remembered is None
                users = np.array(matrix.user_ids)  # part after part
                continue
            assert matrix.n_remembered == remembered
            hashes = hashes_of(users.tolist())
            smallest = hashes <= np.sort(hashes)[remembered - 1]
            assert list(matrix.user_ids) == [*users[smallest], *users[~smallest]]
        assert (list(users) == list(whole.user_ids)) == (number == 1)
    for parts, hash_seed in ((1, 0), (5, 0), (5, 99), (64, 1)):
        folder = tmp_path / f"{parts}-{hash_seed}"
        manifest = await asyncio.to_thread(
            write_parts, changed, folder, parts=parts, hash_seed=hash_seed
        )
        assert manifest.last_seq == last_seq
        snapshot = Snapshot.open(folder)
        assert len(snapshot.manifest.parts) == parts
        assert_same(snapshot.read(), whole)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


@pytest.mark.anyio
async def test_a_snapshot_of_nothing_says_what_is_missing(
    services: Services, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="training needs events"):
        await asyncio.to_thread(write_parts, services.settings, tmp_path / "s")
    await services.events.import_rows([NewEvent("1", "u", "a", "dislike")])
    with pytest.raises(DataError, match="no event is positive by NCR_FEEDBACK"):
        await asyncio.to_thread(write_parts, services.settings, tmp_path / "s")
    await services.catalog.delete("a")
    with pytest.raises(DataError, match="no event is about an item"):
        await asyncio.to_thread(write_parts, services.settings, tmp_path / "s")
    assert not (tmp_path / "s").exists()
    assert list(tmp_path.glob(".ncr-*")) == []


@ON_POSTGRESQL
def test_a_query_that_ends_amid_its_rows_is_an_error(database_url: str) -> None:
    """The database has sent rows by then, and the connection can be used again."""
    rows = "SELECT 1 / (100000 - n) FROM generate_series(1, 200000) n"
    with psycopg.connect(database_url, autocommit=True) as connection:
        copied = _copied(connection.pgconn, f"COPY ({rows}) TO STDOUT (FORMAT BINARY)".encode())
        assert bytes(next(copied)).startswith(b"PGCOPY")
        with pytest.raises(psycopg.errors.DivisionByZero):
            list(copied)
        with pytest.raises(psycopg.errors.SyntaxError):
            list(_copied(connection.pgconn, b"COPY (SELECT"))
        assert connection.execute("SELECT 1").fetchone() == (1,)
