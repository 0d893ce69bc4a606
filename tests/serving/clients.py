"""Small helpers around the real clients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import HTTPConnection
from typing import Any

import numpy as np
from tritonclient.utils import np_to_triton_dtype


def infer_inputs(module: Any, inputs: Mapping[str, np.ndarray], **options: Any) -> list[Any]:
    """The inputs as `InferInput`s of a tritonclient module; `options` go to `set_data_from_numpy`."""
    tensors = []
    for name, array in inputs.items():
        tensor = module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array, **options)
        tensors.append(tensor)
    return tensors


class Answer:
    """A plain HTTP answer."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


def http(
    address: str,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, Any] | None = None,
    timeout: float = 120,
) -> Answer:
    """One HTTP exchange on a connection of its own; a body that is not bytes is sent as JSON."""
    connection = HTTPConnection(address, timeout=timeout)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {k: str(v) for k, v in (headers or {}).items()})
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()
