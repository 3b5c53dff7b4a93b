"""The command line, `ncr`."""

import sys

try:
    from app.cli.main import main
except ModuleNotFoundError as error:
    if str(error.name).partition(".")[0] in ("app", "ncr_core"):
        raise
    _missing = error.name

    def main() -> None:
        """Exits with the command that installs the missing packages of the service."""
        sys.exit(
            f"ncr: {_missing} is not installed; run pip install "
            "'neural-collaborative-ranking[service]'"
        )


__all__ = ["main"]
