"""Several ranks learn what one process learns, go on after a loss, and say what is wrong."""

from __future__ import annotations

import copy
import errno
import gc
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ncr_core.data import Interactions, Split, leave_latest_out
from ncr_core.data.interactions import UserFeedback
from ncr_core.data.snapshot import Snapshot
from ncr_core.errors import ConfigError, DataError, NcrError, TrainingError
from ncr_core.evaluation.protocols import of_random_users
from ncr_core.models import PairwiseRanker
from ncr_core.models.precision import may_use_bfloat16
from ncr_core.recipes import Recipe, recipe, tuned
from ncr_core.tensor_files import map_tensors, write_tensors
from ncr_core.training import History, Progress, phase_files, rank_process, validation
from ncr_core.training.batches import (
    Batches,
    Rows,
    Share,
    SharedRows,
    TrainingPart,
    learned_and_seen,
)
from ncr_core.training.phase_files import SPLIT, USERS, PhaseOrder, RankParts, load_result
from ncr_core.training.pretraining import start_model
from ncr_core.training.rank_process import end_rank, resource_problem, run_rank
from ncr_core.training.ranks import DataParallelRanks, Ranks, RankVersion, Tables, check_ranks
from ncr_core.training.ray_ranks import check_address
from ncr_core.training.torchrun import MAX_RESTARTS, TorchrunEngine
from ncr_core.training.trainer import TrainingPhase, learn_held_out, remember, train_loop
from tests.cluster.process import children_of, is_running, wait_until

RANKS = 2
GRADIENTS = "gradients.safetensors"
TOLERANCE = 1e-6  # of weights
ROUNDING, COARSE_ROUNDING = 1e-4, 2.0**-6  # of gradients: sums in another order


@dataclass(frozen=True)
class Case:
    """A phase to train by one process and by two ranks."""

    recipe: Recipe
    tables: Tables = "replicated"
    told: bool = False
    """With dislikes, stated preferences and weights."""
    lone: bool = False
    """With a dislike of one user alone, so that most batches of a rank have none."""
    odd: bool = False
    """With weights, a user of all items, and a user of none."""


def _case(
    method: str,
    tables: Tables = "replicated",
    told: bool = False,
    odd: bool = False,
    lone: bool = False,
    **values: Any,
) -> Case:
    base = recipe(method) if method.islower() else tuned(method)
    # At a low rate: rounding is not blown up by Adam, whose first steps are of the rate's size
    # however small a gradient is.
    # The last epoch is kept: the start may be better, and would be the same whatever was trained.
    common = {"epochs": 2, "device": "cpu", "dropout": 0.0, "factors": 8, "stopping": "paper"}
    common["learning_rate"] = 1e-5
    return Case(base.with_(**common | values), tables, told, lone, odd)


CASES = {
    "NBPR": _case("NBPR", optimizer="dense"),
    "NBPR by rows": _case("NBPR", optimizer="sparse", batch_size=32, negatives=2),
    "NBPR told": _case("NBPR", told=True),
    "NBPR with few rows a batch": _case("NBPR", batch_size=2, epochs=1),
    "NBPR history": _case("NBPR history"),
    "NBPR history told": _case("NBPR history", told=True),
    "NBPR history, pairs": _case("NBPR history", loss="bce", l2=1e-3),
    "next-item": _case("next-item-nbpr"),
    "next-item, odd": _case("next-item-nbpr", odd=True),
    "next-item by rows": _case(
        "next-item-nbpr", optimizer="sparse", batch_size=32, shared_negatives=8
    ),
    "next-item told by rows": _case(
        "next-item-nbpr", told=True, optimizer="sparse", batch_size=32, shared_negatives=8
    ),
    "next-item told": _case("next-item-nbpr", told=True),
    "next-item, one dislike": _case("next-item-nbpr", lone=True, batch_size=256),
    "DNCR": _case("DNCR"),
    "DNCR history": _case("DNCR history"),
    "DNCR history, whole catalogue": _case("DNCR history", validation="full"),
    "NBPR sharded": _case("NBPR", "sharded", optimizer="dense"),
    # One process projects the whole table where a batch has more items than that: other sums.
    "DNCR sharded": _case(
        "DNCR", "sharded", optimizer="dense", batch_size=16, negatives=1, epochs=1
    ),
    "NBPR history sharded": _case("NBPR history", "sharded", optimizer="dense"),
    "NBPR history sharded, dropout": _case("NBPR history", "sharded", dropout=0.3),
    "next-item sharded": _case("next-item-nbpr", "sharded"),
}


