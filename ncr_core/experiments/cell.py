"""One cell of a table: one method with one configuration on one data set, as a JSON file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ncr_core.data.interactions import IntArray
from ncr_core.errors import DataError

FORMAT = "ncr-cell/1"
OUTSIDE = "."


@dataclass(frozen=True)
class Cell:
    """What to run. ``variant`` tells it from others of the same method, for its name.

    ``full`` adds the ranking over all unseen items; a cell that only serves a choice has
    ``test=False``: its test items are not looked at.
    """

    data: str
    method: str
    factors: int
    settings: Mapping[str, Any]
    variant: str = ""
    seed: int = 0
    refit: bool = False
    full: bool = True
    test: bool = True
    parts: tuple[Cell, Cell] | None = field(default=None, repr=False)
    group: str = "cells"

    @property
    def name(self) -> str:
        """A name for files: data set, method, factors and what else differs."""
        words = [self.method, f"d{self.factors}" if self.factors else "", self.variant]
        if self.refit:
            words.append("refit")
        if self.seed:
            words.append(f"seed{self.seed}")
        slug = "-".join(re.sub(r"[^a-z0-9.=+]+", "-", w.lower()).strip("-") for w in words if w)
        return f"{self.group}/{self.data}/{slug}"

    def with_parts(self, nbpr: Cell, dncr: Cell) -> Cell:
        """The cell of a NeuPR that starts from what these two give."""
        return replace(self, parts=(nbpr, dncr))

    def before_refit(self) -> Cell:
        """The cell whose validation chooses the rounds of this refit.

        Where the protocol's figures are the refit's, its test items are of no interest.
        """
        parts = self.parts and (self.parts[0].before_refit(), self.parts[1].before_refit())
        return replace(self, refit=False, parts=parts, test=self.test and self.data == "ml-1m")

    def configuration(self) -> dict[str, Any]:
        """What a stored result must have been run with to stand for this cell."""
        configuration: dict[str, Any] = {
            "data": self.data,
            "method": self.method,
            "factors": self.factors,
            "settings": json.loads(json.dumps(self.settings)),
            "seed": self.seed,
            "refit": self.refit,
        }
        if self.parts is not None:
            configuration["parts"] = [part.configuration() for part in self.parts]
        return configuration


def ranks_as_text(ranks: IntArray) -> str:
    """(n,) ranks from 0 to 9, −1 outside, as one character a user."""
    return "".join(str(r) if r >= 0 else OUTSIDE for r in ranks.tolist())


def ranks_from_text(text: str) -> IntArray:
    """The inverse of ``ranks_as_text``."""
    return np.array([-1 if c == OUTSIDE else int(c) for c in text], dtype=np.int64)


def read_result(path: Path) -> dict[str, Any] | None:
    """A stored result, None where there is none. Raises DataError for a damaged one."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        result = json.loads(content)
    except ValueError:
        raise DataError(f"{path} is damaged: remove it to have it run again") from None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise DataError(f"{path} is not a result of format {FORMAT}")
    return result


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a result; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(f".{os.getpid()}.partial")
    staging.write_text(json.dumps(result, indent=1) + "\n")
    staging.replace(path)
