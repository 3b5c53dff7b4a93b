"""Cron schedules: minute, hour, day of the month, month, day of the week; in UTC."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from cronsim import CronSim, CronSimError

_START = datetime(2000, 1, 1, tzinfo=UTC)
# CronSim reads `3-3/5` as `3/5`, which goes on to the end; to cron it is one value.
_SINGLE_VALUE = re.compile(r"\b(\w+)-\1/[1-9]\d*\b")
# Sunday ends a week as well as it begins one: `fri-sun` is three days, `sun-sun` is one.
_UNTIL_SUNDAY = re.compile(r"(?<![a-z0])([a-z]{3}|[1-6])-sun\b")


@dataclass(frozen=True, slots=True)
class CronSchedule:
    """The times that a cron expression names.

    If an expression restricts both day fields, a match of one field suffices, as in cron.
    """

    expression: str

    @classmethod
    def parse(cls, text: str) -> CronSchedule:
        """Check an expression.

        Raises:
            ValueError: the text is malformed, or names no day that exists. The message is one line.
        """
        fields = text.lower().split()
        # CronSim takes a sixth field, for seconds.
        if len(fields) != 5:
            raise ValueError(
                "a schedule has five fields: minute, hour, day of the month, month, day of "
                f"the week, not {len(fields)}"
            )
        fields = [_SINGLE_VALUE.sub(r"\1", field) for field in fields]
        fields[4] = _UNTIL_SUNDAY.sub(_until_sunday, fields[4])
        schedule = cls(" ".join(fields))
        try:
            never = schedule.after(_START) is None
        except CronSimError as error:
            reason = str(error)[:1].lower() + str(error)[1:]
            raise ValueError(f"{text[:80]!r} is not a schedule: {reason}") from None
        if never:
            raise ValueError("the schedule names a day that no month has")
        return schedule

    def after(self, moment: datetime) -> datetime | None:
        """The first time after ``moment``, which has to be in UTC; None if there is none."""
        return next(CronSim(self.expression, moment), None)


def _until_sunday(match: re.Match[str]) -> str:
    return match.group() if match[1] == "sun" else f"{match[1]}-7"