IN_PARTS = {
    "NBPR history",
    "NBPR history told",
    "NBPR history, pairs",
    "next-item",
    "next-item, odd",
    "next-item by rows",
    "next-item told by rows",
    "next-item told",
    "next-item, one dislike",
}
"""The cases whose ranks read the interactions of their own users alone."""


def _odd(split: Split) -> Split:
    train, random = split.train, np.random.default_rng(1)
    lengths = np.diff(train.indptr)
    lengths[:2] = train.n_items, 0
    items = np.concatenate([np.arange(train.n_items), train.items[train.indptr[2] :]])
    weights = random.uniform(0.5, 2.0, len(items)).astype(np.float32)
    indptr = np.concatenate([[0], lengths.cumsum()])
    validation, test = split.validation.copy(), split.test.copy()
    validation[:2] = test[:2] = -1
    return Split(replace(train, indptr=indptr, items=items, weights=weights), validation, test)


def _split_of(case: Case, split: Split, told: Interactions) -> Split:
    if case.tables == "sharded":  # tables that the ranks cannot divide evenly
        train = replace(split.train, item_ids=[*split.train.item_ids, "new"])
        return replace(split, train=train)
    if case.lone:
        assert told.feedback is not None
        feedback = UserFeedback(
            disliked=told.feedback.disliked[:1], disliked_weights=np.ones(1, np.float32)
        )
        return replace(split, train=replace(split.train, feedback=feedback))
    if not case.told:
        return _odd(split) if case.odd else split
    weights = np.random.default_rng(1).uniform(0.5, 2.0, told.nnz).astype(np.float32)
    return leave_latest_out(replace(told, weights=weights))


def _phase(each: Recipe) -> TrainingPhase:
    return TrainingPhase("train", each.training.epochs, each.training.learning_rate)


def _join(rank: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(meeting), RANKS)
    minute = timedelta(minutes=1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=minute)


@contextmanager
def _first_gradients(kind: type[Ranks]) -> Iterator[dict[str, Tensor]]:
    """The gradients of the first step of a training by this kind of ranks, added up."""
    found: dict[str, Tensor] = {}
    honest = kind.reduce_gradients

    def reduce(ranks: Ranks, model: PairwiseRanker) -> None:
        honest(ranks, model)
        if not found:
            every = ((name, each.grad) for name, each in model.named_parameters())
            found.update({n: grad.to_dense().clone() for n, grad in every if grad is not None})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "reduce_gradients", reduce)
        yield found


def _train_cases(rank: int, folder: Path) -> None:
    """A rank of all cases, one after the other, and of what each kind of failure looks like."""
    _join(rank, folder / "meeting")
    for name, case in CASES.items():
        with _first_gradients(DataParallelRanks) as gradients:
            run_rank(folder / name, case.tables, rank, lambda progress: None)
        if rank == 0:
            write_tensors(folder / name / GRADIENTS, gradients)
    version = RankVersion.of_this_process()
    for name, call in {
        "version": lambda: check_ranks(version=replace(version, torch=f"9.{rank}")),
        "folder": lambda: run_rank(folder / ("reach", "absent")[rank], "replicated", 0, print),
        "nowhere": lambda: run_rank(folder / "nowhere", "replicated", 0, print),
        "order": lambda: run_rank(folder / ("diverged", "reach")[rank], "replicated", 0, print),
        "diverged": lambda: run_rank(
            folder / "diverged", "replicated", rank, lambda progress: None
        ),
    }.items():
        try:
            call()
        except NcrError as error:
            (folder / f"{name}.{rank}").write_text(str(error))
    dist.destroy_process_group()
    end_rank()


