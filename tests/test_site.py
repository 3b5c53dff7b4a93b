"""The documentation as a site, its pictures and its notebooks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from scripts.site.pictures import PICTURES, diagrams, name_of

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_each_diagram_has_its_picture_and_each_picture_its_diagram() -> None:
    assert {name_of(diagram) for diagram in diagrams()} == {p.name for p in PICTURES.iterdir()}


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_asks_no_other_origin(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING -" not in built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\"> ]+)"
        assert not re.findall(loaded, text), page.name


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    for data in path.parent.glob("*.csv"):
        shutil.copy(data, tmp_path)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    assert all(cell.get("execution_count") for cell in notebook.cells if cell.cell_type == "code")
