"""Keeps the active model loaded: polls the registry and swaps one reference."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from app.core.logging import get_logger
from app.core.settings import Settings
from app.models.schemas import ModelRow
from app.models.service import ModelRegistry
from app.recommend.metrics import RankerMetrics
from app.recommend.new_items import NewItems
from app.recommend.other_versions import OtherVersions
from app.recommend.precomputed import Precomputed
from app.recommend.serving import ServingModel
from ncr_core.errors import CheckpointError
from ncr_core.ranking.loader import kernel_or_none
from ncr_core.training.config import resolve_device

log = get_logger(__name__)

GPU = Path("/dev/nvidia0")
RETRY_SECONDS = 30.0  # a checkpoint on shared storage may come a little after its row


class ModelHost:
    """``current`` is the model to answer with; a request keeps the one it began with.

    A version that cannot be loaded is refused and reported, and the one before goes on serving.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        settings: Settings,
        on_model: Callable[[ServingModel], None] = lambda model: None,
        metrics: RankerMetrics | None = None,
        new_items: NewItems | None = None,
    ) -> None:
        self.current: ServingModel | None = None
        self.refused: str | None = None
        """Why the active version is not the one that serves; None when all is well."""
        self._on_model = on_model
        self._metrics = metrics or RankerMetrics()
        self._registry = registry
        self._settings = settings
        self._device = str(resolve_device(settings.device))
        self._generation: int | None = None
        self._looked_for: str | None = None
        self._retry_at = float("inf")
        self._woken = asyncio.Event()
        self._new_items = new_items
        self._tasks: list[asyncio.Task[None]] = []
        self.others = OtherVersions(registry, self._load, settings.trial_models)

    async def start(self) -> None:
        """Loads the active model, if there is one, and begins to follow the registry."""
        log.info("device", device=self._device)
        if self._settings.device == "auto" and self._device == "cpu" and GPU.exists():
            log.warning("there is a GPU that torch cannot use: models run on the CPU")
        if self._device == "cpu":
            # The first time on a machine this compiles, for a quarter of a minute: now, and not
            # when the first model has been published and is waited for.
            await asyncio.to_thread(kernel_or_none)
        await self.refresh()
        self._tasks = [asyncio.create_task(self._follow())]
        if self._new_items is not None and self._settings.new_items_seconds > 0:
            self._tasks.append(asyncio.create_task(self._grow(self._new_items)))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.others.stop()

    async def version(self, version: str) -> ServingModel:
        """A version, loaded for a trial where it is not the active one. Raises as
        `OtherVersions.get`.
        """
        if self.current is not None and self.current.version == version:
            return self.current
        return await self.others.get(version)

    async def ready(self) -> str | None:
        """Why requests should not be sent here; None when the active model is loaded."""
        if self._generation is None:
            return "the registry has not been read"
        return self.refused if self.current is None else None

    async def refresh(self) -> None:
        """Brings ``current`` up to what the registry says."""
        activation = await self._registry.activation()
        if self.current is not None:
            await self._look_for_candidates(self.current)
        if activation.generation == self._generation and time.monotonic() < self._retry_at:
            return
        self._retry_at = float("inf")
        if activation.version is None:
            self.current, self.refused = None, None
        elif self.current is None or self.current.version != activation.version:
            try:
                model = self.others.take(activation.version)
                if model is None:
                    model = await self._load(await self._registry.get(activation.version))
                self._looked_for = None
                await self._look_for_candidates(model)
            except Exception as error:
                # Not only a damaged file: too little memory for it, say. The old one goes on.
                reason = str(error).partition("\n")[0] or type(error).__name__
                # Readiness shows it to everyone: others may name addresses.
                known = isinstance(error, CheckpointError)
                self.refused = reason if known else f"it cannot be loaded: {type(error).__name__}"
                self._retry_at = time.monotonic() + RETRY_SECONDS
                log.error("model refused", version=activation.version, reason=reason)
            else:
                self.current, self.refused = model, None
                self._on_model(model)
                log.info("model loaded", version=model.version, items=model.n_items)
        else:
            self.refused = None
        self._generation = activation.generation

    async def _load(self, row: ModelRow) -> ServingModel:
        checkpoint = await self._registry.load(row, self._device)
        model = await asyncio.to_thread(
            ServingModel,
            row,
            checkpoint,
            self._settings.candidates,
            self._settings.candidate_cache_bytes,
            self._metrics.pairs.inc,
            self._fell_back,
        )
        await asyncio.to_thread(model.warm_up)
        return model

    async def _look_for_candidates(self, model: ServingModel) -> None:
        """Takes over what a worker has computed for this version, once it is there."""
        if self._looked_for == model.version:
            return
        try:
            path = await self._registry.fetch_candidates(model.version)
            if path is None:
                return
            found = await asyncio.to_thread(Precomputed.load, path, model.n_items)
        except (OSError, CheckpointError) as error:  # it may be there the next time
            log.warning("precomputed candidates cannot be read", reason=str(error))
        except ValueError as error:
            self._looked_for = model.version
            log.warning("precomputed candidates are not used", reason=str(error))
        else:
            self._looked_for = model.version
            model.candidates.precomputed = found
            log.info("candidates loaded", version=model.version, users=len(found))

    def _fell_back(self, to: str) -> None:
        log.warning("the GPU has too little memory for a pass", now=to)
        self._metrics.fallbacks.labels(to).inc()

    def wake(self) -> None:
        """Somebody says that another version is active: look now instead of at the next poll."""
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

    async def grow(self, new_items: NewItems) -> None:
        """Adds the items that enough users took up since the training of the model that serves."""
        before = self.current
        larger = None if before is None else await new_items.extend(before)
        # Another version may have taken its place meanwhile.
        if larger is not None and self.current is before:
            self.current = larger
            self._on_model(larger)

    async def _grow(self, new_items: NewItems) -> None:
        while True:
            await asyncio.sleep(self._settings.new_items_seconds)
            try:
                await self.grow(new_items)
            except Exception as error:
                log.warning("new items are not added", error=str(error).partition("\n")[0])
