"""The gRPC side of the Open Inference Protocol v2, on the message types that `tritonclient` ships.

Other generated code for the same protocol must not be imported beside it: two copies of `package inference`
cannot live in one process.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any

import grpc
import numpy as np
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from serving.codec import (
    DTYPES,
    InferRequest,
    TensorHeader,
    check_shape,
    datatype_of,
    encode_raw,
    numpy_dtype,
    parse_timeout,
)
from serving.errors import Reason, ServingError, invalid
from serving.model import ServedModel
from serving.rest_api import DURATIONS, check_token, load_version
from serving.service import EXTENSIONS, Service, log

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
Method = Callable[..., Awaitable[Any]]


def _answers(*, private: bool = True, scoring: bool = False) -> Callable[[Method], Method]:
    """Adds the token check and turns exceptions into status codes."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        async def call(self: Servicer, request: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                if private and self.token is not None:
                    metadata = dict(context.invocation_metadata() or ())
                    check_token(self.token, str(metadata.get("authorization", "")))
                return await method(self, request, context)
            except ServingError as error:
                if scoring:
                    self.service.count(error)
                code = grpc.StatusCode[error.reason.grpc]
                await context.abort(code, str(error), (("reason", error.reason.label),))
            except Exception:
                log.exception("%s failed", method.__name__)
                await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")

        return call

    return decorate


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Translates gRPC to calls of the service. What it does not define answers UNIMPLEMENTED.

    Args:
        token: what clients must send as metadata `authorization: Bearer ...`; None asks for nothing.
        version: of the server, for its metadata.
        max_in_flight: scoring requests at once; one more gets RESOURCE_EXHAUSTED.
    """

    def __init__(self, service: Service, token: str | None, version: str, max_in_flight: int) -> None:
        self.service = service
        self.token = token
        self._version = version
        self._max_in_flight = max_in_flight
        self._in_flight = 0

    @_answers(private=False)
    async def ServerLive(self, request: Any, context: Any) -> Any:
        """True while the process answers."""
        return service_pb2.ServerLiveResponse(live=True)

    @_answers(private=False)
    async def ServerReady(self, request: Any, context: Any) -> Any:
        """True after start-up and before shutdown."""
        return service_pb2.ServerReadyResponse(ready=self.service.ready)

    @_answers(private=False)
    async def ModelReady(self, request: Any, context: Any) -> Any:
        """True where the model, and the version if one is named, is loaded."""
        try:
            self.service.repository.get(request.name, request.version)
        except ServingError as error:
            if error.reason in (Reason.NOT_FOUND, Reason.UNAVAILABLE):
                return service_pb2.ModelReadyResponse(ready=False)
            raise
        return service_pb2.ModelReadyResponse(ready=True)

    @_answers()
    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        """Name, version and the extensions that are implemented."""
        return service_pb2.ServerMetadataResponse(name="opengem", version=self._version, extensions=EXTENSIONS)

    @_answers()
    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        """The signature of a model."""
        metadata = self.service.metadata(request.name, request.version)
        return json_format.ParseDict(metadata, service_pb2.ModelMetadataResponse())

    @_answers()
    async def ModelConfig(self, request: Any, context: Any) -> Any:
        """The configuration of a model, as Triton would state it."""
        config = self.service.model_config(request.name, request.version)
        return service_pb2.ModelConfigResponse(config=json_format.ParseDict(config, model_config_pb2.ModelConfig()))

    @_answers()
    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        """Running totals of loaded versions."""
        response = service_pb2.ModelStatisticsResponse()
        for model, version, stats in self.service.statistics(request.name, request.version):
            entry = response.model_stats.add(
                name=model,
                version=version,
                last_inference=stats.last_inference_ms,
                inference_count=stats.inference_count,
                execution_count=stats.execution_count,
            )
            for name in DURATIONS:
                duration = getattr(stats, name)
                getattr(entry.inference_stats, name).MergeFrom(
                    service_pb2.StatisticDuration(count=duration.count, ns=duration.ns)
                )
        return response

    @_answers()
    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        """Every version on disk or loaded, with state and reason."""
        response = service_pb2.RepositoryIndexResponse()
        for entry in await self.service.index():
            if entry.state == "READY" or not request.ready:
                response.models.add(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
        return response

    @_answers()
    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        """Loads the newest version, or the one in the parameter `version`."""
        parameters = {name: _parameter(value) for name, value in request.parameters.items()}
        await self.service.load(request.model_name, load_version(parameters))
        return service_pb2.RepositoryModelLoadResponse()

    @_answers()
    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        """Unloads all versions of a model."""
        await self.service.unload(request.model_name)
        return service_pb2.RepositoryModelUnloadResponse()

    @_answers(scoring=True)
    async def ModelInfer(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Scores tensors within the deadline of the call."""
        arrived = self.service.clock()
        if self._in_flight >= self._max_in_flight:
            raise ServingError(Reason.QUEUE_FULL, f"{self._in_flight} requests are in flight, the most allowed")
        self._in_flight += 1
        try:
            parsed = parse_request(request)
            budgets = [] if parsed.timeout_us is None else [parsed.timeout_us / 1e3]
            remaining = context.time_remaining()
            if remaining is not None and math.isfinite(remaining):
                budgets.append(remaining * 1e3)
            deadline = self.service.deadline(arrived, min(budgets, default=None))

            def encode(model: ServedModel, outputs: Mapping[str, np.ndarray]) -> Any:
                return build_response(model, parsed.id, outputs)

            return await self.service.infer(
                request.model_name, request.model_version, deadline, arrived, parsed, encode
            )
        finally:
            self._in_flight -= 1


