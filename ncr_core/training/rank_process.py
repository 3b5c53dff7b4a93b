"""The process of one rank: it joins the other ranks, reads the order and runs the loop.

torchrun starts a rank as `python -m ncr_core.training.rank_process FOLDER TABLES`. A rank writes
lines of JSON to standard output: ``{"progress": …}`` by rank 0, ``{"problem": …}`` by any rank.
Standard input is a pipe of the process that wants the model. The rank ends when the pipe closes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist

from ncr_core.data.array_storage import IN_MEMORY, FileStorage, storing_tables
from ncr_core.errors import CheckpointError, DataError, NcrError, lacks_memory
from ncr_core.training.epoch_checkpoints import EpochCheckpoints
from ncr_core.training.phase_files import (
    ORDER,
    RESULT,
    PhaseOrder,
    remove_outcome,
    save_failure,
    save_outcome,
    sum_of,
)
from ncr_core.training.ranking_files import RANKING, RankingOrder, save_positions
from ncr_core.training.ranks import DataParallelRanks, ShardedTables, Tables, check_ranks
from ncr_core.training.trainer import OnProgress, Progress, train_loop

WAIT_SECONDS = 10_800
"""How long a rank waits for the slowest of the others."""

FOLDER_RULE = (
    "all machines of a training must reach the folder NCR_TRAIN_FOLDER under the same path, and "
    "nothing may change its files"
)


def backend() -> str:
    """The backends of a process group on this machine."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def run_rank(folder: Path, tables: Tables, local_rank: int, on_progress: OnProgress) -> None:
    """Carries out an order with the ranks of the process group that this process has joined.

    Args:
        folder: The folder of the order of a phase, where the ranks write epochs and the result, or
            of a full ranking, where they write positions.
        tables: How the ranks keep the embedding tables.
        local_rank: The number of this rank on its machine, which is also the number of its GPU.
        on_progress: Called by rank 0 after each epoch of a phase.

    Raises:
        TrainingError: A rank is of another version or cannot read the folder, or the loss is not
            finite. Another try would fail too, so the rank writes the error as the outcome, if the
            folder is there.
    """
    rank = dist.get_rank()
    if rank == 0:
        with suppress(OSError):  # if this rank cannot reach the folder, the ranks say so below
            remove_outcome(folder)
    in_files = tables == "sharded"  # the ranking tables of a rank are files
    with storing_tables(FileStorage(folder) if in_files else IN_MEMORY):
        _carry_out(folder, tables, local_rank, on_progress)


def _carry_out(folder: Path, tables: Tables, local_rank: int, on_progress: OnProgress) -> None:
    """As `run_rank`, in the current storage of tables."""
    rank = dist.get_rank()
    try:
        check_ranks()  # of other versions, ranks may not know what the order says
        order: PhaseOrder | RankingOrder | None = None
        problem, checksum = None, ""
        try:
            if (folder / RANKING).exists():
                checksum, order = sum_of(folder / RANKING), RankingOrder.load(folder)
            else:
                checksum = sum_of(folder / ORDER)
                order = PhaseOrder.load(folder, rank, dist.get_world_size())
        except OSError as error:
            problem = f"cannot read {error.filename or folder}: {error.strerror}; {FOLDER_RULE}"
        except DataError as error:
            problem = f"cannot read its users: {error}; {FOLDER_RULE}"
        check_ranks(problem, order=checksum)
        if isinstance(order, RankingOrder):
            if tables == "sharded":
                order = _sharing_tables(order, folder)
            found = order.positions(DataParallelRanks())
            if rank == 0:
                save_positions(folder, *found)
        else:
            assert order is not None  # noqa: S101 - `check_ranks` raises for a rank without it
            _train(order, folder, tables, local_rank, on_progress)
    except NcrError as error:
        with suppress(OSError):
            if folder.is_dir():  # a folder that this machine makes is not that of the job
                save_failure(folder, str(error))  # by any rank: the others may not know of it
        raise


def _sharing_tables(order: RankingOrder, folder: Path) -> RankingOrder:
    """The order with ranking tables in a file that rank 0 writes, and that all ranks map.

    Raises TrainingError on every rank if rank 0 cannot write the file.
    """
    problem, rank = None, dist.get_rank()
    if rank == 0:
        try:
            order = order.sharing_tables(folder)
        except (OSError, CheckpointError) as error:
            problem = resource_problem(error) or f"cannot write its tables: {error}"
    check_ranks(problem)
    return order if rank == 0 else order.sharing_tables(folder)


def _train(
    order: PhaseOrder, folder: Path, tables: Tables, local_rank: int, on_progress: OnProgress
) -> None:
    """Trains a phase and writes its result."""
    config = order.config
    device = config.torch_device()
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        config = replace(config, device=str(device))
        torch.cuda.set_device(config.torch_device())
    # Each rank draws the dropout of its own users, and with sharded tables that of all users.
    torch.manual_seed(config.seed + (dist.get_rank() if tables == "replicated" else 0))
    ranks = ShardedTables(folder) if tables == "sharded" else DataParallelRanks(order.part)
    history = train_loop(
        order.model,
        order.split,
        config,
        order.phase,
        on_progress,
        order.later_phases,
        ranks,
        EpochCheckpoints(folder),
    )
    ranks.write(order.model, folder / RESULT)
    if ranks.is_first:
        save_outcome(folder, history)


def main() -> None:
    """Runs the rank that torchrun's environment variables name."""
    folder, tables = Path(sys.argv[1]), sys.argv[2]
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=end_with_pipe, args=(sys.stdin.fileno(),), daemon=True).start()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = folder / f"ranks-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
    wait = timedelta(seconds=WAIT_SECONDS)
    dist.init_process_group(backend(), timeout=wait, store=store, rank=rank, world_size=size)
    local_rank = int(os.environ["LOCAL_RANK"])
    try:
        run_rank(
            folder, "sharded" if tables == "sharded" else "replicated", local_rank, _to(answers)
        )
    except NcrError:
        pass  # it is written down
    except BaseException as error:  # as are the errors of epoch checkpoints
        reason = resource_problem(error)
        if reason is None:
            raise
        _answer(answers, {"problem": f"rank {rank} on {socket.gethostname()} {reason}"})
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    answers.close()
    end_rank()


def end_rank() -> NoReturn:
    """Ends a rank whose work is done, without the finalisation of the interpreter.

    In the finalisation the interpreter ends a thread of the process group that releases a tensor.
    C++ then aborts the process, and torchrun would restart a rank whose result is written.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def resource_problem(error: BaseException) -> str | None:
    """The message for an error of memory or disk; None for any other error."""
    if lacks_memory(error):
        return (
            "has too little memory: use a machine with more memory, fewer ranks on it, "
            "sharded tables (NCR_TRAIN_TABLES, or --tables), or fewer factors"
        )
    text = str(error).lower()
    if "no space left" in text or "quota exceeded" in text:
        return (
            "has too little disk: the folder of the ranks (NCR_TRAIN_FOLDER, or that of --out) "
            "takes about 15 times the tables"
        )
    return None


def end_with_pipe(descriptor: int) -> None:
    """Ends this process once the other end of a pipe is closed."""
    while os.read(descriptor, 4096):
        pass
    os._exit(1)


def _to(answers: TextIO) -> Callable[[Progress], None]:
    return lambda progress: _answer(answers, {"progress": asdict(progress)})


def _answer(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
