"""The law of the synthetic world, worked out again from its log, event by event."""

from __future__ import annotations

import numpy as np
import pytest

from foundation.data.world_model import (
    DIMENSIONS,
    HOUR,
    SURFACE_LAWS,
    TOPICS,
    Law,
    draw_items,
    draw_users,
    sigmoid,
    simulate,
    unit,
)


@pytest.mark.parametrize("confirmation", [0.0, 16.0])
def test_true_probabilities_follow_from_the_clicks_before(confirmation: float) -> None:
    rng = np.random.default_rng(0)
    centres = unit(rng.standard_normal((TOPICS, DIMENSIONS)))
    items = draw_items(200, centres, rng)
    law = Law(
        surfaces=3,
        days=5,
        start_ms=0,
        candidates=6,
        requests_per_user=12,
        half_life_hours=30,
        fade_per_click=0.8,
        confirmation=confirmation,
        delay_hours=24,
    )
    users = draw_users(1, 20, centres, law, rng)
    log = simulate(users, items, law, rng)
    place = np.empty(items.count + 1, int)
    place[items.ids] = np.arange(items.count)
    interest, seen = np.zeros((21, DIMENSIONS)), np.zeros(21)
    request = np.stack([log["user_id"], log["time_ms"]], axis=1)
    starts = np.flatnonzero(np.r_[True, (np.diff(request, axis=0) != 0).any(1)])
    for start, end in zip(starts, np.r_[starts[1:], len(request)], strict=True):
        user, time = request[start]
        vectors = items.vectors[place[log["item_id"][start:end]]].astype(float)
        h = interest[user] * 2 ** (-(time - seen[user]) / (law.half_life_hours * HOUR))
        agreement = vectors @ h / np.sqrt(1 + h @ h)
        surface = SURFACE_LAWS[log["surface"][start]]
        logit = (
            surface.bias
            + 0.25 * np.sin(2 * np.pi * (time // HOUR % 24) / 24)
            + items.quality[place[log["item_id"][start:end]]]
            + surface.taste * vectors @ users.taste[user - 1]
            + surface.recent * agreement
        )
        np.testing.assert_allclose(log["true_click"][start:end], sigmoid(logit), rtol=2e-4)
        click = log["click"][start:end]
        weight = 2 * sigmoid(confirmation * (agreement - 0.3)) if confirmation else np.ones(len(click))
        interest[user] = (law.fade_per_click * h if click.any() else h) + (click * weight) @ vectors
        seen[user] = time
    assert log["click"].sum() > 200
