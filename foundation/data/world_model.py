"""The laws of the synthetic world: who is shown what, and with which true probability they click, like and convert.

Items and users are points of one taste space, unit vectors near topic centres. A user u at time t has a long-term
taste `p_u` and a recent interest `h_u(t)`: the sum of the vectors of the items clicked so far, each click fading by
`fade_per_click` with every later request that had a click and by half every `half_life_hours`. With `confirmation`
k > 0 a click on item j at t' enters with the weight `2 sigmoid(k (<h_u(t'), v_j> / sqrt(1 + |h_u(t')|^2) - 0.3))`:
clicks in line with the interest of their time last, odd ones are forgotten at once. For item i on surface s

    logit P(click)          = a_s + b_i + c_s <p_u, v_i> + r_s <h_u(t), v_i> / sqrt(1 + |h_u(t)|^2) + hour effect
    logit P(like | click)   = a'  + b'_i + c' <p_u, v_i>
    logit P(convert|click)  = a'' - price effect + c'' <p_u, v_i> + surface effect

so that the order and the times of a user's past clicks carry signal which no static feature holds. A like is only
possible after a click: `true_like` is the product. Everything is drawn with one generator per block of users, so a
block does not depend on the others.

U users of a block, Q requests, C candidates of a request, d dimensions of the taste space; times are milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

HOUR = 3_600_000
DAY = 24 * HOUR
DIMENSIONS = 8
TOPICS = 24
COUNTRIES = 6
DEVICES = 3
TAGS = 4
TAG_VALUES = 4 * DIMENSIONS

# Agreement of a click with the interest of its time at which it weighs 1.
_CONFIRMED = 0.3
# Share of requests by hour of the day: quiet nights, busy evenings.
_HOURS = 1.0 + 0.7 * np.sin((np.arange(24) - 13) / 24 * 2 * np.pi)


@dataclass(frozen=True, slots=True)
class SurfaceLaw:
    """How one surface behaves: click bias, weight of the long-term taste, weight of the recent interest, traffic."""

    bias: float
    taste: float
    recent: float
    traffic: float


# Surfaces take these in turn. They differ in base rate, in what drives clicks, and in size.
SURFACE_LAWS = (
    SurfaceLaw(bias=-1.9, taste=1.4, recent=2.6, traffic=0.55),
    SurfaceLaw(bias=-0.9, taste=0.7, recent=3.4, traffic=0.30),
    SurfaceLaw(bias=-2.7, taste=2.2, recent=1.4, traffic=0.15),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Items:
    """All items, sorted by topic. Arrays of `count` rows; `ids` are what the logs show."""

    ids: np.ndarray
    vectors: np.ndarray
    topic: np.ndarray
    topic_start: np.ndarray
    quality: np.ndarray
    like_quality: np.ndarray
    price: np.ndarray
    creator: np.ndarray
    tags: np.ndarray

    @property
    def count(self) -> int:
        """Number of items."""
        return len(self.ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Users:
    """The users of one block: `taste [U, d]`, `requests [U]`, `topics [U, 3]` and what the logs show of them."""

    ids: np.ndarray
    taste: np.ndarray
    topics: np.ndarray
    requests: np.ndarray
    surface_share: np.ndarray
    age: np.ndarray
    country: np.ndarray
    device: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """Constants of the world that a run can choose.

    Args:
        surfaces: number of surfaces.
        days: length of the log.
        start_ms: time of its beginning, UTC.
        candidates: impressions of a request, before repeated items are dropped.
        requests_per_user: mean number of requests of a user over the whole log.
        half_life_hours: after this time a past click counts half.
        fade_per_click: what remains of past clicks after a request that had a click.
        confirmation: how much a click's weight depends on the interest that it fell into; 0: all weigh 1.
        delay_hours: a conversion counts up to this long after the click.
    """

    surfaces: int
    days: int
    start_ms: int
    candidates: int
    requests_per_user: float
    half_life_hours: float
    fade_per_click: float
    confirmation: float
    delay_hours: float


def draw_items(count: int, topic_centres: np.ndarray, rng: np.random.Generator) -> Items:
    """Draws all items of the world.

    Args:
        count: number of items; at least the number of topics.
        topic_centres: float32 [topics, d], unit vectors.
        rng: the world's own generator.
    """
    topics = len(topic_centres)
    # Every topic has an item; the rest are spread unevenly.
    share = rng.dirichlet(np.full(topics, 2.0))
    topic = np.sort(np.concatenate([np.arange(topics), rng.choice(topics, count - topics, p=share)]))
    vectors = unit(topic_centres[topic] + 0.22 * rng.standard_normal((count, DIMENSIONS)).astype(np.float32))
    coordinates = np.argsort(-np.abs(vectors), axis=1)[:, :TAGS]
    value = np.take_along_axis(vectors, coordinates, axis=1)
    # A tag names a large coordinate and its sign and size: 4 values per dimension.
    tags = 4 * coordinates + 2 * (value > 0) + (np.abs(value) > 0.5)
    return Items(
        ids=1 + rng.permutation(count).astype(np.int64),
        vectors=vectors,
        topic=topic.astype(np.int64),
        topic_start=np.searchsorted(topic, np.arange(topics + 1)),
        quality=(0.5 * rng.standard_normal(count)).astype(np.float32),
        like_quality=(0.5 * rng.standard_normal(count)).astype(np.float32),
        price=np.exp(3 + rng.standard_normal(count)).round(2),
        creator=1 + rng.zipf(1.5, count).clip(max=max(2, count // 10)).astype(np.int64),
        tags=tags.astype(np.int64),
    )


def draw_users(first_id: int, count: int, topic_centres: np.ndarray, law: Law, rng: np.random.Generator) -> Users:
    """Draws a block of users with ids `first_id ...`; few have very many requests, most have a handful."""
    topics = rng.integers(0, len(topic_centres), (count, 3))
    noise = 0.35 * rng.standard_normal((count, DIMENSIONS)).astype(np.float32)
    taste = unit(topic_centres[topics[:, 0]] + 0.6 * topic_centres[topics[:, 1]] + noise)
    # Lognormal with sigma 1.2: the mean is exp(sigma^2 / 2) times the median, the top percent has 8 times the mean.
    sigma = 1.2
    heavy = np.exp(sigma * rng.standard_normal(count) - sigma**2 / 2)
    requests = np.maximum(1, np.rint(law.requests_per_user * heavy)).astype(np.int64)
    traffic = np.array([SURFACE_LAWS[s % len(SURFACE_LAWS)].traffic for s in range(law.surfaces)])
    share = rng.gamma(4.0 * traffic, size=(count, law.surfaces)) + 1e-6
    country = (np.argmax(taste[:, :3], axis=1) + rng.integers(0, 4, count)) % COUNTRIES
    return Users(
        ids=np.arange(first_id, first_id + count, dtype=np.int64),
        taste=taste,
        topics=topics,
        requests=requests,
        surface_share=np.cumsum(share / share.sum(1, keepdims=True), axis=1),
        age=(38 + 10 * taste[:, 0] + 9 * rng.standard_normal(count)).clip(13, 90).round().astype(np.float64),
        country=country.astype(np.int64),
        device=rng.integers(0, DEVICES, count),
    )


def request_times(users: Users, law: Law, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """User index int64 [Q] and time int64 [Q] of every request, sorted by user, then strictly by time."""
    user = np.repeat(np.arange(len(users.ids)), users.requests)
    hour = rng.choice(24, len(user), p=_HOURS / _HOURS.sum())
    # The last quarter hour of the last day stays free, so that making the times strict cannot leave the log.
    within = rng.integers(0, HOUR, len(user))
    time = rng.integers(0, law.days, len(user)) * DAY + hour * HOUR + within
    time = np.minimum(time, law.days * DAY - HOUR // 4)
    order = np.lexsort((time, user))
    rank = np.arange(len(user)) - np.repeat(np.cumsum(users.requests) - users.requests, users.requests)
    return user, law.start_ms + time[order] + rank


def draw_candidates(
    users: Users, who: np.ndarray, items: Items, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Item index int64 [Q, count] of each request's candidates, and a mask of those that repeat an earlier one.

    Half come from the user's favourite topics, half from all; within a topic few items take most impressions.
    """
    shape = (len(who), count)
    favourite = users.topics[who[:, None], rng.integers(0, users.topics.shape[1], shape)]
    topics = len(items.topic_start) - 1
    topic = np.where(rng.random(shape) < 0.5, favourite, rng.integers(0, topics, shape))
    start, end = items.topic_start[topic], items.topic_start[topic + 1]
    item = start + ((end - start) * rng.random(shape) ** 2).astype(np.int64)
    order = np.argsort(item, axis=1, kind="stable")
    ranked = np.take_along_axis(item, order, axis=1)
    repeated = np.zeros(shape, bool)
    np.put_along_axis(repeated[:, :], order[:, 1:], ranked[:, 1:] == ranked[:, :-1], axis=1)
    return item, repeated


