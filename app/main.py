"""The factory of the web application. The import of this module builds no application."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware

from app import __version__
from app.ab_tests.endpoints import router as trials_router
from app.ab_tests.metrics import ABTestMetrics
from app.catalog.endpoints import router as catalog_router
from app.core import monitoring
from app.core.access import AccessTable, ResolveRoute
from app.core.errors import install_error_handlers
from app.core.middleware import AnswerRefusals, ConcurrencyMiddleware, RequestContext
from app.core.migrations import schema_problem
from app.core.monitoring import (
    HttpMetrics,
    OnScrape,
    Tracing,
    new_registry,
    shut_down,
    tracer_provider,
)
from app.core.openapi import describe
from app.core.requests import BodyLimit
from app.core.security import (
    RATE_LIMIT_HEADERS,
    Authentication,
    NoKeys,
    RateLimiter,
    Security,
)
from app.core.settings import Settings
from app.dashboard import pages as dashboard
from app.dashboard.kept import KeptFigures
from app.dashboard.rendering import error_page
from app.events.endpoints import router as events_router
from app.events.metrics import EventMetrics, GroupCommitMetrics
from app.events.user_endpoints import router as users_router
from app.inference.loaded_model import LoadedModel
from app.inference.metrics import CacheMetrics, InferenceMetrics
from app.jobs.endpoints import router as jobs_router
from app.jobs.metrics import JobMetrics
from app.keys.endpoints import router as keys_router
from app.recommend.endpoints import list_router
from app.recommend.endpoints import router as recommend_router
from app.recommend.metrics import ModelMetrics
from app.recommend.wiring import RecommendFeature
from app.registry.endpoints import router as models_router
from app.wiring import Services, build_services
from app.worker.worker import build_worker

DESCRIPTION = "Record events of users, and recommend items to them."

TAGS = [
    {"name": "recommend", "description": "Recommendations for users."},
    {"name": "events", "description": "Events, preferences and histories of users."},
    {"name": "users", "description": "Users and their attributes."},
    {"name": "catalog", "description": "Items that can be recommended."},
    {"name": "jobs", "description": "Training jobs."},
    {"name": "models", "description": "Model versions and their activation."},
    {"name": "trials", "description": "Trials of a second version, or of other settings."},
    {"name": "keys", "description": "Tokens for users."},
    {"name": "health", "description": "Liveness, readiness and metrics endpoints for monitoring."},
]

WORKER_STOP_SECONDS = 3.0  # for a worker to return its job to the queue
REQUEUE_SECONDS = 1.0  # for one that did not
SWITCH_SECONDS = 0.0005

ROUTERS = (
    list_router,  # first: no other route has as many requests
    recommend_router,
    events_router,
    users_router,
    catalog_router,
    jobs_router,
    models_router,
    trials_router,
    keys_router,
    monitoring.router,
)


def create_app(
    settings: Settings, *, with_worker: bool = False, own_process: bool = False
) -> FastAPI:
    """Build the application. Its lifespan builds and closes the services.

    Args:
        settings: the settings of the service.
        with_worker: also run a worker in this process's loop. The worker trains in child processes.
        own_process: the application has the process to itself. The start then exempts its objects
            from garbage collection and sets Python's switch interval to ``SWITCH_SECONDS``.
    """
    readiness = monitoring.Readiness()
    provider = None if settings.otlp_endpoint is None else tracer_provider(settings.otlp_endpoint)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        services = await build_services(settings, observe_commit=commits.observe)
        app.state.services = services
        app.state.limiter = RateLimiter(settings.rate_limit, settings.rate_burst, services.redis)
        app.state.keys = services.keys
        await services.keys.any()  # known from here on, even while the database is away
        services.database.log_warning()
        _add_readiness_checks(readiness, services)
        _add_metrics(app, services)
        try:
            async with (
                _run_recommendations(app, services, readiness),
                _run_worker(services, with_worker),
                _running(services.events.item_index.keep()),
            ):
                if own_process:
                    # Libraries and the model are millions of objects: each garbage collection
                    # over them would stop all requests for a quarter of a second.
                    gc.collect()
                    gc.freeze()
                    # Beside a busy thread each turn of the loop waits this long for Python's lock,
                    # and a list takes some twenty turns; Python's own interval is 5 ms.
                    sys.setswitchinterval(SWITCH_SECONDS)
                yield
                readiness.draining = True
        finally:
            readiness.draining = True
            await services.close()
            if provider is not None:
                await shut_down(provider)

    app: FastAPI = FastAPIOffline(
        title="Neural collaborative ranking",
        description=DESCRIPTION,
        version=__version__,
        openapi_tags=TAGS,
        lifespan=lifespan,
        # An empty id is not found; it is not another way to ask for the list.
        redirect_slashes=False,
    )
    app.state.settings = settings
    app.state.readiness = readiness
    app.state.metrics = registry = new_registry()
    commits = GroupCommitMetrics(registry)
    app.state.inference_metrics = inference = InferenceMetrics(registry)
    install_error_handlers(app)
    # Before the pages of the documentation, and not as routers within the router: each of those
    # would look at every request by itself.
    routers = (*ROUTERS, *dashboard.ROUTERS) if settings.dashboard else ROUTERS
    app.router.routes[:0] = [route for router in routers for route in router.routes]

    table = app.state.access = AccessTable(app.router.routes)
    describe(app, table, keyed=settings.admin_key is not None)

    # The last one added is the outermost.
    http = app.state.http_metrics = HttpMetrics(registry)
    app.state.on_scrape = OnScrape(registry)
    # Until the database is there: see the lifespan.
    app.state.keys = NoKeys()
    app.state.limiter = RateLimiter(settings.rate_limit, settings.rate_burst)
    app.state.questions_in_making = set()
    app.state.kept_figures = KeptFigures()
    app.state.authentication = Authentication(settings, lambda: app.state.keys)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(
        Security,
        authentication=app.state.authentication,
        limiter=lambda: app.state.limiter,
        on_refused=lambda code: http.refused.labels(code).inc(),
    )
    app.add_middleware(
        ConcurrencyMiddleware,
        limits={"recommend": settings.max_concurrency},
        on_refused=inference.refused.inc,
    )
    app.add_middleware(AnswerRefusals, error_page=error_page)
    origins = [origin.strip() for origin in settings.cors_origins.split(",") if origin.strip()]
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=[
                "Authorization",
                "X-API-Key",
                "Content-Type",
                "X-Request-ID",
                "Idempotency-Key",
            ],
            expose_headers=["X-Request-ID", "Retry-After", *RATE_LIMIT_HEADERS],
        )
    if provider is not None:
        app.add_middleware(Tracing, provider=provider)
    app.add_middleware(
        RequestContext, log_requests=settings.log_level == "debug", observe=http.observe
    )
    app.add_middleware(ResolveRoute, table=table)
    return app


@asynccontextmanager
async def _run_recommendations(
    app: FastAPI, services: Services, readiness: monitoring.Readiness
) -> AsyncIterator[None]:
    settings = services.settings
    inference: InferenceMetrics = app.state.inference_metrics
    caches = CacheMetrics(app.state.metrics, services.redis)

    def on_model(model: LoadedModel) -> None:
        caches.add("candidates", model.candidate_cache)

    feature = app.state.recommend = RecommendFeature(
        services.events,
        services.catalog,
        services.models,
        settings,
        ab_tests=services.trials,
        redis=services.redis if settings.redis_lists else None,
        metrics=inference,
        on_model=on_model,
    )
    models = ModelMetrics(feature.models, services.events)
    app.state.on_scrape.add(models.collect, models.refresh)
    trials = ABTestMetrics(services.trials, services.models)
    app.state.on_scrape.add(trials.collect, trials.refresh)
    if services.redis is not None:
        services.redis.on_hint("model", feature.models.wake)
    caches.add("lists", feature.lists.cache)
    caches.add("profiles", services.events.profiles.cache)
    readiness.add("model", feature.models.ready)
    readiness.add("popularity", feature.popularity.ready)
    try:
        await services.trials.start()
        await feature.start()
        yield
    finally:
        await feature.stop()


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@asynccontextmanager
async def _run_worker(services: Services, with_worker: bool) -> AsyncIterator[None]:
    if not with_worker:
        yield
        return
    stop = asyncio.Event()
    task = asyncio.create_task(build_worker(services).run(stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=WORKER_STOP_SECONDS)
        task.cancel()
        # The job goes back into the queue, which needs the database.
        await asyncio.wait({task}, timeout=REQUEUE_SECONDS)


def _add_readiness_checks(readiness: monitoring.Readiness, services: Services) -> None:
    readiness.add("database", lambda: schema_problem(services.database))
    readiness.warnings = [warning] if (warning := services.database.warning) else []


def _add_metrics(app: FastAPI, services: Services) -> None:
    events, jobs = EventMetrics(services.events), JobMetrics(services.jobs)
    app.state.on_scrape.add(events.collect)
    app.state.on_scrape.add(jobs.collect, jobs.refresh)
