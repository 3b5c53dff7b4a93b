"""Readers that stream interactions and items from files, row by row and without trust.

`open_source` finds the contents of a file or folder, and returns a `DataSource` that yields the
rows. A file that cannot be read raises `DataError`. A row that cannot be read goes to `on_bad` and
is left out.
"""

from __future__ import annotations

from ncr_core.data.readers.rows import (
    LATEST_OFFSET,
    BadRow,
    Columns,
    InteractionRow,
    ItemRow,
)
from ncr_core.data.readers.source import DataSource, Format, open_source

__all__ = [
    "LATEST_OFFSET",
    "BadRow",
    "Columns",
    "DataSource",
    "Format",
    "InteractionRow",
    "ItemRow",
    "open_source",
]
