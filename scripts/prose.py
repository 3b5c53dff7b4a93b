"""Checks the prose of documents, docstrings, settings and the OpenAPI document by the rule.

    python scripts/prose.py                 what breaks the rule, a line each; exit status 1 if any
    python scripts/prose.py draw N SEED     N sentences at random, to be judged by a reader

The rule: the subject is a noun of the glossary, a sentence has one fact, the voice is active, a
number has a unit and a leading zero. A program can see a part of that: sentences that are too long,
turns of phrase that hide their subject, words that the glossary has another for, numbers without a
leading zero, and what proselint finds.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proselint.checks import __register__ as proselint_checks
from proselint.config import DEFAULT as PROSELINT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parents[1]
MAX_WORDS = 40

PHRASES: dict[str, str] = {
    r"\b(?:has|have) not (?:the|a|an|any|got)\b": "say 'does not have'",
    r"\bcounts? not\b": "say 'does not count' or 'is skipped'",
    r"\bby (?:itself|themselves) beside\b": "name what happens",
    r"\bnothing that is\b": "name what there is",
    r"\bof whom(?:ever)?\b": "start a new sentence",
    r"(?<![\w,]) Whoever\b": "name the reader: an operator, a client",
    r"\bso (?:that )?surely\b": "say 'statistically significant'",
    r"\bgoes? on (?:taking|giving|having)\b": "say 'keeps'",
    r"\bis no news\b": "name the fact",
    r"\bit is looked (?:for|at|after)\b": "name the subject",
    r"\b(?:are|is) another's\b": "name the owner",
    r"\bnot a little\b|\bnot un\w+\b": "say it without two negations",
}
"""Turns of phrase that hide the subject or the verb, and what to write."""

SYNONYMS: dict[str, str] = {
    r"\bhyper-?parameter tables?\b": "recipe",
    r"\b(?:incumbent|reigning) models?\b": "served version",
    r"\b(?:A/B|split) (?:experiment|test-run)s?\b": "trial",
    r"\bcatalog\b(?!ue)": "catalogue",
    r"\bretrainings?\b": "training",
    r"\bmini-?batch(?:es)?\b": "batch",
    r"\b(?:replica|node)s? of the service\b": "server",
    r"\b(?:daemon|background process)(?:es)?\b": "worker",
    r"\bsuggestions?\b": "recommendation",
    r"\bcustomers?\b": "user, or client for a program",
    r"\brecommendation lists?\b": "list",
    r"\bAPI tokens?\b": "API key, or token for one user",
}
"""Words for what the glossary has another word for."""

# Straight quotes and three dots are the style of these documents.
_OFF = ("typography", "restricted", "misc", "needless_variants", "dates_times")
_PROSELINT = PROSELINT | {"checks": {**PROSELINT["checks"], **dict.fromkeys(_OFF, False)}}

PACKAGES = ("ncr_core", "app")
SECTION = re.compile(r"(?:Args|Attributes|Raises|Returns|Yields|Example|Examples|Note):$")
ENTRY = re.compile(r" {4}\*{0,2}[\w.]+(?: \([^)]*\))?: (?=\S)|\s*[-*] ")
FENCED = re.compile(r"^(```|~~~).*?^\1$", re.M | re.S)
LEADING_ZERO = re.compile(r"(?<![\w.)\]])\.\d")


@dataclass(frozen=True)
class Sentence:
    """A sentence and where it stands."""

    where: str
    text: str


def sentences() -> Iterator[Sentence]:
    """All sentences of documents, docstrings, settings and the OpenAPI document."""
    for path in documents():
        for number, block in _blocks(path.read_text(encoding="utf-8")):
            for text in _split(block):
                yield Sentence(f"{path.relative_to(ROOT)}:{number}", text)
    for where, description in itertools.chain(_docstrings(), _descriptions()):
        for text in _split(description):
            yield Sentence(where, text)


def documents() -> list[Path]:
    """The documents that are written by hand."""
    made = {"settings.md", "results.md"}
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path for path in found if path.name not in made)


def _blocks(markdown: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items and table cells with the number of their first line."""
    lines = FENCED.sub(lambda match: "\n" * match[0].count("\n"), markdown)
    block: list[str] = []
    first = 0
    for number, line in enumerate([*lines.splitlines(), ""], 1):
        starts = re.match(r"\s*(?:[-*+]|\d+\.)\s|\||#|$|    ", line)
        if starts and block:
            yield first, " ".join(block)
            block = []
        if not line.strip() or line.startswith(("    ", "#")):
            continue
        if line.startswith("|"):
            yield from ((number, cell.strip()) for cell in line.strip("|").split("|"))
            continue
        if not block:
            first = number
        block.append(re.sub(r"^\s*(?:[-*+]|\d+\.)\s+", "", line).strip())


