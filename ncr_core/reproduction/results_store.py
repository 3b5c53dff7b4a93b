"""Results of runs, with the machine, the versions and the commit that made them.

Each result is a line of the JSON Lines file ``<group>/<data set>.jsonl``. The lines of a file are
sorted by the run's name. A result appears in the file whole or not at all.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch

from ncr_core.atomic_files import atomic_write
from ncr_core.checkpoint import software_versions
from ncr_core.data.interactions import BoolArray, IntArray
from ncr_core.errors import DataError
from ncr_core.evaluation.metrics import FloatArray, hit_of_each, hit_ratio, ndcg, ndcg_of_each
from ncr_core.evaluation.protocols import K
from ncr_core.evaluation.significance import PairedTest, paired_t_test
from ncr_core.reproduction.suites import FULL_CHOICE, RunSpec

FORMAT = "ncr-cell/1"
_OUTSIDE = "."

Payload = dict[str, Any]
"""The JSON object of a result's line."""


def ranks_as_text(ranks: IntArray) -> str:
    """Encodes (n,) ranks as one character a user: the rank from 0 to 9, or a dot outside (−1)."""
    return "".join(str(r) if r >= 0 else _OUTSIDE for r in ranks.tolist())


def ranks_from_text(text: str) -> IntArray:
    """The inverse of ``ranks_as_text``."""
    return np.array([-1 if c == _OUTSIDE else int(c) for c in text], dtype=np.int64)


def hits_as_text(hits: BoolArray) -> str:
    """Encodes (n, K) hits, K ≤ 26: a letter for each hit, and a dot after each user.

    The letter is that of the place in the list: ``a`` for the first place.
    """
    _, places = np.nonzero(hits)
    letters = np.split(np.array(list(ascii_lowercase))[places], np.cumsum(hits.sum(axis=1))[:-1])
    return "".join("".join(of_user) + _OUTSIDE for of_user in letters)


