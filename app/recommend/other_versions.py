"""Versions that are not the active one, loaded because somebody asks for them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from app.core.errors import AppError, Unavailable, Unprocessable
from app.core.logging import get_logger
from app.models.schemas import ModelRow
from app.models.service import ModelRegistry
from app.models.told import deleted, told_of
from app.recommend.serving import ServingModel
from ncr_core.errors import CheckpointError

log = get_logger(__name__)

WAIT_SECONDS = 10.0
RETRY_SECONDS = 30.0  # before a version that could not be loaded is tried again unasked


class OtherVersions:
    """At most so many loaded models; the one that was not asked for the longest makes place.

    One is loaded at a time, and once for all who ask for it; who gives up waiting stops nothing.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        load: Callable[[ModelRow], Awaitable[ServingModel]],
        most: int,
    ) -> None:
        self._registry = registry
        self._load = load
        self._most = most
        self._kept: OrderedDict[str, ServingModel] = OrderedDict()
        self._loading: dict[str, asyncio.Task[ServingModel]] = {}
        self._failed_at: dict[str, float] = {}
        self._one_at_a_time = asyncio.Lock()

    async def get(self, version: str) -> ServingModel:
        """The version, published or rejected, loaded if need be.

        Raises NotFound for one that there is not, Conflict where its files are removed or damaged,
        Unprocessable where none is to be kept, and Unavailable where loading takes long.
        """
        row = await self._registry.get(version)
        if row.status == "deleted":
            raise deleted(version)
        if self._most == 0:
            raise Unprocessable("only the active version can be asked for", code="model_not_served")
        found = self._find(version)
        if found is not None:
            return found
        if version not in self._loading and len(self._loading) >= self._most:
            raise Unavailable("other versions are being loaded", code="model_loading")
        loading = self._begin(version)
        try:
            return await asyncio.wait_for(asyncio.shield(loading), WAIT_SECONDS)
        except TimeoutError:
            raise Unavailable("this version is still being loaded", code="model_loading") from None
        except Exception as error:
            raise _told(error) from None

    def at_hand(self, version: str) -> ServingModel | None:
        """The version, if it is loaded; if not, loading it begins, and nobody waits."""
        found = self._find(version)
        tried = self._failed_at.get(version, -float("inf"))
        if (
            found is None
            and version not in self._loading
            and len(self._loading) < self._most
            and time.monotonic() - tried > RETRY_SECONDS
        ):
            self._begin(version)
        return found

    def take(self, version: str) -> ServingModel | None:
        """The version, if it is loaded, no longer kept here."""
        return self._kept.pop(version, None)

    async def stop(self) -> None:
        """Waits for nothing more."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _find(self, version: str) -> ServingModel | None:
        found = self._kept.get(version)
        if found is not None:
            self._kept.move_to_end(version)
        return found

    def _begin(self, version: str) -> asyncio.Task[ServingModel]:
        task = self._loading.get(version)
        if task is None:
            task = self._loading[version] = asyncio.create_task(self._loaded(version))
            task.add_done_callback(lambda done: self._done(version, done))
        return task

    async def _loaded(self, version: str) -> ServingModel:
        async with self._one_at_a_time:
            row = await self._registry.get(version)
            if row.status == "deleted":
                raise deleted(version)
            model = await self._load(row)
        self._kept[version] = model
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        log.info("another version loaded", version=version, kept=len(self._kept))
        return model

    def _done(self, version: str, task: asyncio.Task[ServingModel]) -> None:
        del self._loading[version]
        self._failed_at.pop(version, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed_at[version] = time.monotonic()
            reason = str(error).partition("\n")[0] or type(error).__name__
            log.warning("a version cannot be loaded", version=version, reason=reason)


def _told(error: Exception) -> AppError:
    """What the client is told of it."""
    if isinstance(error, AppError):
        return error
    if isinstance(error, CheckpointError):
        return told_of(error)
    # Too little memory for it, say; others may name addresses.
    name = type(error).__name__
    return Unavailable(f"it cannot be loaded: {name}", code="model_not_loaded", retry_after=30)
