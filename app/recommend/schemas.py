"""What an answer looks like."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Source = Literal["model", "fold_in", "popular"]


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


class Recommendation(BaseModel):
    """The answer of `GET /recommend/{user}`."""

    recommendation_id: str
    user: str
    model_version: str | None
    as_of_seq: int = Field(description="Every event of this user up to here has been taken in.")
    took_ms: float
    items: list[RecommendedItem]
