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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ncr_core.data.interactions import Interactions
from ncr_core.data.splits import Split
from ncr_core.errors import ConfigError, TrainingError
from ncr_core.models.base import PairwiseRanker
from ncr_core.models.lookups import is_sharded
from ncr_core.training.batches import WHOLE, Share, TrainingPart

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
        """Whether this rank measures the model, reports progress and writes the result."""
        return self.rank == 0

    def learned(self, split: Split) -> Interactions:
        """The interactions that this rank makes its batches of."""
        return split.train

    def prepare(self, model: PairwiseRanker) -> None:
        """Copies the model of rank 0 to every rank, before the optimiser of the model is built."""

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

    def whole(self, model: PairwiseRanker) -> PairwiseRanker | None:
        """The model with whole tables, to measure and to write it; None on all ranks but 0."""
        return model

    def finish(self, model: PairwiseRanker, state: Mapping[str, Tensor]) -> None:
        """Leaves the model of rank 0 with these parameters and whole tables."""
        model.load_state_dict(state)


ONE_RANK = Ranks()


class _Group(Ranks):
    """The ranks of the process group that this process has joined."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device = torch.device("cpu")

    def prepare(self, model: PairwiseRanker) -> None:
        """Sends the model of rank 0 to the others."""
        self._device = model.device
        for value in model.state_dict().values():
            dist.broadcast(value, src=0)

    def agreed(self, values: list[float]) -> list[float]:
        """The values of rank 0, on every rank."""
        shared = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.broadcast(shared, src=0)
        agreed: list[float] = shared.tolist()
        return agreed


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

    def whole(self, model: PairwiseRanker) -> PairwiseRanker | None:
        """The model itself, on rank 0."""
        return model if self.is_first else None

    def finish(self, model: PairwiseRanker, state: Mapping[str, Tensor]) -> None:
        """Sets the model of rank 0; the models of the other ranks stay as they are."""
        if self.is_first:
            model.load_state_dict(state)


def _sum_of_rows(table: Tensor) -> Tensor:
    """The sum over all ranks of gradients by rows; each rank may have different rows."""
    gradient = table.grad
    if gradient is None:
        nothing = torch.empty((1, 0), dtype=torch.long, device=table.device)
        none = table.new_empty(0, table.shape[1])
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

    The tables are the DTensors that torch's ``RowwiseParallel`` makes. Every rank has all other
    parameters and the whole batch, so the gradients need no sum.
    """

    sparse_gradients = False

    def prepare(self, model: PairwiseRanker) -> None:
        """Replaces the tables of the model by sharded tables.

        Raises ConfigError if the model is neither an NBPR nor a DNCR.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

        super().prepare(model)
        if model.config.kind not in ("nbpr", "dncr"):
            raise ConfigError(
                f"tables sharded by rows are for nbpr and dncr, not {model.config.kind}"
            )
        # A copy of rank 0's alone keeps whole tables, without gradients.
        self._whole = copy.deepcopy(model).requires_grad_(False) if self.is_first else None
        mesh = init_device_mesh(model.device.type, (self.size,))
        tables = [name for name, part in model.named_modules() if isinstance(part, nn.Embedding)]
        parallelize_module(
            model,
            mesh,
            {name: RowwiseParallel(input_layouts=Replicate()) for name in tables},
        )

    def whole(self, model: PairwiseRanker) -> PairwiseRanker | None:
        """A copy with whole tables, on rank 0; every rank has to call it."""
        parts: dict[str, Any] = model.state_dict()
        state = {
            name: value.full_tensor() if is_sharded(value) else value
            for name, value in parts.items()
        }
        if self._whole is not None:
            self._whole.load_state_dict(state)
        return self._whole

    def finish(self, model: PairwiseRanker, state: Mapping[str, Tensor]) -> None:
        """Gives the model of rank 0 whole tables again; the others keep their rows."""
        parameters: list[tuple[str, Any]] = list(model.named_parameters())
        for name, parameter in parameters:
            if is_sharded(parameter):
                owner, _, own = name.rpartition(".")
                whole = nn.Parameter(state[name]) if self.is_first else parameter.to_local()
                model.get_submodule(owner).register_parameter(own, nn.Parameter(whole.detach()))
        if self.is_first:
            model.load_state_dict(state)


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


def check_ranks(problem: str | None = None, version: RankVersion | None = None) -> None:
    """Compares the versions of all ranks of the process group; every rank has to call it.

    Args:
        problem: the reason why this rank cannot train, as the words after its name in a sentence.
        version: the version of this rank; by default that of this process.

    Raises:
        TrainingError: A rank has a problem, or runs other code than rank 0; the message names its
            machine. Every rank raises the error.
    """
    own = asdict(version or RankVersion.of_this_process())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (socket.gethostname(), own, problem))
    first = every[0][1]
    for rank, (host, theirs, their_problem) in enumerate(every):
        if their_problem is not None:
            raise TrainingError(
                f"rank {rank} on {host} {their_problem}; all machines of a training must reach "
                "the folder NCR_TRAIN_FOLDER under the same path, and nothing may change its files"
            )
        for name, value in theirs.items():
            if value != first[name]:
                raise TrainingError(
                    f"rank {rank} on {host} has {name} {value}, and rank 0 has {first[name]}: "
                    "install the same version on all machines of a training"
                )
