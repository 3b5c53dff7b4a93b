"""What a request asks for beside the user."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

STRING_BYTES = 60  # of a Python string without its characters


@dataclass(frozen=True)
class Filters:
    """The parameters of a list, checked, in one form for all that ask for the same."""

    n: int = 10
    exclude_seen: bool = True
    categories: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    min_seq: int | None = None
    model: str | None = None
    diversity: float = 0.0
    explain: bool = False

    @cached_property
    def key(self) -> Hashable:
        """What a list depends on of it."""
        return (
            self.n,
            self.exclude_seen,
            self.categories,
            self.exclude,
            self.diversity,
            self.explain,
        )

    @cached_property
    def key_bytes(self) -> int:
        """What the strings in the key take."""
        return sum(STRING_BYTES + 4 * len(x) for x in (*self.categories, *self.exclude))
