"""What went wrong, as the service tells it (RFC 9457)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ncr_client.answers import EventsAnswer


class RequestError(Exception):
    """A request was not answered as it should be. The attributes are for `post_events`."""

    stored: Sequence[EventsAnswer] = ()
    """The answers to the lists before the one that failed."""
    remaining: Iterable[dict[str, Any]] = ()
    """The events of the list that failed and all after it, each with its id: an iterator.

    Some may be stored. Posted again they count once."""


class ServiceError(RequestError):
    """The service refused a request, or could not answer it.

    ``code`` is stable and meant for programs; ``detail`` says more to people; ``request_id`` finds
    the request in the service's log. ``problem`` is the whole body of the answer.
    """

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        self.status = status
        self.problem = problem
        self.code = str(problem.get("code", "unknown"))
        self.detail = str(problem.get("detail", ""))
        self.request_id = problem.get("request_id")
        super().__init__(f"{status} {self.code}: {self.detail}")


class NotReachedError(RequestError):
    """The service could not be reached, or did not answer in time, however often it was tried."""


class JobFailedError(Exception):
    """A job ended in another way than it was meant to; ``job`` tells how."""

    def __init__(self, job: Any) -> None:
        self.job = job
        why = job["error"] or _of_the_gate(job) or "no reason given"
        super().__init__(f"job {job['job_id']} {job['status']}: {why}")


def _of_the_gate(job: Any) -> str:
    """Why the gate has rejected the job's model, as far as its report says."""
    gate = (job.get("metrics") or {}).get("gate") or {}
    figures = gate.get("ndcg@10")
    if job["status"] != "rejected" or "finding" not in gate:
        return ""
    if figures is None:
        return f"the gate found {gate['finding']}"
    return (
        f"the gate found {gate['finding']}: NDCG@10 {figures['challenger']:g} beside "
        f"{figures['incumbent']:g} of {gate['incumbent']}"
    )
