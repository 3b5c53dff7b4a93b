"""Jobs, and the parameters of a training."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
)

from app.registry.schemas import BY, iso
from ncr_core.model_config import ModelConfig
from ncr_core.parameters import ConfigField, parameters_of
from ncr_core.recipes import AUTO_RECIPE, SERVICE_RECIPES, Recipe, recipe
from ncr_core.train_config import TrainConfig

Kind = Literal["train", "candidates"]
Status = Literal["queued", "running", "succeeded", "failed", "cancelled", "rejected"]
Trigger = Literal["request", "schedule", "events"]
"""What queued a training: a client, the schedule, or the number of new events."""
ENDED = ("succeeded", "failed", "cancelled", "rejected")


REQUEST_PARAMETERS = tuple(
    spec
    for config in (ModelConfig, TrainConfig)
    for spec in parameters_of(config)
    if spec.parameter.request is not None
)
"""The hyper-parameters that a request for training may give."""


def _known_recipe(name: str) -> str:
    if name not in SERVICE_RECIPES:
        raise ValueError(f"there is no such recipe; there are {', '.join(SERVICE_RECIPES)}")
    return name


RecipeName = Annotated[
    str, AfterValidator(_known_recipe), Field(json_schema_extra={"enum": list(SERVICE_RECIPES)})
]

_DESCRIPTIONS = {
    "users": "What a user's vector is: `free`, learned for each user, or `history`, made of "
    "the items that the user took up, the latest ones counting most. By default as the service "
    "is set. With `history`, `epochs` is {epochs} and `learning_rate` {learning_rate} unless "
    "given.".format_map(vars(recipe("history").training)),
}

M = TypeVar("M", bound=BaseModel)


def _as_integer(value: Any) -> Any:
    """In JSON 5.0 is as whole a number as 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_as_integer)]


def _request_field(spec: ConfigField) -> tuple[Any, Any]:
    """The type and the field of a hyper-parameter in a request."""
    description = _DESCRIPTIONS.get(spec.public_name)
    bounds: dict[str, Any] = {**spec.parameter.bounds, **(spec.parameter.request or {})}
    kind: Any = Annotated[spec.parameter.request_type or spec.type, Field(**bounds)]
    if spec.type is int:
        kind = Annotated[kind, BeforeValidator(_as_integer)]
    if spec.parameter.by_setting:  # None: the request leaves it to the setting
        return kind | None, Field(default=None, description=description)
    return kind, Field(default=spec.default, description=description)


def with_hyperparameters(model: type[M]) -> type[M]:
    """Adds a field for each of ``REQUEST_PARAMETERS`` to a request model."""
    fields: dict[str, Any] = {s.public_name: _request_field(s) for s in REQUEST_PARAMETERS}
    return create_model(
        model.__name__, __base__=model, __doc__=model.__doc__, __module__=model.__module__, **fields
    )


