"""Jobs, the parameters of a training, and the task that a worker sends to its child process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    create_model,
    model_validator,
)

from app.core.requests import Integer, as_integer, text_problem, text_schema
from app.core.settings import Settings
from app.registry.schemas import BY, iso
from ncr_core.model_config import ModelConfig
from ncr_core.parameters import ConfigField, parameters_of
from ncr_core.recipes import AUTO_RECIPE, RECIPES, SERVICE_RECIPES, Recipe
from ncr_core.train_config import TrainConfig

Kind = Literal["train", "candidates", "export"]
Status = Literal["queued", "running", "succeeded", "failed", "cancelled", "rejected"]
Trigger = Literal["request", "schedule", "events"]
"""The cause of a training: a client, the schedule, or the number of new events."""
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
        raise ValueError(f"unknown recipe; the recipes are {', '.join(SERVICE_RECIPES)}")
    return name


RecipeName = Annotated[
    str, AfterValidator(_known_recipe), Field(json_schema_extra={"enum": list(SERVICE_RECIPES)})
]

_DESCRIPTIONS = {
    "users": "The kind of user vector. `free` learns a vector for each user. `history` makes "
    "the vector from the items of the user, with the largest weight on the latest "
    "ones. The default is the setting of the service. With `history`, the default of "
    "`epochs` is {epochs}, and the default of `learning_rate` is {learning_rate}.".format_map(
        vars(RECIPES["history"].training)
    ),
}

M = TypeVar("M", bound=BaseModel)


AttributeName = Annotated[str, Field(min_length=1, max_length=256)]
Attributes = Literal["auto"] | Annotated[list[AttributeName], Field(max_length=64)]


def _request_field(spec: ConfigField) -> tuple[Any, Any]:
    """The type and the field of a hyper-parameter in a request."""
    description = _DESCRIPTIONS.get(spec.public_name)
    bounds: dict[str, Any] = {**spec.parameter.bounds, **(spec.parameter.request or {})}
    kind: Any = Annotated[spec.parameter.request_type or spec.type, Field(**bounds)]
    if spec.type is int:
        kind = Annotated[kind, BeforeValidator(as_integer)]
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
    """The body of `POST /admin/train`. Missing fields get the defaults of the service."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    recipe: RecipeName | None = Field(
        default=None,
        description="The recipe. `auto` trains several recipes and keeps the one with the "
        "best validation result. Any other name trains that recipe. "
        "Hyper-parameters of the request replace those of the recipe. The default "
        "is the setting of the service, unless the request gives a "
        "hyper-parameter.",
    )
    min_interactions: Integer = Field(
        default=1,
        ge=1,
        lt=2**31,
        description="The minimum number of interactions of an item. The training leaves out "
        "other items.",
    )
    start: Literal["scratch", "warm"] | None = Field(
        default=None,
        description="`warm` starts the training from the parameters of the served model. The "
        "kind, factors and layers of both models must be the same. The training "
        "then has fewer epochs and the learning rate of fine-tuning. The default "
        "is the setting of the service.",
    )
    attributes: Attributes | None = Field(
        default=None,
        description="Attributes of items and users for the placement of new ones. `auto` "
        "keeps the attributes that predict on this data. An empty list uses no "
        "attributes. The default is the setting of the service.",
    )
    force: bool = Field(
        default=False,
        description="Publish the version even if the gate rejects it. The report of the gate "
        "records the force.",
    )

    @property
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
        """The recipe of this request; ``overrides`` as for ``Recipe.with_``.

        A request with the recipe ``auto`` is invalid here, because the training chooses its recipe.
        """
        values = self.model_dump()
        base = self.recipe or ("history" if values["users"] == "history" else "default")
        given = self.hyperparameters
        own = {s.name: values[s.public_name] for s in REQUEST_PARAMETERS if s.public_name in given}
        return RECIPES[base].with_(**own, **overrides)

    def completed(self, recipe: str | None, **defaults: Any) -> dict[str, Any]:
        """The request with all defaults filled in.

        Args:
            recipe: The default recipe of the settings, for a request without hyper-parameters.
            defaults: The values of the settings, for the fields that a setting decides.

        Raises:
            ConfigError: The hyper-parameters do not fit each other.
        """
        chosen = self.recipe or (None if self.hyperparameters - {"seed"} else recipe)
        if chosen == AUTO_RECIPE:
            names = {spec.public_name for spec in REQUEST_PARAMETERS} - {"seed"}
            return self._dump(names) | {"recipe": AUTO_RECIPE}
        by_setting = {name: v for name, v in defaults.items() if getattr(self, name) is None}
        request = self.model_copy(update={"recipe": chosen} if chosen else by_setting)
        values = request._dump(set() if chosen else {"recipe"})
        return values | request.configured_recipe().public_values()

    def _dump(self, without: set[str]) -> dict[str, Any]:
        # Where the worker's own setting decides, the order does not name it: a worker of the
        # version before knows no such field.
        left = {"attributes"} if self.attributes is None else set()
        return self.model_dump(exclude=without | left)


