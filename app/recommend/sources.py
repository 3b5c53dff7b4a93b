"""What answers are made from: what is known of users and items, and the models."""

from __future__ import annotations

from collections.abc import Callable

from app.catalog.service import CatalogService
from app.core.errors import Conflict
from app.events.service import EventService
from app.recommend.asking import Asked
from app.recommend.batcher import IsGone
from app.recommend.filters import Filters
from app.recommend.model_host import ModelHost
from app.recommend.serving import ServingModel


class Sources:
    """For one answer: look everything up once, and answer from that."""

    def __init__(self, events: EventService, catalog: CatalogService, host: ModelHost) -> None:
        self.events = events
        self.catalog = catalog
        self.host = host

    async def ask(
        self,
        user: str,
        filters: Filters,
        gone: IsGone | None = None,
        on_slow: Callable[[], None] | None = None,
    ) -> Asked:
        """What is known at this moment. Raises Conflict for a seq that is not reached.

        Everything that was committed about the user has been taken in: see `Profiles`.
        """
        profile = await self.events.profile(user, filters.min_seq)
        if filters.min_seq is not None and profile.event_seq < filters.min_seq:
            raise Conflict(
                f"no event has the seq {filters.min_seq} yet; the last is {profile.event_seq}",
                code="seq_not_reached",
            )
        catalogue = await self.catalog.catalogue(profile.catalog_seq)
        return Asked(user, filters, profile, catalogue, gone, on_slow)

    async def model(self, version: str | None) -> ServingModel | None:
        """The model to answer with, the active one if no version is named; None where there is no
        model yet. Raises as `OtherVersions.get`.
        """
        if version is None:
            return self.host.current
        return await self.host.version(version)
