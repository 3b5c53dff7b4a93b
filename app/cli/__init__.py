"""The command line, `ncr`."""

import sys

try:
    from app.cli.main import main
except ModuleNotFoundError as error:
    if str(error.name).partition(".")[0] in ("app", "ncr_core"):
        raise
    _missing = error.name

    def main() -> None:
        """Says what to install: the library is here, the packages of the service are not."""
        sys.exit(
            f"ncr: {_missing} is not installed; run pip install "
            "'neural-collaborative-ranking[service]'"
        )


__all__ = ["main"]
