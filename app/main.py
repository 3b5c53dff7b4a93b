"""The web application. A factory: nothing is built on import."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware

from app import __version__
from app.catalog.endpoints import router as catalog_router
from app.core import health, metrics
from app.core.errors import install_error_handlers
from app.core.limits import Limiter
from app.core.metrics import HttpMetrics, OnScrape, new_registry
from app.core.middleware import AnswerRefusals, BodyLimit, RawPath, RequestContext
from app.core.migrations import schema_is_current
from app.core.openapi import describe
from app.core.overload import Concurrency
from app.core.security import Security
from app.core.settings import Settings
from app.core.tracing import Tracing, shut_down, tracer_provider
from app.events.endpoints import router as events_router
from app.events.metrics import EventMetrics
from app.events.preferences_endpoints import router as preferences_router
from app.jobs.endpoints import router as jobs_router
from app.jobs.metrics import JobMetrics
from app.models.endpoints import router as models_router
from app.recommend.endpoints import router as recommend_router
from app.recommend.feature import Recommending
from app.recommend.metrics import CacheMetrics, RankerMetrics
from app.recommend.model_metrics import ModelMetrics
from app.recommend.more_endpoints import router as more_router
from app.recommend.questions_endpoints import router as questions_router
from app.recommend.serving import ServingModel
from app.services import Services, build_services, worker_of
from app.trials.endpoints import router as trials_router
from app.trials.metrics import TrialMetrics

DESCRIPTION = "Post what users did; ask what they would like next."

TAGS = [
    {"name": "recommend", "description": "What users would like next."},
    {"name": "events", "description": "What users did."},
    {"name": "catalog", "description": "What can be recommended."},
    {"name": "jobs", "description": "Training."},
    {"name": "models", "description": "What was trained and what is served."},
    {"name": "trials", "description": "Two versions beside each other."},
    {"name": "health", "description": "For whoever watches over the service."},
]

STOP_SECONDS = 3.0  # for a worker to give its job back

ROUTERS = (
    recommend_router,  # first: nothing is asked for as often
    more_router,
    questions_router,
    events_router,
    preferences_router,
    catalog_router,
    jobs_router,
    models_router,
    trials_router,
    health.router,
    metrics.router,
)


def create_app(
    settings: Settings, *, with_worker: bool = False, own_process: bool = False
) -> FastAPI:
    """The application for these settings. Everything that holds a resource is in its lifespan.

    ``with_worker`` also works on jobs, in this process's loop; training is a child process anyway.
    With ``own_process`` there is nothing else in it, and what starting made is for good.
    """
    readiness = health.Readiness()
    provider = None if settings.otlp_endpoint is None else tracer_provider(settings.otlp_endpoint)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        services = await build_services(settings)
        app.state.services = services
        app.state.limiter = Limiter(settings.rate_limit, settings.rate_burst, services.shared)
        await services.keys.any()  # known from here on, even while the database is away
        _add_checks(readiness, services)
        _add_figures(app, services)
        try:
            async with _recommending(app, services, readiness), _working(services, with_worker):
                if own_process:
                    # Libraries and the model are millions of objects: to look through them for
                    # garbage stops every request for a quarter of a second, again and again.
                    gc.collect()
                    gc.freeze()
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
    app.state.ranker_metrics = ranking = RankerMetrics(registry)
    install_error_handlers(app)
    # Before the pages of the documentation, and not as routers within the router: each of those
    # would look at every request by itself.
    app.router.routes[:0] = [route for router in ROUTERS for route in router.routes]

    describe(app, keyed=settings.admin_key is not None)

    # The last one added is the outermost.
    http = HttpMetrics(registry)
    app.state.on_scrape = OnScrape(registry)
    app.state.limiter = Limiter(settings.rate_limit, settings.rate_burst)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(
        Security,
        settings=settings,
        keys=lambda: app.state.services.keys if hasattr(app.state, "services") else None,
        limiter=lambda: app.state.limiter,
        on_refused=lambda code: http.refused.labels(code).inc(),
    )
    app.add_middleware(
        Concurrency,
        prefix="/recommend",
        limit=settings.max_concurrency,
        on_refused=ranking.refused.inc,
    )
    app.add_middleware(AnswerRefusals)
    origins = [origin.strip() for origin in settings.cors_origins.split(",") if origin.strip()]
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["X-API-Key", "Content-Type", "X-Request-ID"],
            expose_headers=["X-Request-ID", "Retry-After", "RateLimit-Remaining"],
        )
    if provider is not None:
        app.add_middleware(Tracing, provider=provider)
    app.add_middleware(
        RequestContext, log_requests=settings.log_level == "debug", observe=http.observe
    )
    app.add_middleware(RawPath)
    return app


@asynccontextmanager
async def _recommending(
    app: FastAPI, services: Services, readiness: health.Readiness
) -> AsyncIterator[None]:
    settings = services.settings
    ranking: RankerMetrics = app.state.ranker_metrics
    caches = CacheMetrics(app.state.metrics, services.shared)

    def on_model(model: ServingModel) -> None:
        caches.add("candidates", model.candidates.cache)

    recommending = app.state.recommend = Recommending(
        services.events,
        services.catalog,
        services.models,
        settings,
        trials=services.trials,
        shared=services.shared if settings.redis_lists else None,
        metrics=ranking,
        on_model=on_model,
    )
    models = ModelMetrics(recommending.host, services.events)
    app.state.on_scrape.add(models.collect, models.refresh)
    trials = TrialMetrics(services.trials, services.models)
    app.state.on_scrape.add(trials.collect, trials.refresh)
    if services.shared is not None:
        services.shared.on_hint("model", recommending.host.wake)
    caches.add("lists", recommending.lists)
    caches.add("profiles", services.events.profiles.cache)
    readiness.add("model", recommending.host.ready)
    try:
        await services.trials.start()
        await recommending.start()
        yield
    finally:
        await recommending.stop()


@asynccontextmanager
async def _working(services: Services, with_worker: bool) -> AsyncIterator[None]:
    if not with_worker:
        yield
        return
    stop = asyncio.Event()
    task = asyncio.create_task(worker_of(services).run(stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=STOP_SECONDS)
        task.cancel()


def _add_checks(readiness: health.Readiness, services: Services) -> None:
    async def database() -> str | None:
        if await schema_is_current(services.database):
            return None
        return "the schema is not the one of this version: run `ncr db upgrade`"

    readiness.add("database", database)


def _add_figures(app: FastAPI, services: Services) -> None:
    events, jobs = EventMetrics(app.state.metrics, services.events), JobMetrics(services.jobs)
    app.state.on_scrape.add(events.collect)
    app.state.on_scrape.add(jobs.collect, jobs.refresh)