def _parameter(value: Any) -> Any:
    chosen = value.WhichOneof("parameter_choice")
    return None if chosen is None else getattr(value, chosen)


def parse_request(request: Any) -> InferRequest:
    """ModelInferRequest -> request with tensors still undecoded. Raises ServingError naming the field."""
    parameters = {name: _parameter(value) for name, value in request.parameters.items()}
    if parameters.get("sequence_id"):
        raise invalid("parameters.sequence_id: stateful sequences are not supported")
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise invalid(f"raw_input_contents: has {len(raws)} entries for {len(request.inputs)} inputs")
    if not request.inputs:
        raise invalid("inputs: expected at least one tensor")
    tensors: dict[str, TensorHeader] = {}
    for index, tensor in enumerate(request.inputs):
        if tensor.name in tensors:
            raise invalid(f"inputs[{index}]: tensor {tensor.name!r} is given twice")
        if "shared_memory_region" in tensor.parameters:
            raise invalid(f"inputs[{index}]: shared memory is not supported")
        shape = check_shape(tensor.name, list(tensor.shape))
        if raws:
            if tensor.HasField("contents"):
                raise invalid(f"{tensor.name}: has both contents and raw_input_contents")
            numpy_dtype(tensor.name, tensor.datatype)
            raw = raws[index]
        else:
            raw = _pack_contents(tensor)
        tensors[tensor.name] = TensorHeader(name=tensor.name, datatype=tensor.datatype, shape=shape, raw=raw)
    for output in request.outputs:
        for unsupported in ("classification", "shared_memory_region"):
            if unsupported in output.parameters:
                raise invalid(f"outputs.{output.name}.{unsupported}: not supported")
    return InferRequest(
        id=request.id,
        timeout_us=parse_timeout(parameters.get("timeout")),
        inputs=tuple(tensors.values()),
        outputs=dict.fromkeys((output.name for output in request.outputs), True),
        binary_outputs=True,
    )


def _pack_contents(tensor: Any) -> bytes:
    """Typed contents -> raw bytes. Contents of a kind that is not the datatype's are an error."""
    numpy_dtype(tensor.name, tensor.datatype)
    expected = _CONTENTS.get(tensor.datatype)
    filled = [field.name for field, _ in tensor.contents.ListFields()]
    for name in filled:
        if name != expected:
            wanted = expected or "raw_input_contents"
            raise invalid(f"{tensor.name}: datatype {tensor.datatype} takes {wanted}, got {name}")
    if expected is None or not filled:
        return b""
    dtype = DTYPES[tensor.datatype]
    values = list(getattr(tensor.contents, expected))
    if dtype.hasobject:
        array = np.empty(len(values), object)
        array[:] = values
        return encode_raw(array)
    try:
        return np.array(values, dtype).tobytes()
    except OverflowError:
        raise invalid(f"{tensor.name}: a value is outside {tensor.datatype}") from None


def build_response(model: ServedModel, request_id: str, outputs: Mapping[str, np.ndarray]) -> Any:
    """Output arrays -> ModelInferResponse with raw contents."""
    response = service_pb2.ModelInferResponse(model_name=model.name, model_version=model.version, id=request_id)
    for name, array in outputs.items():
        response.outputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        response.raw_output_contents.append(encode_raw(array))
    return response
