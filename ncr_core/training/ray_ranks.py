"""Ranks on the machines of a Ray cluster, started and watched by Ray Train.

The process that wants the model is Ray's driver. When the driver ends, Ray ends its ranks. This
module does not use Ray's job API, because the drivers of jobs outlive the process that submitted
them. `RayEngine` imports Ray when the first one is made.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ncr_core.errors import ConfigError, NcrError, TrainingError
from ncr_core.optional_imports import require
from ncr_core.training.rank_engine import MAX_RESTARTS, RankEngine, rank_environment
from ncr_core.training.rank_process import (
    FOLDER_RULE,
    WAIT_SECONDS,
    resource_problem,
    run_rank,
)
from ncr_core.training.ranks import Tables
from ncr_core.training.trainer import OnProgress, Progress

PROGRESS = "progress.jsonl"
POLL_SECONDS = 0.2
PROBE_SECONDS = 60.0
_UNKNOWN = (
    "the worker cannot find out whether the Ray cluster at {} asks clients for a token: check "
    "`ray status` there, and the version of Ray"
)


class RayEngine(RankEngine):
    """Ranks of a Ray cluster, each with a CPU or a GPU; see `RankEngine`."""

    def __init__(self, ranks: int, tables: Tables, folder: Path, address: str | None) -> None:
        """Imports Ray, and connects to no cluster yet.

        Args:
            ranks: the number of processes, each with a CPU.
            tables: how the processes keep the embedding tables.
            folder: the parent of a folder for each phase, and of one with the data of the ranks;
                all machines of the cluster reach it under this path.
            address: the address of the cluster's head; None starts a cluster on this machine,
                protected by a token.

        Raises:
            ConfigError: Ray is not installed, or the cluster is beyond loopback and has no token.
        """
        check_address(address)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if address is None:
            # The ports of a Ray of our own are not bound to loopback alone, and run whatever they
            # are sent. Ray reads the token when it is imported.
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        self._ray = require("ray", "ray")
        require("ray.train", "ray")
        super().__init__(ranks, tables, folder)
        self._address = address

    def close(self) -> None:
        """Leaves the cluster; a cluster of this machine alone ends."""
        self._ray.shutdown()

    def _connect(self) -> None:
        """Joins the cluster, or starts one.

        Raises TrainingError if that fails, if there are too few CPUs, or if a cluster beyond
        loopback accepts clients without a token.
        """
        if self._ray.is_initialized():
            return
        own: dict[str, Any] = {"address": self._address}
        if self._address is None:
            own = {"address": "local", "num_cpus": self._ranks, "_node_ip_address": "127.0.0.1"}
            own["include_dashboard"] = False
        stops = (signal.SIGTERM, signal.SIGINT)
        handlers = [signal.getsignal(number) for number in stops]
        try:
            with _private_variables_removed():  # a Ray of our own would hand them to the ranks
                self._ray.init(**own, configure_logging=False)
        except (
            *(ConnectionError, RuntimeError, ValueError, TimeoutError),
            self._ray.exceptions.RayError,
        ) as error:
            raise TrainingError(problem_of(error, self._address)) from None
        finally:  # Ray would end this process at a signal that is for others
            for number, handler in zip(stops, handlers, strict=True):
                signal.signal(number, handler)
        if self._address and not _is_loopback(self._address) and is_open(self._address):
            self._ray.shutdown()
            raise TrainingError(
                f"the Ray cluster at {self._address} is beyond loopback and runs code from any "
                "client, also without a token: set RAY_AUTH_MODE=token on its machines"
            )
        cpus = int(self._ray.cluster_resources().get("CPU", 0))
        if cpus < self._ranks:
            raise TrainingError(
                f"{self._ranks} ranks need {self._ranks} CPUs, and the Ray cluster has {cpus}: add "
                "machines, or lower NCR_TRAIN_RANKS"
            )

    def _threads(self) -> int:
        """One for each rank, because a rank is given one CPU."""
        return self._ranks

    def _run(self, folder: Path, on_progress: OnProgress | None) -> str | None:
        """Runs Ray Train to its end, and returns the problem if Ray lost the ranks.

        Ranks that reach the folder leave an outcome there, so the problem of ranks that ended by
        themselves is that none reached it.
        """
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        # All machines have the build of torch of this one; that for CPUs makes no use of a GPU.
        gpus = self._ray.cluster_resources().get("GPU", 0)
        has_gpus = dist.is_nccl_available() and gpus >= self._ranks
        trainer = TorchTrainer(
            train_rank,
            train_loop_config={"folder": str(folder), "tables": self.tables},
            torch_config=TorchConfig(
                backend="cpu:gloo,cuda:nccl" if has_gpus else "gloo", timeout_s=WAIT_SECONDS
            ),
            scaling_config=ScalingConfig(
                num_workers=self._ranks, use_gpu=has_gpus, placement_strategy="SPREAD"
            ),
            run_config=RunConfig(
                name="ray",
                storage_path=str(folder),
                failure_config=FailureConfig(max_failures=MAX_RESTARTS),
            ),
        )
        ended = threading.Event()
        follower = threading.Thread(target=_follow, args=(folder / PROGRESS, on_progress, ended))
        follower.start()
        try:
            trainer.fit()
        except Exception as error:  # those of Ray have no common root
            return (
                f"the Ray cluster lost the ranks {1 + MAX_RESTARTS} times: {loss_of(error)}; the "
                "logs of Ray have their output"
            )
        finally:
            ended.set()
            follower.join()
        return f"no rank of the Ray cluster can write to {folder}; {FOLDER_RULE}"


@contextmanager
def _private_variables_removed() -> Iterator[None]:
    """Leaves this process the `rank_environment` alone, until the end of the block."""
    kept = rank_environment(os.environ)
    removed = {name: value for name, value in os.environ.items() if name not in kept}
    for name in removed:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(removed)


def loss_of(error: Exception) -> str:
    """The words for the loss of ranks: the rank with the first known reason, or the last error.

    Ray names the ranks of a loss, but not those that it lost together with their machine.
    """
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    for rank, failure in failures.items():
        if reason := resource_problem(failure):
            return f"rank {rank} {reason}"
    if reason := resource_problem(error):
        return f"a rank {reason}"
    for rank, failure in failures.items():
        return f"rank {rank} at last by {type(failure).__name__}"
    return f"at last by {type(error).__name__}"


def problem_of(error: Exception, address: str | None) -> str:
    """The sentence for an error of Ray when it joins a cluster."""
    cluster = f"the Ray cluster at {address or 'this machine'}"
    if "no authentication token" in str(error):
        return (
            f"{cluster} needs a token, and the worker has none: set RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH for the worker"
        )
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", str(error))
    if len(versions) == 2:  # as Ray says of a mismatch, first the cluster's
        theirs, own = (f"Ray {ray} and Python {python}" for ray, python in versions)
        return (
            f"{cluster} has {theirs}, and this worker has {own}: install the same versions on all "
            "machines of a training"
        )
    return (
        f"{cluster} does not answer, or refuses the worker's token: check `ray status` there and "
        "NCR_RAY_ADDRESS"
    )


def check_address(address: str | None) -> None:
    """Raises ConfigError if a cluster is beyond loopback and has no token authentication."""
    if address is None or os.environ.get("RAY_AUTH_MODE") == "token":
        return
    if not _is_loopback(address):
        raise ConfigError(
            f"the Ray cluster at {address} is beyond loopback, and a cluster without a token "
            "runs code from any client: set RAY_AUTH_MODE=token on its machines and for the "
            "worker"
        )


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]") or address
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_open(address: str) -> bool:
    """Whether a cluster that answers this process also answers a client without a token.

    The client is a process of its own, because Ray reads its token when it is imported.

    Raises TrainingError if the client ends for another reason than its missing token.
    """
    code = (
        "import sys; from ray._raylet import GcsClient\n"
        "GcsClient(address=sys.argv[1]).internal_kv_get(b'key', b'ncr', timeout=5)"
    )
    environment = rank_environment(os.environ) | {"RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-P", "-c", code, address]
    try:
        asked = subprocess.run(
            command, env=environment, capture_output=True, check=False, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise TrainingError(_UNKNOWN.format(address)) from None
    # Versions of Ray name the refusal differently.
    if asked.returncode and not re.search(rb"(?i)authenticat|token", asked.stderr):
        raise TrainingError(_UNKNOWN.format(address))
    return asked.returncode == 0


def train_rank(order: dict[str, str]) -> None:
    """Runs a rank; Ray calls this function in the process of each rank."""
    from ray import train

    folder = Path(order["folder"])

    def write(progress: Progress) -> None:
        with (folder / PROGRESS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(progress)) + "\n")

    tables: Tables = "sharded" if order["tables"] == "sharded" else "replicated"
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # each rank is given one CPU
    try:
        run_rank(folder, tables, train.get_context().get_local_rank(), write)
    except NcrError:
        pass  # it is written down: another try would fail, too


def _follow(path: Path, on_progress: OnProgress | None, ended: threading.Event) -> None:
    """Calls ``on_progress`` with the lines of rank 0, until ``ended`` is set and once after it."""
    position, last = 0, False
    while not last:
        last = ended.wait(POLL_SECONDS)
        try:
            text = path.read_bytes()[position:]
        except OSError:
            continue
        whole = text[: text.rfind(b"\n") + 1]
        position += len(whole)
        for line in whole.splitlines():
            if on_progress is not None:
                on_progress(Progress(**json.loads(line)))
