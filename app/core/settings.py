"""Settings, which a start of the service reads once from the environment (`NCR_*`)."""

from __future__ import annotations

import os
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from app.core.cron import CronSchedule
from app.core.errors import SettingsError
from ncr_core.model_config import MAX_REQUEST_FACTORS, ServiceKind, Users
from ncr_core.recipes import AUTO_RECIPE, SERVICE_RECIPES, recipe

_DEFAULT = recipe("default")

_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}

MIN_KEY_LENGTH = 16
_SECRETS = ("database_url", "redis_url", "admin_key", "webhook_urls", "webhook_secret")
MAX_WEBHOOKS = 8
MAX_SECRET_BYTES = 64 * 1024
_OTHER_VARIABLES = (
    "NCR_DOWNLOAD_BASE_URL",  # read by one command
    *(f"NCR_{name.upper()}_FILE" for name in _SECRETS),
)


def normalise_database_url(url: str) -> str:
    """The URL of the same database with the asynchronous driver. Raises SettingsError."""
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
    """The settings of the service. Each is read from `NCR_` and its name in capitals."""

    model_config = SettingsConfigDict(
        env_prefix="NCR_", use_attribute_docstrings=True, extra="ignore", frozen=True
    )

    data_dir: Path = Path("./var")
    """The folder of the SQLite database, of the checkpoints and of the files of running trainings.
    A relative path depends on the folder in which the process starts."""

    database_url: str | None = None
    """The URL of the database: `sqlite:///…` or `postgresql://…`. The default is SQLite in the data
    folder. `NCR_DATABASE_URL_FILE` can name a file that holds the URL."""

    checkpoint_store: str | None = None
    """The place of the checkpoints: a folder, or an fsspec URL such as `s3://bucket/prefix`. The
    default is `models` in the data folder. A store belongs to one database, and other files in it
    stay.

    For S3, credentials and endpoint come from the usual `AWS_*` variables and never from the URL.
    S3 needs `pip install '.[s3]'`."""

    redis_url: str | None = None
    """The URL of a Redis server that caches lists, passes hints of changes and counts rate limits
    for several servers. `NCR_REDIS_URL_FILE` can name a file that holds the URL.

    Redis is optional. Without Redis all answers stay the same, and each server caches on its
    own."""

    redis_lists: bool = True
    """Share cached lists through Redis. Sharing helps models that need milliseconds for a list.
    Small models rank faster than Redis answers."""

    redis_prefix: str = Field(default="ncr", min_length=1, max_length=64, pattern=r"^[\w.:-]+$")
    """The prefix of all keys in Redis."""

    device: str = "auto"
    """The device that models run on: `auto`, `cpu`, `cuda` or `cuda:N`."""

    admin_key: SecretStr | None = None
    """The administrator's key of at least 16 characters, which clients send as `X-API-Key` or
    `Authorization: Bearer`. `NCR_ADMIN_KEY_FILE` can name a file that holds the key.

    Without any key all routes are open, and the server listens on a loopback address only."""

    open_to_the_network: bool = False
    """Listen beyond loopback without a key: **every client that reaches the port may read, write,
    train and delete everything**. Use it only in a network that nobody else can reach."""

    rate_limit: float = Field(default=0, ge=0, le=1e6)
    """The requests a second that each key may make, unless the key has a rate of its own. With 0
    keys have no limit."""

    rate_burst: int = Field(default=0, ge=0, le=1_000_000)
    """The requests that a key without a rate of its own may make at once after a pause. With 0 a
    key may make as many as in two seconds."""

    cors_origins: str = ""
    """The origins, separated by commas, whose pages may read answers in a browser. By default no
    origin may."""

    dashboard: bool = True
    """Serve the dashboard: pages for a browser at `/dashboard`. The pages need the same keys and
    roles as the API."""

    otlp_endpoint: str | None = None
    """The endpoint for traces by OTLP over HTTP, such as `http://collector:4318/v1/traces`. Traces
    need `pip install '.[otel]'`."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that servers and workers log."""

    log_format: Literal["auto", "console", "json"] = "auto"
    """The format of log lines: `console`, `json`, or `auto`. `auto` is `console` on a terminal and
    `json` elsewhere."""

    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    """The maximum size of a request body, in bytes. The server streams NDJSON, which has no
    limit."""

    max_events: int = Field(default=10_000, ge=1)
    """The maximum length of a list that `POST /events`, `/items`, `/users` and `/preferences`
    accept."""

    model_poll_seconds: float = Field(default=1.0, gt=0)
    """The interval, in seconds, at which a server looks for another active version."""

    inference_threads: int = Field(default=1, ge=1)
    """The threads of one pass of the ranker. More than one thread helps only large models."""

    new_items_seconds: float = Field(default=60, ge=0)
    """The interval, in seconds, at which a server fits items that are newer than the model's
    training. With 0 new items wait for the next training."""

    new_item_users: int = Field(default=5, ge=1)
    """The minimum number of the model's users with a positive event on a new item before a server
    fits the item."""

    candidates: int = Field(default=200, ge=1)
    """The number of a user's candidates that the ranker orders."""

    trial_models: int = Field(default=2, ge=0, le=64)
    """The versions beside the active one that a server keeps in memory, for `model=` and for
    trials. Each version takes as much memory as the active one. With 0 clients can request only the
    active version."""

    exploration: float = Field(default=0.1, ge=0, le=1)
    """The fraction of the places in a new user's list that go to less popular and new items. The
    server draws these items for each user, and never for the first place. With 0 every new user
    gets the same popular items."""

    max_concurrency: int = Field(default=64, ge=1)
    """The maximum number of `GET /recommend/{user}` and `POST /recommend` requests that a server
    processes at a time. Further requests get 503."""

    precompute_users: int = Field(default=20_000, ge=0)
    """The number of latest active users for whom a worker precomputes candidates and lists after a
    model is published. Servers compute those of other users at their first request."""

    list_cache_bytes: int = Field(default=128 * 2**20, ge=0)
    """The memory for cached lists, in bytes. With 0 the server ranks every list anew."""

    candidate_cache_bytes: int = Field(default=128 * 2**20, ge=0)
    """The memory for cached candidates of users, in bytes."""

    share_tables: bool = False
    """Keep the tables of the ranker in files of the data folder, so that the servers of a machine
    share one copy in memory. The files take three times the bytes of the model's items. On a GPU
    the setting has no effect."""

    filter_cache_bytes: int = Field(default=64 * 2**20, ge=0)
    """The memory for the results of filters by attributes, in bytes. A result takes about 2 bytes
    an item."""

    profile_cache_bytes: int = Field(default=64 * 2**20, ge=0)
    """The memory for cached profiles of users, in bytes."""

    default_recipe: str | None = None
    """The recipe of a training request without hyper-parameters. `auto` trains a few recipes and
    keeps the best on the data. The default is `auto`, unless `NCR_DEFAULT_MODEL`,
    `NCR_DEFAULT_FACTORS` or `NCR_DEFAULT_USERS` is set."""

    train_budget: float | None = Field(default=None, gt=0)
    """The time for the choice of the recipe `auto`, in seconds. The default is 60 s, plus 50 s for
    each million interactions, plus 0.5 s for each thousand users and items. The last part is at
    most 60 s."""

    train_memory_bytes: int | None = Field(default=None, ge=2**20)
    """The memory that a training may take, in bytes. A training whose estimate is higher fails at
    once, and its job names the estimate. By default a training fails if two thirds of its estimate
    are above the memory that is free when the training begins."""

    train_engine: Literal["local", "torchrun", "ray"] = "local"
    """The engine of trainings: `local` is the job's own process, `torchrun` is `NCR_TRAIN_RANKS`
    processes of the worker's machine, and `ray` is as many processes of a Ray cluster. `ray` needs
    `pip install '.[ray]'`."""

    train_ranks: int = Field(default=2, ge=1, le=1024)
    """The number of processes (ranks) that train one model together with `torchrun` or `ray`."""

    train_tables: Literal["replicated", "sharded"] = "replicated"
    """The embedding tables of the ranks. With `replicated` each rank has all rows and learns from
    its share of the users. With `sharded` each rank has a part of the rows and processes all users,
    for tables that do not fit one machine."""

    train_folder: Path | None = None
    """The folder for the files that the ranks of a training share. All ranks reach it under this
    path. The default is `ranks` in the data folder."""

    ray_address: str | None = Field(default=None, pattern=r"^[\w.:\[\]-]+$")
    """The address of the head of a Ray cluster, such as `10.0.0.1:6379`. An address beyond loopback
    needs token authentication, `RAY_AUTH_MODE=token`. By default the worker starts a cluster on its
    own machine for the time of the training."""

    default_model: ServiceKind = _DEFAULT.value("kind")
    """The model of a training request that names none."""

    default_factors: int = Field(default=_DEFAULT.model.factors, ge=1, le=MAX_REQUEST_FACTORS)
    """The number of predictive factors of a training request that names none."""

    default_users: Users = _DEFAULT.model.users
    """The user vectors of a training request that names none. `free` learns a vector for each user.
    `history` computes the vector from the user's items, with more weight on recent ones."""

    train_schedule: str | None = None
    """The times at which a worker starts a training: a cron expression in UTC, such as `30 3 * * *`
    or `0 */6 * * mon-fri`. Its five fields are minute, hour, day of the month, month and day of the
    week. A worker makes up once for times that passed while no worker ran."""

    train_every: int = Field(default=0, ge=0)
    """The number of new events, preferences and deletions since the last training after which a
    worker starts another. With 0 their number starts no training."""

    train_start: Literal["scratch", "warm"] = "scratch"
    """The start of a training request that names none: `scratch`, or `warm` from a served model of
    the same kind and sizes."""

    gate_margin: float = Field(default=0.05, ge=0, le=1)
    """The loss of NDCG@10 that the gate tolerates, as a fraction of the served model's NDCG@10 on
    items held out from both models. The gate rejects a new model that may be worse."""

    keep_models: int = Field(default=5, ge=1)
    """The number of newest published versions that keep their files. The served version, the one
    before it and versions in a trial keep theirs, too."""

    keep_rejected_days: float = Field(default=14, ge=0)
    """The days for which a rejected version keeps its files."""

    keep_exports_days: float = Field(default=7, gt=0, le=36_500)
    """The days for which the files of `POST /admin/export` stay in the checkpoint store."""

    keep_jobs_days: float = Field(default=90, gt=0, le=36_500)
    """The days for which an ended job stays in `GET /admin/jobs`. The job of a version stays as
    long as the version's files."""

    job_poll_seconds: float = Field(default=1.0, gt=0)
    """The interval, in seconds, at which an idle worker looks for a job."""

    job_lease_seconds: float = Field(default=30, gt=0)
    """The seconds without a heartbeat after which a worker loses its job."""

    worker_alive_file: Path | None = None
    """A file that a running worker touches every 5 s. Health checks read its age, because a worker
    has no port."""

    feedback: str | None = None
    """The event weights, as JSON: a weight for each event type. A positive weight is positive
    feedback, a negative one is a dislike, and `"seen"` only marks the item as seen. A list of
    ranges makes the weight depend on the event's value: `{"purchase": 3, "click": 1, "view":
    "seen", "rating": [{"from": 4, "weight": 1}, {"from": 3, "weight": "seen"}, {"weight": -1}]}`.
    Other types get the weight of `"*"`, which is 1 by default. The weight of `dislike` is -1 by
    default."""

    attributes: str = "auto"
    """The attributes of items and users that place new ones. `auto` keeps the attributes that
    predict on the data. Otherwise the setting names attributes, separated by commas; `categories`
    and `embedding` are possible names. With an empty value attributes take no part in lists."""

    feedback_half_life_days: float | None = Field(default=None, gt=0, le=36_500)
    """The days after which an event counts half as much in trainings and in users' vectors. By
    default the age has no effect."""

    seen: str | None = None
    """How long an event keeps its item out of the user's lists, as JSON: an age for each event
    type, such as `{"purchase": "14d", "view": "0s"}`. An age is a number of `s`, `m`, `h` or `d` of
    at most 36,500 days, or `"forever"`. Other types get the age of `"*"`, which is `"forever"` by
    default. A disliked item comes back only if the rule names the type of the negative event. A
    request may send its own rule (`seen=`). The times of events take up to half of
    `NCR_PROFILE_CACHE_BYTES` more. By default a seen item never comes back."""

    hide_shown: str = "0"
    """How long a shown item stays out of the user's next lists, unless the user has an event about
    it. The value is a number of seconds, or a number of `s`, `m`, `h` or `d` such as `6h`, up to 30
    days. With 0 the service hides no shown items and stores no lists. A request may send another
    time (`hide_shown=`)."""

    return_drop: float = Field(default=0.1, ge=0, le=1)
    """The drop of click-through at which a worker rolls back a newly published model, as a
    fraction: 0.1 is 10 %. The drop must be statistically significant. Click-through varies by a few
    percent from day to day, so smaller values cause false alarms. With 0 workers never roll
    back."""

    return_lists: int = Field(default=1000, ge=100)
    """The minimum number of lists of each version before workers compare their click-through."""

    return_wait_hours: int = Field(default=1, ge=1, le=168)
    """The hours that workers wait for clicks on a list, after the hour in which the list was
    served. Raise the value if clients post events late, for example once a day."""

    webhook_secret: SecretStr | None = None
    """The secret that signs webhooks, of at least 16 characters. `NCR_WEBHOOK_URLS` needs it.
    `NCR_WEBHOOK_SECRET_FILE` can name a file that holds the secret."""

    webhook_urls: SecretStr | None = None
    """The receivers of webhooks, at most 8, separated by commas. Workers tell these `https://…` or
    `http://…` addresses of ended jobs and of changes of the served model. Servers and workers need
    the same value.
    `NCR_WEBHOOK_URLS_FILE` can name a file that holds the URLs, which may contain secrets. By
    default the service sends no webhooks."""

    webhook_private: bool = False
    """Send webhooks also to private, loopback and link-local addresses, such as those of a service
    in the same cluster."""

    event_group_rows: int = Field(default=500, ge=1)
    """The number of waiting events that the server writes at once, as one group."""

    event_group_ms: float = Field(default=5, ge=0)
    """The maximum time, in milliseconds, that an event waits for its group. The server writes a
    group earlier if the group is full, or if no event arrived for a millisecond."""

    event_buffer_rows: int = Field(default=20_000, ge=1)
    """The maximum number of events that wait for the database. Beyond it requests get 503."""

    drain_seconds: float = Field(default=15, ge=0)
    """The maximum time, in seconds, in which a stopping server finishes the requests and events
    that it has accepted."""

    drain_notice_seconds: float = Field(default=1, ge=0)
    """The seconds after SIGTERM in which a server still accepts requests, while `/health/ready`
    already answers 503. They are part of `NCR_DRAIN_SECONDS`. Set the value above the interval of
    your load balancer's health checks."""

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

    @field_validator("default_recipe")
    @classmethod
    def _default_recipe(cls, name: str | None) -> str | None:
        if name and name not in SERVICE_RECIPES:
            raise ValueError(f"there is no such recipe; there are {', '.join(SERVICE_RECIPES)}")
        return name or None

    @field_validator("train_schedule")
    @classmethod
    def _train_schedule(cls, schedule: str | None) -> str | None:
        if schedule:
            CronSchedule.parse(schedule)
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

    @field_validator("webhook_urls")
    @classmethod
    def _webhook_urls(cls, urls: SecretStr | None, others: ValidationInfo) -> SecretStr | None:
        targets = _split(urls)
        if targets and others.data.get("webhook_secret") is None:
            raise ValueError("needs NCR_WEBHOOK_SECRET, too")
        if len(targets) > MAX_WEBHOOKS:
            raise ValueError(f"at most {MAX_WEBHOOKS} receivers are possible")
        for url in targets:
            problem = _webhook_problem(url)
            if problem is not None:
                raise ValueError(problem)
        return urls if targets else None

    @field_validator("webhook_secret")
    @classmethod
    def _webhook_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is None or not secret.get_secret_value():
            return None
        if len(secret.get_secret_value()) < MIN_KEY_LENGTH:
            raise ValueError(f"needs at least {MIN_KEY_LENGTH} characters")
        return secret

    @property
    def webhook_targets(self) -> list[str]:
        """The receivers of webhooks."""
        return _split(self.webhook_urls)

    @property
    def trainings_folder(self) -> Path:
        """The folder for the events and matrices of running trainings."""
        return self.data_dir.resolve() / "trainings"

    @property
    def effective_train_folder(self) -> Path:
        """The folder for the files that the ranks of a training share."""
        return self.train_folder or self.data_dir / "ranks"

    @property
    def effective_default_recipe(self) -> str | None:
        """The recipe of a request without hyper-parameters.

        None if a setting such as `default_model` applies instead.
        """
        chosen = {"default_model", "default_factors", "default_users"} & self.model_fields_set
        return self.default_recipe or (None if chosen else AUTO_RECIPE)

    @property
    def attribute_names(self) -> list[str] | None:
        """The attributes in use; None: those that predict; an empty list: no attributes."""
        names = [name.strip() for name in self.attributes.split(",")]
        return None if names == ["auto"] else [name for name in names if name]

    @property
    def effective_database_url(self) -> str:
        """The URL of the database, with its asynchronous driver."""
        if self.database_url is not None:
            return self.database_url
        return f"sqlite+aiosqlite:///{self.data_dir / 'ncr.db'}"