@dataclass(frozen=True)
class Trained:
    alone: PairwiseRanker
    history: History
    by_ranks: PairwiseRanker
    ranks_history: History
    gradients: dict[str, Tensor]
    """Of the first step of one process."""
    ranks_gradients: dict[str, Tensor]
    """The same of the ranks, added up; empty with sharded tables."""


@pytest.fixture(scope="module")
def trained(
    split: Split, told: Interactions, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Trained], Path]:
    """All cases by two ranks of one process group, and by this process."""
    folder = tmp_path_factory.mktemp("ranks")
    starts: dict[str, PairwiseRanker] = {}
    parts = {name: RankParts(folder / "parts" / name, RANKS) for name in CASES}
    wild, other = (_case("NBPR", learning_rate=1e30, epochs=epochs) for epochs in (3, 2))
    for name, case in {**CASES, "diverged": wild, "reach": other}.items():
        (folder / name).mkdir()
        part = _split_of(case, split, told)
        starts[name] = start_model(case.recipe.model, case.recipe.training, part)
        order = PhaseOrder(starts[name], part, case.recipe.training, _phase(case.recipe))
        order.save(folder / name, parts.get(name) if case.tables == "replicated" else None)
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=_train_cases, args=(rank, folder)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in the order of the ranks
    results = {}
    try:
        for name, case in CASES.items():
            part, alone = _split_of(case, split, told), copy.deepcopy(starts[name])
            torch.manual_seed(case.recipe.training.seed)  # of dropout
            with _first_gradients(Ranks) as gradients:
                history = train_loop(alone, part, case.recipe.training, _phase(case.recipe))
            results[name] = (alone, history, gradients)
    finally:
        torch.set_num_threads(threads)
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    every, in_parts = {}, set[str]()
    torch.set_num_threads(1)
    for name, (alone, history, gradients) in results.items():
        by_ranks = copy.deepcopy(starts[name])
        ranks_history = load_result(folder / name, by_ranks)
        assert ranks_history is not None
        remember(by_ranks, _split_of(CASES[name], split, told).train)
        if any((folder / "parts" / name).rglob(USERS)):
            in_parts.add(name)
        added_up = map_tensors(folder / name / GRADIENTS)
        every[name] = Trained(alone, history, by_ranks, ranks_history, gradients, added_up)
    torch.set_num_threads(threads)
    assert in_parts == IN_PARTS
    return every, folder


def _difference(one: PairwiseRanker, other: PairwiseRanker) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.tables != "sharded"])
def test_two_ranks_learn_what_one_process_learns(
    name: str, trained: tuple[dict[str, Trained], Path]
) -> None:
    each = trained[0][name]
    assert each.alone.sparse_items == name.endswith("by rows")
    is_pooled = each.alone.config.users == "history"
    assert each.alone.sparse_pooled_items == (name.endswith("by rows") and is_pooled)
    pairs = zip(each.by_ranks.state_dict().values(), each.alone.state_dict().values(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)
    # Adam's steps do not show the scale of the gradients.
    assert each.gradients
    for key, alone in each.gradients.items():
        rounding = ROUNDING
        if key == "items.weight" and may_use_bfloat16(alone):
            rounding = COARSE_ROUNDING  # of products over shared negatives
        near = rounding * float(alone.abs().max())
        torch.testing.assert_close(each.ranks_gradients[key], alone, rtol=rounding, atol=near)
    assert each.ranks_history.loss == pytest.approx(each.history.loss, rel=1e-5)
    assert each.ranks_history.ndcg == pytest.approx(each.history.ndcg, abs=1e-3)
    assert each.ranks_history.hr == pytest.approx(each.history.hr, abs=1e-9)
    assert each.ranks_history.best_epoch == each.history.best_epoch > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.tables == "sharded"])
