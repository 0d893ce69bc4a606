"""Starts the server: one process with a REST side, a gRPC side and the worker threads behind both."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import grpc
from tritonclient.grpc import service_pb2_grpc

from serving.grpc_api import Servicer
from serving.http_server import HttpServer, listen
from serving.model import ModelLimits
from serving.rest_api import HttpLimits, RestApi
from serving.service import SchedulingConfig, Service

log = logging.getLogger("opengem.serving")
SWITCH_SECONDS = 0.001
"""How long a worker may hold the interpreter while the event loop waits for it. Python's 5 ms are a tenth of a
usual latency budget; shorter than this costs more switches than it saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Options of `opengem serve`.

    Args:
        models: folder of exported models, `NAME/VERSION/` inside.
        host: address to listen on; the default answers only this machine.
        http_port: of the REST side; 0 takes a free one.
        grpc_port: of the gRPC side; 0 takes a free one.
        ready_file: JSON file with the addresses, written once requests are answered, removed at the end.
        token_file: file with the bearer token that clients must send; none asks for nothing.
        keep_versions: versions of a model that stay loaded; older ones answer only by version.
        unknown_fields: what a field of `/rank` that the model does not know is: an error, or counted.
        allow_empty: start even when no model can be loaded.
        drain_seconds: time that requests in progress have after Ctrl-C or SIGTERM.
        scheduling: workers, queue and deadlines.
        limits: rows per call and execution providers.
        http: sizes and times of what clients send.
    """

    models: Path
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    ready_file: Path | None = None
    token_file: Path | None = None
    keep_versions: int = 1
    unknown_fields: Literal["reject", "count"] = "reject"
    allow_empty: bool = False
    drain_seconds: float = 10.0
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    limits: ModelLimits = field(default_factory=ModelLimits)
    http: HttpLimits = field(default_factory=HttpLimits)

    def __post_init__(self) -> None:
        for key in ("http_port", "grpc_port"):
            if not 0 <= getattr(self, key) < 65536:
                raise ValueError(f"{key}: must be from 0 to 65535, got {getattr(self, key)}")
        if self.keep_versions < 1:
            raise ValueError(f"keep_versions: must be at least 1, got {self.keep_versions}")
        if self.drain_seconds < 0:
            raise ValueError(f"drain_seconds: must not be negative, got {self.drain_seconds}")
        if self.unknown_fields not in ("reject", "count"):
            raise ValueError(f"unknown_fields: must be reject or count, got {self.unknown_fields!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Addresses:
    """Where a running server answers."""

    host: str
    http_port: int
    grpc_port: int

    @property
    def http(self) -> str:
        """`host:port` of the REST side, as `tritonclient.http` takes it."""
        return f"{_bracket(self.host)}:{self.http_port}"

    @property
    def grpc(self) -> str:
        """`host:port` of the gRPC side, as `tritonclient.grpc` takes it."""
        return f"{_bracket(self.host)}:{self.grpc_port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeResult:
    """What a server did before it was stopped."""

    answered: int
    rejected: int


class Server:
    """A server inside a running event loop: `start`, then `stop`."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        token = _read_token(config.token_file)
        self.service = Service(
            config.models,
            config.scheduling,
            config.limits,
            keep_versions=config.keep_versions,
            reject_unknown=config.unknown_fields == "reject",
        )
        version = _version()
        rest = RestApi(self.service, config.http, token, version)
        self._http = HttpServer(rest.app(), config.drain_seconds)
        self._servicer = Servicer(self.service, token, version, config.http.max_in_flight)
        self._grpc: grpc.aio.Server | None = None
        self._http_task: asyncio.Task[None] | None = None

    async def start(self) -> Addresses:
        """Listens, loads the models, and turns ready.

        Raises:
            ValueError: a port is taken, or no model can be loaded and that is not allowed.
        """
        try:
            return await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> Addresses:
        config = self.config
        self._grpc, grpc_port = self._make_grpc()
        listener = listen(config.host, config.http_port)
        await self._grpc.start()
        self._http_task = asyncio.create_task(self._http.serve(sockets=[listener]))
        await self._http.listening.wait()
        await asyncio.to_thread(self.service.repository.start)
        if not self.service.repository.loaded() and not config.allow_empty:
            reasons = [f"{e.name}/{e.version}: {e.reason}" for e in await self.service.index()]
            raise ValueError(
                f"models: no model in {config.models} can be served: {'; '.join(reasons) or 'it holds none'}"
            )
        self.service.ready = True
        return Addresses(host=config.host, http_port=listener.getsockname()[1], grpc_port=grpc_port)

    def _make_grpc(self) -> tuple[grpc.aio.Server, int]:
        config = self.config
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", config.http.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # else two servers could share a port without noticing
            )
        )
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self._servicer, server)
        try:
            port: int = server.add_insecure_port(f"{_bracket(config.host)}:{config.grpc_port}")
        except RuntimeError:
            raise ValueError(f"grpc_port: cannot listen on {config.host}:{config.grpc_port}; is it in use?") from None
        return server, port

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Turns unready, stops listening, lets requests in progress finish within the time, ends."""
        self.service.ready = False
        self._http.should_exit = True
        self._http.force_exit = drain_seconds == 0
        if self._grpc is not None:
            await self._grpc.stop(drain_seconds)
        if self._http_task is not None:
            await self._http_task
        await asyncio.to_thread(self.service.close, drain_seconds)

    def result(self) -> ServeResult:
        """Totals so far."""
        answered, rejected = self.service.metrics.totals()
        return ServeResult(answered=answered, rejected=rejected)


def serve(config: ServeConfig) -> ServeResult:
    """Serves until Ctrl-C or SIGTERM, then finishes the requests in progress; a second signal ends at once.

    Raises:
        ValueError: the models folder, a port or an option cannot be used.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # the table says what it would
    _print_config(config)
    sys.setswitchinterval(SWITCH_SECONDS)
    return asyncio.run(_serve(config))


