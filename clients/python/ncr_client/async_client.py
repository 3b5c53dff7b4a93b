"""The client for asyncio; `client.py`, for threads, is made from it by `hatch_build.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from types import EllipsisType, TracebackType
from typing import Any, Literal, Self, cast

import httpx2

from ncr_client import answers
from ncr_client.calls import (
    MAX_ATTEMPTS,
    NOT_SENT_ERRORS,
    RETRY_STATUSES,
    TOO_MANY_REQUESTS,
    Body,
    JobFailedError,
    NotReachedError,
    RequestError,
    as_text,
    lists_to_post,
    moment,
    path,
    result,
    waits,
    without_none,
    without_unset,
)


class AsyncClient:
    """The service at ``base_url``, called with ``key`` where it has keys.

    A ``token`` instead of a key opens ``recommend`` and ``post_events`` of its user.

    What can be sent twice without harm is tried again, a few times, while the service cannot be
    reached or says 429 or 503; events can, because each gets an ``event_id``, and what is to be
    deleted may be gone by the second time. What the caller posts again needs those ids, too: see
    ``post_events``. What would be done twice (a training, a preference, a
    trial, a rollback, the end of a job or a trial) is tried again only where it was surely not
    done: after a 429, and where no connection came about. A 503 may come after it was done.
    Raises ServiceError for what the service refuses and NotReachedError when it cannot be reached.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        key: str | None = None,
        *,
        token: str | None = None,
        timeout: float = 10.0,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {} if key is None else {"X-API-Key": key}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx2.AsyncClient(
            base_url=base_url, headers=headers, timeout=timeout, transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of the connections."""
        await self._http.aclose()

    # What users would like

    async def recommend(
        self,
        user: str,
        n: int = 10,
        *,
        exclude_seen: bool | None = None,
        category: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        explain: Literal["none", "pairwise"] | None = None,
        min_seq: int | None = None,
        model: str | None = None,
        diversity: float | None = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - as the service has it
        boost: Sequence[Mapping[str, Any]] | None = None,
        include: Sequence[Literal["categories", "attributes"]] | None = None,
        seen: Mapping[str, str | int] | None = None,
        hide_shown: str | int | None = None,
        cursor: str | None = None,
    ) -> answers.Recommendation:
        """The ``n`` items that the user would like next.

        ``filter`` leaves items by their attributes, as ``{"brand": "x", "price": {"lt": 50}}``;
        ``boost`` adds log-odds, as ``[{"filter": {"brand": "x"}, "by": 0.5}]``; ``include`` says
        what is shown of each item. ``seen`` says for how long an event of a type keeps its item
        out, as ``{"purchase": "14d"}``, and ``hide_shown`` for how long, as ``"6h"``, what lists
        showed and the user did not take. ``cursor`` is the ``next_cursor`` of the page before, with
        the same other arguments.
        """
        query = without_none(
            {
                "n": n,
                "exclude_seen": exclude_seen,
                "category": category,
                "exclude": exclude,
                "explain": explain,
                "min_seq": min_seq,
                "model": model,
                "diversity": diversity,
                "filter": as_text(filter),
                "boost": as_text(boost),
                "include": include and ",".join(include),
                "seen": as_text(seen),
                "hide_shown": hide_shown,
                "cursor": cursor,
            }
        )
        answer = await self._send("GET", path("/recommend/{}", user), query)
        return cast(answers.Recommendation, answer)

    async def recommend_for(
        self,
        items: Sequence[str] | None = None,
        n: int = 10,
        *,
        user: str | None = None,
        item: str | None = None,
        exclude_seen: bool | None = None,
        category: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        explain: Literal["none", "pairwise"] | None = None,
        min_seq: int | None = None,
        model: str | None = None,
        diversity: float | None = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - as the service has it
        boost: Sequence[Mapping[str, Any]] | None = None,
        include: Sequence[Literal["categories", "attributes"]] | None = None,
        seen: Mapping[str, str | int] | None = None,
        hide_shown: str | int | None = None,
        cursor: str | None = None,
    ) -> answers.BasketRecommendation:
        """The ``n`` items that suit a basket or session, the latest of ``items`` last.

        ``item`` is what is being looked at; with ``user`` the user's own events count, too.
        Nothing is stored, but what ``hide_shown`` has to know. ``filter``, ``boost``, ``include``,
        ``seen`` and ``hide_shown`` as in ``recommend``.
        """
        body = without_none(
            {
                "user": user,
                "items": None if items is None else list(items),
                "item": item,
                "n": n,
                "exclude_seen": exclude_seen,
                "category": category,
                "exclude": exclude,
                "explain": explain,
                "min_seq": min_seq,
                "model": model,
                "diversity": diversity,
                "filter": filter,
                "boost": boost,
                "include": include,
                "seen": seen,
                "hide_shown": hide_shown,
                "cursor": cursor,
            }
        )
        answer = await self._send("POST", "/recommend", body=body)
        return cast(answers.BasketRecommendation, answer)

    async def recommend_batch(
        self,
        users: Sequence[str],
        n: int = 10,
        *,
        exclude_seen: bool | None = None,
        category: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        explain: Literal["none", "pairwise"] | None = None,
        min_seq: int | None = None,
        model: str | None = None,
        diversity: float | None = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - as the service has it
        boost: Sequence[Mapping[str, Any]] | None = None,
        include: Sequence[Literal["categories", "attributes"]] | None = None,
        seen: Mapping[str, str | int] | None = None,
        hide_shown: str | int | None = None,
    ) -> answers.BatchAnswer:
        """Lists of ``n`` items for many users; see ``recommend``."""
        body = without_none(
            {
                "users": list(users),
                "n": n,
                "exclude_seen": exclude_seen,
                "category": category,
                "exclude": exclude,
                "explain": explain,
                "min_seq": min_seq,
                "model": model,
                "diversity": diversity,
                "filter": filter,
                "boost": boost,
                "include": include,
                "seen": seen,
                "hide_shown": hide_shown,
            }
        )
        return cast(answers.BatchAnswer, await self._send("POST", "/recommend/batch", body=body))

    async def rerank(
        self,
        user: str,
        items: Sequence[str],
        *,
        min_seq: int | None = None,
        model: str | None = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - as the service has it
        boost: Sequence[Mapping[str, Any]] | None = None,
        include: Sequence[Literal["categories", "attributes"]] | None = None,
    ) -> answers.Recommendation:
        """These items, if they fit, in the order in which the user would like them.

        ``filter``, ``boost`` and ``include`` are those of ``recommend``.
        """
        body = without_none(
            {
                "user": user,
                "items": list(items),
                "min_seq": min_seq,
                "model": model,
                "filter": filter,
                "boost": boost,
                "include": include,
            }
        )
        return cast(answers.Recommendation, await self._send("POST", "/rerank", body=body))

    async def compare(
        self,
        user: str,
        items: Sequence[str],
        *,
        min_seq: int | None = None,
        model: str | None = None,
    ) -> answers.Comparison:
        """How probable it is that the user prefers each of these items to each other."""
        fields = {"user": user, "items": list(items), "min_seq": min_seq, "model": model}
        body = without_none(fields)
        return cast(answers.Comparison, await self._send("POST", "/compare", body=body))

    async def similar(
        self,
        item: str,
        n: int = 10,
        *,
        user: str | None = None,
        category: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - as the service has it
        include: Sequence[Literal["categories", "attributes"]] | None = None,
        seen: Mapping[str, str | int] | None = None,
        hide_shown: str | int | None = None,
        cursor: str | None = None,
    ) -> answers.SimilarItems:
        """Items that are liked by the same users, without those that ``user`` has seen.

        ``filter``, ``include``, ``seen`` and ``hide_shown`` as in ``recommend``.
        """
        query = without_none(
            {
                "n": n,
                "user": user,
                "category": category,
                "exclude": exclude,
                "filter": as_text(filter),
                "include": include and ",".join(include),
                "seen": as_text(seen),
                "hide_shown": hide_shown,
                "cursor": cursor,
            }
        )
        answer = await self._send("GET", path("/items/{}/similar", item), query)
        return cast(answers.SimilarItems, answer)

    async def popular(
        self,
        n: int = 10,
        *,
        window: str | None = None,
        category: Sequence[str] | None = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - as the service has it
        cursor: str | None = None,
    ) -> answers.PopularItems:
        """The items with the most users, of all time or of a ``window`` such as 6h or 7d."""
        query = without_none(
            {
                "n": n,
                "window": window,
                "category": category,
                "filter": as_text(filter),
                "cursor": cursor,
            }
        )
        return cast(answers.PopularItems, await self._send("GET", "/popular", query))

    async def trending(
        self,
        n: int = 10,
        *,
        window: str | None = None,
        category: Sequence[str] | None = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - as the service has it
        cursor: str | None = None,
    ) -> answers.TrendingItems:
        """The items with more users than in the ``window`` before: a day, or such as 6h or 7d."""
        query = without_none(
            {
                "n": n,
                "window": window,
                "category": category,
                "filter": as_text(filter),
                "cursor": cursor,
            }
        )
        return cast(answers.TrendingItems, await self._send("GET", "/trending", query))

    async def questions(self, user: str, n: int = 5) -> answers.Questions:
        """Pairs of items to ask the user about: their answers go to ``prefer``."""
        answer = await self._send("GET", path("/users/{}/questions", user), {"n": n})
        return cast(answers.Questions, answer)

    # What users did

    async def post_events(self, events: Iterable[Mapping[str, Any]]) -> list[answers.EventsAnswer]:
        """Records events, in lists of a thousand, each list stored when this returns.

        An event has ``user`` and ``item``, and may have ``type``, ``value``, ``timestamp`` (a
        datetime, ISO-8601 or epoch seconds), ``recommendation_id`` and ``event_id``. A row that is
        rejected harms no other: see ``rejected`` in the answers.

        A RequestError has what is ``stored`` and the ``remaining`` events with their ids: post
        those again, for the events themselves would get other ids and count twice.
        """
        stored: list[answers.EventsAnswer] = []
        lists = lists_to_post(events)
        for rows in lists:
            try:
                answer = await self._send("POST", "/events", body=rows)
            except RequestError as error:
                error.stored = stored
                error.remaining = chain(rows, chain.from_iterable(lists))
                raise
            stored.append(answer)
        return stored

    async def post_event(
        self,
        user: str,
        item: str,
        *,
        type: str | None = None,  # noqa: A002 - as an event has it
        value: float | None = None,
        timestamp: datetime | str | float | None = None,
        recommendation_id: str | None = None,
        event_id: str | None = None,
    ) -> answers.EventsAnswer:
        """Records one event; see ``post_events``."""
        event = without_none(
            {
                "user": user,
                "item": item,
                "type": type,
                "value": value,
                "timestamp": timestamp,
                "recommendation_id": recommendation_id,
                "event_id": event_id,
            }
        )
        return (await self.post_events([event]))[0]

    async def delete_event(self, event_id: str) -> None:
        """Deletes an event."""
        await self._send("DELETE", path("/events/{}", event_id))

    async def prefer(
        self, user: str, winner: str, loser: str, *, timestamp: datetime | str | float | None = None
    ) -> answers.PreferenceAnswer:
        """Records that the user said to prefer ``winner`` to ``loser``; without a time, now."""
        said = {"user": user, "winner": winner, "loser": loser, "timestamp": moment(timestamp)}
        answer = await self._send("POST", "/preferences", body=without_none(said), again=False)
        return cast(answers.PreferenceAnswer, answer)

    async def events_of(self, user: str, n: int = 100) -> AsyncIterator[answers.EventOut]:
        """The user's events, newest first, ``n`` a request."""
        async for row in self._pages(path("/users/{}/events", user), {"n": n}):
            yield cast(answers.EventOut, row)

    # Who they are

    async def post_users(self, users: Sequence[Mapping[str, Any]]) -> answers.UsersAnswer:
        """Describes users: ``id``, ``attributes``."""
        return cast(answers.UsersAnswer, await self._send("POST", "/users", body=list(users)))

    async def put_user(
        self, user: str, *, attributes: dict[str, Any] | None = None
    ) -> answers.UserOut:
        """Describes a user; without attributes there are none afterwards."""
        body = without_none({"attributes": attributes})
        return cast(answers.UserOut, await self._send("PUT", path("/users/{}", user), body=body))

    async def patch_user(
        self, user: str, *, attributes: dict[str, Any] | EllipsisType | None = ...
    ) -> answers.UserOut:
        """Adds to the user's attributes; one that is None is removed, and None removes all."""
        body = without_unset({"attributes": attributes})
        return cast(answers.UserOut, await self._send("PATCH", path("/users/{}", user), body=body))

    async def get_user(self, user: str) -> answers.UserOut:
        """A user's attributes."""
        return cast(answers.UserOut, await self._send("GET", path("/users/{}", user)))

    async def users(
        self, n: int = 100, prefix: str | None = None
    ) -> AsyncIterator[answers.UserOut]:
        """All users, or those whose id begins with ``prefix``, newest first, ``n`` a request."""
        async for row in self._pages("/users", without_none({"n": n, "prefix": prefix})):
            yield cast(answers.UserOut, row)

    async def merge_user(self, user: str, into: str) -> answers.MergeOut:
        """Gives all that a visitor did to the user who has logged in; once, however often sent."""
        answer = await self._send("POST", path("/users/{}/merge", user), body={"into": into})
        return cast(answers.MergeOut, answer)

    async def delete_user(self, user: str) -> None:
        """Erases a user and all that they did."""
        await self._send("DELETE", path("/users/{}", user))

    # What can be recommended

    async def post_items(self, items: Sequence[Mapping[str, Any]]) -> answers.ItemsAnswer:
        """Describes items.

        An item has ``id``, and may have ``title``, ``categories``, ``hidden``, ``attributes``,
        ``available_from`` and ``available_until`` (ISO-8601 or epoch seconds).
        """
        return cast(answers.ItemsAnswer, await self._send("POST", "/items", body=list(items)))

    async def put_item(
        self,
        item: str,
        *,
        title: str | None = None,
        categories: Sequence[str] | None = None,
        hidden: bool | None = None,
        attributes: dict[str, Any] | None = None,
        available_from: datetime | str | float | None = None,
        available_until: datetime | str | float | None = None,
        embedding: Sequence[float] | None = None,
    ) -> answers.ItemOut:
        """Describes an item; fields left out are empty afterwards.

        It is in no list before ``available_from``, and from ``available_until`` on. The
        ``embedding`` is a vector of your own, as long as those of the other items.
        """
        body = without_none(
            {
                "title": title,
                "categories": categories,
                "hidden": hidden,
                "attributes": attributes,
                "available_from": moment(available_from),
                "available_until": moment(available_until),
                "embedding": embedding,
            }
        )
        return cast(answers.ItemOut, await self._send("PUT", path("/items/{}", item), body=body))

    async def patch_item(
        self,
        item: str,
        *,
        title: str | EllipsisType | None = ...,
        categories: Sequence[str] | EllipsisType | None = ...,
        hidden: bool | EllipsisType | None = ...,
        attributes: dict[str, Any] | EllipsisType | None = ...,
        available_from: datetime | str | float | EllipsisType | None = ...,
        available_until: datetime | str | float | EllipsisType | None = ...,
        embedding: Sequence[float] | EllipsisType | None = ...,
    ) -> answers.ItemOut:
        """Changes these fields of an item's description; None empties a field.

        ``attributes`` are added to those that exist; one that is None is removed.
        """
        body = without_unset(
            {
                "title": title,
                "categories": categories,
                "hidden": hidden,
                "attributes": attributes,
                "available_from": moment(available_from),
                "available_until": moment(available_until),
                "embedding": embedding,
            }
        )
        return cast(answers.ItemOut, await self._send("PATCH", path("/items/{}", item), body=body))

    async def get_item(self, item: str) -> answers.ItemOut:
        """An item's description."""
        return cast(answers.ItemOut, await self._send("GET", path("/items/{}", item)))

    async def items(
        self, n: int = 100, category: str | None = None, prefix: str | None = None
    ) -> AsyncIterator[answers.ItemOut]:
        """All items, or those of a category or whose id begins with ``prefix``, ``n`` a request."""
        query = without_none({"n": n, "category": category, "prefix": prefix})
        async for row in self._pages("/items", query):
            yield cast(answers.ItemOut, row)

    async def delete_item(self, item: str) -> None:
        """Never recommends the item again."""
        await self._send("DELETE", path("/items/{}", item))

    # Models

    async def train(
        self,
        *,
        recipe: Literal[
            "auto",
            "default",
            "history",
            "next-item",
            "next-item-nbpr",
            "next-item-attention",
            "als-nbpr",
            "spectral-neupr",
            "next-item-two-layer-attention",
            "next-item-neupr",
            "next-item-dncr",
        ]
        | None = None,
        model: Literal["nbpr", "dncr", "neupr"] | None = None,
        factors: int | None = None,
        layers: int | None = None,
        users: Literal["free", "history"] | None = None,
        epochs: int | None = None,
        negatives: int | None = None,
        learning_rate: float | None = None,
        batch_size: int | None = None,
        pretrain: bool | None = None,
        alpha: float | None = None,
        min_interactions: int | None = None,
        seed: int | None = None,
        start: Literal["scratch", "warm"] | None = None,
        attributes: Literal["auto"] | Sequence[str] | None = None,
        force: bool | None = None,
    ) -> answers.JobAccepted:
        """Submits a training; parameters left out take the service's defaults."""
        body = without_none(
            {
                "recipe": recipe,
                "model": model,
                "factors": factors,
                "layers": layers,
                "users": users,
                "epochs": epochs,
                "negatives": negatives,
                "learning_rate": learning_rate,
                "batch_size": batch_size,
                "pretrain": pretrain,
                "alpha": alpha,
                "min_interactions": min_interactions,
                "seed": seed,
                "start": start,
                "attributes": attributes,
                "force": force,
            }
        )
        answer = await self._send("POST", "/admin/train", body=body, again=False)
        return cast(answers.JobAccepted, answer)

    async def export(
        self,
        *,
        format: Literal["jsonl", "parquet"] | None = None,  # noqa: A002 - the service's word
        tables: Sequence[str] | None = None,
        lists: dict[str, Any] | None = None,
    ) -> answers.JobAccepted:
        """Submits an export; ``lists``, as ``{"n": 10}``, adds the lists of all users."""
        body = without_none({"format": format, "tables": tables, "lists": lists})
        answer = await self._send("POST", "/admin/export", body=body, again=False)
        return cast(answers.JobAccepted, answer)

    async def job(self, job_id: str) -> answers.JobOut:
        """How a job stands."""
        return cast(answers.JobOut, await self._send("GET", path("/admin/jobs/{}", job_id)))

    async def jobs(self, n: int = 100) -> AsyncIterator[answers.JobOut]:
        """All jobs, newest first, ``n`` a request."""
        async for row in self._pages("/admin/jobs", {"n": n}):
            yield cast(answers.JobOut, row)

    async def wait_for(
        self, job_id: str, timeout: float = 3600.0, poll: float = 1.0
    ) -> answers.JobOut:
        """The job when it has succeeded. Raises JobFailedError, or TimeoutError."""
        until = time.monotonic() + timeout
        while True:
            job = await self.job(job_id)
            if job["status"] == "succeeded":
                return job
            if job["status"] not in ("queued", "running"):
                raise JobFailedError(job)
            if time.monotonic() > until:
                raise TimeoutError(f"job {job_id} is {job['status']} after {timeout:g} s")
            await asyncio.sleep(poll)

    async def cancel(self, job_id: str) -> answers.JobOut:
        """Asks for an end of the job."""
        answer = await self._send("POST", path("/admin/jobs/{}/cancel", job_id), again=False)
        return cast(answers.JobOut, answer)

    async def models(self, n: int = 100) -> AsyncIterator[answers.ModelOut]:
        """All versions, newest first, ``n`` a request."""
        async for row in self._pages("/admin/models", {"n": n}):
            yield cast(answers.ModelOut, row)

    async def model(self, version: str) -> answers.ModelDetail:
        """A version: what was measured of it, and what became of it."""
        return cast(answers.ModelDetail, await self._send("GET", path("/admin/models/{}", version)))

    async def activate(self, version: str, force: bool = False) -> answers.ModelOut:
        """Serves this version; with ``force`` also one that the gate has rejected."""
        where = path("/admin/models/{}/activate", version)
        return cast(answers.ModelOut, await self._send("POST", where, {"force": force}))

    async def pin(self, version: str, force: bool = False) -> answers.ModelOut:
        """Serves this version, whatever is trained."""
        where = path("/admin/models/{}/pin", version)
        return cast(answers.ModelOut, await self._send("POST", where, {"force": force}))

    async def unpin(self) -> answers.PinOut:
        """Serves again what is trained from here on."""
        return cast(answers.PinOut, await self._send("DELETE", "/admin/models/pin"))

    async def rollback(self) -> answers.ModelOut:
        """Serves the version before."""
        answer = await self._send("POST", "/admin/models/rollback", again=False)
        return cast(answers.ModelOut, answer)

    async def activations(self, n: int = 100) -> AsyncIterator[answers.ActivationOut]:
        """What was served when and why, newest first, ``n`` a request."""
        async for row in self._pages("/admin/activations", {"n": n}):
            yield cast(answers.ActivationOut, row)

    # Trials of one version beside another

    async def begin_trial(
        self,
        version: str | None,
        kind: Literal["interleaving", "settings", "shadow"],
        share: float = 0.1,
        settings: Mapping[str, Any] | None = None,
        planned_lists: int | None = None,
        planned_clicked: int | None = None,
    ) -> answers.ABTestOut:
        """Tries a version or settings beside what is served, with a share of users or requests.

        Args:
            version: the version to try; None for a trial of settings alone.
            kind: how it is tried.
            share: the share of the users, of a shadow trial of the requests.
            settings: of kind `settings`, what its users get, by name.
            planned_lists: of kind `settings`, the lists for which the test is tuned.
            planned_clicked: of kind `interleaving`, the lists with a click at which it is read.
        """
        body: dict[str, Any] = {"kind": kind, "share": share}
        given = {
            "version": version, "settings": settings, "planned_lists": planned_lists,
            "planned_clicked": planned_clicked,
        }  # fmt: skip
        body |= {name: value for name, value in given.items() if value is not None}
        answer = await self._send("POST", "/admin/trials", body=body, again=False)
        return cast(answers.ABTestOut, answer)

    async def trial(self, trial_id: str) -> answers.ABTestOut:
        """A trial with its report, while it runs too."""
        return cast(answers.ABTestOut, await self._send("GET", path("/admin/trials/{}", trial_id)))

    async def trials(self, n: int = 100) -> AsyncIterator[answers.ABTestOut]:
        """All trials, newest first, ``n`` a request."""
        async for row in self._pages("/admin/trials", {"n": n}):
            yield cast(answers.ABTestOut, row)

    async def end_trial(self, trial_id: str) -> answers.ABTestOut:
        """Ends a trial and keeps its report."""
        answer = await self._send("POST", path("/admin/trials/{}/stop", trial_id), again=False)
        return cast(answers.ABTestOut, answer)

    # Tokens for browsers

    async def sign_token(
        self, user: str, *, ttl_s: float | None = None, roles: Sequence[str] | None = None
    ) -> answers.TokenOut:
        """A token for a user's browser: for the user's lists, and for posting their events."""
        body = without_none({"user": user, "ttl_s": ttl_s, "roles": roles})
        return cast(answers.TokenOut, await self._send("POST", "/tokens", body=body))

    # How the service is

    async def ready(self) -> bool:
        """Whether requests should be sent here: asked once. Raises NotReachedError."""
        try:
            answer = await self._http.get("/health/ready")
        except httpx2.TransportError as error:
            raise NotReachedError(f"GET /health/ready: {error}") from error
        return answer.status_code == 200

    async def metrics(self) -> str:
        """Figures in Prometheus's text format."""
        return cast(str, await self._send("GET", "/metrics"))

    async def _pages(self, where: str, query: Mapping[str, Any]) -> AsyncIterator[Any]:
        cursor: str | None = None
        while True:
            page = await self._send("GET", where, without_none({**query, "cursor": cursor}))
            for row in page["items"]:
                yield row
            cursor = page["next_cursor"]
            if cursor is None:
                return

    async def _send(
        self,
        method: str,
        where: str,
        query: Mapping[str, Any] | None = None,
        body: Body = None,
        *,
        again: bool = True,
    ) -> Any:
        """The body of the answer. Raises ServiceError and NotReachedError.

        A request that may not be sent ``again`` is repeated only if it was surely not carried out.
        """
        answer: httpx2.Response | None = None
        error: httpx2.TransportError | None = None
        doubt = False  # whether a try may have been carried out that did not say so
        for tried in range(MAX_ATTEMPTS):
            if tried:
                await asyncio.sleep(waits(answer, tried - 1))
            answer = None
            try:
                answer = await self._http.request(method, where, params=query, json=body)
            except httpx2.TransportError as failure:
                error = failure
                doubt = doubt or not isinstance(failure, NOT_SENT_ERRORS)
            else:
                if answer.status_code not in RETRY_STATUSES:
                    break
                # A 503 may come after the commit, where the database is lost just then.
                doubt = doubt or answer.status_code != TOO_MANY_REQUESTS
            if doubt and not again:
                break
        if answer is None:
            raise NotReachedError(f"{method} {where}: {error or 'no answer'}") from error
        if doubt and method == "DELETE" and answer.status_code == 404:
            return None  # an earlier try has deleted it
        return result(answer)
