"""What the model that is served had learned of users when it was trained."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from app.core.settings import Settings
from app.events.snapshot import EventSnapshot
from app.jobs.served import earlier_in
from app.jobs.training import interactions_of
from app.models.store import StoreUnavailable
from app.services import Services, build_services
from ncr_core.data import Interactions, leave_latest_out
from ncr_core.data.interactions import BoolArray
from ncr_core.evaluated import Evaluated
from ncr_core.evaluation.frozen import Incumbent, frozen_hold_out, learned_by
from ncr_core.models import ModelConfig
from tests.app.models import add_small_data, publish_model
from tests.app.object_store import ObjectStore
from tests.ncr_core.conftest import wild_model

USERS = {1: "ann", 2: "ben", 3: "cem", 4: "dan"}
ITEMS = {n: f"i{n}" for n in range(1, 9)}
# Ann said something about an item before the model was trained and did something with it later;
# ben said it later; cem preferred the other one; dan said nothing.
EVENTS = [(user, item, at) for at, (user, item) in enumerate(
    [(u, i) for u in USERS for i in (1, 2, 3)] + [(u, 4) for u in USERS], 1
)]  # fmt: skip
TRAINED_SEQ = 100
PREFERENCES = [(1, 4, 5, 0, 50), (2, 4, 5, 0, 150), (3, 5, 4, 0, 60), (4, 7, 8, 0, 70)]


def snapshot() -> EventSnapshot:
    rows = np.array(sorted(EVENTS, key=lambda row: (row[0], row[2])), dtype=np.int64)
    seq = np.where(rows[:, 1] == 4, 100 + rows[:, 2], rows[:, 2])
    return EventSnapshot(
        user_id=rows[:, 0],
        item_id=rows[:, 1],
        timestamp=rows[:, 2],
        weight=np.ones(len(rows), dtype=np.float32),
        seq=seq,
        preferences=np.array(PREFERENCES, dtype=np.int64),
        preference_weight=np.ones(len(PREFERENCES), dtype=np.float32),
        max_seq=200,
    )


def pairs(found: Interactions) -> set[tuple[str, str]]:
    at = zip(found.users.tolist(), found.items.tolist(), strict=True)
    return {(found.user_ids[user], found.item_ids[item]) for user, item in at}


def everyone(matrix: Interactions) -> BoolArray:
    return np.ones(matrix.n_users, dtype=np.bool_)


def test_what_was_done_and_what_was_said_by_then() -> None:
    every = interactions_of(snapshot(), USERS, ITEMS)
    earlier = earlier_in(snapshot(), USERS, ITEMS)
    done, told = earlier(every, everyone(every), TRAINED_SEQ)
    assert pairs(done) == {(user, f"i{n}") for user in USERS.values() for n in (1, 2, 3)}
    assert pairs(told) == {("ann", "i4"), ("cem", "i4")}
    done, told = earlier(every, everyone(every), 200)
    assert pairs(done) == pairs(every)
    assert pairs(told) == {("ann", "i4"), ("ben", "i4"), ("cem", "i4")}
    done, told = earlier(every, np.arange(every.n_users) == 2, 200)
    assert {user for user, _ in pairs(done) | pairs(told)} == {"cem"}


def test_what_was_said_about_an_item_that_is_held_out_was_learned() -> None:
    every = interactions_of(snapshot(), USERS, ITEMS)
    model = wild_model(ModelConfig(kind="nbpr", factors=3), every.n_users, every.n_items)
    held_out = np.full((every.n_users, 2), -1)
    for user in range(every.n_users):  # as it was held out then: the items 3 and 2
        held_out[user] = [every.item_ids.index("i3"), every.item_ids.index("i2")]
    evaluated = Evaluated(model, np.arange(every.n_users), held_out)
    earlier = earlier_in(snapshot(), USERS, ITEMS)
    done, told = earlier(every, everyone(every), TRAINED_SEQ)
    incumbent = Incumbent(evaluated, every.user_ids, every.item_ids, done, told)
    split = leave_latest_out(every)
    found = frozen_hold_out(split, incumbent)
    assert [every.user_ids[user] for user in found.users] == ["ben", "dan"]
    assert found.left_out["held-out item learned by the incumbent"] == 2
    learned = learned_by(split, incumbent)  # and so a training that goes on from it
    assert [every.user_ids[user] for user in np.flatnonzero(learned)] == ["ann", "cem"]

    # What was held out then was in nothing that the copy was trained on: not in what was said.
    held_out[:, 1] = every.item_ids.index("i4")
    assert not learned_by(split, incumbent).any()


def test_what_was_said_does_not_count_as_done() -> None:
    """A user who did something with an item since is behind, whatever was said about it before."""
    every = interactions_of(snapshot(), USERS, ITEMS)
    model = wild_model(ModelConfig(kind="nbpr", factors=3), every.n_users, every.n_items)
    evaluated = Evaluated(model, np.arange(every.n_users), np.full((every.n_users, 2), -1))
    none = every.select(np.zeros(every.nnz, dtype=np.bool_))
    split = leave_latest_out(every)
    told = every.select(~np.isin(every.items, [split.test[0], split.validation[0]]))
    incumbent = Incumbent(evaluated, every.user_ids, every.item_ids, none, told)
    assert frozen_hold_out(split, incumbent).behind.all()


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    store = ObjectStore(monkeypatch)
    try:
        yield store
    finally:
        store.clear()


@pytest.mark.anyio
async def test_a_damaged_measured_copy_is_fetched_again(
    settings: Settings, objects: ObjectStore
) -> None:
    services = await build_services(settings.model_copy(update={"checkpoint_store": objects.url}))
    try:
        await add_small_data(services)
        version = await publish_model(services)
        await services.models.upload(version)
        row = await services.models.get(version)
        copy = services.models.folder(version) / "evaluated.safetensors"
        copy.write_bytes(b"rotten")
        _, evaluated = await services.models.load_measured(row, "cpu")
        assert evaluated is not None
        copy.unlink()
        _, evaluated = await services.models.load_measured(row, "cpu")
        assert evaluated is not None
        copy.write_bytes(b"rotten")
        objects.stop()
        with pytest.raises(StoreUnavailable):
            await services.models.load_measured(row, "cpu")
    finally:
        await services.close()


@pytest.mark.anyio
async def test_a_damaged_measured_copy_where_there_is_no_other(services: Services) -> None:
    await add_small_data(services)
    version = await publish_model(services)
    row = await services.models.get(version)
    folder = services.models.folder(version)
    (folder / "evaluated.safetensors").write_bytes(b"rotten")
    checkpoint, evaluated = await services.models.load_measured(row, "cpu")
    assert len(checkpoint.user_ids) == 60
    assert evaluated is None
    shutil.rmtree(folder)
    with pytest.raises(Exception, match="cannot be read"):
        await services.models.load_measured(row, "cpu")