class TrainOrder(TrainParams):
    """The stored params of a training job: the request with all defaults, and what triggered it."""

    epochs: Integer = Field(default=TrainConfig.epochs, ge=0, le=1000)
    """0 in recipes that keep their start; a request cannot give 0."""
    trigger: Trigger = "request"


MAX_EXPORTED_LIST = 1_000
MAX_CATEGORIES, MAX_CATEGORY_BYTES = 64, 128

ExportTable = Literal["events", "items", "users", "preferences"]
EXPORT_TABLES: tuple[ExportTable, ...] = get_args(ExportTable)
ExportFormat = Literal["jsonl", "parquet"]


def _category(name: str) -> str:
    problem = text_problem(name, MAX_CATEGORY_BYTES)
    if problem is not None:
        raise ValueError(f"a category {problem}")
    return name


Category = Annotated[
    str, AfterValidator(_category), Field(json_schema_extra=text_schema(MAX_CATEGORY_BYTES))
]


class ExportedLists(BaseModel):
    """The parameters of exported lists."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    n: Integer = Field(
        default=10, ge=1, le=MAX_EXPORTED_LIST, description="The number of items for each user."
    )
    exclude_seen: bool = Field(
        default=True, description="Leave out the items that the user has seen."
    )
    category: list[Category] = Field(
        default_factory=list,
        max_length=MAX_CATEGORIES,
        description="Categories. The list has only items in at least one of them.",
    )


class ExportParams(BaseModel):
    """The body of `POST /admin/export`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    format: ExportFormat = Field(
        default="jsonl",
        description="The file format: `jsonl` for JSON Lines, `parquet` for Apache Parquet.",
    )
    tables: list[ExportTable] = Field(
        default=list(EXPORT_TABLES),
        max_length=len(EXPORT_TABLES),
        description="The tables to export, in a file each. The default is all tables.",
    )
    lists: ExportedLists | None = Field(
        default=None,
        description="The lists to export, as the service makes them now with the active "
        "model. The default is no lists.",
    )

    @model_validator(mode="after")
    def _something(self) -> ExportParams:
        if not self.tables and self.lists is None:
            raise ValueError("an export needs tables or lists")
        return self


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
    eta_s: float | None = Field(description="The estimated time left, in seconds.")
    peak_bytes: int | None = Field(
        default=None, description="The peak memory of the child process, in bytes."
    )


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
    """The response to a request for a job."""

    job_id: str


# The typed order that a worker sends to its child process, as one line of JSON

_FROZEN = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TaskSettings(BaseModel):
    """The worker's settings that decide what a child process reads and where it writes."""

    model_config = _FROZEN

    data_dir: Path
    database_url: str = Field(repr=False)
    checkpoint_store: str | None = None
    candidates: int
    precompute_users: int
    feedback: str | None = None
    feedback_half_life_days: float | None = None
    attributes: str = "auto"
    train_budget: float | None = None
    train_memory_bytes: int | None = None
    train_engine: Literal["local", "torchrun", "ray"] = "local"
    train_ranks: int = 2
    train_tables: Literal["replicated", "sharded"] = "replicated"
    train_folder: Path | None = None
    ray_address: str | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> TaskSettings:
        """Copies the settings, with the database and the data folder resolved."""
        values = {name: getattr(settings, name) for name in cls.model_fields}
        return cls.model_validate(
            values
            | {
                "data_dir": settings.data_dir.resolve(),
                "train_folder": settings.effective_train_folder.resolve(),
                "database_url": settings.effective_database_url,
            }
        )


class _Task(BaseModel):
    model_config = _FROZEN

    device: str
    exit_at: float = Field(ge=0)
    """The second of `app.worker.child_process.clock` when the child exits, unless put off."""
    retry_seconds: float = Field(ge=0)
    """The time that the child retries while the database or the checkpoint store is unavailable."""
    settings: TaskSettings


class TrainingTask(_Task):
    """Train a model, compare it with the served one, and write its checkpoint."""

    kind: Literal["train"] = "train"
    version: str
    """The model version to write."""
    params: TrainOrder
    gate_margin: float
    """The share of the served model's NDCG@10 by which the new model may be worse."""
    expected_seconds: dict[str, float] | None = None
    """Seconds that each phase of the last training took, for the estimated time left."""


class PrecomputeTask(_Task):
    """Compute the candidates of the most active users with a published model."""

    kind: Literal["candidates"] = "candidates"
    version: str
    """The model version that computes the candidates."""


class ExportTask(_Task):
    """Write tables and lists to the checkpoint store."""

    kind: Literal["export"] = "export"
    job_id: str
    params: ExportParams


Task = TrainingTask | PrecomputeTask | ExportTask
TASK: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])
"""Reads a task from JSON; raises ValidationError for JSON that is no task of this version."""
