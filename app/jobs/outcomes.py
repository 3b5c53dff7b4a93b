"""How a job's work can end, other than well."""

from __future__ import annotations


class LostJob(Exception):  # noqa: N818 - it is what happened, not an error to report
    """The job is another worker's now: write nothing more about it."""


class Cancelled(Exception):  # noqa: N818 - asked for
    """Somebody asked for an end of the job."""


class Stopped(Exception):  # noqa: N818 - asked for
    """The worker was told to stop."""


class Stalled(Exception):  # noqa: N818 - it is what happened
    """The worker stood still for nearly a lease's time, and its training process gave up."""


class TrainingFailed(Exception):  # noqa: N818 - it is the job that failed
    """The training process said why it could not go on, in one line."""
