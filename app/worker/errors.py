"""How a job can end other than by success."""

from __future__ import annotations


class LostJob(Exception):  # noqa: N818 - an outcome, not an error to report
    """Another worker owns the job now: this one writes nothing more about it."""


class Cancelled(Exception):  # noqa: N818 - requested by a client
    """A client cancelled the job."""


class Stopped(Exception):  # noqa: N818 - requested by the operator
    """The worker was told to stop."""


class Stalled(Exception):  # noqa: N818 - an outcome
    """The worker was suspended for nearly a lease, and its child process gave up."""


class TrainingFailed(Exception):  # noqa: N818 - the job failed, not the worker
    """The child process failed; the message is one line for the client."""