def _split(urls: SecretStr | None) -> list[str]:
    values = "" if urls is None else urls.get_secret_value()
    return list(dict.fromkeys(values.replace(",", " ").split()))


def _webhook_problem(url: str) -> str | None:
    """The reason why a URL cannot receive webhooks; None if it can. The reason omits the URL."""
    if not (url.isascii() and url.isprintable()):
        return "a URL must be percent-encoded ASCII"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        return "needs addresses that begin with https:// or http://"
    if parts.username is not None or parts.password is not None or "#" in url:
        return "a URL without user, password and fragment is needed"
    return None


def unknown_variables() -> dict[str, str | None]:
    """The variables `NCR_*` that are no setting, each with the nearest setting's variable."""
    known = [f"NCR_{name.upper()}" for name in Settings.model_fields]
    return {
        name: next(iter(get_close_matches(name.upper(), known, 1)), None)
        for name in sorted(os.environ)
        if name.upper().startswith("NCR_")
        and name.upper() not in (*known, *_OTHER_VARIABLES)
        and not name.startswith("NCR_TEST_")
    }


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment. Raises SettingsError with one line for all problems.

    Values stay out of the message, because a wrong value may be a secret in the wrong place.
    """
    try:
        return Settings(**_read_secrets(overrides.keys()), **overrides)
    except ValidationError as error:
        problems = "; ".join(
            f"NCR_{'_'.join(str(part) for part in problem['loc']).upper()}: {problem['msg']}"
            for problem in error.errors(include_input=False, include_url=False)
        )
        raise SettingsError(problems.replace("\n", " ")) from None


def _read_secrets(given: Collection[str]) -> dict[str, Any]:
    """The settings from the files that `NCR_…_FILE` name, as containers get secrets."""
    secrets: dict[str, Any] = {}
    for name in _SECRETS:
        variable = f"NCR_{name.upper()}"
        path = os.environ.get(f"{variable}_FILE")
        if not path or name in given:
            continue
        if os.environ.get(variable):
            raise SettingsError(f"{variable} and {variable}_FILE are both set")
        try:
            with Path(path).open("rb") as file:
                secrets[name] = file.read(MAX_SECRET_BYTES).decode().strip()
        except OSError as error:
            raise SettingsError(f"{variable}_FILE: {error.strerror}") from None
        except UnicodeDecodeError:
            raise SettingsError(f"{variable}_FILE: the file is not UTF-8") from None
    return secrets
