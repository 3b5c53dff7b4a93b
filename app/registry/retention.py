"""Retention: the rule by which versions keep their files."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from app.registry.schemas import Activation, ActivationChange

GRACE_SECONDS = 3600.0  # for servers, trainings and requests that still use the previous version
DAY_SECONDS = 86_400.0


class StoredVersion(NamedTuple):
    """A version that has files."""

    version: str
    status: str
    created_at: int
    """Microseconds since 1970, UTC."""


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """The number of published versions that stay, and the days that rejected versions stay."""

    newest: int = 5
    rejected_days: float = 14.0
    grace_seconds: float = GRACE_SECONDS

    def expired(
        self,
        versions: Iterable[StoredVersion],
        activation: Activation,
        changes: Iterable[ActivationChange],
        in_use: Collection[str],
        now: int,
    ) -> list[str]:
        """The versions whose files are to be removed.

        The rule keeps the newest published versions, the active version, the target of a rollback,
        versions in use, and rejected versions for some days. The rule also keeps a version that is
        new or was active a moment ago, because a server may still load the version.

        Args:
            versions: all versions with files.
            activation: the active version.
            changes: the history of activations, in any order.
            in_use: versions that other features need.
            now: microseconds since 1970, UTC.
        """
        grace_began = now - int(self.grace_seconds * 1e6)
        rejected_since = now - int(self.rejected_days * DAY_SECONDS * 1e6)
        newest_first = sorted(versions, key=lambda v: (v.created_at, v.version), reverse=True)
        kept = {activation.version, activation.previous, *in_use}
        published = [each.version for each in newest_first if each.status == "published"]
        kept.update(published[: self.newest])
        for change in changes:
            if change.at > grace_began:
                kept.update((change.version, change.previous))
        return [
            each.version
            for each in newest_first
            if each.version not in kept
            and each.created_at <= grace_began
            and (each.status != "rejected" or each.created_at <= rejected_since)
        ]
