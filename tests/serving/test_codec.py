"""The codec: what goes in comes out, and nothing malformed gets through or breaks it."""

from __future__ import annotations

import string

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient import utils as triton

from serving import codec
from serving.errors import Reason, ServingError

NUMERIC = [name for name in codec.DTYPES if name != "BYTES"]
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    datatype = draw(st.sampled_from(list(codec.DTYPES)))
    shape = draw(shapes)
    if datatype == "BYTES":
        size = int(np.prod(shape))
        elements = draw(st.lists(st.binary(max_size=9), min_size=size, max_size=size))
        array = np.empty(size, object)
        array[:] = elements
        return datatype, array.reshape(shape)
    return datatype, draw(hnp.arrays(codec.DTYPES[datatype], shape))


@given(arrays())
def test_raw_round_trip_keeps_every_bit(case: tuple[str, np.ndarray]) -> None:
    datatype, array = case
    raw = codec.encode_raw(array)
    decoded = codec.decode_raw("x", datatype, list(array.shape), raw)
    assert decoded.dtype == array.dtype and decoded.shape == array.shape
    assert codec.encode_raw(decoded) == raw
    np.testing.assert_array_equal(decoded, array)


@given(arrays())
def test_raw_bytes_equal_those_of_tritonclient(case: tuple[str, np.ndarray]) -> None:
    datatype, array = case
    assert triton.np_to_triton_dtype(array.dtype) == datatype == codec.datatype_of(array.dtype)
    if datatype != "BYTES":
        assert codec.encode_raw(array) == array.tobytes()
    elif array.size:
        assert codec.encode_raw(array) == triton.serialize_byte_tensor(array).item()


@given(arrays(), st.data())
def test_a_changed_length_is_refused(case: tuple[str, np.ndarray], data: st.DataObject) -> None:
    datatype, array = case
    raw = codec.encode_raw(array)
    cut = data.draw(st.integers(0, len(raw)))
    for wrong in (raw[:cut], raw + b"\0"):
        if wrong != raw:
            with pytest.raises(ServingError, match=r"^x"):
                codec.decode_raw("x", datatype, list(array.shape), wrong)


def test_a_misaligned_buffer_is_copied_to_an_aligned_one() -> None:
    raw = memoryview(b"." + np.arange(4, dtype=np.int64).tobytes())[1:]
    decoded = codec.decode_raw("x", "INT64", [4], raw)
    assert decoded.flags.aligned and decoded.tolist() == [0, 1, 2, 3]


@given(hnp.arrays(np.int16, shapes), st.booleans())
def test_json_integers_flat_or_nested(array: np.ndarray, nested: bool) -> None:
    data = array.tolist() if nested and array.ndim else array.reshape(-1).tolist()
    np.testing.assert_array_equal(codec.decode_json("x", "INT16", list(array.shape), data), array)


