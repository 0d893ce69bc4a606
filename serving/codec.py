"""Bytes and JSON to numpy and back, as the Open Inference Protocol v2 writes tensors.

Two forms exist. JSON carries every element as text. The binary extension puts a JSON header first (its
length in the HTTP header `Inference-Header-Content-Length`) and the raw little-endian tensors after it, in
the order of the header; `BYTES` elements carry a 4-byte length each. All functions here are pure, and every
fault raises `ServingError` with the name of the tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from serving.errors import Reason, ServingError, invalid

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
"""Datatype name of the protocol -> numpy dtype. `BYTES` elements are Python `bytes`. BF16 is not supported."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_JSON_TYPES: dict[str, tuple[frozenset[type], str]] = {
    "b": (frozenset({bool}), "true or false"),
    "i": (frozenset({int}), "an integer"),
    "u": (frozenset({int}), "a non-negative integer"),
    "f": (frozenset({int, float}), "a number"),
    "O": (frozenset({str}), "a string"),
}
MAX_RANK = 8


def datatype_of(dtype: np.dtype[Any]) -> str:
    """Protocol name of a numpy dtype, e.g. float32 -> "FP32". Raises `ValueError` for other dtypes."""
    name = _NAMES.get(dtype.newbyteorder("<") if dtype.kind in "iuf" else dtype)
    if name is None:
        raise ValueError(f"numpy dtype {dtype} has no Open Inference Protocol name")
    return name


def numpy_dtype(name: str, datatype: Any) -> np.dtype[Any]:
    """numpy dtype of protocol `datatype`, for tensor `name`. Raises `ServingError` for an unknown one."""
    dtype = DTYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise invalid(f"{name}: datatype {shorten(datatype)} is not one of {', '.join(DTYPES)}")
    return dtype


def shorten(value: Any, limit: int = 60) -> str:
    """A value from a client as text for an error message, short whatever the value is."""
    if isinstance(value, list | dict):  # may be huge or nested deeply: do not print it
        return f"a list of {len(value)}" if isinstance(value, list) else f"an object of {len(value)} fields"
    text = repr(value[:limit] if isinstance(value, str | bytes) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    """A shape from a client as a tuple; rank at most 8, dims non-negative integers below 2**31."""
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) > MAX_RANK:
        raise invalid(f"{name}: shape must be a list of at most {MAX_RANK} integers, got {shorten(shape)}")
    for axis, dim in enumerate(shape):
        if type(dim) is not int or not 0 <= dim < 2**31:
            raise invalid(f"{name}: shape[{axis}] must be an integer from 0 to 2**31-1, got {shorten(dim)}")
    return tuple(shape)


def decode_raw(name: str, datatype: Any, shape: Any, raw: bytes | memoryview) -> np.ndarray:
    """Raw little-endian bytes -> array of `shape`; the number of bytes must match exactly, nothing is copied
    where the buffer is aligned. Raises `ServingError` naming the tensor."""
    dtype = numpy_dtype(name, datatype)
    dims = check_shape(name, shape)
    count = math.prod(dims)
    if datatype == "BYTES":
        return _split_bytes(name, raw, count).reshape(dims)
    expected = count * dtype.itemsize
    if len(raw) != expected:
        raise invalid(f"{name}: shape {list(dims)} of {datatype} is {expected} bytes, got {len(raw)}")
    if datatype == "BOOL":
        numbers = np.frombuffer(raw, np.uint8)
        if numbers.size and numbers.max() > 1:
            raise invalid(f"{name}: a BOOL byte must be 0 or 1, got {numbers.max()}")
        return numbers.view(np.bool_).reshape(dims)
    array = np.frombuffer(raw, dtype)
    return (array if array.flags.aligned else array.copy()).reshape(dims)


def _split_bytes(name: str, raw: bytes | memoryview, count: int) -> np.ndarray:
    if count > len(raw) // 4:  # each element has a 4-byte length: refuse before making room for them
        raise invalid(f"{name}: {count} BYTES elements need at least {4 * count} bytes, got {len(raw)}")
    elements = np.empty(count, object)
    offset = 0
    for index in range(count):
        if offset + 4 > len(raw):
            raise invalid(f"{name}[{index}]: the data ends before the element's length")
        (size,) = struct.unpack_from("<I", raw, offset)
        offset += 4
        if offset + size > len(raw):
            raise invalid(f"{name}[{index}]: length {size} runs past the end of the data")
        elements[index] = bytes(raw[offset : offset + size])
        offset += size
    if offset != len(raw):
        raise invalid(f"{name}: {len(raw) - offset} bytes follow the last of {count} elements")
    return elements


