"""Which versions keep their files."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from app.models.history import Change
from app.models.schemas import Activation

GRACE_SECONDS = 3600.0  # for servers, trainings and requests that still use what was served
DAY_SECONDS = 86_400.0


class Stored(NamedTuple):
    """A version that has files; ``created_at`` in microseconds since 1970."""

    version: str
    status: str
    created_at: int


@dataclass(frozen=True, slots=True)
class Rule:
    """How many published versions are kept, and how long rejected ones are."""

    newest: int = 5
    rejected_days: float = 14.0
    grace_seconds: float = GRACE_SECONDS

    def to_remove(
        self,
        versions: Iterable[Stored],
        activation: Activation,
        changes: Iterable[Change],
        in_use: Collection[str],
        now: int,
    ) -> list[str]:
        """The versions whose files are to go; ``now`` in microseconds since 1970.

        Kept are the newest published ones, the one that is served, the one that a rollback leads
        to, whatever is in use, and rejected ones for some days; and for a while whatever is new or
        was served until a moment ago: a server may just be loading it.
        """
        young = now - int(self.grace_seconds * 1e6)
        rejected_since = now - int(self.rejected_days * DAY_SECONDS * 1e6)
        stored = sorted(versions, key=lambda one: (one.created_at, one.version), reverse=True)
        kept = {activation.version, activation.previous, *in_use}
        kept.update([one.version for one in stored if one.status == "published"][: self.newest])
        for change in changes:
            if change.at > young:
                kept.update((change.version, change.previous))
        return [
            one.version
            for one in stored
            if one.version not in kept
            and one.created_at <= young
            and (one.status != "rejected" or one.created_at <= rejected_since)
        ]
