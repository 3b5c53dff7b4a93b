"""What the service answers. Made from its OpenAPI document by `scripts/client.py`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class ABTestOut(TypedDict):
    """A trial."""

    trial_id: str
    kind: Literal["interleaving", "settings", "shadow"]
    version_a: str
    version_b: str
    share: float
    settings: dict[str, Any] | None
    planned_lists: int | None
    status: Literal["running", "ended"]
    created_at: str
    ended_at: str | None
    report: dict[str, Any] | None
    planned_clicked: int | None


class ABTestPage(TypedDict):
    """Trials, newest first."""

    items: list[ABTestOut]
    next_cursor: str | None


class ActivationOut(TypedDict):
    """An activation."""

    generation: int
    version: str | None
    previous: str | None
    reason: Literal["published", "activated", "rolled_back", "returned"]
    detail: dict[str, Any] | None
    at: str
    by: str | None


class ActivationPage(TypedDict):
    """Activations, newest first."""

    items: list[ActivationOut]
    next_cursor: str | None


class BasketRecommendation(TypedDict):
    """The response of `POST /recommend`."""

    recommendation_id: str
    user: str | None
    model_version: str | None
    as_of_seq: int
    took_ms: float
    items: list[RecommendedItem]
    next_cursor: str | None
    ignored: list[str]


class BatchAnswer(TypedDict):
    """The response of `POST /recommend/batch`."""

    results: list[BatchList | BatchRefusal]


class BatchList(TypedDict):
    """The list of a user in a batch."""

    recommendation_id: str
    user: str
    model_version: str | None
    as_of_seq: int
    took_ms: float
    items: list[RecommendedItem]
    next_cursor: str | None
    status: Literal[200]


class BatchRefusal(TypedDict):
    """The problem of a user in a batch who gets no list."""

    status: int
    code: str
    detail: str


class Because(TypedDict):
    """An item of the user that explains a place in the list."""

    id: str
    title: str | None
    effect: float


class ClickThrough(TypedDict):
    """The click-through of a version."""

    lists: int
    clicked: int
    rate: float | None


class Comparison(TypedDict):
    """The response of `POST /compare`."""

    user: str
    model_version: str
    as_of_seq: int
    source: Literal["model", "fold_in", "popular"]
    items: list[str]
    probability: list[list[float]]
    order: list[str]


class EventOut(TypedDict):
    """An event in a user's history."""

    seq: int
    event_id: str
    user: str
    item: str
    type: str
    value: float | None
    timestamp: str


class EventPage(TypedDict):
    """A page of a user's history."""

    items: list[EventOut]
    next_cursor: str | None


class EventsAnswer(TypedDict):
    """The result of each row of `POST /events`."""

    accepted: int
    duplicates: int
    rejected: list[RejectedRow]
    last_seq: int


class ItemOut(TypedDict):
    """An item."""

    id: str
    title: str | None
    categories: list[str]
    hidden: bool
    attributes: dict[str, Any]
    available_from: str | None
    available_until: str | None
    embedding: list[float] | None


class ItemPage(TypedDict):
    """A page of the catalogue."""

    items: list[ItemOut]
    next_cursor: str | None


class ItemsAnswer(TypedDict):
    """The result of each row of `POST /items`."""

    accepted: int
    rejected: list[RejectedItem]


class JobAccepted(TypedDict):
    """The response to a request for a job."""

    job_id: str


class JobOut(TypedDict):
    """A job."""

    job_id: str
    kind: str
    status: Literal["queued", "running", "succeeded", "failed", "cancelled", "rejected"]
    params: dict[str, Any]
    progress: JobProgress | None
    attempt: int
    created_at: str
    started_at: str | None
    finished_at: str | None
    model_version: str | None
    metrics: dict[str, Any] | None
    error: str | None
    by: str | None


class JobPage(TypedDict):
    """Jobs, newest first."""

    items: list[JobOut]
    next_cursor: str | None


class JobProgress(TypedDict):
    """The progress of a running job."""

    phase: str
    epoch: int
    epochs: int
    loss: float | None
    ndcg: float | None
    eta_s: float | None
    peak_bytes: NotRequired[int | None]


class MergeOut(TypedDict):
    """The result of a merge."""

    id: str
    into: str
    events: int
    preferences: int
    last_seq: int


