"""`ncr serve` and `ncr worker`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from app.core.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(serve)
    app.command()(worker)


def serve(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on.")] = 8000,
    with_worker: Annotated[bool, typer.Option("--with-worker", help="Also run a worker.")] = False,
) -> None:
    """Run the server. Without an API key, the server binds only a loopback address."""
    from app.cli.common import logged_settings

    settings = logged_settings()
    run_server(settings, host, port, with_worker=with_worker)


def run_server(settings: Settings, host: str, port: int, *, with_worker: bool) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    # Before torch and numpy are loaded, whose threads would compete by busy waiting.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import uvicorn

    from app.cli.graceful_shutdown import DrainingServer
    from app.core.security import ensure_bindable
    from app.main import create_app

    ensure_free(host, port)
    ensure_bindable(host, settings, has_keys=asyncio.run(_check_start(settings)))
    app = create_app(settings, with_worker=with_worker, own_process=True)
    notice = settings.drain_notice_seconds
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        http=http_protocol(),
        ws="none",
        # Two thirds for requests in progress, a third for the events still to be written.
        timeout_graceful_shutdown=max(1, int(settings.drain_seconds * 2 / 3 - notice)),
    )
    server = DrainingServer(config, app.state.readiness, notice)
    # After draining, uvicorn raises the signal again, which would end this process as killed.
    # The shutdown was regular: exit 0.
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: None)
    server.run()
    if not server.started:
        raise typer.Exit(1)


def http_protocol() -> Any:
    """The protocol with limits. Without httptools, uvicorn's `h11` has limits of its own."""
    try:
        from app.core.http_protocol import BoundedProtocol
    except ImportError:
        return "auto"
    return BoundedProtocol


def ensure_free(host: str, port: int) -> None:
    """Refuse an occupied port before the command loads or trains a model.

    Raises:
        SettingsError: the port cannot be bound.
    """
    from app.core.errors import SettingsError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SettingsError(f"{host} port {port}: {error.strerror or error}") from None


def _check_device(settings: Settings) -> None:
    """Check the device. `auto` and `cpu` always exist, so that a worker loads no torch for them."""
    if settings.device not in ("auto", "cpu"):
        from ncr_core.training import resolve_device

        resolve_device(settings.device)


async def _check_start(settings: Settings) -> bool:
    """Check whether the service can start, with an error of one line instead of a traceback.

    Returns:
        Whether there are keys in the database.
    """
    from app.core.database import Database
    from app.core.migrations import ensure_schema
    from app.events.event_weights import EventWeights
    from app.keys.service import KeyService
    from app.registry.service import ModelRegistry, open_checkpoint_store

    _check_device(settings)
    EventWeights.from_settings(settings)
    database = Database(settings.effective_database_url)
    models = ModelRegistry(database, open_checkpoint_store(settings))
    try:
        await ensure_schema(database)
        await models.claim_store(required=False)
        return await KeyService(database).any()
    finally:
        models.close()
        await database.close()


def worker() -> None:
    """Run a worker, which claims and runs jobs. Any number of workers may run."""
    from app.cli.common import logged_settings

    settings = logged_settings()
    asyncio.run(_work(settings))


async def _work(settings: Settings) -> None:
    from app.cli.common import services_of
    from app.worker.worker import build_worker

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    _check_device(settings)
    async with services_of(settings) as services:
        await services.models.claim_store(required=False)
        services.database.log_warning()
        await build_worker(services).run(stop)
