"""The REST side: Open Inference Protocol v2 (JSON and binary tensors), `/rank`, `/metrics`, health."""

from __future__ import annotations

import asyncio
import hmac
import logging
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from serving.codec import build_infer_response, loads, parse_infer_request, shorten
from serving.encoder import RankRequest
from serving.errors import Reason, ServingError, invalid
from serving.metrics import Duration, ModelStats
from serving.model import ServedModel
from serving.service import EXTENSIONS, Service

log = logging.getLogger("opengem.serving")
HEADER_LENGTH = "inference-header-content-length"
_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """What one client may send.

    Args:
        max_body_bytes: largest body, also after decompression, and largest gRPC message.
        max_json_bytes: largest JSON text, `/rank` included; larger tensors must be binary.
        max_in_flight: scoring requests at once, bodies being read included; one more gets 429.
        read_seconds: time to send a body.
    """

    max_body_bytes: int = 16 << 20
    max_json_bytes: int = 4 << 20
    max_in_flight: int = 256
    read_seconds: float = 10.0

    def __post_init__(self) -> None:
        for key in ("max_body_bytes", "max_json_bytes", "max_in_flight", "read_seconds"):
            if getattr(self, key) <= 0:
                raise ValueError(f"http.{key}: must be above 0, got {getattr(self, key)}")


