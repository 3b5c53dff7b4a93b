"""Child processes: started, watched, paused, killed and restarted; none outlives its parent.

A process is bound to the thread that started it: when that thread ends, so does the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol, Self

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
START_SECONDS = 300.0  # a new checkout compiles its kernels first
STOP_SECONDS = 30.0
POLL_SECONDS = 0.05
PR_SET_PDEATHSIG = 1
MAX_LOG_SHOWN = 2000  # characters

_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_used_ports: set[int] = set()


class ProcessError(RuntimeError):
    """A process did not start, or ended when it should not have; with the end of its log."""


def free_port() -> int:
    """A port that nobody listens on, and never the same one twice.

    Below the range that outgoing connections take theirs from: it has to be free again when what
    listened there has been killed, and a client that looks for it must not meet itself.
    """
    low = 32768
    with contextlib.suppress(OSError):
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for attempt in range(1000):
        candidate = random.randrange(10_000, low) if low > 11_000 and attempt < 900 else 0
        with socket.socket() as probe:
            try:
                probe.bind((HOST, candidate))
            except OSError:
                continue
            port: int = probe.getsockname()[1]
        if port not in _used_ports:
            _used_ports.add(port)
            return port
    raise ProcessError("no free port")


def temporary_folder(prefix: str) -> Path:
    """A new folder that another user of this machine may pass through, but not list."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    folder.chmod(0o711)
    return folder


def children_of(pid: int) -> list[int]:
    """The processes that this one started; Linux only, elsewhere there are none."""
    children: list[int] = []
    for threads in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, threads.read_text().split())
    return children


def state_of(pid: int) -> str:
    """A letter: `T` is stopped, `Z` has ended and waits to be counted; Z also when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended. Linux only, as all that reads `/proc`."""
    return state_of(pid) != "Z"


def wait_until(done: Callable[[], bool], seconds: float, what: str) -> None:
    """Polls until ``done()``; ProcessError after so many seconds."""
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            raise ProcessError(f"{what}: not within {seconds:g} s")
        time.sleep(POLL_SECONDS)


def environment_with(env: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with these settings of the service in place of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NCR_")}
    return inherited | dict(env)


class Started(Protocol):
    """A process that was started, with the methods of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...


class Process:
    """One process in a session of its own, with its output appended to a log file.

    ``with`` starts it and waits until it is ready; at the end it is stopped, or killed.
    """

    name = "process"
    death_signal = signal.SIGKILL
    """Sent when the thread that started the process ends."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self.command = list(command)
        self.log = log
        self.env = dict(env or {})
        self._user = user
        self._cwd = cwd
        self._log_start = 0
        self._process: Started | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _started(self) -> Started:
        if self._process is None:
            raise ProcessError(f"{self.name} has not been started")
        return self._process

    @property
    def pid(self) -> int:
        return self._started.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs, or before it was started."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        """Whether it has been started and has not ended; a paused one runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> Self:
        """Starts it, again if it has ended. Without ``wait`` the caller calls `wait_ready()`."""
        if self.running:
            raise ProcessError(f"{self.name} is running")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = self._launch(log)
        if wait:
            self.wait_ready()
        return self

    def _launch(self, log: IO[bytes]) -> Started:
        return subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment_with(self.env),
            cwd=self._cwd,
            user=self._user,
            group=self._user,
            extra_groups=None if self._user is None else [],
            # Ctrl-C is for the parent, which stops its processes in order.
            start_new_session=True,
            preexec_fn=_bound_to_parent(self.death_signal),
        )

    def is_ready(self) -> bool:
        """Whether it can be used."""
        return self.running

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Waits; ProcessError when it ends before it is ready, or takes longer."""
        until = time.monotonic() + seconds
        while not self.is_ready():
            if not self.running or time.monotonic() > until:
                what = "did not get ready" if self.running else f"ended with {self.returncode}"
                self.kill()
                raise ProcessError(f"{self.name} {what}: {self.log_text()[-MAX_LOG_SHOWN:]}")
            time.sleep(POLL_SECONDS)

    def log_text(self) -> str:
        """The log since it was last started."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def send(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self._process is not None:
            self._process.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP, and waits until it has stopped where it is, with all its connections."""
        self.send(signal.SIGSTOP)
        # A signal that follows too soon would be taken first.
        wait_until(lambda: state_of(self.pid) in "TZ", STOP_SECONDS, f"pause of {self.name}")

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Its exit code, once it has ended; ProcessError after so many seconds."""
        try:
            return self._started.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ProcessError(f"{self.name} did not end within {seconds:g} s") from None

    def terminate(self, seconds: float = STOP_SECONDS) -> int:
        """SIGTERM, and its exit code; ProcessError if it goes on."""
        self.send(signal.SIGTERM)
        return self.wait(seconds)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone. Nothing happens if it is."""
        if self._process is not None:
            self.send(signal.SIGKILL)
            self.wait()

    def restart(self) -> Self:
        """Ends it in an orderly way and starts it again; a dead one is only started."""
        if self.running:
            self.resume()
            self.terminate()
        return self.start()

    def close(self) -> None:
        """Stops it, or kills it; never raises over a process that will not end."""
        if self.running:
            self.resume()
            try:
                self.terminate()
            except ProcessError:
                self.kill()


def _bound_to_parent(number: int) -> Callable[[], None] | None:
    if _prctl is None:
        return None
    parent = os.getpid()

    def bind() -> None:
        # Between fork and exec: nothing but two system calls.
        _prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return bind
