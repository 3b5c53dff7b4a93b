"""The figures of the pages are those of the results that they link to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)]*benchmarks/results/[\w./-]+\.jsonl?)\)")
FIGURE = re.compile(r"(?<![\w.,/-])(\d{1,3}(?:,\d{3})+|\d+)\.(\d+)(?![\w.])( %)?")
BOUND = re.compile(r"(?:less than|at most|at least|more than|torch) \d+\.\d+")
"""Bounds and versions are no figures."""
STAR = re.compile(r"(?<![*\s|])\*(?!\*)(?=[\s,.|]|$)")
SCALES = (1.0, 100.0, 1_000.0, 1e-3, 1e-6, 1 / 2**10, 1 / 2**20, 1 / 2**30)
"""A share as a percentage, seconds as milliseconds and back, bytes as MiB and GiB."""


def parts(text: str) -> Iterator[str]:
    """Paragraphs, each with the table that follows it."""
    blocks = re.split(r"\n\s*\n", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    for block, after in zip(blocks, [*blocks[1:], ""], strict=True):
        yield f"{block}\n{after}" if after.startswith("|") else block


@cache
def numbers(path: Path) -> tuple[float, ...]:
    """All numbers of a file of results, those in its texts too."""
    text = path.read_text(encoding="utf-8")
    found: list[float] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            for below in value.values():
                look(below)
        elif isinstance(value, list):
            for below in value:
                look(below)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append(abs(float(value)))
        elif isinstance(value, str):
            numerals = re.findall(r"\d+(?:\.\d+)?", value.replace(",", ""))
            found.extend(map(float, numerals))

    for line in text.splitlines() if path.suffix == ".jsonl" else [text]:
        look(json.loads(line))
    return tuple(found)


def is_there(whole: str, decimals: str, known: tuple[float, ...]) -> bool:
    """Whether a number of the results is this one when it is rounded."""
    figure, places = float(f"{whole.replace(',', '')}.{decimals}"), len(decimals)
    near = 0.5 * 10**-places * (1 + 1e-9)
    return any(abs(value * scale - figure) <= near for value in known for scale in SCALES)


def kept(part: str) -> str:
    """A part without what a star marks as not kept: a sentence, a row, a column or a figure."""
    columns: set[int] = set()
    lines = []
    for line in part.splitlines():
        cells = line.strip("|").split("|")
        if not line.startswith("|"):
            columns = set()
            lines.append(line)
        elif not columns and STAR.search(line) and not FIGURE.search(line):  # the heads
            columns = {at for at, cell in enumerate(cells) if STAR.search(cell)}
        elif not STAR.search(cells[0]):
            lines.append(" | ".join(c for at, c in enumerate(cells) if at not in columns))
    text = re.sub(r"[\d.]+\*", "", "\n".join(lines))
    return " ".join(s for s in re.split(r"(?<=[.:])\s+", text) if not STAR.search(s))


CITED = [
    (page, part)
    for page in PAGES
    for part in parts(page.read_text(encoding="utf-8"))
    if LINK.search(part) and FIGURE.search(part)
]


def test_pages_cite_results() -> None:
    assert len(CITED) > 30


@pytest.mark.parametrize(("page", "part"), CITED, ids=lambda value: getattr(value, "name", ""))
def test_figures_are_those_of_the_results(page: Path, part: str) -> None:
    known = tuple(
        number for link in LINK.findall(part) for number in numbers((page.parent / link).resolve())
    )
    text = BOUND.sub("", kept(LINK.sub("]()", re.sub(r"`[^`]*`", "", part))))
    wrong = [
        f"{whole}.{decimals}{percent}"
        for whole, decimals, percent in FIGURE.findall(text)
        if not is_there(whole, decimals, known)
    ]
    assert not wrong, f"{page.name}: {wrong} are in none of the linked results:\n{part}"
