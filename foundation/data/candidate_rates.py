"""What became of a candidate's earlier impressions: rates by video, author and so on, as they were known at the time.

For an impression at time t and a key (its video, its author), the impressions of the same key up to ``t - delay`` are
counted, and the rate of each outcome among them is smoothed towards an expected one and given as log-odds beside it:

    log(r / (1 - r)) - log(e / (1 - e)),   r = (positives + strength * e) / (told + strength)

where `told` are the impressions with a label, so that 0 means "as expected, or nothing known yet". Ids that training
saw too rarely to learn a vector for them still have a rate, and so do outcomes that are too rare to shape one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ibis
import ibis.expr.types as ir

HOUR_MS = 3_600_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One rate.

    Args:
        label: column of zeros and ones; an impression without a label says nothing of the rate.
        expected: the rate of a key of which nothing is known.
        strength: weighs as much as so many impressions.
    """

    label: str
    expected: float
    strength: float


def with_rates(
    rows: ir.Table, keys: Mapping[str, str], outcomes: Mapping[str, Outcome], time: str, delay_hours: float
) -> ir.Table:
    """Adds ``NAME_shown`` (log(1 + impressions)) and ``NAME_OUTCOME_rate`` for every key and outcome.

    Args:
        rows: all impressions, those that only serve as history too.
        keys: column by NAME; where it is missing, so are the rates.
        outcomes: by the OUTCOME of the new column's name.
        time: column of milliseconds.
        delay_hours: an outcome is known so long after its impression.
    """
    until = int(delay_hours * HOUR_MS)
    added: dict[str, ir.Value] = {}
    for name, key in keys.items():
        past = ibis.range_window(preceding=(None, until), group_by=key, order_by=time)
        known = rows[key].notnull()
        shown = rows[time].count().over(past)
        added[f"{name}_shown"] = known.ifelse((shown + 1).ln(), ibis.null("float64"))
        for outcome, law in outcomes.items():
            told = rows[law.label].count().over(past)
            positives = rows[law.label].sum().over(past).fill_null(0)
            rate = (positives + law.strength * law.expected) / (told + law.strength)
            change = (rate / (1 - rate)).ln() - _log_odds(law.expected)
            added[f"{name}_{outcome}_rate"] = known.ifelse(change, ibis.null("float64"))
    return rows.mutate(**added)


def _log_odds(rate: float) -> ir.Value:
    odds = ibis.literal(rate / (1 - rate), "float64")
    return odds.ln()
