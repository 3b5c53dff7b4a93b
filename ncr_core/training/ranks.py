"""Ranks: the processes that train one model together, each with its share of every batch.

A rank is a process of a `torch.distributed` group. With replicated tables (`DataParallelRanks`)
every rank draws the same batches and learns from the rows of its own users. The sum of the
gradients gives the step of one process with the whole batch. With sharded tables (`ShardedTables`)
each rank holds some rows of every table, and all ranks go through whole batches.
"""

from __future__ import annotations

import copy
import hashlib
import platform
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ncr_core.checkpoint import is_finite, model_of
from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.data.splits import Split
from ncr_core.errors import ConfigError, TrainingError
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.models.lookups import first_row, is_sharded
from ncr_core.models.user_embeddings import PooledUsers, pooled_tables
from ncr_core.tensor_files import TensorLayout, map_tensors, write_tensors
from ncr_core.training.batches import WHOLE, Share, TrainingPart

SHARDED_KINDS = ("nbpr", "dncr")
"""The kinds of models whose tables can be sharded by rows."""
Tables = Literal["replicated", "sharded"]
"""Whether each rank has whole tables and a share of the users, or some rows of every table."""
Count = Callable[[], Tensor | float]
"""A function that counts the rows of a mean by their weights; only several ranks call it."""


class Ranks:
    """The only rank of a training, which has whole batches and no other rank to talk to."""

    rank = 0
    size = 1
    share: Share = WHOLE
    sparse_gradients = True
    """Whether gradients of tables may come by rows."""

    @property
    def is_first(self) -> bool:
        """Whether this rank reports progress and writes the result."""
        return self.rank == 0

    def learned(self, split: Split) -> Interactions:
        """The interactions that this rank makes its batches of."""
        return split.train

    def prepare(self, model: PairwiseRanker, device: torch.device) -> None:
        """Moves the model to the device, the same model on every rank, before its optimiser."""
        model.to(device)

    def part(self, mean: Tensor, count: Count) -> Tensor:
        """A mean over this rank's rows → its part of the mean over all rows; the parts add up."""
        return mean

    def total(self, value: Tensor | float) -> Tensor | float:
        """The sum of a scalar over all ranks that have rows of their own."""
        return value

    def reduce_gradients(self, model: PairwiseRanker) -> None:
        """Adds up the gradients of all ranks; each rank then has the sum."""

    def agreed(self, values: list[float]) -> list[float]:
        """The values of rank 0, on every rank."""
        return values

    def summed(self, values: IntArray) -> IntArray:
        """The sum of the (n,) values of all ranks, on every rank."""
        return values

    def all_finite(self, model: PairwiseRanker) -> bool:
        """Whether all parameters of all ranks are finite; the same on every rank."""
        return _finite(model)

    def measured(self, n_users: int) -> IntArray:
        """The places, among so many users, of those that this rank measures."""
        return np.arange(n_users)

    def whole(self, model: PairwiseRanker, n_users: int) -> PairwiseRanker | None:
        """The model with whole tables, to measure it; None on a rank that has none.

        Every rank has to call this method. If users' vectors are pooled, the model of several ranks
        has those of ``n_users`` users, which are zeros.
        """
        return model

    def copied(self, model: PairwiseRanker) -> dict[str, Tensor]:
        """A copy of the parameters that this rank keeps of an epoch; see `restore`."""
        return copy.deepcopy(model.state_dict())

    def restore(self, model: PairwiseRanker, state: Mapping[str, Tensor]) -> None:
        """Sets the model to a copy of its parameters."""
        model.load_state_dict(state)

    def write(self, model: PairwiseRanker, path: Path) -> None:
        """Writes the whole tables into a file, without vectors that are pooled from items.

        Every rank has to call this method. Raises OSError.
        """
        write_tensors(path, without_pooled(model))


ONE_RANK = Ranks()