def encode_raw(array: np.ndarray) -> bytes:
    """Array -> raw little-endian bytes in row-major order (inverse of `decode_raw`). Elements of an object
    array are `bytes`, or `str` written as UTF-8."""
    if array.dtype == object:
        parts = []
        for element in array.reshape(-1):
            data = element if isinstance(element, bytes) else str(element).encode()
            parts += [struct.pack("<I", len(data)), data]
        return b"".join(parts)
    return np.ascontiguousarray(array, DTYPES[datatype_of(array.dtype)]).tobytes()


def decode_json(name: str, datatype: Any, shape: Any, data: Any) -> np.ndarray:
    """The `data` list of a JSON tensor, flat or nested, -> array of `shape`. Types are strict: no number
    for BOOL, no fraction for an integer, no text for a number. Raises `ServingError` naming the element."""
    dtype = numpy_dtype(name, datatype)
    dims = check_shape(name, shape)
    if not isinstance(data, list):
        raise invalid(f"{name}: data must be a list, got {shorten(data)}")
    flat = data
    for _ in range(len(dims) - 1):
        if not any(type(part) is list for part in flat):
            break
        if not all(type(part) is list for part in flat):
            raise invalid(f"{name}: data mixes lists and elements")
        flat = [element for part in flat for element in part]
    if len(flat) != math.prod(dims):
        raise invalid(f"{name}: shape {list(dims)} is {math.prod(dims)} elements, data has {len(flat)}")
    allowed, wanted = _JSON_TYPES[dtype.kind]
    if not allowed.issuperset(map(type, flat)):
        index = next(i for i, element in enumerate(flat) if type(element) not in allowed)
        raise invalid(f"{name}: data[{index}]: expected {wanted}, got {shorten(flat[index])}")
    if dtype.kind == "O":
        return np.array([element.encode() for element in flat], object).reshape(dims)
    try:
        with np.errstate(over="ignore"):
            return np.array(flat, dtype).reshape(dims)
    except OverflowError:
        bounds = np.iinfo(dtype)
        index = next(i for i, value in enumerate(flat) if not bounds.min <= value <= bounds.max)
        raise invalid(f"{name}: data[{index}]: {shorten(flat[index])} is outside {datatype}") from None


def encode_json(array: np.ndarray) -> list[Any]:
    """Array -> flat list for the `data` of a JSON tensor. `BYTES` must be UTF-8 (else `ServingError`)."""
    if array.dtype == object:
        try:
            return [e.decode() if isinstance(e, bytes) else str(e) for e in array.reshape(-1)]
        except UnicodeDecodeError:
            raise invalid("a BYTES output is not UTF-8 text: ask for it with binary_data") from None
    flat: list[Any] = array.reshape(-1).tolist()
    return flat


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """One input as announced by a client; `data` (JSON) or `raw` (bytes) holds the elements."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any = None
    raw: bytes | memoryview | None = None

    def decode(self) -> np.ndarray:
        """The tensor as an array. Raises `ServingError` naming it."""
        if self.raw is None:
            return decode_json(self.name, self.datatype, self.shape, self.data)
        return decode_raw(self.name, self.datatype, self.shape, self.raw)


@dataclass(frozen=True, kw_only=True, slots=True)
class InferRequest:
    """An inference request, checked in form but with tensors not decoded yet."""

    id: str = ""
    timeout_us: int | None = None
    inputs: tuple[TensorHeader, ...] = ()
    outputs: dict[str, bool] = field(default_factory=dict)
    """Requested output -> sent in binary. Empty: all outputs."""
    binary_outputs: bool = False
    """How outputs are sent when `outputs` is empty."""

    def decode(self) -> dict[str, np.ndarray]:
        """All inputs as arrays."""
        return {tensor.name: tensor.decode() for tensor in self.inputs}


def loads(body: bytes | memoryview, what: str = "body") -> dict[str, Any]:
    """JSON object from bytes. Raises `ServingError` when it is not JSON or not an object."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"{what}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(f"{what}: expected a JSON object, got {shorten(value)}")
    return value


