"""Wall times of a time zone: cuts of a split, and the hour and weekday of a row.

Times are int64 milliseconds since 1970 (UTC) everywhere; only this module knows time zones. Changes of the
zone's offset (daylight saving) inside the data are taken into account.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import ibis
import ibis.expr.types as ir

HOUR = 3_600_000
DAY = 24 * HOUR
PARTS = ("hour", "weekday")


def zone(name: str, key: str = "timezone") -> ZoneInfo:
    """The time zone called ``name``, such as ``Asia/Shanghai``. Raises ValueError naming ``key``."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{key}: {name!r} is not a time zone; write one such as UTC or Asia/Shanghai") from None


def wall_to_ms(text: str, timezone: str, key: str) -> int:
    """A wall time (``YYYY-MM-DD`` or ISO 8601) of a time zone as milliseconds since 1970.

    A text with its own offset keeps it. Raises ValueError naming ``key``.
    """
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        raise ValueError(f"{key}: {text!r} is not a date such as 2022-05-04 or 2022-05-04T12:00") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=zone(timezone, f"{key} timezone"))
    return round(moment.timestamp() * 1000)


def wall_text(ms: int, timezone: str = "UTC") -> str:
    """Milliseconds since 1970 as ``YYYY-MM-DD HH:MM:SS`` of a time zone; far-off values are said to be so."""
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
    except OverflowError:
        return "a time beyond the calendar"
    return f"{moment.astimezone(zone(timezone)):%Y-%m-%d %H:%M:%S}"


def offsets(first_ms: int, last_ms: int, timezone: str) -> list[tuple[int, int]]:
    """The zone's offsets over a range of time: (from ms, offset ms), ascending, at least one.

    Offsets change on whole quarter hours of UTC; the range is searched day by day, then refined.
    """
    tz = zone(timezone)
    found = [(first_ms, _offset(first_ms, tz))]
    step = first_ms
    while step < last_ms:
        following = min(step + DAY, last_ms)
        if _offset(following, tz) != found[-1][1]:
            low, high = step, following
            while high - low > 1:
                middle = (low + high) // 2
                if _offset(middle, tz) == found[-1][1]:
                    low = middle
                else:
                    high = middle
            found.append((high, _offset(high, tz)))
        step = following
    return found


def calendar_part(time: ir.IntegerValue, part: str, changes: list[tuple[int, int]]) -> ir.IntegerValue:
    """Hour of the day 0-23, or weekday 0 (Monday) - 6, of a time in ms, as an Ibis expression.

    Args:
        part: ``hour`` or ``weekday``. changes: what :func:`offsets` found for the range of ``time``.
    """
    offset = ibis.literal(changes[0][1], "int64")
    for since, milliseconds in changes[1:]:
        offset = (time >= since).ifelse(milliseconds, offset)
    local = time + offset
    if part == "hour":
        return ((local // HOUR) % 24).cast("int64")
    assert part == "weekday"
    return ((local // DAY + 3) % 7).cast("int64")


def _offset(ms: int, tz: ZoneInfo) -> int:
    moment = datetime.fromtimestamp(ms / 1000, tz)
    delta = moment.utcoffset()
    assert delta is not None
    return round(delta.total_seconds() * 1000)
