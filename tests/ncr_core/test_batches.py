"""An epoch has every positive once, with negatives that the user has not interacted with."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from ncr_core.data import Interactions, build_interactions
from ncr_core.errors import ConfigError
from ncr_core.training import TrainConfig
from ncr_core.training.batches import Batches, Rows, SharedRows

CPU = torch.device("cpu")
MODES = pytest.mark.parametrize(
    ("shared", "histories"),
    [(0, False), (30, False), (0, True), (30, True)],
    ids=["own", "shared", "own of histories", "shared of histories"],
)


def batches_of(
    train: Interactions, *, shared: int = 0, histories: bool = False, seed: int = 0, size: int = 500
) -> Batches:
    config = TrainConfig(batch_size=size, negatives=3, shared_negatives=shared, seed=seed)
    return Batches(train, config, CPU, histories=histories)


def users_of(rows: Rows | SharedRows) -> Tensor:
    """(R,) the user of each row."""
    return rows.users[rows.row] if isinstance(rows, SharedRows) else rows.users


def tensors_of(rows: object) -> list[Tensor]:
    found: list[Tensor] = []
    for field in fields(rows):  # type: ignore[arg-type]
        value = getattr(rows, field.name)
        if is_dataclass(value):
            found += tensors_of(value)
        elif value is not None:
            found.append(value)
    return found


@MODES
def test_an_epoch_has_every_positive_exactly_once(
    synthetic: Interactions, shared: int, histories: bool
) -> None:
    batches = batches_of(synthetic, shared=shared, histories=histories)
    for _ in range(2):
        keys = torch.cat([users_of(rows) * batches.n_items + rows.items for rows in batches])
        assert keys.sort().values.tolist() == synthetic.keys.tolist()
        assert keys.tolist() != synthetic.keys.tolist()


@MODES
def test_a_batch_has_its_size_or_as_many_rows_as_whole_users_give(
    synthetic: Interactions, shared: int, histories: bool
) -> None:
    batches = batches_of(synthetic, shared=shared, histories=histories)
    sizes = [len(rows.items) for rows in batches]
    if not shared and not histories:
        assert sizes[:-1] == [500] * (len(sizes) - 1)
        assert 0 < sizes[-1] <= 500
    longest = int(np.diff(synthetic.indptr).max())
    assert max(sizes) < 500 + longest
    assert len(sizes) == len(batches) == -(-synthetic.nnz // 500)


@pytest.mark.parametrize("shared", [0, 3])
def test_a_user_of_several_batches_leaves_fewer_of_them(shared: int) -> None:
    rows = [("long", str(i), float(i)) for i in range(9)]
    rows += [(f"short {n}", str(i), float(i)) for n in range(3) for i in range(10, 12)]
    matrix = build_interactions(rows)
    batches = batches_of(matrix, shared=shared, histories=True, size=3)
    for _ in range(5):
        sizes = [len(part.items) for part in batches]
        assert sum(sizes) == matrix.nnz
        assert 0 not in sizes
        assert len(sizes) < len(batches) == 5


@pytest.mark.parametrize("histories", [False, True])
def test_own_negatives_are_never_interacted_with(synthetic: Interactions, histories: bool) -> None:
    for rows in batches_of(synthetic, histories=histories):
        assert isinstance(rows, Rows)
        assert rows.negatives.shape == (len(rows.items), 3)
        users = rows.users.unsqueeze(1).expand_as(rows.negatives)
        assert not synthetic.contains(users.numpy(), rows.negatives.numpy()).any()


@pytest.mark.parametrize("histories", [False, True])
def test_valid_is_exactly_what_was_not_interacted_with(
    synthetic: Interactions, histories: bool
) -> None:
    for rows in batches_of(synthetic, shared=30, histories=histories):
        assert isinstance(rows, SharedRows)
        assert rows.negatives.shape == (30,)
        assert rows.valid.shape == (len(rows.users), 30)
        users, items = torch.broadcast_tensors(rows.users.unsqueeze(1), rows.negatives)
        assert (rows.valid.numpy() == ~synthetic.contains(users.numpy(), items.numpy())).all()
        if histories:
            assert rows.row.equal(torch.arange(len(rows.items)))
        else:
            assert len(rows.users.unique()) == len(rows.users)


@pytest.mark.parametrize("more", [0, 1, 1_000])
def test_as_many_shared_negatives_as_items_are_all_items_in_order(
    synthetic: Interactions, more: int
) -> None:
    for rows in batches_of(synthetic, shared=synthetic.n_items + more):
        assert rows.negatives.equal(torch.arange(synthetic.n_items))
    fewer = next(iter(batches_of(synthetic, shared=synthetic.n_items - 1)))
    assert not fewer.negatives.equal(torch.arange(synthetic.n_items - 1))


@pytest.mark.parametrize("shared", [0, 30])
def test_histories_are_the_users_sequences_and_the_rows_places_in_them(
    synthetic: Interactions, shared: int
) -> None:
    for rows in batches_of(synthetic, shared=shared, histories=True):
        own = rows.histories
        assert own is not None
        assert own.items[own.at].equal(rows.items)
        places = zip(
            users_of(rows).tolist(),
            own.start.tolist(),
            own.at.tolist(),
            own.end.tolist(),
            strict=True,
        )
        for user, start, at, end in places:
            assert start <= at < end
            assert own.items[start:end].tolist() == synthetic.items_of(user).tolist()


def test_there_are_no_histories_unless_they_are_asked_for(synthetic: Interactions) -> None:
    assert next(iter(batches_of(synthetic))).histories is None
    assert next(iter(batches_of(synthetic, shared=5))).histories is None


def test_too_few_items_for_the_negatives_are_an_error() -> None:
    rows = [("u", "a", 0.0), ("u", "b", 1.0), ("v", "c", 0.0)]
    with pytest.raises(ConfigError, match=r"3 items are too few for 3 negatives .* at least 4"):
        batches_of(build_interactions(rows))
    batches = batches_of(build_interactions([*rows, ("v", "d", 1.0)]))
    assert sum(len(part.items) for part in batches) == 4


@MODES
def test_the_same_seed_gives_the_same_batches(
    synthetic: Interactions, shared: int, histories: bool
) -> None:
    def epoch(batches: Batches) -> Tensor:
        return torch.cat([x.flatten().long() for rows in batches for x in tensors_of(rows)])

    one, two, other = (
        batches_of(synthetic, shared=shared, histories=histories, seed=seed) for seed in (3, 3, 4)
    )
    first = epoch(one)
    assert first.equal(epoch(two))
    assert not first.equal(epoch(other))
    second = epoch(one)
    assert not first.equal(second)
    assert second.equal(epoch(two))