def parse_infer_request(body: bytes, header_length: str | None, max_json_bytes: int) -> InferRequest:
    """Body of `POST .../infer` (with the value of `Inference-Header-Content-Length`, if sent) -> request.

    Raises `ServingError` for JSON above `max_json_bytes`, a wrong header length, binary sizes that do not
    add up to the body, and malformed fields.
    """
    length = len(body)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit()) or int(header_length) > len(body):
            raise invalid(
                f"Inference-Header-Content-Length: expected an integer from 0 to the body's {len(body)} "
                f"bytes, got {shorten(header_length)}"
            )
        length = int(header_length)
    if length > max_json_bytes:
        raise ServingError(
            Reason.TOO_LARGE,
            f"body: {length} bytes of JSON, at most {max_json_bytes} are read; send tensors with binary_data",
        )
    header = loads(memoryview(body)[:length])
    binary = memoryview(body)[length:]
    parameters = _mapping(header.get("parameters"), "parameters")
    if parameters.get("sequence_id"):
        raise invalid("parameters.sequence_id: stateful sequences are not supported")
    request_id = header.get("id", "")
    if not isinstance(request_id, str):
        raise invalid(f"id: expected a string, got {shorten(request_id)}")
    inputs = header.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise invalid("inputs: expected a list with at least one tensor")
    tensors: dict[str, TensorHeader] = {}
    offset = 0
    for index, entry in enumerate(inputs):
        tensor = _parse_input(entry, f"inputs[{index}]", binary[offset:])
        if tensor.name in tensors:
            raise invalid(f"inputs[{index}]: tensor {tensor.name!r} is given twice")
        tensors[tensor.name] = tensor
        offset += len(tensor.raw) if tensor.raw is not None else 0
    if offset != len(binary):
        raise invalid(f"body: {len(binary) - offset} bytes belong to no input's binary_data_size")
    binary_default = _flag(parameters, "binary_data_output", "parameters")
    return InferRequest(
        id=request_id,
        timeout_us=parse_timeout(parameters.get("timeout")),
        inputs=tuple(tensors.values()),
        outputs=_parse_outputs(header.get("outputs"), binary_default),
        binary_outputs=binary_default,
    )


def parse_timeout(value: Any) -> int | None:
    """The `timeout` request parameter: microseconds, 0 or absent for none."""
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise invalid(f"parameters.timeout: expected microseconds as an integer, got {shorten(value)}")
    return value or None


def _parse_input(entry: Any, where: str, binary: memoryview) -> TensorHeader:
    if not isinstance(entry, dict):
        raise invalid(f"{where}: expected an object, got {shorten(entry)}")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.name: expected a string, got {shorten(name)}")
    parameters = _mapping(entry.get("parameters"), f"{where}.parameters")
    if "shared_memory_region" in parameters:
        raise invalid(f"{where}.parameters: shared memory is not supported")
    datatype = entry.get("datatype", "")
    numpy_dtype(name, datatype)
    shape = check_shape(name, entry.get("shape"))
    size = parameters.get("binary_data_size")
    if size is None:
        if "data" not in entry:
            raise invalid(f"{where} ({name}): has neither data nor parameters.binary_data_size")
        return TensorHeader(name=name, datatype=datatype, shape=shape, data=entry["data"])
    if "data" in entry:
        raise invalid(f"{where} ({name}): has both data and parameters.binary_data_size")
    if type(size) is not int or not 0 <= size <= len(binary):
        raise invalid(
            f"{where} ({name}): binary_data_size must be an integer from 0 to the {len(binary)} bytes left, "
            f"got {shorten(size)}"
        )
    return TensorHeader(name=name, datatype=datatype, shape=shape, raw=binary[:size])


def _parse_outputs(outputs: Any, binary_default: bool) -> dict[str, bool]:
    if outputs is None:
        return {}
    if not isinstance(outputs, list):
        raise invalid(f"outputs: expected a list, got {shorten(outputs)}")
    requested = {}
    for index, entry in enumerate(outputs):
        where = f"outputs[{index}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise invalid(f"{where}.name: expected a string")
        parameters = _mapping(entry.get("parameters"), f"{where}.parameters")
        for unsupported in ("classification", "shared_memory_region"):
            if parameters.get(unsupported):
                raise invalid(f"{where}.parameters.{unsupported}: not supported")
        binary = parameters.get("binary_data", binary_default)
        if type(binary) is not bool:
            raise invalid(f"{where}.parameters.binary_data: expected true or false, got {shorten(binary)}")
        requested[entry["name"]] = binary
    return requested


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(f"{where}: expected an object, got {shorten(value)}")
    return value


def _flag(parameters: Mapping[str, Any], key: str, where: str) -> bool:
    value = parameters.get(key, False)
    if type(value) is not bool:
        raise invalid(f"{where}.{key}: expected true or false, got {shorten(value)}")
    return value


def build_infer_response(
    model: str, version: str, request: InferRequest, outputs: Mapping[str, np.ndarray]
) -> tuple[bytes, int | None]:
    """Output arrays -> (body, length of its JSON header, or None where the body is JSON alone)."""
    entries, blobs = [], []
    for name, array in outputs.items():
        entry: dict[str, Any] = {
            "name": name,
            "datatype": datatype_of(array.dtype),
            "shape": list(array.shape),
        }
        if request.outputs.get(name, request.binary_outputs):
            blobs.append(encode_raw(array))
            entry["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            entry["data"] = encode_json(array)
        entries.append(entry)
    header: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": entries}
    if request.id:
        header["id"] = request.id
    text = orjson.dumps(header)
    return (b"".join([text, *blobs]), len(text)) if blobs else (text, None)
