"""Settings, read once from the environment (`NCR_*`) by whoever starts the service."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from app.core.errors import SettingsError
from app.core.schedule import Schedule

_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}

MIN_KEY_LENGTH = 16


def normalise_database_url(url: str) -> str:
    """The same database, addressed through the asynchronous driver the service uses."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        # The message of SQLAlchemy repeats the URL, and a URL may hold a password.
        raise SettingsError("NCR_DATABASE_URL is not a database URL") from None
    driver = _DRIVERS.get(parsed.drivername)
    if driver is None:
        raise SettingsError(
            f"NCR_DATABASE_URL: {parsed.drivername!r} is not supported; use sqlite:/// or postgresql://"
        )
    if driver.startswith("sqlite") and parsed.database in (None, "", ":memory:"):
        raise SettingsError(
            "NCR_DATABASE_URL: SQLite needs a file, as in sqlite:////data/ncr.db; "
            "a database in memory would be another one for each connection"
        )
    return parsed.set(drivername=driver).render_as_string(hide_password=False)


class Settings(BaseSettings):
    """Everything that can be set. Each field is read from `NCR_` and its name in capitals."""

    model_config = SettingsConfigDict(
        env_prefix="NCR_", use_attribute_docstrings=True, extra="ignore", frozen=True
    )

    data_dir: Path = Path("./var")
    """Where the embedded database and the checkpoints live."""

    database_url: str | None = None
    """The database. Default: SQLite in the data folder. `postgresql://…` for PostgreSQL."""

    checkpoint_store: str | None = None
    """Where checkpoints are kept: a folder, or an fsspec URL such as `s3://bucket/prefix`. Default:
    `models` in the data folder.

    For S3, credentials and endpoint come from the usual `AWS_*` variables, never from the URL; it
    needs `pip install neural-collaborative-ranking[s3]`."""

    redis_url: str | None = None
    """A Redis for what several servers share: lists that are ready, hints of news, rate limits.

    Optional: without it, or while it is away, everything works, and no answer is another."""

    redis_lists: bool = True
    """Share lists that are ready through Redis. Worth it for models that take milliseconds a list;
    small ones rank faster than Redis answers."""

    redis_prefix: str = Field(default="ncr", min_length=1, max_length=64, pattern=r"^[\w.:-]+$")
    """What the names of everything in Redis begin with."""

    device: str = "auto"
    """Where models run: `auto`, `cpu`, `cuda` or `cuda:N`."""

    admin_key: SecretStr | None = None
    """The key that clients send as `X-API-Key`, at least 16 characters.

    Without one every route is open, and only a loopback address is bound."""

    open_to_the_network: bool = False
    """Listen beyond loopback though there is no key: **whoever reaches the port may read, write,
    train and delete everything**. For networks that nobody else is on."""

    rate_limit: float = Field(default=0, ge=0, le=1e6)
    """Requests a second that each key may make, unless it has a rate of its own; 0: no bound."""

    rate_burst: int = Field(default=0, ge=0, le=1_000_000)
    """Requests that a key may make at once after a pause; 0: those of two seconds."""

    cors_origins: str = ""
    """Origins, separated by commas, whose pages a browser lets read answers; none by default."""

    otlp_endpoint: str | None = None
    """Where traces are sent by OTLP over HTTP, as `http://collector:4318/v1/traces`; needs
    `pip install neural-collaborative-ranking[otel]`."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important message that is logged."""

    log_format: Literal["auto", "console", "json"] = "auto"
    """How log lines look: `console`, `json`, or `auto`: console on a terminal, else JSON."""

    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    """The largest request body, in bytes. NDJSON is streamed and not bound by it."""

    max_events: int = Field(default=10_000, ge=1)
    """The longest list that `POST /events`, `/items` and `/preferences` take."""

    model_poll_seconds: float = Field(default=1.0, gt=0)
    """How often a server looks whether another model has been activated."""

    inference_threads: int = Field(default=1, ge=1)
    """How many threads one pass of the ranker may take. More than one pays off for large models."""

    new_items_seconds: float = Field(default=60, ge=0)
    """How often a server looks for items that came after the training, to fit them to the model;
    0: they wait for the next training."""

    new_item_users: int = Field(default=5, ge=1)
    """How many of the model's users must have taken up a new item before it is fitted."""

    candidates: int = Field(default=200, ge=1)
    """How many candidates the ranker orders for each user."""

    trial_models: int = Field(default=2, ge=0, le=64)
    """How many versions beside the active one a server keeps loaded, for `model=` and for trials;
    each takes as much memory. 0: only the active version can be asked for."""

    exploration: float = Field(default=0.1, ge=0, le=1)
    """The share of places in a newcomer's list that go to less popular and new items, drawn for
    each user; never the first place. 0: the most popular for everyone."""

    max_concurrency: int = Field(default=64, ge=1)
    """How many GET requests for lists a server answers at a time; beyond it the answer is 503."""

    precompute_users: int = Field(default=20_000, ge=0)
    """For how many users, the latest active first, a worker finds the candidates when a model has
    been published; others' are found when they ask."""

    list_cache_bytes: int = Field(default=128 * 2**20, ge=0)
    """Memory for lists that are ready to be sent, in bytes; 0: each is ranked anew."""

    candidate_cache_bytes: int = Field(default=128 * 2**20, ge=0)
    """Memory for users' candidates, in bytes."""

    profile_cache_bytes: int = Field(default=64 * 2**20, ge=0)
    """Memory for what is known of users, in bytes."""

    default_model: Literal["nbpr", "dncr", "neupr"] = "neupr"
    """The model that is trained when a request for training names none."""

    default_factors: int = Field(default=8, ge=1, le=512)
    """The number of predictive factors when a request for training gives none."""

    default_users: Literal["free", "history"] = "free"
    """What a user's vector is when a request for training does not say: `free`, learned for each
    user, or `history`, made of the items that the user took up, the latest ones counting most."""

    train_schedule: str | None = None
    """When a worker trains by itself: five fields as of cron (minute, hour, day of the month,
    month, day of the week), in UTC, as `30 3 * * *` or `0 */6 * * mon-fri`. A time that was missed
    while no worker ran is made up for, once."""

    train_every: int = Field(default=0, ge=0)
    """A worker trains by itself once there are this many events, stated preferences and deletions
    that the last training has not seen; 0: never."""

    train_start: Literal["scratch", "warm"] = "scratch"
    """Whether a training that does not say begins from `scratch`, or `warm`: from the model that is
    served, where that is of the same kind and sizes."""

    gate_margin: float = Field(default=0.05, ge=0, le=1)
    """By how much, as a share of the served model's NDCG@10, a newly trained one may be worse at
    most, on what was held out from both; a new one that may be worse than that is rejected."""

    keep_models: int = Field(default=5, ge=1)
    """How many published versions keep their files: the newest so many, beside the one that is
    served, the one before it, and any in a trial."""

    keep_rejected_days: float = Field(default=14, ge=0)
    """How many days a version that was rejected keeps its files."""

    job_poll_seconds: float = Field(default=1.0, gt=0)
    """How often an idle worker looks for a job."""

    job_lease_seconds: float = Field(default=30, gt=0)
    """How long a job stays its worker's without a heartbeat."""

    feedback: str | None = None
    """What events mean, as JSON: a weight by type, `"seen"` for an item that only counts as seen,
    below 0 for one that is not wanted, and a list of ranges where the value decides:
    `{"purchase": 3, "click": 1, "view": "seen", "rating": [{"from": 4, "weight": 1}, {"from": 3,
    "weight": "seen"}, {"weight": -1}]}`. Types that are not named take the weight of `"*"`, 1 if
    that is not given; `dislike` is -1 where nothing else is said."""

    feedback_half_life_days: float | None = Field(default=None, gt=0, le=36_500)
    """After how many days an event counts half as much when models are trained and users' vectors
    fitted; by default its age plays no part."""

    return_drop: float = Field(default=0.1, ge=0, le=1)
    """The version before is served again if the click-through of one that training has published is
    lower by this share, as 0.1 for a tenth, and surely so: less is hardly worth an alarm, and days
    differ by a few hundredths by themselves. 0: never."""

    return_lists: int = Field(default=1000, ge=100)
    """How many lists of both versions there must be before that is looked at."""

    return_wait_hours: int = Field(default=1, ge=1, le=168)
    """How many hours after the hour of a list its clicks are waited for; more where events are
    posted late, as once a day."""

    event_group_rows: int = Field(default=500, ge=1)
    """Waiting events are written at once when there are this many of them."""

    event_group_ms: float = Field(default=5, ge=0)
    """Waiting events are written after this many milliseconds at the latest; sooner when there are
    enough for a group, or no more have come for a millisecond."""

    event_buffer_rows: int = Field(default=20_000, ge=1)
    """How many events may wait to be written; beyond it the answer is 503."""

    drain_seconds: float = Field(default=15, ge=0)
    """How long a server that was told to stop may take to finish what it has accepted."""

    drain_notice_seconds: float = Field(default=1, ge=0)
    """How long, of that time, a server goes on taking requests after SIGTERM while `/health/ready`
    says that it is stopping: longer than a balancer takes to notice."""

    @field_validator("database_url")
    @classmethod
    def _database_url(cls, url: str | None) -> str | None:
        return normalise_database_url(url) if url else None

    @field_validator("checkpoint_store")
    @classmethod
    def _checkpoint_store(cls, store: str | None) -> str | None:
        if store and "://" in store and any(sign in store for sign in ("@", "?", "::")):
            raise ValueError("a URL without credentials, options and chains is needed")
        return store or None

    @field_validator("train_schedule")
    @classmethod
    def _train_schedule(cls, schedule: str | None) -> str | None:
        if schedule:
            Schedule.parse(schedule)
        return schedule or None

    @field_validator("redis_url")
    @classmethod
    def _redis_url(cls, url: str | None) -> str | None:
        if url and not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("needs redis://, rediss:// or unix://")
        if url:
            from redis.asyncio.connection import parse_url

            try:
                parse_url(url)
            except ValueError:
                # Its message holds a part of the URL, which may be one of the password.
                raise ValueError("is not a Redis URL; is the password URL-encoded?") from None
        return url or None

    @field_validator("otlp_endpoint")
    @classmethod
    def _otlp_endpoint(cls, url: str | None) -> str | None:
        return url or None

    @field_validator("admin_key")
    @classmethod
    def _admin_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and len(key.get_secret_value()) < MIN_KEY_LENGTH:
            raise ValueError(f"needs at least {MIN_KEY_LENGTH} characters")
        return key

    @property
    def effective_database_url(self) -> str:
        """The database to use, with its asynchronous driver."""
        if self.database_url is not None:
            return self.database_url
        return f"sqlite+aiosqlite:///{self.data_dir / 'ncr.db'}"


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment; what is wrong with them becomes one line without values.

    Values stay out of the message because a wrong one may well be a secret in the wrong place.
    """
    try:
        return Settings(**overrides)
    except ValidationError as error:
        problems = "; ".join(
            f"NCR_{'_'.join(str(part) for part in problem['loc']).upper()}: {problem['msg']}"
            for problem in error.errors(include_input=False, include_url=False)
        )
        raise SettingsError(problems.replace("\n", " ")) from None
