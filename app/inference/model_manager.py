"""The models in memory: the active model, which follows the registry, and other versions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from app.core.errors import AppError, Unavailable, Unprocessable
from app.core.logging import get_logger
from app.core.settings import Settings
from app.inference.loaded_model import LoadedModel
from app.inference.metrics import InferenceMetrics
from app.inference.new_items import NewItems
from app.inference.precomputed import PrecomputedCandidates, ranked_by
from app.registry.activation import checkpoint_unusable, version_deleted
from app.registry.schemas import ModelRow
from app.registry.service import ModelRegistry
from ncr_core.errors import CheckpointError
from ncr_core.inference.shared_tables import SharedTables
from ncr_core.ranking import compile_kernels
from ncr_core.train_config import resolve_device

log = get_logger(__name__)

GPU = Path("/dev/nvidia0")
RETRY_SECONDS = 30.0  # a checkpoint on shared storage may come a little after its row
WAIT_SECONDS = 10.0  # for a version that is being loaded
LOOK_SECONDS = 1.0  # between two looks at whether the catalogue has changed
# After items were added the next wait, by their attributes: every cached list is ranked anew.
PAUSE_SECONDS, PAUSE_FACTOR = 5.0, 10.0


class ModelManager:
    """Loads the active model, and swaps one reference when another version is activated.

    ``current`` is the model that answers. A request keeps the model that it began with.

    The manager refuses and reports a version that cannot be loaded. The previous model then keeps
    serving.

    Args:
        registry: the versions.
        settings: the settings of the service.
        on_model: called with each model that begins to serve.
        metrics: counts passes and fallbacks.
        new_items: finds items that are newer than the model.
        warm_up: awaited with a model before the model takes the place of another.
        follow: awaited with the users who have precomputed lists, to follow their changes.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        settings: Settings,
        on_model: Callable[[LoadedModel], None] = lambda model: None,
        metrics: InferenceMetrics | None = None,
        new_items: NewItems | None = None,
        warm_up: Callable[[LoadedModel], Awaitable[None]] | None = None,
        follow: Callable[[Mapping[str, int]], Awaitable[None]] | None = None,
    ) -> None:
        self._warm_up = warm_up
        self._follow_users = follow
        self.current: LoadedModel | None = None
        self.refused: str | None = None
        """The reason why the active version does not serve; None while it serves."""
        self._on_model = on_model
        self._metrics = metrics or InferenceMetrics()
        self._registry = registry
        self._settings = settings
        self._device = str(resolve_device(settings.device))
        self._shared = SharedTables(settings.data_dir / "tables") if settings.share_tables else None
        self._registry_read = False
        self._followed: str | None = None
        self._candidates_checked: str | None = None
        self._retry_at = float("inf")
        self._woken = asyncio.Event()
        self._new_items = new_items
        self._tasks: list[asyncio.Task[None]] = []
        self.versions = ModelVersionCache(
            registry, self._load, settings.trial_models, lambda: self.current
        )

    async def start(self) -> None:
        """Loads the active model, if there is one, and begins to follow the registry."""
        log.info("device", device=self._device)
        if self._settings.device == "auto" and self._device == "cpu" and GPU.exists():
            log.warning("torch cannot use the GPU: models run on the CPU")
        if self._device == "cpu":
            # The first time on a machine this compiles, for a quarter of a minute: now, and not
            # when the first model has been published and is waited for.
            await asyncio.to_thread(compile_kernels)
        await self.refresh()
        self._tasks = [asyncio.create_task(self._follow())]
        if self._new_items is not None and self._settings.new_items_seconds > 0:
            self._tasks.append(asyncio.create_task(self._follow_events(self._new_items)))

    async def stop(self) -> None:
        """Ends the background tasks."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.versions.stop()

    async def get(self, version: str | None) -> LoadedModel | None:
        """The model of a version, loaded if necessary; None stands for the active version.

        Returns None where ``version`` is None and no model is active. Raises as
        `ModelVersionCache.get`.
        """
        current = self.current
        if version is None or (current is not None and current.version == version):
            return current
        return await self.versions.get(version)

    def at_hand(self, version: str) -> LoadedModel | None:
        """The model of an inactive version, as `ModelVersionCache.at_hand`."""
        return self.versions.at_hand(version)

    async def ready(self) -> str | None:
        """The reason why this server is not ready; None if a model serves or none is active."""
        if not self._registry_read:
            return "the registry has not been read"
        return self.refused if self.current is None else None

    async def refresh(self) -> None:
        """Updates ``current`` to the active version in the registry."""
        row = await self._registry.serving()
        if self.current is not None:
            await self._load_candidates(self.current)
        version = None if row is None else row.version
        if self._registry_read and version == self._followed and time.monotonic() < self._retry_at:
            return
        self._retry_at = float("inf")
        if row is None:
            self.current, self.refused = None, None
        elif self.current is None or self.current.version != row.version:
            try:
                model = await self.versions.take(row.version) or await self._load(row)
                self._candidates_checked = None
                await self._load_candidates(model)
                if self.current is not None and self._warm_up is not None:
                    await self._warm_up(model)
            except Exception as error:
                # Not only a damaged file: too little memory for it, say. The old one goes on.
                reason = str(error).partition("\n")[0] or type(error).__name__
                # Readiness shows it to everyone: others may name addresses.
                known = isinstance(error, CheckpointError)
                self.refused = (
                    reason if known else f"the version cannot be loaded: {type(error).__name__}"
                )
                self._retry_at = time.monotonic() + RETRY_SECONDS
                log.error("model refused", version=row.version, reason=reason)
            else:
                self.current, self.refused = model, None
                self.versions.drop(model.version)
                self._on_model(model)
                log.info(
                    "model loaded",
                    version=model.version,
                    items=model.engine.n_items,
                    ranker=model.engine.ranker_name,
                )
        else:
            self.refused = None
        self._registry_read, self._followed = True, version

    async def _load(self, row: ModelRow) -> LoadedModel:
        checkpoint = await self._registry.load(row, self._device)
        model = await asyncio.to_thread(
            LoadedModel,
            row,
            checkpoint,
            self._settings.candidates,
            self._settings.candidate_cache_bytes,
            self._metrics.pairs.inc,
            self._record_fallback,
            shared=self._shared,
        )
        await asyncio.to_thread(model.engine.warm_up)
        return model

    async def _load_candidates(self, model: LoadedModel) -> None:
        """Uses the candidates and lists that a worker computed for this version, once stored."""
        await self._check_candidates(model)
        if self._follow_users is not None:
            await self._follow_users(model.listed)

    async def _check_candidates(self, model: LoadedModel) -> None:
        if self._candidates_checked == model.version:
            return
        try:
            path = await self._registry.fetch_candidates(model.version)
            if path is None:
                return
            candidates = await asyncio.to_thread(
                PrecomputedCandidates.load, path, model.trained.n_items
            )
        except (OSError, CheckpointError) as error:  # it may be there the next time
            log.warning("precomputed candidates cannot be read", reason=str(error))
        except ValueError as error:
            self._candidates_checked = model.version
            log.warning("precomputed candidates are not used", reason=str(error))
        else:
            self._candidates_checked = model.version
            fit = candidates.lists.made_by == ranked_by(model.engine)
            listed = candidates.rows if fit and not model.revision else None
            model.use_precomputed(candidates, candidates.searched, listed)
            current = self.current
            if current is not None and current.version == model.version:
                current.keep_precomputed(model)  # new items may have joined it meanwhile
            log.info("candidates loaded", version=model.version, users=len(candidates), lists=fit)

    def _record_fallback(self, to: str) -> None:
        log.warning("the GPU has too little memory for a pass", now=to)
        self._metrics.fallbacks.labels(to).inc()

    def wake(self) -> None:
        """Polls the registry now: another version may be active."""
        self._woken.set()

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), self._settings.model_poll_seconds)
            self._woken.clear()
            try:
                await self.refresh()
            except Exception as error:
                log.warning("the registry cannot be read", error=str(error).partition("\n")[0])

    async def add_new_items(self, new_items: NewItems) -> None:
        """Adds the items that got a vector after the training to the current model."""
        current = self.current
        extended = None if current is None else await new_items.extend(current)
        if extended is not None and self._warm_up is not None:
            await self._warm_up(extended)
        # Another version may have taken its place meanwhile.
        if extended is not None and current is not None and self.current is current:
            extended.keep_precomputed(current)  # they may have come meanwhile
            self.current = extended
            self._on_model(extended)

    async def _follow_events(self, new_items: NewItems) -> None:
        interval = self._settings.new_items_seconds
        due, earliest = time.monotonic() + interval, 0.0
        while True:
            await asyncio.sleep(min(interval, LOOK_SECONDS))
            began = time.monotonic()
            try:
                if began < due and (began < earliest or not await self._is_behind(new_items)):
                    continue
                await self.add_new_items(new_items)
            except Exception as error:
                log.warning("new items are not added", error=str(error).partition("\n")[0])
            now = time.monotonic()
            due = now + interval
            earliest = now + max(PAUSE_SECONDS, PAUSE_FACTOR * (now - began))

    async def _is_behind(self, new_items: NewItems) -> bool:
        current = self.current
        return current is not None and await new_items.is_behind(current)


class ModelVersionCache:
    """Loaded models of inactive versions: an LRU cache of at most ``max_models`` models.

    The cache loads one version at a time, and once for all requests that wait for the version.
    Loading continues where a request gives up waiting.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        load: Callable[[ModelRow], Awaitable[LoadedModel]],
        max_models: int,
        current: Callable[[], LoadedModel | None],
    ) -> None:
        self._registry = registry
        self._load = load
        self._max_models = max_models
        self._current = current
        self._loaded: OrderedDict[str, LoadedModel] = OrderedDict()
        self._loading: dict[str, asyncio.Task[LoadedModel]] = {}
        self._failed_at: dict[str, float] = {}
        self._lock = asyncio.Lock()

    async def get(self, version: str) -> LoadedModel:
        """The model of a published or rejected version, loaded if necessary.

        Raises:
            NotFound: the version does not exist.
            Conflict: the version's files are removed or damaged.
            Unprocessable: the service keeps no version but the active version.
            Unavailable: loading takes longer than ``WAIT_SECONDS``, too many other versions are
                loading, or the version cannot be loaded.
        """
        row = await self._registry.get(version)
        if row.status == "deleted":
            raise version_deleted(version)
        if self._max_models == 0:
            raise Unprocessable("only the active version is available", code="model_not_served")
        model = self._find(version)
        if model is not None:
            return model
        if version not in self._loading and len(self._loading) >= self._max_models:
            raise Unavailable(
                "the server loads other versions now; retry later", code="model_loading"
            )
        loading = self._start_loading(version)
        try:
            return await asyncio.wait_for(asyncio.shield(loading), WAIT_SECONDS)
        except TimeoutError:
            raise Unavailable(
                "the server still loads this version; retry later", code="model_loading"
            ) from None
        except Exception as error:
            raise _app_error(error) from None

    def at_hand(self, version: str) -> LoadedModel | None:
        """The model of a version; None where the version is not loaded yet.

        Loading then begins in the background, unless too many versions are loading, or loading
        failed less than ``RETRY_SECONDS`` ago.
        """
        model = self._find(version)
        failed_at = self._failed_at.get(version, -float("inf"))
        if (
            model is None
            and version not in self._loading
            and len(self._loading) < self._max_models
            and time.monotonic() - failed_at > RETRY_SECONDS
        ):
            self._start_loading(version)
        return model

    async def take(self, version: str) -> LoadedModel | None:
        """The model of a version that is loaded or being loaded, else None.

        Raises the error of a loading in progress.
        """
        loading = self._loading.get(version)
        return self._loaded.get(version) if loading is None else await asyncio.shield(loading)

    def drop(self, version: str) -> None:
        """Removes a version from the cache."""
        self._loaded.pop(version, None)

    async def stop(self) -> None:
        """Cancels loadings in progress."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _find(self, version: str) -> LoadedModel | None:
        model = self._loaded.get(version)
        if model is not None:
            self._loaded.move_to_end(version)
        return model

    def _start_loading(self, version: str) -> asyncio.Task[LoadedModel]:
        task = self._loading.get(version)
        if task is None:
            task = self._loading[version] = asyncio.create_task(self._load_version(version))
            task.add_done_callback(lambda done: self._finish_loading(version, done))
        return task

    async def _load_version(self, version: str) -> LoadedModel:
        async with self._lock:
            row = await self._registry.get(version)
            if row.status == "deleted":
                raise version_deleted(version)
            model = await self._load(row)
        current = self._current()
        if current is not None and current.version == version:
            return current  # activated meanwhile: a second copy would hold a place and its memory
        self._loaded[version] = model
        while len(self._loaded) > self._max_models:
            self._loaded.popitem(last=False)
        log.info("trial version loaded", version=version, loaded=len(self._loaded))
        return model

    def _finish_loading(self, version: str, task: asyncio.Task[LoadedModel]) -> None:
        del self._loading[version]
        self._failed_at.pop(version, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed_at[version] = time.monotonic()
            reason = str(error).partition("\n")[0] or type(error).__name__
            log.warning("a version cannot be loaded", version=version, reason=reason)


def _app_error(error: Exception) -> AppError:
    """The error that the client gets."""
    if isinstance(error, AppError):
        return error
    if isinstance(error, CheckpointError):
        return checkpoint_unusable(error)
    # Too little memory for it, say; others may name addresses.
    name = type(error).__name__
    return Unavailable(
        f"the version cannot be loaded: {name}", code="model_not_loaded", retry_after=30
    )
