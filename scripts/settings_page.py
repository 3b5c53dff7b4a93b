"""Writes docs/settings.md from the settings themselves: python scripts/settings_page.py."""

from __future__ import annotations

from pathlib import Path

from pydantic_core import PydanticUndefined

from app.core.settings import Settings

HEAD = """# Settings

*For operators who configure the service.*

Each setting is an environment variable. Without settings, the service runs on SQLite in `./var`.
`python scripts/settings_page.py` makes this page from `app/core/settings.py`.

| variable | default | meaning |
|---|---|---|
"""


def page() -> str:
    """The page's text."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = field.default
        shown = "none" if default is None or default is PydanticUndefined else f"`{default}`"
        text = " ".join((field.description or "").split())
        rows.append(f"| `NCR_{name.upper()}` | {shown} | {text} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "settings.md").write_text(page())
