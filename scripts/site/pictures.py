"""Draws the Mermaid diagrams of the documents: python -m scripts.site.pictures MERMAID_JS.

MERMAID_JS is `dist/mermaid.min.js` of the npm package `mermaid`. The pictures lie in
`docs/assets/pictures`, named by what they are drawn from; the site shows them in the diagrams'
place, so that it needs no script of another origin. Needs Chromium.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "assets" / "pictures"
FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.M | re.S)
SETTINGS = """{startOnLoad: false, theme: "base", htmlLabels: false, flowchart: {htmlLabels: false},
    themeVariables: {fontFamily: "sans-serif", fontSize: "15px", primaryColor: "#e4eeee",
    primaryBorderColor: "#1f5c63", primaryTextColor: "#1c1d1f", lineColor: "#5d6066",
    clusterBkg: "#f6f5f1", clusterBorder: "#e3e1da", edgeLabelBackground: "#fffefc",
    noteBkgColor: "#f7ead0", noteBorderColor: "#7d4e00", actorBkg: "#e4eeee",
    actorBorder: "#1f5c63", background: "#fffefc"}}"""


def name_of(diagram: str) -> str:
    """The file name of a diagram's picture."""
    return f"{hashlib.sha256(diagram.encode()).hexdigest()[:16]}.svg"


def diagrams() -> list[str]:
    """The Mermaid text of every diagram."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [found for path in documents for found in FENCE.findall(path.read_text("utf-8"))]


def draw(mermaid: Path) -> None:
    """Draws the pictures that are not there, and removes those of no diagram."""
    from playwright.sync_api import sync_playwright

    PICTURES.mkdir(parents=True, exist_ok=True)
    wanted = {name_of(diagram): diagram for diagram in diagrams()}
    for old in PICTURES.glob("*.svg"):
        if old.name not in wanted:
            old.unlink()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        page = browser.new_page()
        page.add_script_tag(path=mermaid)
        page.evaluate(f"mermaid.initialize({SETTINGS})")
        for name, diagram in wanted.items():
            if not (PICTURES / name).exists():
                drawn = "async text => (await mermaid.render('diagram', text)).svg"
                (PICTURES / name).write_text(page.evaluate(drawn, diagram) + "\n", "utf-8")
        browser.close()


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