def test_sharded_tables_learn_the_same_bits(
    name: str, trained: tuple[dict[str, Trained], Path]
) -> None:
    each = trained[0][name]
    assert _difference(each.alone, each.by_ranks) == 0.0
    assert each.ranks_history.loss == each.history.loss
    assert each.ranks_history.ndcg == each.history.ndcg
    assert each.ranks_history.best_epoch == each.history.best_epoch > 0
    assert not list((trained[1] / name).glob("whole-*"))


@pytest.mark.slow
def test_every_rank_says_what_is_wrong_with_one(trained: tuple[dict[str, Trained], Path]) -> None:
    folder = trained[1]
    for rank in range(RANKS):
        assert "rank 1 on " in (folder / f"version.{rank}").read_text()
        assert "has torch 9.1, and rank 0 has 9.0" in (folder / f"version.{rank}").read_text()
        unreachable = (folder / f"folder.{rank}").read_text()
        assert "rank 1 on " in unreachable
        assert "cannot read" in unreachable
        assert "NCR_TRAIN_FOLDER" in unreachable
        assert "NCR_TRAIN_FOLDER" in (folder / f"nowhere.{rank}").read_text()
        other_order = (folder / f"order.{rank}").read_text()
        assert "rank 1 on " in other_order
        assert "has another recipe or other data than rank 0" in other_order
        assert "learning rate 1e+30" in (folder / f"diverged.{rank}").read_text()
    with pytest.raises(TrainingError, match="try a smaller rate"):
        load_result(folder / "diverged", trained[0]["NBPR"].by_ranks)
    assert not (folder / "nowhere").exists()  # nor would the job find what a rank writes there


# Without processes


def _rows(batch: Rows | SharedRows) -> list[tuple[int, ...]]:
    """What each row of a batch says, by user."""
    users = batch.users if isinstance(batch, Rows) else batch.users[batch.row]
    weights = torch.ones(len(users)) if batch.weights is None else batch.weights
    parts: list[Tensor] = [users.unsqueeze(1), batch.items.unsqueeze(1), weights.unsqueeze(1)]
    if isinstance(batch, Rows):
        parts.append(batch.negatives)
    else:
        parts.append(batch.valid[batch.row] * (batch.negatives + 1))
    rows = torch.cat(parts, dim=1).tolist()
    stated = []
    if batch.preferences is not None:
        each = batch.preferences
        stated = torch.stack([each.users, each.winners, each.losers], dim=1).tolist()
    return sorted(map(tuple, rows + stated))


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("name", ["NBPR", "NBPR told", "NBPR history", "NBPR history told"])
def test_the_shares_of_all_ranks_are_the_batches(
    name: str, size: int, split: Split, told: Interactions
) -> None:
    case = CASES[name]
    train, config = _split_of(case, split, told).train, case.recipe.training
    histories = case.recipe.model.users == "history"

    def epoch(share: Share) -> list[list[tuple[int, ...]]]:
        batches = Batches(train, config, torch.device("cpu"), histories=histories, share=share)
        return [_rows(batch) for _ in range(2) for batch in batches]

    shares = [epoch(Share(rank, size)) for rank in range(size)]
    together = [sorted(chain.from_iterable(parts)) for parts in zip(*shares, strict=True)]
    assert together == epoch(Share())


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("name", sorted(IN_PARTS))
def test_the_parts_of_all_ranks_are_the_batches(
    name: str, size: int, split: Split, told: Interactions, tmp_path: Path
) -> None:
    each = CASES[name].recipe
    its = _split_of(CASES[name], split, told)
    model = start_model(each.model, each.training, its)
    parts_of_ranks = RankParts(tmp_path, size)
    PhaseOrder(model, its, each.training, _phase(each)).save(tmp_path, parts_of_ranks)

    collective = set[tuple[int, bool]]()

    def epoch(train: Interactions, share: Share) -> list[list[tuple[int, ...]]]:
        cpu = torch.device("cpu")
        batches = Batches(train, each.training, cpu, histories=True, share=share)
        for number, batch in enumerate(batches):
            collective.add((number, batch.preferences is None))
        owner = np.arange(its.train.n_users)
        if share.lengths is not None:
            owner = owner[share.rank :: share.size]
        every = [_rows(batch) for _ in range(2) for batch in batches]
        return [[(owner[int(user)], *rest) for user, *rest in rows] for rows in every]

    parts = [PhaseOrder.load(tmp_path, rank, size).part for rank in range(size)]
    shares = [epoch(part.interactions, part.share) for part in parts if part is not None]
    assert len(collective) == len(shares[0]) / 2  # all ranks add up the same losses of a batch
    together = [sorted(chain.from_iterable(rows)) for rows in zip(*shares, strict=True)]
    assert together == epoch(its.train, Share())


