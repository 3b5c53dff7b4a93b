"""Where and with what a result was made."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ncr_core.checkpoint import software_versions


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
    """Of the libraries that fit baselines, as far as they are installed."""
    found = {}
    for name in ("implicit", "scipy", "cornac"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@cache
def commit() -> str:
    """The commit of the checkout this runs in, ``-dirty`` with changes; ``unknown`` elsewhere.

    As it was when first asked for: code that is running does not change with the checkout.
    """
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
