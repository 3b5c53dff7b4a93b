"""The command line, `ncr`."""

from app.cli.main import main

__all__ = ["main"]
