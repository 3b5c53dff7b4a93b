"""p"""

from pathlib import Path


def write_page(a: Path, b: Path) -> None: ...
