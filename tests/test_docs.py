"""What the documents say is what is there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))


def test_the_settings_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "settings_page.py"))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text() == page


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_modules_that_documents_run_exist() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        for module in re.findall(r"python\s+-m\s+((?:benchmarks|tests)[\w.]*)", text):
            path = ROOT / module.rstrip(".").replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").exists(), f"{document.name}: {module}"


def test_architecture_names_files_and_definitions_that_there_are() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in re.findall(r"`((?:app|ncr_core|migrations|scripts)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), f"there is no {path}"
    named = re.findall(r"`([\w/]+\.py)`\s+(?:\|\s+)?`([\w.]+)`", text)
    assert len(named) > 60
    for path, name in named:
        definition = rf"^\s*(?:(?:async )?def|class) {name.rpartition('.')[2]}\b"
        assert re.search(definition, (ROOT / path).read_text(), re.M), f"{path} has no {name}"


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    for record in folder.glob("[0-9]*.md"):
        assert f"({record.name})" in index


def test_each_page_says_for_whom_it_is() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        if page.parent.name != "decisions":
            head = page.read_text(encoding="utf-8").split("\n\n")
            assert head[0].startswith("# "), page.name
            assert head[1].startswith("*For "), page.name


TASKS = {
    "get a first list": ("docs/getting-started.md", "/recommend/user-1"),
    "import a CSV file of one's own": ("docs/how-to/data.md", "ncr import ratings.csv"),
    "weigh events": ("docs/how-to/event-weights.md", "NCR_FEEDBACK"),
    "filter by an attribute": ("docs/how-to/filters.md", "filter="),
    "make a token for a browser": ("docs/how-to/browser.md", "/tokens"),
    "add a new item": ("docs/how-to/cold-start.md", "new item"),
    "roll a model back": ("docs/how-to/roll-back.md", "/admin/models/rollback"),
    "move to PostgreSQL": ("docs/how-to/postgresql.md", "ncr restore"),
    "add a model": ("docs/how-to/add-a-model.md", "MODELS"),
    "find where a list's cache key is made": ("ARCHITECTURE.md", "key of a cached list"),
}
CLICKS = 3


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_found_from_the_front_page(task: str) -> None:
    name, text = TASKS[task]
    assert text in (ROOT / name).read_text(encoding="utf-8")
    reached = {ROOT / "README.md"}
    for _ in range(CLICKS):
        reached |= {
            (page.parent / target).resolve()
            for page in reached
            for target in re.findall(r"\]\(([^)#:]+\.md)", page.read_text(encoding="utf-8"))
        }
    assert ROOT / name in reached
