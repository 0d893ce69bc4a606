"""An encoded batch as tensors: what the foundation model takes.

Legend: R requests, N impressions, K tasks, T events of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from foundation.data.encoding import EncodedBatch, EncodedRows
from foundation.data.schema import Feature, Schema


def sparse_keys(schema: Schema) -> tuple[str, ...]:
    """Keys of ``Batch.sparse`` in order: request features, sequence attributes, item features."""
    request = [f.name for f in schema.request_features if _has_ids(f)]
    sequences = [s.key(a.name) for s in schema.sequences for a in s.attributes]
    items = [f.name for f in schema.item_features if _has_ids(f)]
    return (*request, *sequences, *items)


@dataclass(frozen=True, slots=True)
class Batch:
    """R requests with their N impressions, as tensors on one device.

    ``sparse`` has stride R and the keys of :func:`sparse_keys`, ids int64. Item features ride as jagged features
    of their request: a categorical one has as many ids as the request has impressions, a multi-valued one as many
    as those impressions together, split by ``item_multi_lengths[name]`` int64 ``[N]``; either way values are in
    the order of impressions. ``sparse_weights[key]`` float32 goes with the values of a weighted feature.

    ``request_dense`` float32 ``[R, Ur]``, ``item_dense`` float32 ``[N, Ui]``, ``sequence_offsets[sequence]`` int64
    ``[R + 1]``, ``sequence_times[sequence]`` int64 ``[T]`` ms (-1: unknown), ``request_index`` int64 ``[N]``
    ascending, ``request_time`` int64 ``[R]`` ms, ``user_id`` int64 ``[R]``, ``surface`` int64 ``[R]``, ``labels``
    float32 ``[N, K]``, ``label_valid`` bool ``[N, K]``, ``weight`` and ``sampling_rate`` float32 ``[N]``,
    ``impression_id`` int64 ``[N]``. R and N may be 0.

    ``impression_events[sequence]``, a plain number, is how many events there are when every impression has its own copy
    of its request's history; ``sparse`` knows its lengths per key. Both are counted before the batch goes to a device,
    where the model would have to wait for them.
    """

    sparse: KeyedJaggedTensor
    sparse_weights: dict[str, torch.Tensor]
    item_multi_lengths: dict[str, torch.Tensor]
    request_dense: torch.Tensor
    item_dense: torch.Tensor
    sequence_offsets: dict[str, torch.Tensor]
    sequence_times: dict[str, torch.Tensor]
    request_index: torch.Tensor
    request_time: torch.Tensor
    user_id: torch.Tensor
    surface: torch.Tensor
    labels: torch.Tensor
    label_valid: torch.Tensor
    weight: torch.Tensor
    sampling_rate: torch.Tensor
    impression_id: torch.Tensor
    impression_events: dict[str, int]

    @staticmethod
    def from_encoded(encoded: EncodedBatch, schema: Schema, device: torch.device | str | None = None) -> Batch:
        """Tensors of a batch; memory is shared with numpy where that is possible.

        Args:
            device: where to move them; stays on the CPU by default.
        """
        request, item = encoded.request, encoded.item
        per_request = np.bincount(encoded.request_index, minlength=request.rows)
        values: list[np.ndarray] = []
        lengths: list[np.ndarray] = []
        multi: dict[str, np.ndarray] = {}
        weights: dict[str, np.ndarray] = {}
        item_names = {f.name for f in schema.item_features}
        for key in sparse_keys(schema):
            side: EncodedRows = item if key in item_names else request
            values.append(side.ids[key])
            if side is request:
                lengths.append(request.lengths[key])
            elif schema.feature(key).kind == "multi":
                multi[key] = item.lengths[key]
                lengths.append(_sums(item.lengths[key], per_request))
            else:
                lengths.append(per_request)
            if key in side.weights:
                weights[key] = side.weights[key]
        sparse = KeyedJaggedTensor(
            keys=list(sparse_keys(schema)),
            values=_tensor(np.concatenate(values)) if values else torch.zeros(0, dtype=torch.int64),
            lengths=_tensor(np.concatenate(lengths)) if lengths else torch.zeros(0, dtype=torch.int64),
            stride=request.rows,
        ).sync()
        firsts = {s.name: request.lengths[s.key(s.attributes[0].name)] for s in schema.sequences}
        offsets = {name: np.concatenate([[0], np.cumsum(own)]) for name, own in firsts.items()}
        batch = Batch(
            sparse=sparse,
            sparse_weights={key: _tensor(value) for key, value in weights.items()},
            item_multi_lengths={key: _tensor(value) for key, value in multi.items()},
            request_dense=_tensor(request.dense),
            item_dense=_tensor(item.dense),
            sequence_offsets={name: _tensor(value) for name, value in offsets.items()},
            sequence_times={name: _tensor(value) for name, value in request.times.items()},
            request_index=_tensor(encoded.request_index),
            request_time=_tensor(encoded.request_time),
            user_id=_tensor(encoded.user_id),
            surface=_tensor(encoded.surface),
            labels=_tensor(encoded.labels),
            label_valid=_tensor(encoded.label_valid),
            weight=_tensor(encoded.weight),
            sampling_rate=_tensor(encoded.sampling_rate),
            impression_id=_tensor(encoded.impression_id),
            impression_events={name: int(own @ per_request) for name, own in firsts.items()},
        )
        return batch if device is None else batch.to(device)

    @property
    def num_impressions(self) -> int:
        """N."""
        return int(self.request_index.shape[0])

    @property
    def num_requests(self) -> int:
        """R."""
        return int(self.request_time.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.request_index.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on another device; ``non_blocking`` copies overlap with computation if memory is pinned."""
        target = torch.device(device)
        return self._map(
            lambda t: t.to(target, non_blocking=non_blocking),
            lambda k: k.to(target, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory."""
        return self._map(lambda t: t.pin_memory(), lambda k: k.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory from reuse until work queued on ``stream`` is done."""
        for value in (getattr(self, f.name) for f in fields(self)):
            for part in value.values() if isinstance(value, dict) else (value,):
                if not isinstance(part, int):
                    part.record_stream(stream)

    def _map(
        self,
        tensor: Callable[[torch.Tensor], torch.Tensor],
        keyed: Callable[[KeyedJaggedTensor], KeyedJaggedTensor],
    ) -> Batch:
        def apply(value: object) -> object:
            if isinstance(value, torch.Tensor):
                return tensor(value)
            if isinstance(value, dict):
                return {key: part if isinstance(part, int) else tensor(part) for key, part in value.items()}
            return keyed(value)

        return Batch(*(apply(getattr(self, f.name)) for f in fields(self)))  # type: ignore[arg-type]


def _has_ids(feature: Feature) -> bool:
    return feature.kind in ("categorical", "multi")


def _sums(lengths: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sums of consecutive runs of ``lengths``: run r has ``counts[r]`` of them."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    stops = np.cumsum(counts)
    return ends[stops] - ends[stops - counts]


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
