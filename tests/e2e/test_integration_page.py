"""The page for integrators: what it says is run, line by line, against a real service."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import Service

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[2] / "docs" / "integration.md"


def test_the_commands_of_the_integration_page_work(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    with Service(tmp_path) as service:
        names: dict[str, Any] = {"BASE": service.url}
        for kind, block in blocks:
            if kind == "python":
                exec(compile(block, str(PAGE), "exec"), names)
                continue
            # Any answer that is an error is one of the command too.
            commands = "set -e\n" + block.replace("curl -s", "curl -sSf")
            done = subprocess.run(
                ["bash", "-c", commands],
                env={**os.environ, "BASE": service.url},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        answer = service.recommend("newcomer")
        assert answer["items"][0]["source"] == "fold_in"
        assert service.recommend("user-1")["items"][0]["source"] in ("model", "fold_in")
        history = service.client.get("/users/user-1/events").json()["items"]
        assert history[0]["type"] == "click"