class _Group(Ranks):
    """The ranks of the process group that this process has joined."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device = torch.device("cpu")

    def agreed(self, values: list[float]) -> list[float]:
        """The values of rank 0, on every rank."""
        shared = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.broadcast(shared, src=0)
        agreed: list[float] = shared.tolist()
        return agreed

    def summed(self, values: IntArray) -> IntArray:
        """The sum of the (n,) values of all ranks, on every rank."""
        shared = torch.from_numpy(values).to(self._device, copy=True)
        dist.all_reduce(shared)
        summed: IntArray = shared.cpu().numpy()
        return summed

    def all_finite(self, model: PairwiseRanker) -> bool:
        """Whether all parameters of all ranks are finite; the same on every rank."""
        finite = torch.tensor(float(_finite(model)), device=self._device)
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        return bool(finite)

    def copied(self, model: PairwiseRanker) -> dict[str, Tensor]:
        """A copy of the parameters of this rank, without pooled vectors."""
        return {name: value.detach().clone() for name, value in without_pooled(model).items()}

    def restore(self, model: PairwiseRanker, state: Mapping[str, Tensor]) -> None:
        """Sets the parameters of this rank; pooled vectors stay as they are."""
        model.load_state_dict(state, strict=False)


class DataParallelRanks(_Group):
    """Ranks with replicated tables, which share out a batch's users and add up the gradients.

    Over gloo the gradients of large tables come by rows. NCCL supports dense gradients alone.
    """

    def __init__(self, part: TrainingPart | None = None) -> None:
        """``part`` are the interactions of this rank's users; None: every rank has all of them."""
        super().__init__()
        self._part = part
        self.share = Share(self.rank, self.size) if part is None else part.share
        self.sparse_gradients = not torch.cuda.is_available()

    def prepare(self, model: PairwiseRanker, device: torch.device) -> None:
        """Gives each rank the model of rank 0, in memory of its own.

        The model has no vectors of pooled users: a batch has histories in their place.
        """
        self._device = device
        _with_vectors(model, 0)
        model.to(device)
        if device.type == "cpu":  # the tensors are a file mapped into memory
            for value in chain(model.parameters(), model.buffers()):
                value.data = value.data.clone()
        for value in without_pooled(model).values():
            dist.broadcast(value, src=0)

    def learned(self, split: Split) -> Interactions:
        """The interactions of this rank's users, or all of them."""
        return split.train if self._part is None else self._part.interactions

    def part(self, mean: Tensor, count: Count) -> Tensor:
        """This rank's part of the mean; zero for a rank without rows."""
        own = float(count())
        every = float(self.total(own))
        if own == 0.0:  # the mean of nothing is not a number
            return mean.new_zeros(())
        return mean * (own / every)

    def total(self, value: Tensor | float) -> Tensor | float:
        """The sum over all ranks, computed in float64."""
        summed = torch.as_tensor(value, dtype=torch.float64, device=self._device).detach().clone()
        dist.all_reduce(summed)
        return float(summed)

    def reduce_gradients(self, model: PairwiseRanker) -> None:
        """Adds up the gradients of all ranks, in place."""
        by_rows = {id(table) for table in model.sparse_tables()}
        waiting = []
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            if id(parameter) in by_rows:
                parameter.grad = _sum_of_rows(parameter)
                continue
            if parameter.grad is None:  # no row of this rank's has used it
                parameter.grad = torch.zeros_like(parameter)
            waiting.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in waiting:
            work.wait()

    def measured(self, n_users: int) -> IntArray:
        """An equal share for each rank."""
        return np.arange(self.rank, n_users, self.size)

    def whole(self, model: PairwiseRanker, n_users: int) -> PairwiseRanker | None:
        """The model itself."""
        _with_vectors(model, n_users)
        return model

    def copied(self, model: PairwiseRanker) -> dict[str, Tensor]:
        """A copy of the parameters on rank 0; the other ranks keep none."""
        return super().copied(model) if self.is_first else {}

    def restore(self, model: PairwiseRanker, state: Mapping[str, Tensor]) -> None:
        """Sets the model of rank 0; the models of the other ranks stay as they are."""
        if self.is_first:
            super().restore(model, state)

    def write(self, model: PairwiseRanker, path: Path) -> None:
        """Writes the model of rank 0."""
        if self.is_first:
            super().write(model, path)


