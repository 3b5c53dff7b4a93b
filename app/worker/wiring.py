"""Builds a worker from the services."""

from __future__ import annotations

from app.jobs.triggers import Triggers
from app.wiring import Services
from app.worker.periodic_tasks import PeriodicTask
from app.worker.worker import Worker

TRIGGERS_SECONDS = 5.0
CLEAN_SECONDS = 600.0
END_TRIALS_SECONDS = 10.0
ROLLBACK_SECONDS = 300.0  # the click-through rates that it compares change once an hour
FORGET_SECONDS = 3600.0


def build_worker(services: Services) -> Worker:
    """A worker with its periodic tasks."""
    trials, models, settings = services.trials, services.models, services.settings
    triggers = Triggers(
        services.database, settings, services.jobs, services.events.last_seq, models.trained_seq
    )
    tasks = [
        PeriodicTask("triggers", TRIGGERS_SECONDS, triggers.fire),
        PeriodicTask("clean", CLEAN_SECONDS, models.clean),
        PeriodicTask("trials", END_TRIALS_SECONDS, trials.end_outdated),
        PeriodicTask("forget", FORGET_SECONDS, trials.delete_old_impressions),
    ]
    if settings.return_drop > 0:
        from app.ab_tests.auto_rollback import AutoRollback  # optional

        rollback = AutoRollback(services.database, models, trials.click_through, settings)
        tasks.append(PeriodicTask("return", ROLLBACK_SECONDS, rollback.check))
    return Worker(services.database, models, settings, tasks)
