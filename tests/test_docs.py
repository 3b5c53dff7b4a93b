"""What the documents say is what is there."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import yaml
from typer.main import get_command

from app.cli.main import app
from app.core.settings import Settings

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


def compose() -> dict[str, Any]:
    text = (ROOT / "docker-compose.yml").read_text()
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


def test_compose_and_dockerfile_run_commands_that_there_are() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    commands = [json.loads(found) for found in re.findall(r"^CMD (\[.*\])$", dockerfile, re.M)]
    commands += [s["command"] for s in compose().values() if s.get("command", [""])[0] == "ncr"]
    assert len(commands) == 4
    for _, *arguments in commands:
        command: Any = get_command(app)
        while arguments and arguments[0] in getattr(command, "commands", {}):
            command = command.commands[arguments.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {a for a in arguments if a.startswith("--")} <= options


def test_compose_and_dockerfile_set_settings_that_there_are() -> None:
    known = {f"NCR_{name.upper()}" for name in Settings.model_fields}
    for service in compose().values():
        own = {name for name in service.get("environment", {}) if name.startswith("NCR_")}
        assert own <= known
    assert set(re.findall(r"\b(NCR_[A-Z_]+)=", (ROOT / "Dockerfile").read_text())) <= known


def test_the_image_does_not_run_as_root_and_is_watched() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^USER ncr$", dockerfile, re.M)
    assert "/health/ready" in dockerfile


def test_nothing_is_published_beyond_loopback() -> None:
    for service in compose().values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