def _sum_of_rows(table: Tensor) -> Tensor:
    """The sum over all ranks of gradients by rows; each rank may have different rows."""
    gradient = table.grad
    if gradient is None:
        nothing = torch.empty((1, 0), dtype=torch.long, device=table.device)
        none = table.new_empty(0, *table.shape[1:])
        gradient = torch.sparse_coo_tensor(nothing, none, table.shape, check_invariants=False)
    gradient = gradient.coalesce()
    rows, values = gradient.indices()[0], gradient.values()
    size = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.long, device=table.device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(rows)], device=table.device))
    counts = [int(length) for length in lengths]
    padded_rows, padded_values = (
        torch.cat([x, x.new_zeros(max(counts) - len(rows), *x.shape[1:])]) for x in (rows, values)
    )
    all_rows = [torch.empty_like(padded_rows) for _ in range(size)]
    all_values = [torch.empty_like(padded_values) for _ in range(size)]
    dist.all_gather(all_rows, padded_rows)
    dist.all_gather(all_values, padded_values)
    return torch.sparse_coo_tensor(
        torch.cat([x[:n] for x, n in zip(all_rows, counts, strict=True)]).unsqueeze(0),
        torch.cat([x[:n] for x, n in zip(all_values, counts, strict=True)]),
        table.shape,
        check_invariants=False,
    ).coalesce()


class ShardedTables(_Group):
    """Ranks with some rows of every embedding table each, and their gradients and moments.

    The tables are DTensors with the rows that torch's ``RowwiseParallel`` gives each rank. Every
    rank has all other parameters and the whole batch, so the gradients need no sum. The ranks write
    one file of whole tables together. Rank 0 maps the file into memory, and measures the model on
    the CPU.
    """

    sparse_gradients = False

    def __init__(self, folder: Path) -> None:
        """``folder`` is a folder of the ranks for files of whole tables."""
        super().__init__()
        self._folder = folder
        self._whole_files = 0

    def prepare(self, model: PairwiseRanker, device: torch.device) -> None:
        """Replaces the tables of the model by sharded tables; the ranks have equal models.

        Raises ConfigError if the model is neither an NBPR nor a DNCR.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        check_sharded(model.config)
        self._device = device
        mesh = init_device_mesh(device.type, (self.size,))
        for part in model.modules():
            if isinstance(part, nn.Embedding):
                table = part.weight.detach()
                first, end = (
                    first_row(len(table), rank, self.size) for rank in (self.rank, self.rank + 1)
                )
                own = table[first:end]
                shard = DTensor.from_local(
                    own.to(device, copy=True),
                    mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=table.shape,
                    stride=table.stride(),
                )
                part.weight = nn.Parameter(shard, requires_grad=part.weight.requires_grad)
        _with_vectors(model, 0)
        model.to(device)
        if device.type == "cpu":  # the other parameters are a file mapped into memory
            for parameter in model.parameters():
                if not is_sharded(parameter):
                    parameter.data = parameter.data.clone()

    def measured(self, n_users: int) -> IntArray:
        """All users on rank 0: each rank that measures would write ranking tables of its own."""
        return np.arange(n_users if self.is_first else 0)

    def whole(self, model: PairwiseRanker, n_users: int) -> PairwiseRanker | None:
        """A model on the CPU whose tables are a file mapped into memory, on rank 0.

        Raises OSError.
        """
        path = self._folder / f"whole-{self._whole_files}.safetensors"
        self._whole_files += 1
        self.write(model, path)
        if not self.is_first:
            return None
        n_users = n_users if pooled_tables(model) else model.n_users
        whole = mapped_model(path, model.config, n_users, model.n_items)
        path.unlink()  # its content stays mapped
        _with_vectors(whole, n_users)
        return whole.requires_grad_(False)

    def write(self, model: PairwiseRanker, path: Path) -> None:
        """Writes the rows of each rank into one file, one rank after the other.

        Clients of a network's file system may lose bytes if they write a file at the same time.
        """
        state: dict[str, Any] = without_pooled(model)
        layout = TensorLayout.of(state)
        for rank in range(self.size):
            if rank == self.rank:
                with path.open("wb" if self.is_first else "r+b") as file:
                    if self.is_first:
                        layout.begin(file)
                    for name, value in state.items():
                        if is_sharded(value):
                            first = first_row(len(value), self.rank, self.size)
                            layout.write(file, name, value.to_local(), first)
                        elif self.is_first:
                            layout.write(file, name, value)
            self._wait()

    def _wait(self) -> None:
        """Returns once every rank has called it."""
        together = torch.zeros((), device=self._device)
        dist.all_reduce(together)
        together.item()


def check_sharded(config: ModelConfig) -> None:
    """Raises ConfigError if the tables of such a model cannot be sharded."""
    if config.kind not in SHARDED_KINDS:
        kinds = " and ".join(SHARDED_KINDS)
        raise ConfigError(
            f"tables sharded by rows are for {kinds}, not {config.kind}: set NCR_TRAIN_TABLES "
            "(--tables of ncr train) to replicated, or request another model"
        )


def _with_vectors(model: PairwiseRanker, n_users: int) -> None:
    """Gives the model vectors of so many pooled users, which are zeros."""
    for part in model.user_parts():
        if isinstance(part, PooledUsers):
            part.weight = part.weight.new_zeros((n_users, part.weight.shape[1]))


def without_pooled(model: PairwiseRanker) -> dict[str, Tensor]:
    """The state of a model without the vectors of users that are pooled from items."""
    pooled = pooled_tables(model)
    return {name: value for name, value in model.state_dict().items() if name not in pooled}


def mapped_model(
    path: Path,
    config: ModelConfig,
    n_users: int,
    n_items: int,
    absent: Callable[[nn.Module], set[str]] = pooled_tables,
) -> PairwiseRanker:
    """A model whose parameters are a file, as of `Ranks.write`, mapped into memory.

    The tables that are ``absent`` from the file are zeros that take no memory. Raises
    CheckpointError if the file is missing or damaged, and RuntimeError if it does not fit.
    """
    with torch.device("meta"):
        like = build_model(config, n_users, n_items)
    shapes = like.state_dict()
    zeros = {name: torch.zeros(()).expand(shapes[name].shape) for name in absent(like)}
    return model_of(config, n_users, n_items, map_tensors(path) | zeros)


def _finite(model: PairwiseRanker) -> bool:
    """Whether every parameter is finite; of a sharded table, this rank's rows."""
    parameters: list[Any] = list(model.parameters())
    return all(is_finite(p.to_local() if is_sharded(p) else p) for p in parameters)


