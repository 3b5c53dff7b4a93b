"""Libraries that need not be there, and compiled code that cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ncr_core import optional_imports
from ncr_core.errors import ConfigError
from ncr_core.ranking.backends import numba_kernel

ROOT = Path(__file__).parents[2]


def test_a_missing_library_is_an_error_that_names_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"no_such_library.*\[research\]"):
        optional_imports.require("no_such_library.models", "research")
    assert optional_imports.require("json", "research").loads("1") == 1


def test_a_library_set_to_none_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert optional_imports.is_installed("json")
    monkeypatch.setitem(sys.modules, "json", None)
    assert not optional_imports.is_installed("json")


def test_a_kernel_that_cannot_be_compiled_is_warned_about_and_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numba_kernel, "compile_all", fails)
    monkeypatch.setattr(optional_imports, "_discard_cache", lambda _: None)
    with pytest.warns(UserWarning, match="No space left"):
        assert optional_imports.numba_kernel.__wrapped__(numba_kernel.__name__) is None


@pytest.mark.slow
def test_a_change_of_the_shared_kernel_code_invalidates_what_was_compiled(tmp_path: Path) -> None:
    """numba itself looks for changes only in the file of the function that is called."""
    shared = (ROOT / "ncr_core/ranking/backends/dense_kernel.py").read_text()
    shared += "\n\n@compiled\ndef constant() -> int:\n    return 1\n"
    (tmp_path / "shared.py").write_text(shared)
    (tmp_path / "caller.py").write_text(
        "from shared import compiled, constant\n\n"
        "@compiled\ndef call() -> int:\n    return constant()\n\nprint(call())\n"
    )

    def call() -> str:
        done = subprocess.run(
            [sys.executable, "caller.py"],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    assert call() == "1"
    assert list((tmp_path / "cache").rglob("*call*.nbi"))
    (tmp_path / "shared.py").write_text(shared.replace("return 1", "return 2"))
    assert call() == "2"