@with_hyperparameters
class TrainParams(BaseModel):
    """The body of `POST /admin/train`; what is left out takes the service's default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    recipe: RecipeName | None = Field(
        default=None,
        description="`auto` trains a few recipes and keeps the best on this data; any other name "
        "trains that recipe, with the hyper-parameters of this request in place of its own. By "
        "default as the service is set, unless the request gives a hyper-parameter.",
    )
    min_interactions: Integer = Field(
        default=1,
        ge=1,
        lt=2**31,
        description="Items with fewer interactions are left out of training.",
    )
    start: Literal["scratch", "warm"] | None = Field(
        default=None,
        description="`warm` begins from the served model, whose kind, factors and layers it has to "
        "have: fewer epochs, at the rate of fine-tuning. By default as the service is set.",
    )
    force: bool = Field(
        default=False,
        description="Publish whatever the gate finds; its report says that it was forced.",
    )

    def hyperparameters(self) -> set[str]:
        """The names of the hyper-parameters that the request gives."""
        return {
            spec.public_name
            for spec in REQUEST_PARAMETERS
            if spec.public_name in self.model_fields_set
            and getattr(self, spec.public_name) is not None
        }

    @property
    def random_seed(self) -> int:
        """The seed, which every recipe takes from the request."""
        return int(self.model_dump()["seed"])

    def configured_recipe(self, **overrides: Any) -> Recipe:
        """The recipe that this request asks for; ``overrides`` as of ``Recipe.with_``.

        Not for the recipe ``auto``, which is chosen in training.
        """
        base = _base_recipe(self.recipe, self.model_dump()["users"])
        given = self.hyperparameters()
        values = {
            spec.name: getattr(self, spec.public_name)
            for spec in REQUEST_PARAMETERS
            if getattr(self, spec.public_name) is not None
            and (self.recipe is None or spec.public_name in given)
        }
        return base.with_(**values, **overrides)

    def completed(self, recipe: str | None, **defaults: Any) -> dict[str, Any]:
        """The request with nothing left open.

        Args:
            recipe: What the service is set to, for a request without hyper-parameters.
            defaults: What the service is set to, for the fields that a setting decides.

        Raises:
            ConfigError: The hyper-parameters do not fit each other.
        """
        values = self.model_dump()
        given = self.hyperparameters()
        chosen = self.recipe or (None if given - {"seed"} else recipe)
        if chosen == AUTO_RECIPE:
            names = {spec.public_name for spec in REQUEST_PARAMETERS} - {"seed"}
            kept = {name: value for name, value in values.items() if name not in names}
            return kept | {"recipe": AUTO_RECIPE}
        if chosen is None:
            values |= {name: value for name, value in defaults.items() if values[name] is None}
        base = _base_recipe(chosen, values["users"])
        for spec in REQUEST_PARAMETERS:
            by_setting = spec.parameter.by_setting and chosen is None
            if not by_setting and spec.public_name not in given:
                values[spec.public_name] = base.value(spec.name)
        base.with_(**{spec.name: values[spec.public_name] for spec in REQUEST_PARAMETERS})
        if chosen is None:
            del values["recipe"]
            return values
        return values | {"recipe": chosen}


def _base_recipe(name: str | None, users: str | None) -> Recipe:
    return recipe(name or ("history" if users == "history" else "default"))


class TrainOrder(TrainParams):
    """The stored params of a training job: the request with all defaults, and what triggered it."""

    epochs: Integer = Field(default=TrainConfig.epochs, ge=0, le=1000)
    """0 in recipes that keep their start; a request cannot give it."""
    trigger: Trigger = "request"


class JobRow(NamedTuple):
    """A job as stored; times are microseconds since 1970, UTC."""

    job_id: str
    kind: str
    status: str
    params: dict[str, Any]
    progress: dict[str, Any] | None
    attempt: int
    owner: str | None
    lease_until: int | None
    cancel_requested: bool
    created_at: int
    started_at: int | None
    finished_at: int | None
    model_version: str | None
    metrics: dict[str, Any] | None
    error: str | None
    by: str | None
    """See `app.core.security.Caller.key_id`; None for the service itself."""


Time = Annotated[str | None, BeforeValidator(iso)]


class JobProgress(BaseModel):
    """The progress of a running job."""

    phase: str
    epoch: int
    epochs: int
    loss: float | None
    ndcg: float | None = Field(description="NDCG@10 on the validation items.")
    eta_s: float | None = Field(description="Seconds left, as far as it can be told.")


class JobOut(BaseModel):
    """A job."""

    model_config = ConfigDict(from_attributes=True)

    job_id: str
    kind: str
    status: Status
    params: dict[str, Any]
    progress: JobProgress | None
    attempt: int
    created_at: Annotated[str, BeforeValidator(iso)]
    started_at: Time
    finished_at: Time
    model_version: str | None
    metrics: dict[str, Any] | None
    error: str | None
    by: str | None = Field(description=BY)


class JobPage(BaseModel):
    """Jobs, newest first."""

    items: list[JobOut]
    next_cursor: str | None


class JobAccepted(BaseModel):
    """The response to a request for training."""

    job_id: str
