"""What the client sends, how often it tries, and errors as the service tells them (RFC 9457)."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any
from urllib.parse import quote

import httpx2

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


MAX_EVENTS_PER_REQUEST = 1_000
MAX_ATTEMPTS = 4
FIRST_WAIT_SECONDS = 0.2
MAX_WAIT_SECONDS = 10.0
TOO_MANY_REQUESTS = 429
RETRY_STATUSES = (TOO_MANY_REQUESTS, 503)
NOT_SENT_ERRORS = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)

Body = Mapping[str, Any] | Sequence[Any] | None


def path(template: str, *ids: str) -> str:
    """The path with the ids in it, each as one percent-encoded segment."""
    return template.format(*(_segment(part) for part in ids))


def _segment(part: str) -> str:
    # The HTTP client would take these two for steps in the path, and leave them out.
    return part.replace(".", "%2E") if part in (".", "..") else quote(part, safe="")


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """What was given; what was not takes the service's default."""
    return {name: value for name, value in values.items() if value is not None}


def without_unset(values: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, None too: where a part is changed, None is not the same as nothing."""
    return {name: value for name, value in values.items() if value is not ...}


def as_text(value: Any) -> str | None:
    """JSON for a query string; None stays."""
    return None if value is None else json.dumps(value, separators=(",", ":"))


def moment(when: Any) -> Any:
    """A time as JSON has it."""
    return when.isoformat() if isinstance(when, datetime) else when


def with_event_ids(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the events, each with an ``event_id``: posted any number of times, they count once.

    For events that are kept until they are known to be stored, in a queue or a file, say.
    """
    return [_with_id(event) for event in events]


def lists_to_post(events: Iterable[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Lists of events to post. Each event has an id, so that a list sent twice counts once."""
    rest = map(_with_id, events)
    while rows := list(islice(rest, MAX_EVENTS_PER_REQUEST)):
        yield rows


def _with_id(event: Mapping[str, Any]) -> dict[str, Any]:
    row = dict(event)
    if row.get("event_id") is None:  # the service would give each try an id of its own
        row["event_id"] = uuid.uuid4().hex
    if "timestamp" in row:
        row["timestamp"] = moment(row["timestamp"])
    return row


def waits(answer: httpx2.Response | None, tried: int) -> float:
    """Seconds until the next try: as the service asks, or twice as long as before."""
    retry_after = answer.headers.get("retry-after", "") if answer is not None else ""
    seconds = float(retry_after) if retry_after.isdigit() else FIRST_WAIT_SECONDS * 2.0**tried
    return min(seconds, MAX_WAIT_SECONDS)


def result(answer: httpx2.Response) -> Any:
    """The body of an answer. Raises ServiceError."""
    if answer.status_code >= 400:
        try:
            problem = answer.json()
        except ValueError:
            problem = {"detail": answer.text[:200]}
        raise ServiceError(answer.status_code, problem if isinstance(problem, dict) else {})
    if answer.status_code == 204 or not answer.content:
        return None
    kind = answer.headers.get("content-type", "")
    return answer.json() if "json" in kind else answer.text