def _docstrings() -> Iterator[tuple[str, str]]:
    """Paragraphs and entries of the docstrings of the library and the service."""
    for folder in PACKAGES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match node:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        where = f"{path.relative_to(ROOT)}:{node.lineno}"
                        yield from ((where, part) for part in _parts(inspect.cleandoc(text)))


def _parts(docstring: str) -> Iterator[str]:
    """Paragraphs, list items and the entries of ``Args`` and ``Raises``; no code."""
    part: list[str] = []
    code = False
    for line in [*docstring.splitlines(), ""]:
        text = line.strip()
        code = (code and bool(text)) or text.startswith(">>>")
        if part and (code or not text or SECTION.match(text) or ENTRY.match(line)):
            yield " ".join(part)
            part = []
        if text and not code and not SECTION.match(text):
            part.append(ENTRY.sub("", line).strip())


def _descriptions() -> Iterator[tuple[str, str]]:
    from app.core.settings import Settings
    from app.main import create_app

    for name, field in Settings.model_fields.items():
        yield f"NCR_{name.upper()}", " ".join((field.description or "").split())
    yield from _of(create_app(Settings()).openapi(), "openapi")


def _of(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, below in value.items():
            if key == "description" and isinstance(below, str):
                yield where, " ".join(below.split())
            else:
                yield from _of(below, f"{where}.{key}")
    elif isinstance(value, list):
        for number, below in enumerate(value):
            yield from _of(below, f"{where}.{number}")


def _split(block: str) -> list[str]:
    """Sentences with at least four words, without marks of Markdown."""
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
    code: list[str] = []

    def keep(match: re.Match[str]) -> str:
        code.append(match[0])
        return f"\x00{len(code) - 1}\x00"

    plain = re.sub(r"``[^`]+``|`[^`]*`", keep, plain)
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z0-9\x00*])", plain.replace("**", ""))
    parts = [re.sub("\x00(\\d+)\x00", lambda m: code[int(m[1])], part).strip() for part in parts]
    return [part for part in parts if len(part.split()) >= 4 and re.search(r"[a-z]{3}", part)]


def problems(sentence: Sentence) -> Iterator[str]:
    """What breaks the rule, as far as a program sees it."""
    counter = itertools.count(1)
    # Each is another word: two in a row are no repetition.
    text = re.sub(r"``[^`]+``|`[^`]*`", lambda _: f"code{next(counter)}", sentence.text)
    words = len(text.split())
    if words > MAX_WORDS:
        yield f"{words} words, at most {MAX_WORDS}: make two sentences of it"
    for pattern, advice in PHRASES.items():
        if found := re.search(pattern, text):
            yield f"'{found[0].strip()}': {advice}"
    if found := LEADING_ZERO.search(text):
        yield f"'{text[found.start() : found.start() + 6]}': a number has a leading zero"
    yield from _synonyms(text)
    yield from _proselint(text)


def _synonyms(text: str) -> Iterator[str]:
    for pattern, term in SYNONYMS.items():
        if found := re.search(pattern, text, re.I):
            yield f"'{found[0]}': the glossary says {term}"


def _proselint(text: str) -> Iterator[str]:
    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(proselint_checks)
    for result in LintFile("sentence", text).lint(_PROSELINT):
        yield f"proselint: {result.check_result.message}"


def main(arguments: list[str]) -> int:
    """The command."""
    if arguments[:1] == ["draw"]:
        drawn = random.Random(int(arguments[2])).sample(list(sentences()), int(arguments[1]))
        for number, sentence in enumerate(drawn, 1):
            print(f"{number}. [{sentence.where}] {sentence.text}")
        return 0
    found = [(s, problem) for s in sentences() for problem in problems(s)]
    for sentence, problem in found:
        print(f"{sentence.where}: {problem}: {sentence.text[:100]}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
