"""Makes `ncr_client/client.py`, for threads, from `async_client.py`, which is for asyncio.

A build of the package runs this, also an editable one; so do `make` and the tests. By hand:

    python clients/python/hatch_build.py
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, without the build's packages
    BuildHookInterface = object

PACKAGE = Path(__file__).resolve().parent / "ncr_client"
SOURCE, TARGET = PACKAGE / "async_client.py", PACKAGE / "client.py"
# asyncio's words, and those of a thread.
WORDS = (
    (
        r"for asyncio; `client\.py`, for threads, is made from it by",
        "for threads, made from `async_client.py` by",
    ),
    (r"^import asyncio\n", ""),
    (r"AsyncIterator", "Iterator"),
    (r"httpx2\.AsyncBaseTransport", "httpx2.BaseTransport"),
    (r"AsyncClient", "Client"),
    (r"__aenter__", "__enter__"),
    (r"__aexit__", "__exit__"),
    (r"\.aclose\(", ".close("),
    (r"async (def|for|with) ", r"\1 "),
    (r"await asyncio\.sleep", "time.sleep"),
    (r"\(await ([^()]*\([^()]*\))\)", r"\1"),
    (r"await ", ""),
)


def client_for_threads(source: str) -> str:
    """The client for threads, from the source of the one for asyncio."""
    for pattern, replacement in WORDS:
        source = re.sub(pattern, replacement, source, flags=re.MULTILINE)
    return source


def write_client() -> None:
    """Writes `client.py` where it is missing or not what it should be."""
    content = client_for_threads(SOURCE.read_text(encoding="utf-8"))
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == content:
        return
    staging = TARGET.with_name(f".{TARGET.name}.{os.getpid()}")  # others may be reading it
    staging.write_text(content, encoding="utf-8")
    staging.replace(TARGET)


class ClientBuildHook(BuildHookInterface):  # type: ignore[misc]
    """The build's part of it: the file is made first, and packed though git ignores it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        write_client()
        build_data["artifacts"].append("ncr_client/client.py")


if __name__ == "__main__":
    write_client()
