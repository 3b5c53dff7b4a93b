"""What an answer looks like."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Source = Literal["model", "fold_in", "popular"]


class Because(BaseModel):
    """One of the user's own items, and what it does for a place."""

    id: str
    title: str | None
    effect: float = Field(
        description="By how much the log-odds that the item is preferred to the other items shown "
        "would be lower, on average, if the user had not had this one."
    )


class RecommendedItem(BaseModel):
    """One place of the list."""

    id: str
    title: str | None
    rank: int = Field(description="From 1.")
    score: float | None = Field(
        description="Mean probability that the user prefers the item to the model's reference "
        "items; comparable within a model version. Null for `popular`."
    )
    source: Source = Field(
        description="`model`: known to the model; `fold_in`: with events it was not trained on; "
        "`popular`: nothing is known of the user, or the item is not known to the model."
    )
    preferred_over_next: float | None = Field(
        description="Probability that the user prefers the item to the one a rank below."
    )
    because: list[Because] | None = Field(
        default=None,
        description="With `explain=pairwise`: up to three of the user's own items, those that it "
        "is due to most, the first one most of all; empty for `popular`. Otherwise it is not "
        "there.",
    )


class Recommendation(BaseModel):
    """The answer of `GET /recommend/{user}` and `POST /rerank`."""

    recommendation_id: str = Field(
        description="Send it with the events that the list leads to: clicks are counted by it."
    )
    user: str
    model_version: str | None
    as_of_seq: int = Field(description="Every event of this user up to here has been taken in.")
    took_ms: float
    items: list[RecommendedItem]


class BatchList(Recommendation):
    """The list of one of the users of a batch."""

    status: Literal[200]


class BatchRefusal(BaseModel):
    """Why one of the users of a batch gets none."""

    status: int = Field(description="As of an answer by itself.", ge=400)
    code: str
    detail: str


class BatchAnswer(BaseModel):
    """The answer of `POST /recommend/batch`."""

    results: list[BatchList | BatchRefusal] = Field(description="In the order of the users.")


class Comparison(BaseModel):
    """The answer of `POST /compare`."""

    user: str
    model_version: str
    as_of_seq: int = Field(description="Every event of this user up to here has been taken in.")
    source: Source = Field(
        description="`popular`: nothing is known of the user, the probabilities are those of the "
        "mean of all users."
    )
    items: list[str] = Field(description="Each once: what the rows and columns stand for.")
    probability: list[list[float]] = Field(
        description="How probably the user prefers the item of the row to that of the column."
    )
    order: list[str] = Field(description="The items, best first.")


class SimilarItem(BaseModel):
    """An item that is like another."""

    id: str
    title: str | None
    score: float = Field(description="Its similarity, at most 1.")


class SimilarItems(BaseModel):
    """The answer of `GET /items/{id}/similar`."""

    item: str
    model_version: str | None = Field(
        description="The version that `score` is by: the cosine of what it knows of the items, "
        "their popularity left out. Null where the model does not know the item, or there is no "
        "model: then it is the cosine of who took them up."
    )
    items: list[SimilarItem] = Field(description="Most alike first.")