class ModelDetail(TypedDict):
    """A model version with its activations and click-through."""

    version: str
    active: bool
    pinned: bool
    status: Literal["published", "rejected", "deleted"]
    model: str
    factors: int
    trained_seq: int
    users: int
    items: int
    interactions: int
    metrics: dict[str, Any]
    params: dict[str, Any]
    job_id: str | None
    created_at: str
    activated_at: str | None
    activations: list[ActivationOut]
    click_through: ClickThrough


class ModelOut(TypedDict):
    """A model version."""

    version: str
    active: bool
    pinned: bool
    status: Literal["published", "rejected", "deleted"]
    model: str
    factors: int
    trained_seq: int
    users: int
    items: int
    interactions: int
    metrics: dict[str, Any]
    params: dict[str, Any]
    job_id: str | None
    created_at: str
    activated_at: str | None


class ModelPage(TypedDict):
    """Model versions, newest first."""

    items: list[ModelOut]
    next_cursor: str | None


class PinOut(TypedDict):
    """The active version and its pin."""

    version: str | None
    previous: str | None
    pinned: bool


class PopularItem(TypedDict):
    """A popular item."""

    id: str
    title: str | None
    rank: int
    users: int


class PopularItems(TypedDict):
    """The response of `GET /popular`."""

    window: str | None
    items: list[PopularItem]
    next_cursor: str | None


class PreferenceAnswer(TypedDict):
    """The seq of a stored preference, in the order of all events and preferences."""

    seq: int


class PreferencesAnswer(TypedDict):
    """The result of each row of a list of preferences."""

    accepted: int
    rejected: list[RejectedRow]
    last_seq: int


class Problem(TypedDict):
    """A problem document by RFC 9457. The `code` is stable, and the `detail` is for people."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: NotRequired[str]


class Question(TypedDict):
    """A question about two items. A client sends the answer to `POST /preferences`."""

    a: QuestionItem
    b: QuestionItem
    information: float | None


class QuestionItem(TypedDict):
    """An item of a question."""

    id: str
    title: str | None


class Questions(TypedDict):
    """Questions, the most informative first."""

    user: str
    model_version: str | None
    as_of_seq: int
    source: Literal["model", "popular"]
    items: list[Question]
    reason: Literal["seen_everything", "asked_everything", "too_few_items"] | None


class Recommendation(TypedDict):
    """The response of `GET /recommend/{user}` and `POST /rerank`."""

    recommendation_id: str
    user: str
    model_version: str | None
    as_of_seq: int
    took_ms: float
    items: list[RecommendedItem]
    next_cursor: str | None


class RecommendedItem(TypedDict):
    """An item in the list."""

    categories: NotRequired[list[str]]
    attributes: NotRequired[dict[str, Any]]
    id: str
    title: str | None
    rank: int
    score: float | None
    source: Literal["model", "fold_in", "popular"]
    preferred_over_next: float | None
    because: NotRequired[list[Because]]


class RejectedItem(TypedDict):
    """A rejected item, by its index in the list."""

    index: int
    code: str
    detail: str


class RejectedRow(TypedDict):
    """A rejected row, by its index in the request."""

    index: int
    code: str
    detail: str


class RejectedUser(TypedDict):
    """A rejected user, by its index in the list."""

    index: int
    code: str
    detail: str


class SimilarItem(TypedDict):
    """A similar item."""

    categories: NotRequired[list[str]]
    attributes: NotRequired[dict[str, Any]]
    id: str
    title: str | None
    score: float


class SimilarItems(TypedDict):
    """The response of `GET /items/{id}/similar`."""

    recommendation_id: str
    item: str
    model_version: str | None
    items: list[SimilarItem]
    next_cursor: str | None


class TokenOut(TypedDict):
    """A signed token."""

    token: str
    expires_at: str


class TrendingItem(TypedDict):
    """A trending item."""

    id: str
    title: str | None
    rank: int
    users: int
    users_before: int


class TrendingItems(TypedDict):
    """The response of `GET /trending`."""

    window: str
    items: list[TrendingItem]
    next_cursor: str | None


class UserOut(TypedDict):
    """A user."""

    id: str
    attributes: dict[str, Any]
    created_at: str


class UserPage(TypedDict):
    """A page of users."""

    items: list[UserOut]
    next_cursor: str | None


class UsersAnswer(TypedDict):
    """The result of each row of `POST /users`."""

    accepted: int
    rejected: list[RejectedUser]
