"""`/rank`: raw request in, ordered candidates out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from serving.codec import shorten
from serving.encoder import Counts, RankRequest
from serving.errors import invalid
from serving.model import ServedModel


class RankJob:
    """One `/rank` request on one model: `prepare`, then the model's scores, then `finish`.

    Args:
        reject_unknown: a field that the model does not know is an error; else it is counted and ignored.
    """

    def __init__(self, model: ServedModel, request: RankRequest, reject_unknown: bool) -> None:
        self.counts = Counts()
        self._model = model
        self._request = request
        self._reject_unknown = reject_unknown
        self._numbers: dict[str, np.ndarray] = {}

    def prepare(self) -> dict[str, np.ndarray]:
        """The model's inputs. Raises ServingError naming the field at fault."""
        value = self._model.value
        request = self._request
        inputs = self._model.request_encoder.encode(request, self.counts, self._reject_unknown)
        self._numbers = {name: _numbers(request.candidates, name, value.text) for name in value.fields}
        return inputs

    def finish(self, scores: Mapping[str, np.ndarray], seconds: float) -> bytes:
        """The JSON answer.

        Args:
            scores: probability ``[N]`` per task. seconds: time since the request arrived.
        """
        value = self._model.value
        values = value.evaluate({**{task: scores[task] for task in value.tasks}, **self._numbers})
        values = np.broadcast_to(values, (len(self._request.candidates),))
        if not np.isfinite(values).all():
            index = int(np.flatnonzero(~np.isfinite(values))[0])
            raise invalid(f"candidates[{index}]: its value, {value.text!r}, is not a finite number")
        tasks = list(scores)
        rows = zip(*(scores[task].tolist() for task in tasks), strict=True)
        probabilities = [dict(zip(tasks, row, strict=True)) for row in rows]
        ranked = [
            {
                "id": self._request.candidates[index].get("id", index),
                "index": index,
                "rank": position,
                "value": float(values[index]),
                "probabilities": probabilities[index],
            }
            for position, index in enumerate(order(values).tolist(), start=1)
        ]
        answer: dict[str, Any] = {
            "model": self._model.name,
            "version": self._model.version,
            "ranked": ranked,
            "counts": {"candidates": len(ranked), **self.counts.to_dict()},
            "latency_ms": round(seconds * 1e3, 3),
        }
        return orjson.dumps(answer)


def order(values: np.ndarray) -> np.ndarray:
    """Positions of candidates by falling value, int64 ``[N]``; equal values keep the order they came in."""
    return np.argsort(-values, kind="stable")


def _numbers(candidates: list[dict[str, Any]], name: str, expression: str) -> np.ndarray:
    """A number that the value expression takes from every candidate, float64 ``[N]``."""
    numbers = [candidate.get(name) for candidate in candidates]
    if not {int, float}.issuperset(map(type, numbers)):
        index = next(i for i, number in enumerate(numbers) if type(number) not in (int, float))
        got = "it is missing" if numbers[index] is None else f"got {shorten(numbers[index])}"
        raise invalid(f"candidates[{index}].{name}: the value {expression!r} needs a number here, {got}")
    return np.array(numbers, np.float64)