def test_parts_leave_out_who_has_seen_every_item_as_one_process_does(told: Interactions) -> None:
    assert told.feedback is not None
    rest = np.setdiff1d(np.arange(told.n_items), told.items_of(1))
    seen = np.stack([np.ones_like(rest), rest], axis=1)
    everything = np.concatenate([told.feedback.seen, seen, seen[:3]])  # some of it twice
    train = replace(told, feedback=replace(told.feedback, seen=everything))
    one_unseen = replace(told, feedback=replace(told.feedback, seen=np.repeat(seen[:-1], 2, 0)))
    for each, is_full in ((train, True), (one_unseen, False)):
        learned, _ = learned_and_seen(each)
        parts = list(TrainingPart.every(each, 3))
        for rank, part in enumerate(parts):
            rows = np.arange(rank, told.n_users, 3)
            assert part.interactions.items.tolist() == learned.of_rows(rows).items.tolist()
            assert part.share.lengths is not None
            assert part.share.lengths.tolist() == np.diff(learned.indptr).tolist()
            assert part.share.dislikes is not None
            assert np.flatnonzero(part.share.dislikes).tolist() == list(range(0, 300, 3))
        assert (parts[1].interactions.items_of(0).size == 0) is is_full
    only_seen = replace(told, feedback=UserFeedback(told.feedback.seen))
    assert [part.share.dislikes for part in TrainingPart.every(only_seen, 2)] == [None, None]
    only_pairs = UserFeedback(pairs=told.feedback.pairs, pair_weights=told.feedback.pair_weights)
    for part in TrainingPart.every(replace(told, feedback=only_pairs), 2):
        assert part.share.dislikes is not None
        assert not part.share.dislikes.any()