@dataclass(frozen=True)
class RunResult:
    """The stored result of a run."""

    payload: Payload
    parts: tuple[RunResult, ...] = ()
    """The stored results of the runs whose models this run starts from."""

    @property
    def name(self) -> str:
        """The name of the run."""
        return str(self.payload["cell"])

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.payload["configuration"]["method"])

    @property
    def label(self) -> str:
        """The method, and whether full NDCG@10 chose settings that sampled NDCG@10 did not."""
        of_full = self.name.removesuffix("-refit").endswith(f"-{FULL_CHOICE}")
        return f"{self.method} ({FULL_CHOICE.replace('-', ' ')})" if of_full else self.method

    @property
    def factors(self) -> int:
        """d, the number of predictive factors; 0 for a method without factors."""
        return int(self.payload["configuration"]["factors"])

    @property
    def refit(self) -> bool:
        """Whether the run trained on the validation items too."""
        return bool(self.payload["configuration"]["refit"])

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the method in this run."""
        return dict(self.payload["configuration"]["settings"])

    @property
    def is_ours(self) -> bool:
        """Whether the method is a trained model of this library; a start alone is a baseline."""
        training = self.settings.get("training", {})
        return "model" in self.settings and training.get("epochs") != 0

    @property
    def validation(self) -> float | None:
        """NDCG@10 on the validation items."""
        metrics = self.payload["validation"]
        return None if metrics is None else float(metrics["ndcg"])

    @property
    def full_validation(self) -> float | None:
        """NDCG@10 on the validation items among all unseen items; None if not measured."""
        metrics = self.payload.get("validation_full")
        return None if metrics is None else float(metrics["ndcg"])

    @property
    def seconds(self) -> float:
        """Seconds of training, including the training of the models that this run starts from."""
        return float(self.payload["seconds"]["train"]) + sum(part.seconds for part in self.parts)

    @property
    def most_processor_seconds(self) -> float:
        """Processor seconds of training, with those of the models that this run starts from.

        Where they were not measured, the number is the most that they can be: seconds by the clock
        times threads.
        """
        seconds = self.payload["seconds"]
        own = seconds["train"] * self.payload["machine"]["threads"]
        known = float(seconds.get("cpu", own))
        return known + sum(part.most_processor_seconds for part in self.parts)

    @property
    def has_processor_seconds(self) -> bool:
        """Whether the processor seconds were measured, also those of the parts."""
        own = "cpu" in self.payload["seconds"]
        return own and all(part.has_processor_seconds for part in self.parts)

    @property
    def on_gpu(self) -> bool:
        """Whether the training, or that of a part, had a GPU."""
        return self.payload["machine"]["gpu"] is not None or any(p.on_gpu for p in self.parts)

    @property
    def seconds_text(self) -> str:
        """The seconds of training, with a mark if a GPU was used."""
        return f"{self.seconds:.0f}{' (GPU)' if self.on_gpu else ''}"

    def metric(self, kind: str, name: str) -> float | None:
        """A metric: ``kind`` is sampled, full or sets, ``name`` is hr, recall or ndcg.

        The metric is None if it was not measured.
        """
        metrics = self.payload.get("metrics", {}).get(kind)
        return None if metrics is None else float(metrics[name])

    @property
    def list_statistics(self) -> dict[str, float] | None:
        """The fields of ``ListStatistics`` of the full lists; None where they were not measured."""
        statistics = self.payload.get("metrics", {}).get("lists")
        return None if statistics is None else dict(statistics)

    @property
    def lists_ndcg(self) -> float | None:
        """Full NDCG@10 of the training whose lists are described, if it is not this one."""
        training = self.payload.get("lists_of")
        return None if training is None else float(training["full"]["ndcg"])

    def interval(self, kind: str, name: str) -> tuple[float, float] | None:
        """The 95 % bootstrap interval over users of a metric."""
        metrics = self.payload.get("metrics", {}).get(kind)
        return None if metrics is None else tuple(metrics[f"{name}_interval"])

    def per_user(self, kind: str, name: str) -> FloatArray:
        """(n,) HR@10 or NDCG@10 of each user, the mean over the seeds of negatives."""
        value = hit_of_each if name == "hr" else ndcg_of_each
        texts = self.payload["ranks"][kind]
        seeds = [texts] if isinstance(texts, str) else texts
        mean: FloatArray = np.mean([value(ranks_from_text(text), K) for text in seeds], axis=0)
        return mean

    def by_cutoff(self, name: str) -> list[float]:
        """Sampled HR@k or NDCG@k for k from 1 to 10, each the mean over the seeds of negatives."""
        value = hit_ratio if name == "hr" else ndcg
        seeds = [ranks_from_text(text) for text in self.payload["ranks"]["sampled"]]
        return [float(np.mean([value(ranks, k) for ranks in seeds])) for k in range(1, K + 1)]

    def compare(self, other: RunResult, kind: str, name: str) -> PairedTest:
        """Paired t-test over users of this result against another."""
        return paired_t_test(self.per_user(kind, name), other.per_user(kind, name))


class ResultsStore:
    """The results under a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fingerprints: dict[str, str] = {}
        self._files: dict[Path, tuple[tuple[int, int, int], dict[str, Payload]]] = {}

    def path(self, name: str) -> Path:
        """The file that holds the result of a run, by the run's name."""
        return self.folder / f"{name.rpartition('/')[0]}.jsonl"

    def read(self, name: str) -> Payload | None:
        """The result with the run's name; None if there is no result.

        Raises DataError if the file is damaged or has another format.
        """
        return self._read_file(self.path(name)).get(name)

    def write(self, result: Mapping[str, Any]) -> None:
        """Writes a result, in place of an older result of the same name."""
        name = result["cell"]
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            results = {**self._read_file(path), name: result}
            lines = [json.dumps(results[key]) + "\n" for key in sorted(results)]
            atomic_write(path, "".join(lines).encode(), replace=True)

    def result(self, run: RunSpec) -> RunResult | None:
        """The result of a run; None if no result has the configuration of the run.

        Raises DataError if the results are from different versions of a data set. Paired tests
        compare results user by user, so all results need the same version.
        """
        payload = self.read(run.name)
        if payload is None or payload["configuration"] != run.configuration():
            return None
        name, fingerprint = payload["data"]["name"], payload["data"]["fingerprint"]
        first = self._fingerprints.setdefault(name, fingerprint)
        if fingerprint != first:
            raise DataError(
                f"{self.folder} holds results of different versions of {name} "
                f"({first}, {fingerprint})"
            )
        parts = [self.result(part) for part in run.parts or ()]
        return RunResult(payload, tuple(part for part in parts if part is not None))

    def __iter__(self) -> Iterator[RunResult]:
        """All results, by name."""
        for path in sorted(self.folder.glob("*/*.jsonl")):
            for payload in self._read_file(path).values():
                yield RunResult(payload)

    def _read_file(self, path: Path) -> dict[str, Payload]:
        """The results of a file by name; the method reads a file again only after a change."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return {}
        version = (status.st_mtime_ns, status.st_size, status.st_ino)
        if path not in self._files or self._files[path][0] != version:
            lines = path.read_text(encoding="utf-8").splitlines()
            results = [_parsed(path, number, line) for number, line in enumerate(lines, 1)]
            self._files[path] = version, {result["cell"]: result for result in results}
        return self._files[path][1]


def _parsed(path: Path, number: int, line: str) -> Payload:
    try:
        result = json.loads(line)
    except ValueError:
        raise DataError(
            f"{path} line {number} is damaged: remove it to have it run again"
        ) from None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise DataError(f"{path} line {number} is not a result of format {FORMAT}")
    return result


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a lock against other processes that add results, where the system has file locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(ImportError):
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def provenance() -> dict[str, Any]:
    """Time, commit, machine and versions."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "system": platform.system(),
        },
        "software": {**software_versions(), **_versions_of_baselines()},
    }


@cache
def _versions_of_baselines() -> dict[str, str]:
    """The versions of the installed libraries that fit baselines."""
    found = {}
    for name in ("implicit", "scipy", "cornac"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@cache
def commit() -> str:
    """The commit of this code's checkout, with ``-dirty`` after changes; ``unknown`` elsewhere.

    The variable BENCHMARK_COMMIT names the commit of code that was copied to another machine. The
    first call fixes the answer, because running code does not change with the checkout.
    """
    if named := os.environ.get("BENCHMARK_COMMIT"):
        return named
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            cwd=here,
            check=False,
        )
    except OSError:  # no git
        return "unknown"
    return done.stdout.strip() or "unknown"


def cpu_name() -> str:
    """The processor's model name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
