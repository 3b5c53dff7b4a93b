"""Ranks on this machine, started and watched by torchrun's elastic agent.

`TorchrunEngine` runs the agent in a process of its own, because the agent handles signals. The
agent starts the ranks (`ncr_core.training.rank_process`). The agent and the ranks hold the reading
end of a pipe of the caller, so they end with the caller, even if the caller is killed. No socket
listens beyond loopback: the ranks meet through a file, and gloo is bound to the loopback interface.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from ncr_core.training.rank_engine import MAX_RESTARTS, RankEngine, rank_environment
from ncr_core.training.rank_process import end_with_pipe
from ncr_core.training.trainer import OnProgress, Progress


class TorchrunEngine(RankEngine):
    """Ranks on this machine; see `RankEngine`."""

    def _connect(self) -> None:
        """Does nothing: the processes are of this machine."""

    def _threads(self) -> int:
        """As many as this machine has cores, or as ``OMP_NUM_THREADS`` says for each rank."""
        return self._ranks * self._threads_of_a_rank()

    def _threads_of_a_rank(self) -> int:
        wanted = os.environ.get("OMP_NUM_THREADS", "")
        if wanted.isdecimal() and int(wanted) > 0:
            return int(wanted)
        return max(1, (os.cpu_count() or 1) // self._ranks)

    def _run(self, folder: Path, on_progress: OnProgress | None) -> str | None:
        """Runs the agent to its end, and returns the problem that the agent or a rank reported."""
        environment = {
            "OMP_NUM_THREADS": str(self._threads_of_a_rank()),
            **rank_environment(os.environ),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        command = [
            sys.executable,
            "-P",
            "-m",
            __name__,
            str(folder),
            self.tables,
            str(self._ranks),
        ]
        problem: str | None = None
        agent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        assert agent.stdin is not None  # noqa: S101 - they are pipes
        assert agent.stdout is not None  # noqa: S101
        try:
            for line in agent.stdout:
                message = json.loads(line)
                if "progress" not in message:
                    problem = _worse(problem, message)
                elif on_progress is not None:
                    on_progress(Progress(**message["progress"]))
        finally:
            agent.stdin.close()  # ends the ranks
            agent.stdout.close()
            agent.kill()
            agent.wait()
        return problem


def _worse(problem: str | None, message: dict[str, Any]) -> str | None:
    """The problem to report: a rank's own message, rather than the end of its process."""
    if "problem" in message:
        words: str = message["problem"]
        return words
    lost = message["lost"]
    return problem or (
        f"rank {lost['rank']} was lost by {lost['by']} after {MAX_RESTARTS} restarts: the machine "
        "may lack memory for so many ranks; the log has their output"
    )


def main() -> None:
    """Runs the agent: it starts the ranks, restarts them after a loss, and reports a lost rank."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder, tables, ranks = sys.argv[1:]
    threading.Thread(target=end_with_pipe, args=(sys.stdin.fileno(),), daemon=True).start()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(ranks),
        run_id=Path(folder).name,
        rdzv_backend="c10d",
        rdzv_endpoint=str(Path(folder) / "agents"),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=MAX_RESTARTS,
        logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder) / "logs")),
        signals_to_handle="SIGHUP",  # SIGTERM and SIGINT are for the worker
        shutdown_timeout=1,
    )
    command = [sys.executable, "-P", "-m", "ncr_core.training.rank_process", folder, tables]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        by = f"exit code {failure.exitcode}"
        if failure.exitcode < 0:
            with suppress(ValueError):
                by = signal.Signals(-failure.exitcode).name
        print(json.dumps({"lost": {"rank": rank, "by": by}}), flush=True)


if __name__ == "__main__":
    main()