def test_a_rank_that_fails_alone_says_why(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TrainingError("the reason of this rank alone")

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(rank_process, "check_ranks", fail)
    with pytest.raises(TrainingError, match="the reason of this rank alone"):
        run_rank(tmp_path, "replicated", 1, lambda progress: None)
    each = CASES["next-item"].recipe
    model = start_model(each.model, each.training, split)
    with pytest.raises(TrainingError, match="the reason of this rank alone"):
        load_result(tmp_path, model)


def test_every_rank_has_the_users_who_choose_the_epoch(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "FULL_VALIDATION_USERS", 20)
    each = CASES["next-item"].recipe
    model = start_model(each.model, each.training, split)
    parts = RankParts(tmp_path, RANKS)
    PhaseOrder(model, split, each.training, _phase(each)).save(tmp_path, parts)
    orders = [PhaseOrder.load(tmp_path, rank, RANKS) for rank in range(RANKS)]
    chosen = np.flatnonzero(of_random_users(split.validation, 20) >= 0)
    for order in orders:
        assert order.split.validation.tolist() == split.validation[chosen].tolist()
        for row, user in enumerate(chosen):
            assert order.split.train.items_of(row).tolist() == split.train.items_of(user).tolist()
    with pytest.raises(TrainingError, match="3 ranks read an order for 2 ranks"):
        PhaseOrder.load(tmp_path, 0, 3)


def test_users_of_all_items_leave_nothing_to_learn_in_parts(split: Split, tmp_path: Path) -> None:
    each, full = CASES["next-item"].recipe, _odd(split)
    train = full.train.of_rows(np.zeros(2, np.int64))
    nothing = np.full(2, -1)
    model = start_model(each.model, each.training, Split(train, nothing, nothing))
    order = PhaseOrder(model, Split(train, nothing, nothing), each.training, _phase(each))
    with pytest.raises(DataError, match="every user has interacted with every item"):
        order.save(tmp_path, RankParts(tmp_path / "parts", RANKS))
    assert [*(tmp_path / "parts").iterdir()] == []


@pytest.mark.parametrize(
    "name, damage, words",
    [
        ("part-00000.parquet", "missing", "cannot read its users: {} is missing; all machines"),
        ("part-00000.parquet", "changed", "cannot read its users: part-00000.parquet is damaged"),
        ("items.parquet", "changed", "cannot read its users: items.parquet is damaged"),
        ("manifest.json", "missing", "cannot read {}: No such file or directory; all machines"),
        ("manifest.json", "changed", "cannot read {}: it differs from its checksum; all machines"),
        (USERS, "changed", "cannot read {}: it differs from its checksum; all machines"),
        (SPLIT, "missing", "cannot read {}: No such file or directory; all machines"),
    ],
)
def test_a_file_that_is_missing_or_damaged_is_named(
    name: str, damage: str, words: str, split: Split, tmp_path: Path
) -> None:
    each = CASES["next-item"].recipe
    model = start_model(each.model, each.training, split)
    parts = RankParts(tmp_path, RANKS)
    PhaseOrder(model, split, each.training, _phase(each)).save(tmp_path, parts)
    (file,) = tmp_path.rglob(name)
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    if name == SPLIT:  # each rank measures some of its users
        with pytest.raises(OSError, match=SPLIT):
            PhaseOrder.load(tmp_path, 1, RANKS)
    if name == "part-00000.parquet":
        assert PhaseOrder.load(tmp_path, 1, RANKS).part is not None  # it needs no other part
    with pytest.raises((OSError, DataError)):
        PhaseOrder.load(tmp_path, 0, RANKS)
    with pytest.raises(TrainingError, match=re.escape(words.format(file))):
        _alone(lambda: run_rank(tmp_path, "replicated", 0, print), tmp_path / "meeting")


@pytest.mark.slow
def test_parts_are_written_once_for_the_same_positives(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phase_files, "PART_SIZE", 500)
    parts = RankParts(tmp_path, 3)
    folder = parts.written(split.train)
    written = sorted(path.name for path in folder.glob("part-*"))
    each = -(-split.train.nnz // 1_500)
    assert len(written) == 3 * each > 3
    assert parts.written(split.train) == folder
    other = replace(split.train)
    assert parts.written(other) != folder
    assert not folder.exists()
    snapshot = Snapshot.open(parts.written(other))
    for rank, part in enumerate(TrainingPart.every(other, 3)):
        read = snapshot.read(snapshot.manifest.share(rank, 3))
        assert read.items.tolist() == part.interactions.items.tolist()
        assert read.indptr.tolist() == part.interactions.indptr.tolist()
    full = replace(_odd(split).train.of_rows(np.zeros(2, np.int64)))
    with pytest.raises(DataError):
        parts.written(full)
    assert [*tmp_path.iterdir()] == []
    assert Snapshot.open(parts.written(other)).manifest.n_interactions == other.nnz
    del parts
    gc.collect()
    assert [*tmp_path.iterdir()] == []


def _alone(call: Callable[[], None], meeting: Path) -> None:
    """Calls a function as the first of the ranks, in a process group of this process alone."""
    honest = PhaseOrder.load

    def load(folder: Path, rank: int, ranks: int) -> PhaseOrder:
        return honest(folder, rank, RANKS)

    store = dist.FileStore(str(meeting), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PhaseOrder, "load", staticmethod(load))
            call()
    finally:
        dist.destroy_process_group()


def test_more_ranks_than_users_are_refused(split: Split, tmp_path: Path) -> None:
    each = CASES["NBPR"].recipe
    model = start_model(each.model, each.training, split)
    users = int((np.diff(split.train.indptr) > 0).sum())
    phases = TorchrunEngine(users + 1, "replicated", tmp_path / "ranks")
    with pytest.raises(TrainingError, match=f"set NCR_TRAIN_RANKS to {users} or less"):
        phases(model, split, each.training, _phase(each))


@pytest.mark.parametrize(
    "address, mode, refused",
    [
        (None, None, False),
        ("127.0.0.1:6379", None, False),
        ("[::1]:6379", None, False),
        ("localhost:6379", None, False),
        ("10.1.2.3:6379", None, True),
        ("10.1.2.3:6379", "disabled", True),
        ("10.1.2.3:6379", "token", False),
        ("0.0.0.0:6379", None, True),
        ("head.example:6379", None, True),
        ("auto", None, True),
    ],
)
def test_a_cluster_beyond_loopback_needs_a_token(
    address: str | None, mode: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    if not refused:
        check_address(address)
        return
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        check_address(address)


@pytest.mark.parametrize(
    "error, of_memory",
    [
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), True),
        (RuntimeError("Connection closed by peer"), False),
    ],
)
def test_a_lack_of_memory_says_what_to_do(error: Exception, of_memory: bool) -> None:
    words = resource_problem(error)
    assert (words is not None) is of_memory
    assert words is None or "fewer ranks" in words


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(code: int) -> None:
    words = resource_problem(OSError(code, os.strerror(code)))
    assert words is not None
    assert "NCR_TRAIN_FOLDER" in words


# With torchrun


def _ranks_of_this_process() -> list[int]:
    """The processes of torchrun's ranks."""
    return [rank for agent in children_of(os.getpid()) for rank in children_of(agent)]


@pytest.mark.slow
def test_torchrun_learns_what_one_process_learns(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCR_ADMIN_KEY", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    environments: list[bytes] = []

    def look(progress: Progress) -> None:
        for pid in (*children_of(os.getpid()), *_ranks_of_this_process()):
            with suppress(OSError):  # it has just ended
                environments.append(Path(f"/proc/{pid}/environ").read_bytes())

    each, odd = CASES["next-item, odd"].recipe, _odd(split)
    model = start_model(each.model, each.training, odd)
    alone = copy.deepcopy(model)
    engine = TorchrunEngine(3, "replicated", tmp_path)
    history = engine(model, odd, each.training, _phase(each), look)
    assert any(b"RANK=2" in environment for environment in environments)
    assert not any(b"=secret" in environment for environment in environments)
    expected = train_loop(alone, odd, each.training, _phase(each))
    assert _difference(model, alone) < TOLERANCE
    assert history.ndcg == pytest.approx(expected.ndcg, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["replicated", "sharded"])
def test_torchrun_learns_the_held_out_items(tables: Tables, split: Split, tmp_path: Path) -> None:
    each = _case("NBPR", optimizer="dense", fine_tune_rate=1e-5)
    model = start_model(each.recipe.model, each.recipe.training, split)
    alone = copy.deepcopy(model)
    every = split.all_seen
    learn_held_out(alone, every, each.recipe.training)
    before = copy.deepcopy(model)
    learn_held_out(model, every, each.recipe.training, TorchrunEngine(2, tables, tmp_path))
    assert _difference(model, before) > 100 * TOLERANCE
    assert _difference(model, alone) <= (TOLERANCE if tables == "replicated" else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tables, is_told", [("replicated", False), ("replicated", True), ("sharded", False)]
)
def test_training_goes_on_from_the_last_epoch_after_a_rank_is_killed(
    tables: Tables, is_told: bool, split: Split, told: Interactions, tmp_path: Path
) -> None:
    if is_told:  # the draws of rivals have a generator of their own
        split = leave_latest_out(told)
    rate = 1e-4 if is_told else 0.03  # the best epoch is between
    if tables == "replicated" and not is_told:
        split = split.with_validation_in_train()  # all epochs are run, and the last is kept
        rate = 1e-5
    by_rows = {"optimizer": "sparse", "batch_size": 64} if is_told else {}
    each = _case(
        "NBPR history", epochs=4, dropout=0.3, stopping="validation", learning_rate=rate, **by_rows
    ).recipe
    phases = TorchrunEngine(RANKS, tables, tmp_path / "ranks")
    models = [start_model(each.model, each.training, split) for _ in range(2)]
    epochs: list[int] = []
    killed: list[int] = []

    def kill_once(progress: Progress) -> None:
        epochs.append(progress.epoch)
        if progress.epoch == 2 and not killed:
            killed.extend(_ranks_of_this_process()[-1:])
            os.kill(killed[0], signal.SIGKILL)

    history = phases(models[0], split, each.training, _phase(each), kill_once)
    assert killed
    assert not is_running(killed[0])
    # An epoch may have been stored whose progress was not yet told.
    assert sorted(set(epochs)) in ([1, 2, 3, 4], [1, 2, 4])
    assert 1 not in epochs[1:]
    assert len(history.loss) == 4
    kept = [path.name for path in (tmp_path / "ranks").iterdir()]
    uninterrupted = phases(models[1], split, each.training, _phase(each))
    assert history.best_epoch == uninterrupted.best_epoch > 0
    assert (history.loss, history.ndcg) == (uninterrupted.loss, uninterrupted.ndcg)
    assert _difference(*models) == 0.0
    # The parts are for the next phase, too.
    assert [path.name for path in (tmp_path / "ranks").iterdir()] == kept
    assert [name.startswith("ncr-phase-parts-") for name in kept] == [True] * (
        tables == "replicated"
    )
    del phases
    gc.collect()
    assert [*(tmp_path / "ranks").iterdir()] == []


@pytest.mark.slow
def test_ranks_that_are_always_lost_end_the_training_with_one_sentence(
    split: Split, tmp_path: Path
) -> None:
    split = split.with_validation_in_train()
    each = _case("NBPR", epochs=200, stopping="validation").recipe
    phases = TorchrunEngine(RANKS, "replicated", tmp_path)
    killed: set[int] = set()

    def kill(progress: Progress) -> None:
        for rank in _ranks_of_this_process()[-1:]:
            killed.add(rank)
            os.kill(rank, signal.SIGKILL)

    model = start_model(each.model, each.training, split)
    with pytest.raises(TrainingError, match=r"rank \d was lost.*memory"):
        phases(model, split, each.training, _phase(each), kill)
    assert len(killed) == 1 + MAX_RESTARTS
    wait_until(lambda: not any(map(is_running, killed)), 10, "end of the ranks")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space need Linux")
def test_a_rank_without_enough_memory_is_named_with_what_to_do(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks get 2 GiB of address space; the tables with their moments need more."""
    split = split.with_validation_in_train()
    train = split.train
    items = [*train.item_ids, *(f"other {n}" for n in range(60_000))]
    wide = replace(split, train=replace(train, item_ids=items))
    each = _case("NBPR", factors=1024, optimizer="dense", stopping="validation").recipe
    popen = subprocess.Popen

    def limited(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))

        return popen(*arguments, preexec_fn=limit, **options)

    monkeypatch.setattr(subprocess, "Popen", limited)
    model = start_model(each.model, each.training, wide)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TrainingError, match=r"rank \d on \S+ has too little memory: use a machine"):
        TorchrunEngine(RANKS, "replicated", tmp_path)(model, wide, each.training, _phase(each))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert list(tmp_path.iterdir()) == []