@dataclass(frozen=True)
class RankVersion:
    """The versions that have to be the same on all ranks of a training."""

    library: str
    torch: str
    python: str

    @classmethod
    def of_this_process(cls) -> RankVersion:
        """The versions of this process."""
        python = ".".join(platform.python_version_tuple()[:2])
        return cls(_source_version(), torch.__version__, python)


def _source_version() -> str:
    """A short hash of the library's source: a version number may stand for several states of it."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def check_ranks(
    problem: str | None = None, version: RankVersion | None = None, order: str = ""
) -> None:
    """Compares the versions of all ranks of the process group; every rank has to call it.

    Args:
        problem: the reason why this rank cannot train, as the words after its name in a sentence.
        version: the version of this rank; by default that of this process.
        order: the checksum of the order that this rank has read.

    Raises:
        TrainingError: A rank has a problem, or runs other code or has another order than rank 0;
            the message names its machine. Every rank raises the error.
    """
    own = asdict(version or RankVersion.of_this_process())
    if order:  # not in the first comparison, which builds of other versions have to understand
        own["order"] = order
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (socket.gethostname(), own, problem))
    first = every[0][1]
    for rank, (host, theirs, their_problem) in enumerate(every):
        if their_problem is not None:
            raise TrainingError(f"rank {rank} on {host} {their_problem}")
        if theirs.get("order") != first.get("order"):
            raise TrainingError(
                f"rank {rank} on {host} has another recipe or other data than rank 0: all machines "
                "of a training must reach the same folder NCR_TRAIN_FOLDER"
            )
        for name, value in theirs.items():
            if value != first[name]:
                raise TrainingError(
                    f"rank {rank} on {host} has {name} {value}, and rank 0 has {first[name]}: "
                    "install the same version on all machines of a training"
                )
