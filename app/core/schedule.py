"""Schedules as cron writes them: five fields, in UTC."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_PART = re.compile(r"(?:(\*)|([0-9a-z]+)(?:-([0-9a-z]+))?)(?:/([0-9]{1,4}))?")
_YEARS = 9  # 29 February comes after eight years at the latest


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    first: int
    last: int
    names: tuple[str, ...] = ()
    named_from: int = 0

    def parse(self, text: str) -> frozenset[int]:
        values: set[int] = set()
        for part in text.lower().split(","):
            match = _PART.fullmatch(part)
            if match is None:
                raise self._wrong(part)
            star, low, high, step = match.groups()
            if star:
                first, last = self.first, self.last
            else:
                first = self._value(low, part)
                # A single value with a step goes on to the end.
                last = self._last(first, high, part) if high else self.last if step else first
            by = int(step) if step else 1
            if first > last or by == 0:
                raise self._wrong(part)
            values.update(range(first, last + 1, by))
        return frozenset(values)

    def _value(self, text: str, part: str) -> int:
        if text in self.names:
            return self.names.index(text) + self.named_from
        if not text.isdecimal() or not self.first <= int(text) <= self.last:
            raise self._wrong(part)
        return int(text)

    def _last(self, first: int, text: str, part: str) -> int:
        # Sunday ends a week as well as it begins one: fri-sun, but sun-sun is one day.
        return 7 if text == "sun" and first else self._value(text, part)

    def _wrong(self, part: str) -> ValueError:
        return ValueError(
            f"{part[:40]!r} is no {self.name} ({self.first}-{self.last}) of a schedule"
        )


_MINUTE = _Field("minute", 0, 59)
_HOUR = _Field("hour", 0, 23)
_DAY = _Field("day of the month", 1, 31)
_MONTH = _Field("month", 1, 12, _MONTHS, 1)
_WEEKDAY = _Field("day of the week", 0, 7, _DAYS)  # 0 and 7 are both Sunday


@dataclass(frozen=True, slots=True)
class Schedule:
    """Minutes of the calendar. Where both days are restricted, either will do, as in cron."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0 is Sunday."""
    either_day: bool

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Raises ValueError, in one line, for what is not a schedule or never comes."""
        fields = text.split()
        if len(fields) != 5:
            raise ValueError(
                "a schedule has five fields: minute, hour, day of the month, month, "
                f"day of the week; not {len(fields)}"
            )
        minute, hour, day, month, weekday = fields
        # As in cron: a field that begins with a star restricts nothing by itself.
        either = not day.startswith("*") and not weekday.startswith("*")
        schedule = cls(
            _MINUTE.parse(minute),
            _HOUR.parse(hour),
            _DAY.parse(day),
            _MONTH.parse(month),
            frozenset(value % 7 for value in _WEEKDAY.parse(weekday)),
            either,
        )
        if schedule.after(datetime(2000, 1, 1, tzinfo=UTC)) is None:
            raise ValueError("the schedule names a day that no month has")
        return schedule

    def after(self, moment: datetime) -> datetime | None:
        """The first time after ``moment``, which has to be in UTC; None if there is none."""
        found = moment.replace(second=0, microsecond=0) + timedelta(minutes=1)
        end = found + timedelta(days=366 * _YEARS)
        while found < end:
            if found.month not in self.months:
                found = _first_of_next_month(found)
            elif not self._is_day(found):
                found = found.replace(hour=0, minute=0) + timedelta(days=1)
            elif found.hour not in self.hours:
                found = found.replace(minute=0) + timedelta(hours=1)
            elif found.minute not in self.minutes:
                found += timedelta(minutes=1)
            else:
                return found
        return None

    def _is_day(self, moment: datetime) -> bool:
        day, weekday = moment.day in self.days, moment.isoweekday() % 7 in self.weekdays
        return day or weekday if self.either_day else day and weekday


def _first_of_next_month(moment: datetime) -> datetime:
    later = moment.replace(day=1, hour=0, minute=0) + timedelta(days=32)
    return later.replace(day=1)
