"""Helpers of several commands: services, progress and tables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from app.core.settings import Settings
    from app.wiring import Services

T = TypeVar("T")

# Progress and messages go to standard error; standard output is for results.
console = Console(stderr=True, highlight=False)


def bar(*, counted: bool = False) -> Progress:
    """A progress bar; ``counted`` shows the completed and the total number."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn() if counted else TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def logged_settings(**overrides: Any) -> Settings:
    """The settings of a service. The log gets a warning for each variable that is no setting."""
    from app.core.logging import configure_logging, get_logger
    from app.core.settings import load_settings, unknown_variables

    settings = load_settings(**overrides)
    configure_logging(settings.log_level, settings.log_format)
    for variable, nearest in unknown_variables().items():
        get_logger(__name__).warning("unknown setting ignored", variable=variable, nearest=nearest)
    return settings


def quiet_settings(**overrides: Any) -> Settings:
    """The settings of an interactive command, which logs warnings only."""
    from app.core.logging import configure_logging

    settings = logged_settings(**overrides)
    if settings.log_level == "info":
        configure_logging("warning", settings.log_format)
    return settings


@asynccontextmanager
async def services_of(settings: Settings, *, reads: bool = False) -> AsyncIterator[Services]:
    """The services, closed at the end of a command. With ``reads`` an older schema is an error."""
    from app.wiring import build_services

    services = await build_services(settings, may_migrate=not reads)
    try:
        yield services
    finally:
        await services.close()


def with_services(
    work: Callable[[Services], Awaitable[T]], *, reads: bool = False, **overrides: Any
) -> T:
    """Run ``work`` with the services that the settings describe; see `services_of`."""

    async def run() -> T:
        async with services_of(quiet_settings(**overrides), reads=reads) as services:
            return await work(services)

    return asyncio.run(run())


def print_table(table: Table) -> None:
    """Print a table on standard output."""
    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = 200  # a file or a pipe has no width of its own
    out.print(table)


class EpochLines:
    """Training progress: a bar on a terminal, elsewhere a line for each epoch."""

    def __init__(self) -> None:
        self._bar = bar(counted=True)
        self._task: Any = None
        self._phase = ""

    def __enter__(self) -> EpochLines:
        if console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def users(self, done: int, total: int) -> None:
        """Show the number of ranked users, on a terminal."""
        if not console.is_terminal:
            return
        if self._phase != "full ranking":
            self._phase = "full ranking"
            self._task = self._bar.add_task(self._phase, total=total)
        self._bar.update(self._task, completed=done)

    def show(self, progress: dict[str, Any]) -> None:
        """Show progress in the form that a job stores."""
        phase, epoch = progress["phase"], progress["epoch"]
        figures = ""
        if progress["loss"] is not None:
            figures = f"loss {progress['loss']:.4f}"
            if progress["ndcg"] is not None:
                figures += f"  NDCG@10 {progress['ndcg']:.4f}"
        if not console.is_terminal:
            left = f"  {progress['eta_s']:.0f} s left" if progress["eta_s"] is not None else ""
            place = f" {epoch}/{progress['epochs']}" if epoch else ""
            console.print(f"{phase}{place}  {figures}{left}".rstrip())
            return
        total = progress["epochs"] or None
        if phase != self._phase:
            self._phase = phase
            self._task = self._bar.add_task(phase, total=total)
        self._bar.update(
            self._task, completed=epoch, total=total, description=f"{phase}  {figures}".rstrip()
        )
