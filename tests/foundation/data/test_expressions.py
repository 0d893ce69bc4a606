from __future__ import annotations

import ibis
import pytest

from foundation.data.expressions import condition


@pytest.fixture(scope="module")
def table() -> ibis.Table:
    connection = ibis.duckdb.connect()
    connection.raw_sql(
        "CREATE TABLE t AS SELECT * FROM (VALUES (1, 1.5, 'feed'), (0, 2.5, 'reels'), (NULL, 0.0, 'feed'),"
        " (1, NULL, NULL)) v(click, dwell, surface)"
    )
    return connection.table("t")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("click == 1", [True, False, False, True]),
        ("click != 1", [False, True, False, False]),
        ("not click == 1", [False, True, True, False]),
        ("click == 1 and dwell > 1", [True, False, False, False]),
        ("click == 1 or surface == 'reels'", [True, True, False, True]),
        ("surface in ['feed', 'reels']", [True, True, True, False]),
        ("surface not in ('feed',)", [False, True, False, False]),
        ("click is None", [False, False, True, False]),
        ("dwell is not None", [True, True, True, False]),
        ("0 < dwell <= 2", [True, False, False, False]),
        ("dwell * 2 - 1 >= 2", [True, True, False, False]),
        ("-dwell < -2", [False, True, False, False]),
        ("click + 1 == 2 and click % 2 == 1 and dwell / 3 == 0.5", [True, False, False, False]),
        ("1 == 1", [True, True, True, True]),
    ],
)
def test_holds_where_python_would_say_so_and_never_for_missing_values(
    table: ibis.Table, text: str, expected: list[bool]
) -> None:
    rows = table.mutate(found=condition(table, text, "where")).to_pyarrow().to_pylist()
    assert [row["found"] for row in rows] == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("clicks == 1", "no column 'clicks'; columns are click, dwell, surface"),
        ("click ==", "is not a condition"),
        ("click = 1", "is not a condition"),
        ("click", "is not a condition; write a comparison"),
        ("dwell + 1", "is not a condition; write a comparison"),
        ("click and dwell > 1", "need comparisons"),
        ("click is 1", "'is' is only for"),
        ("click in surface", "'in' needs a list"),
        ("__import__('os').system('true')", "cannot be used"),
        ("click.real == 1", "cannot be used"),
        ("[c for c in surface] == 1", "cannot be used"),
        ("dwell ** 2 > 1", "cannot be used"),
        ("click == b'1'", "cannot be used as a value"),
    ],
)
def test_complaint_names_the_setting_and_the_text(table: ibis.Table, text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^sequences\.watched\.where: ") as error:
        condition(table, text, "sequences.watched.where")
    assert problem in str(error.value)
    assert repr(text) in str(error.value)
