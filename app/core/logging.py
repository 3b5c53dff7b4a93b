"""Logs: structlog and the standard library's loggers, one line a message, to standard error."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def configure_logging(log_level: str, log_format: str) -> None:
    """Set up logging for this process. Commands call this function, and no import does.

    Args:
        log_level: see `Settings.log_level`.
        log_format: see `Settings.log_format`.
    """
    level = getattr(logging, log_level.upper())
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[Any] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                # The default shows local variables, and with them what clients sent.
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # At debug level these log every statement and every hop to a thread.
    for name in ("aiosqlite", "alembic", "sqlalchemy", "asyncio"):
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """The logger of a module."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(name)
    return logger