@given(hnp.arrays(np.float32, shapes, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_json_floats_survive_text(array: np.ndarray) -> None:
    data = orjson.loads(orjson.dumps(codec.encode_json(array)))
    np.testing.assert_array_equal(codec.decode_json("x", "FP32", list(array.shape), data), array)


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "message"),
    [
        ("INT64", [2], [1, "x"], r"x: data\[1\]: expected an integer, got 'x'"),
        ("INT64", [1], [1.5], r"x: data\[0\]: expected an integer, got 1.5"),
        ("INT64", [1], [True], r"x: data\[0\]: expected an integer, got True"),
        ("INT8", [2], [1, 200], r"x: data\[1\]: 200 is outside INT8"),
        ("UINT8", [1], [-1], r"x: data\[0\]: -1 is outside UINT8"),
        ("BOOL", [1], [1], r"x: data\[0\]: expected true or false, got 1"),
        ("FP32", [1], [None], r"x: data\[0\]: expected a number, got None"),
        ("FP32", [2, 2], [[1, 2], 3], "x: data mixes lists and elements"),
        ("FP32", [2], [1], r"x: shape \[2\] is 2 elements, data has 1"),
        ("FP32", [1], {"a": 1}, "x: data must be a list, got an object of 1 fields"),
        ("FP32", [1], [[[[[1]]]]], r"x: data\[0\]: expected a number, got a list of 1"),
        ("FP32", [-1], [1], r"x: shape\[0\] must be an integer"),
        ("FP32", [2**40], [1], r"x: shape\[0\] must be an integer"),
        ("FP32", [2**30, 2**30], [1], "x: shape .* is 1152921504606846976 elements"),
        ("FP32", "ab", [1], "x: shape must be a list"),
        ("FP32", [1] * 9, [1], "x: shape must be a list of at most 8"),
        ("FP31", [1], [1], "x: datatype 'FP31' is not one of"),
        ("BF16", [1], [1], "x: datatype 'BF16' is not one of"),
        (["INT64"], [1], [1], "x: datatype a list of 1 is not one of"),
        ("BYTES", [1], [1], r"x: data\[0\]: expected a string, got 1"),
    ],
)
def test_json_faults_name_the_element(datatype: object, shape: object, data: object, message: str) -> None:
    with pytest.raises(ServingError, match=message) as caught:
        codec.decode_json("x", datatype, shape, data)
    assert caught.value.reason is Reason.INVALID


def test_huge_shapes_cost_nothing() -> None:
    with pytest.raises(ServingError, match=r"is 4611686014132420609 elements|bytes, got 0"):
        codec.decode_raw("x", "INT8", [2**31 - 1, 2**31 - 1], b"")
    with pytest.raises(ServingError, match="need at least"):
        codec.decode_raw("x", "BYTES", [2**31 - 1], b"\0\0\0\0")


def _binary_request(tensors: dict[str, np.ndarray], **extra: object) -> tuple[bytes, str]:
    blobs = [codec.encode_raw(array) for array in tensors.values()]
    header = orjson.dumps(
        {
            "inputs": [
                {
                    "name": name,
                    "datatype": codec.datatype_of(array.dtype),
                    "shape": list(array.shape),
                    "parameters": {"binary_data_size": len(blob)},
                }
                for (name, array), blob in zip(tensors.items(), blobs, strict=True)
            ],
            **extra,
        }
    )
    return header + b"".join(blobs), str(len(header))


@given(st.lists(arrays(), min_size=1, max_size=4))
def test_binary_framing_round_trip(cases: list[tuple[str, np.ndarray]]) -> None:
    tensors = {string.ascii_letters[i]: array for i, (_, array) in enumerate(cases)}
    body, length = _binary_request(tensors, id="7", parameters={"timeout": 5000, "binary_data_output": True})
    request = codec.parse_infer_request(body, length, 1 << 20)
    assert (request.id, request.timeout_us, request.binary_outputs) == ("7", 5000, True)
    for name, array in request.decode().items():
        np.testing.assert_array_equal(array, tensors[name])
    answer, header_length = codec.build_infer_response("m", "3", request, tensors)
    assert header_length is not None
    header = orjson.loads(answer[:header_length])
    assert (header["model_name"], header["model_version"], header["id"]) == ("m", "3", "7")
    offset = header_length
    for entry in header["outputs"]:
        size = entry["parameters"]["binary_data_size"]
        raw = answer[offset : offset + size]
        decoded = codec.decode_raw(entry["name"], entry["datatype"], entry["shape"], raw)
        np.testing.assert_array_equal(decoded, tensors[entry["name"]])
        offset += size
    assert offset == len(answer)


@given(st.data())
def test_a_cut_or_stretched_binary_body_is_refused(data: st.DataObject) -> None:
    body, length = _binary_request({"a": np.arange(6), "b": np.ones((2, 3), np.float32)})
    cut = data.draw(st.integers(0, len(body) - 1))
    wrong = data.draw(st.sampled_from([body[:cut], body + b"\0", body[:cut] + b"\xff" + body[cut + 1 :]]))
    if wrong == body:
        return
    try:
        codec.parse_infer_request(wrong, length, 1 << 20).decode()
    except ServingError as error:
        assert error.reason is Reason.INVALID and str(error)
    else:
        assert len(wrong) == len(body)  # a flipped byte inside a number or name can still be well formed


