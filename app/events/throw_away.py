"""Throw-away users of the page "Which of the two?": never trained on, and erased after a day."""

from __future__ import annotations

import re

from app.core.ids import random_hex

THROW_AWAY_PREFIX = "ncr-visitor-"
"""The prefix of the ids of throw-away users."""
KEEP_HOURS = 24
THROW_AWAY_LENGTH = len(THROW_AWAY_PREFIX) + 16
_THROW_AWAY = re.compile(rf"{THROW_AWAY_PREFIX}[0-9a-f]{{16}}")


def new_throw_away_id() -> str:
    """A new random id for a throw-away user."""
    return f"{THROW_AWAY_PREFIX}{random_hex(8)}"


def is_throw_away(user: str) -> bool:
    """Whether an id has the form of a throw-away user's id."""
    return _THROW_AWAY.fullmatch(user) is not None