class RestApi:
    """Translates HTTP to calls of the service.

    Args:
        token: what clients must send as `Authorization: Bearer ...`; None asks for nothing. Health checks
            never need it.
        version: of the server, for its metadata.
    """

    def __init__(self, service: Service, limits: HttpLimits, token: str | None, version: str) -> None:
        self._service = service
        self._limits = limits
        self._token = token
        self._version = version
        self._in_flight = 0

    def app(self) -> Starlette:
        """The ASGI application."""
        routes: list[tuple[str, str, Endpoint, bool]] = [
            ("GET", "/", self._home, True),
            ("GET", "/metrics", self._metrics, True),
            ("POST", "/rank", self._scoring(self._rank), True),
            ("GET", "/v2", self._server, True),
            ("GET", "/v2/health/live", self._live, False),
            ("GET", "/v2/health/ready", self._ready, False),
            ("GET", "/v2/models/stats", self._stats, True),
            ("POST", "/v2/repository/index", self._index, True),
            ("POST", "/v2/repository/models/{model}/load", self._load, True),
            ("POST", "/v2/repository/models/{model}/unload", self._unload, True),
        ]
        for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [
                ("GET", prefix, self._model, True),
                ("GET", f"{prefix}/ready", self._model_ready, False),
                ("GET", f"{prefix}/config", self._config, True),
                ("GET", f"{prefix}/stats", self._stats, True),
                ("POST", f"{prefix}/infer", self._scoring(self._infer), True),
            ]
        return Starlette(
            routes=[
                Route(path, self._guarded(endpoint, private), methods=[method])
                for method, path, endpoint, private in routes
            ],
            exception_handlers={HTTPException: _http_error},
        )

    def _guarded(self, endpoint: Endpoint, private: bool) -> Endpoint:
        """Adds the token check and turns every exception into a JSON error."""

        async def call(request: Request) -> Response:
            try:
                if private:
                    check_token(self._token, request.headers.get("authorization"))
                return await endpoint(request)
            except ServingError as error:
                return _error(error)
            except ClientDisconnect:
                return _error(ServingError(Reason.CANCELLED, "the client went away"))
            except Exception:
                log.exception("%s %s failed", request.method, request.url.path)
                return _error(ServingError(Reason.INTERNAL, "internal error; the server's log has the details"))

        return call

    def _scoring(self, endpoint: Callable[[Request, float], Coroutine[Any, Any, Response]]) -> Endpoint:
        """Adds the limit on requests in flight, counts refusals, and stops work when the client leaves."""

        async def call(request: Request) -> Response:
            try:
                if self._in_flight >= self._limits.max_in_flight:
                    raise ServingError(Reason.QUEUE_FULL, f"{self._in_flight} requests are in flight, the most allowed")
                self._in_flight += 1
                try:
                    return await endpoint(request, self._service.clock())
                finally:
                    self._in_flight -= 1
            except ServingError as error:
                self._service.count(error)
                raise
            except ClientDisconnect:
                self._service.count(ServingError(Reason.CANCELLED, ""))
                raise

        return call

    async def _infer(self, request: Request, arrived: float) -> Response:
        body = await self._body(request, self._limits.max_body_bytes)
        header_length = request.headers.get(HEADER_LENGTH)
        parsed = parse_infer_request(body, header_length, self._limits.max_json_bytes)
        budget = None if parsed.timeout_us is None else parsed.timeout_us / 1e3

        def encode(model: ServedModel, outputs: Mapping[str, np.ndarray]) -> tuple[bytes, int | None]:
            return build_infer_response(model.name, model.version, parsed, outputs)

        content, length = await _while_connected(
            request,
            self._service.infer(*_target(request), self._service.deadline(arrived, budget), arrived, parsed, encode),
        )
        if length is None:
            return Response(content, media_type="application/json")
        headers = {"Inference-Header-Content-Length": str(length)}
        return Response(content, media_type="application/octet-stream", headers=headers)

    async def _rank(self, request: Request, arrived: float) -> Response:
        body = loads(await self._body(request, self._limits.max_json_bytes))
        parsed = RankRequest.parse(body, self._service.limits.max_candidates)
        deadline = self._service.deadline(arrived, parsed.deadline_ms)
        content = await _while_connected(request, self._service.rank(parsed, deadline, arrived))
        return Response(content, media_type="application/json")

    async def _body(self, request: Request, limit: int) -> bytes:
        """The body, decompressed, at most `limit` bytes, within the time allowed for reading."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(limit)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.read_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise _too_large(limit)
                    parts.append(part)
        except TimeoutError:
            seconds = self._limits.read_seconds
            raise ServingError(Reason.SLOW_BODY, f"body: did not arrive within {seconds:g} s") from None
        encoding = request.headers.get("content-encoding", "identity").lower()
        body = b"".join(parts)
        return body if encoding == "identity" else decompress(body, encoding, limit)

    async def _home(self, request: Request) -> Response:
        models = [f"/v2/models/{model.name}" for model in self._service.repository.loaded()]
        return _json({"name": "opengem", "version": self._version, "paths": ["/v2", "/rank", "/metrics", *models]})

    async def _server(self, request: Request) -> Response:
        return _json({"name": "opengem", "version": self._version, "extensions": list(EXTENSIONS)})

    async def _live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, request: Request) -> Response:
        ready = self._service.ready
        return _json({"ready": ready}, 200 if ready else Reason.UNAVAILABLE.http)

    async def _metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _model(self, request: Request) -> Response:
        return _json(self._service.metadata(*_target(request)))

    async def _model_ready(self, request: Request) -> Response:
        self._service.repository.get(*_target(request))
        return _json({"ready": True})

    async def _config(self, request: Request) -> Response:
        return _json(self._service.model_config(*_target(request)))

    async def _stats(self, request: Request) -> Response:
        found = self._service.statistics(*_target(request))
        return _json({"model_stats": [_statistics(*entry) for entry in found]})

    async def _index(self, request: Request) -> Response:
        body = await self._parameters(request)
        ready = body.get("ready", False)
        if type(ready) is not bool:
            raise invalid(f"ready: expected true or false, got {shorten(ready)}")
        return _json(
            [
                {"name": e.name, "version": e.version, "state": e.state, "reason": e.reason}
                for e in await self._service.index()
                if e.state == "READY" or not ready
            ]
        )

    async def _load(self, request: Request) -> Response:
        _refuse_web_pages(request)
        parameters = (await self._parameters(request)).get("parameters", {})
        model = await self._service.load(request.path_params["model"], load_version(parameters))
        return _json({"name": model.name, "version": model.version})

    async def _unload(self, request: Request) -> Response:
        _refuse_web_pages(request)
        await self._parameters(request)
        await self._service.unload(request.path_params["model"])
        return _json({})

    async def _parameters(self, request: Request) -> dict[str, Any]:
        body = await self._body(request, self._limits.max_json_bytes)
        return loads(body) if body.strip() else {}


def load_version(parameters: Any) -> int | None:
    """The version that a load request names in its parameters, or None. Raises ServingError."""
    if not isinstance(parameters, Mapping):
        raise invalid(f"parameters: expected an object, got {shorten(parameters)}")
    for name in parameters:
        if name != "version":
            raise invalid(f"parameters.{name[:100]}: not supported; only 'version' is")
    version = parameters.get("version")
    if version is None:
        return None
    if type(version) not in (str, int) or not str(version).isdecimal() or len(str(version)) > 18:
        raise invalid(f"parameters.version: expected a number, got {shorten(version)}")
    return int(version)


def check_token(token: str | None, header: str | None) -> None:
    """Compares an Authorization header with the token. Raises ServingError `unauthenticated`."""
    if token is None:
        return
    scheme, _, given = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise ServingError(Reason.UNAUTHENTICATED, "authorization: send the server's token as 'Bearer TOKEN'")


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Undoes gzip or deflate, never making more than `limit` bytes. Raises ServingError."""
    if encoding not in _WBITS:
        raise invalid(f"Content-Encoding: must be gzip or deflate, got {shorten(encoding)}")
    unpacker = zlib.decompressobj(_WBITS[encoding])
    try:
        unpacked = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise invalid(f"body: not valid {encoding}: {error}") from None
    if len(unpacked) > limit:
        raise _too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        raise invalid(f"body: the {encoding} data is cut off or has something behind it")
    return unpacked


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. The body must have been read."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        gone = ServingError(Reason.CANCELLED, "the client went away")
        gone.counted = True  # by the service, when its task is cancelled below
        raise gone
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refuse_web_pages(request: Request) -> None:
    """A page open in a browser on this machine can post to loopback; only pages send an Origin."""
    if "origin" in request.headers:
        raise ServingError(Reason.FORBIDDEN, "models are not loaded or unloaded from web pages")


def _target(request: Request) -> tuple[str, str]:
    return request.path_params.get("model", ""), request.path_params.get("version", "")


def _too_large(limit: int) -> ServingError:
    return ServingError(Reason.TOO_LARGE, f"body: larger than the {limit} bytes allowed")


def _statistics(model: str, version: str, stats: ModelStats) -> dict[str, Any]:
    def duration(value: Duration) -> dict[str, int]:
        return {"count": value.count, "ns": value.ns}

    return {
        "name": model,
        "version": version,
        "last_inference": stats.last_inference_ms,
        "inference_count": stats.inference_count,
        "execution_count": stats.execution_count,
        "inference_stats": {name: duration(getattr(stats, name)) for name in DURATIONS},
        "batch_stats": [],
        "memory_usage": [],
    }


DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _error(error: ServingError) -> Response:
    response = _json({"error": str(error), "reason": error.reason.label}, error.reason.http)
    if error.reason.retryable:
        response.headers["Retry-After"] = "1"
    if error.reason is Reason.UNAUTHENTICATED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same form as all other errors."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _error(ServingError(Reason.NOT_FOUND, f"there is nothing at {request.url.path[:200]}"))
    return _error(ServingError(Reason.METHOD, f"{request.method} is not allowed here"))