@pytest.mark.parametrize("length", ["-1", "x", "", "1.0", "99999999", "١", "+3"])
def test_a_wrong_header_length_is_refused(length: str) -> None:
    with pytest.raises(ServingError, match="Inference-Header-Content-Length: expected an integer"):
        codec.parse_infer_request(b"{}", length, 1 << 20)


def test_json_above_its_limit_is_too_large() -> None:
    with pytest.raises(ServingError, match="send tensors with binary_data") as caught:
        codec.parse_infer_request(b" " * 101, None, 100)
    assert caught.value.reason is Reason.TOO_LARGE


_INPUT = {"name": "a", "datatype": "INT64", "shape": [1], "data": [1]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "body: expected a JSON object, got a list of 0"),
        ({}, "inputs: expected a list"),
        ({"inputs": []}, "inputs: expected a list with at least one"),
        ({"inputs": [3]}, r"inputs\[0\]: expected an object, got 3"),
        ({"inputs": [{}]}, r"inputs\[0\].name: expected a string"),
        ({"inputs": [{"name": "a"}]}, "a: datatype '' is not one of"),
        ({"inputs": [{**_INPUT, "shape": None}]}, "a: shape must be a list"),
        ({"inputs": [{"name": "a", "datatype": "INT64", "shape": [1]}]}, "has neither data nor"),
        ({"inputs": [{**_INPUT, "parameters": {"binary_data_size": 8}}]}, "has both data and"),
        ({"inputs": [{**_INPUT, "parameters": 3}]}, r"inputs\[0\].parameters: expected an object"),
        ({"inputs": [{**_INPUT, "parameters": {"shared_memory_region": "x"}}]}, "shared memory"),
        ({"inputs": [_INPUT, _INPUT]}, "tensor 'a' is given twice"),
        ({"inputs": [_INPUT], "outputs": 3}, "outputs: expected a list"),
        ({"inputs": [_INPUT], "outputs": [{}]}, r"outputs\[0\].name: expected a string"),
        (
            {"inputs": [_INPUT], "outputs": [{"name": "x", "parameters": {"classification": 2}}]},
            "classification: not supported",
        ),
        ({"inputs": [_INPUT], "id": 3}, "id: expected a string, got 3"),
        ({"inputs": [_INPUT], "parameters": {"timeout": "soon"}}, "parameters.timeout: expected microseconds"),
        ({"inputs": [_INPUT], "parameters": {"timeout": -1}}, "parameters.timeout"),
        ({"inputs": [_INPUT], "parameters": {"sequence_id": 4}}, "sequence_id: stateful"),
        ({"inputs": [_INPUT], "parameters": {"binary_data_output": 1}}, "binary_data_output: expected true"),
    ],
)
def test_malformed_requests_name_the_field(body: object, message: str) -> None:
    with pytest.raises(ServingError, match=message):
        codec.parse_infer_request(orjson.dumps(body), None, 1 << 20).decode()


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 5000, b'{"a": NaN}', b'{"a":1}x', b"nul"])
def test_bytes_that_are_not_json(body: bytes) -> None:
    with pytest.raises(ServingError, match="body: not JSON"):
        codec.loads(body)


def test_outputs_choose_their_form_one_by_one() -> None:
    request = codec.parse_infer_request(
        orjson.dumps(
            {
                "inputs": [_INPUT],
                "outputs": [{"name": "p", "parameters": {"binary_data": True}}, {"name": "q"}],
            }
        ),
        None,
        1 << 20,
    )
    one = np.array([0.5], np.float32)
    body, length = codec.build_infer_response("m", "1", request, {"p": one, "q": one})
    header = orjson.loads(body[:length])
    assert header["outputs"][0]["parameters"] == {"binary_data_size": 4} and "data" not in header["outputs"][0]
    assert header["outputs"][1]["data"] == [0.5] and body[length:] == one.tobytes()
