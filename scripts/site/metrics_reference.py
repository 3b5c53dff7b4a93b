"""The page of all metrics, made from what a server answers on `/metrics`."""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path

import httpx2

HEAD = """# Metrics

*For operators who set up monitoring.*

`GET /metrics` answers these metrics in the text format of Prometheus. Each server counts on its
own, so Prometheus must scrape every server. [Watch the service](../how-to/watch.md) names the
metrics to watch.

| metric | type | meaning |
|---|---|---|
"""


def page() -> str:
    """The Markdown page."""
    return HEAD + "".join(
        f"| `{name}` | {kind} | {text.replace('|', chr(92) + '|')} |\n"
        for name, kind, text in _described(asyncio.run(_scrape()))
    )


async def _scrape() -> str:
    from app.core.settings import Settings
    from app.main import create_app

    with tempfile.TemporaryDirectory() as folder:
        app = create_app(Settings(data_dir=Path(folder), log_level="error"))
        transport = httpx2.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            return (await client.get("/metrics")).raise_for_status().text


def _described(text: str) -> list[tuple[str, str, str]]:
    """Name, type and help of each metric; not those of Python and the process."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    return sorted(
        (name, kinds.get(name, "untyped"), described)
        for name, described in re.findall(r"^# HELP (\S+) (.*)$", text, re.M)
        if name.startswith("ncr_") and not name.endswith("_created")
    )
