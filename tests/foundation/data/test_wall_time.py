from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import ibis
import pytest

from foundation.data.wall_time import HOUR, calendar_part, offsets, wall_text, wall_to_ms, zone


def test_cuts_are_wall_times_of_the_zone() -> None:
    utc, shanghai = (wall_to_ms("2022-05-04", z, "split") for z in ("UTC", "Asia/Shanghai"))
    assert utc == 1_651_622_400_000
    assert utc - shanghai == 8 * HOUR
    assert wall_to_ms("2022-05-04T12:30", "UTC", "split") == utc + 12 * HOUR + HOUR // 2
    assert wall_to_ms("2022-05-04T00:00+02:00", "Asia/Shanghai", "split") == utc - 2 * HOUR


@pytest.mark.parametrize(
    ("text", "timezone", "problem"),
    [
        ("4 May", "UTC", "split: '4 May' is not a date"),
        ("2022-05-04", "Mars/Olympus", "'Mars/Olympus' is not a time zone"),
    ],
)
def test_bad_dates_and_zones_are_named(text: str, timezone: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^split") as error:
        wall_to_ms(text, timezone, "split")
    assert problem in str(error.value)
    with pytest.raises(ValueError, match="timezone"):
        zone("nowhere")


def test_text_of_a_time() -> None:
    assert wall_text(1_651_622_400_000) == "2022-05-04 00:00:00"
    assert wall_text(1_651_622_400_000, "Asia/Shanghai") == "2022-05-04 08:00:00"
    assert wall_text(2**62) == "a time beyond the calendar"


@pytest.mark.parametrize(
    "timezone", ["UTC", "Asia/Shanghai", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe"]
)
def test_hour_and_weekday_agree_with_the_zone_over_a_year(timezone: str) -> None:
    first = wall_to_ms("2022-01-01", "UTC", "x")
    times = [first + i * 7 * HOUR + i % 5 * 613_000 for i in range(1300)]
    connection = ibis.duckdb.connect()
    connection.raw_sql(f"CREATE TABLE t AS SELECT unnest({times}) AS at")
    table = connection.table("t")
    changes = offsets(times[0], times[-1], timezone)
    parts = {part: calendar_part(table["at"], part, changes) for part in ("hour", "weekday")}
    for row in table.mutate(**parts).to_pyarrow().to_pylist():
        local = datetime.fromtimestamp(row["at"] / 1000, ZoneInfo(timezone))
        assert (row["hour"], row["weekday"]) == (local.hour, local.weekday()), local


def test_a_change_of_the_clock_is_found_to_the_hour() -> None:
    spring = wall_to_ms("2022-03-13T07:00+00:00", "UTC", "x")  # 2 o'clock in New York becomes 3
    found = offsets(spring - 30 * HOUR, spring + 30 * HOUR, "America/New_York")
    assert found == [(spring - 30 * HOUR, -5 * HOUR), (spring, -4 * HOUR)]
    assert offsets(spring, spring, "UTC") == [(spring, 0)]
