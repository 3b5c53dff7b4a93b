"""The recommendation service: HTTP API, worker and command line around ncr_core."""

from __future__ import annotations

__version__ = "0.2.0"