def simulate(users: Users, items: Items, law: Law, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Plays the whole log of a block of users.

    All users take their k-th request together, so that the recent interest of each is a row of one matrix.

    Returns:
        Columns of the impressions, sorted by user, time and position in the request: `user_id`, `item_id`,
        `time_ms`, `surface` (index), `device`, `click`, `like`, `conversion` (int8), `conversion_time_ms` (int64,
        0 where there is none), `true_click`, `true_like`, `true_conversion` (float32; the last given a click).
    """
    user, time = request_times(users, law, rng)
    first = np.cumsum(users.requests) - users.requests
    order = np.argsort(-users.requests, kind="stable")
    interest = np.zeros((len(users.ids), DIMENSIONS), np.float32)
    seen = np.full(len(users.ids), law.start_ms, np.int64)
    steps = []
    for step in range(int(users.requests.max())):
        who = order[: np.searchsorted(-users.requests[order], -step, side="left")]
        request = first[who] + step
        fade = np.exp2(-(time[request] - seen[who]) / (law.half_life_hours * HOUR)).astype(np.float32)
        seen[who] = time[request]
        now = interest[who] * fade[:, None]
        columns, clicked = _requests(users, who, items, law, now, time[request], rng)
        any_click = (clicked != 0).any(axis=1, keepdims=True)
        interest[who] = np.where(any_click, law.fade_per_click * now + clicked, now)
        columns["_request"] = np.repeat(request, law.candidates).reshape(len(who), law.candidates)
        keep = ~columns.pop("_repeated")
        steps.append({name: value[keep] for name, value in columns.items()})
    log = {name: np.concatenate([part[name] for part in steps]) for name in steps[0]}
    by_request = np.argsort(log["_request"], kind="stable")
    request = log.pop("_request")[by_request]
    log = {name: value[by_request] for name, value in log.items()}
    return {"user_id": users.ids[user[request]], "time_ms": time[request], **log}


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1, float32."""
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def _requests(
    users: Users,
    who: np.ndarray,
    items: Items,
    law: Law,
    interest: np.ndarray,
    time: np.ndarray,
    rng: np.random.Generator,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """One request of each user in `who`: columns [Q, C], and the summed vectors of what was clicked, [Q, d]."""
    laws = [SURFACE_LAWS[s % len(SURFACE_LAWS)] for s in range(law.surfaces)]
    bias, taste_weight, recent_weight = (
        np.array([getattr(entry, name) for entry in laws], np.float32) for name in ("bias", "taste", "recent")
    )
    surface = (rng.random((len(who), 1)) > users.surface_share[who]).sum(1).clip(max=law.surfaces - 1)
    item, repeated = draw_candidates(users, who, items, law.candidates, rng)
    vectors = items.vectors[item]
    taste = np.einsum("qcd,qd->qc", vectors, users.taste[who])
    scale = 1 / np.sqrt(1 + (interest**2).sum(1))
    recent = np.einsum("qcd,qd->qc", vectors, interest * scale[:, None])
    evening = 0.25 * np.sin(2 * np.pi * ((time // HOUR) % 24) / 24).astype(np.float32)
    click_logit = (
        (bias[surface] + evening)[:, None]
        + items.quality[item]
        + taste_weight[surface][:, None] * taste
        + recent_weight[surface][:, None] * recent
    )
    true_click = sigmoid(click_logit)
    like_given_click = sigmoid(-1.6 + items.like_quality[item] + 1.2 * taste)
    price = np.log1p(items.price[item]).astype(np.float32)
    conversion_logit = -2.2 - 0.5 * (price - 3) + 1.5 * taste + 0.3 * (surface[:, None] % 3 - 1)
    true_conversion = sigmoid(conversion_logit)
    click = (rng.random(item.shape) < true_click) & ~repeated
    like = click & (rng.random(item.shape) < like_given_click)
    conversion = click & (rng.random(item.shape) < true_conversion)
    # Mean a quarter of the window; the few that would come later come at its end.
    delay = np.minimum(rng.exponential(law.delay_hours / 4, item.shape), law.delay_hours) * HOUR
    weight = click.astype(np.float32)
    if law.confirmation:
        weight *= 2 * sigmoid(law.confirmation * (recent - _CONFIRMED))
    clicked = np.einsum("qcd,qc->qd", vectors, weight)
    columns = {
        "item_id": items.ids[item],
        "surface": np.broadcast_to(surface[:, None], item.shape),
        "device": np.broadcast_to(users.device[who][:, None], item.shape),
        "click": click.astype(np.int8),
        "like": like.astype(np.int8),
        "conversion": conversion.astype(np.int8),
        "conversion_time_ms": np.where(conversion, time[:, None] + delay.astype(np.int64), 0),
        "true_click": true_click,
        "true_like": true_click * like_given_click,
        "true_conversion": true_conversion,
        "_repeated": repeated,
    }
    return columns, clicked


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), float32."""
    return (1 / (1 + np.exp(-logits))).astype(np.float32)
