"""The routers of all pages."""

from __future__ import annotations

from app.dashboard import data, items, jobs, models, overview, trials, users, which
from app.dashboard.endpoints import last_router, router

ROUTERS = (
    router,
    overview.router,
    users.router,
    items.router,
    which.router,
    jobs.router,
    models.router,
    trials.router,
    data.router,
    last_router,
)