async def _serve(config: ServeConfig) -> ServeResult:
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    server = Server(config)
    start = asyncio.create_task(server.start())
    await _first(start, stopping)
    if not start.done():
        print("stopped while loading", file=sys.stderr)
        start.cancel()
        await asyncio.wait({start})
        return server.result()
    addresses = start.result()
    _print_table(addresses, server)
    with _ready_file(config.ready_file, addresses):
        await stopping.wait()
        print("stopping: requests in progress are being finished", file=sys.stderr, flush=True)
        stop = asyncio.create_task(server.stop(config.drain_seconds))
        await _first(stop, hurry)
        if not stop.done():
            await server.stop()
        await stop
    result = server.result()
    print(f"stopped: {result.answered} requests answered, {result.rejected} refused", file=sys.stderr)
    return result


async def _first(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    """Waits for the task or the event, whichever comes first."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


@contextmanager
def running(config: ServeConfig) -> Iterator[Addresses]:
    """A server on a thread of this process for the length of a `with` block; ready when the block begins."""
    started = threading.Event()
    outcome: dict[str, Any] = {}

    async def main() -> None:
        outcome["loop"] = asyncio.get_running_loop()
        outcome["stop"] = asyncio.Event()
        server = Server(config)
        outcome["addresses"] = await server.start()
        started.set()
        await outcome["stop"].wait()
        await server.stop(config.drain_seconds)

    def target() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            outcome["error"] = error
        finally:
            started.set()

    thread = threading.Thread(target=target, name="serving", daemon=True)
    thread.start()
    started.wait()
    if "error" in outcome:
        thread.join()
        raise outcome["error"]
    try:
        with _ready_file(config.ready_file, outcome["addresses"]):
            yield outcome["addresses"]
    finally:
        outcome["loop"].call_soon_threadsafe(outcome["stop"].set)
        thread.join()
    if "error" in outcome:
        raise outcome["error"]


def _version() -> str:
    try:
        return metadata.version("opengem")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"token_file: {path} cannot be read: {error}") from None
    if not token:
        raise ValueError(f"token_file: {path} is empty")
    return token


@contextmanager
def _ready_file(path: Path | None, addresses: Addresses) -> Iterator[None]:
    """The ready file exists, complete, while the block runs."""
    if path is None:
        yield
        return
    content = json.dumps({"http": addresses.http, "grpc": addresses.grpc, "pid": os.getpid()})
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.write_text(content + "\n", encoding="utf-8")
    temporary.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _print_config(config: ServeConfig) -> None:
    print("serve:", file=sys.stderr)
    for key, value in _flat(config, ""):
        print(f"  {key}: {value}", file=sys.stderr, flush=True)


def _flat(config: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if dataclasses.is_dataclass(value):
            yield from _flat(value, f"{prefix}{spec.name}.")
        else:
            yield f"{prefix}{spec.name}", value


def _print_table(addresses: Addresses, server: Server) -> None:
    url = f"http://{addresses.http}"
    rows: list[tuple[str, str]] = [
        ("rank", f"POST {url}/rank"),
        ("REST", f"{url}/v2"),
        ("gRPC", addresses.grpc),
        ("metrics", f"{url}/metrics"),
    ]
    entries = server.service.repository.index()
    rows += [(f"{e.name}/{e.version}", f"{e.state} {e.reason}".strip()) for e in entries]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"  {name:<{width}}  {text}")
    print("ready; Ctrl-C stops", flush=True)
