"""uvicorn, with the few things that a server inside a larger process needs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open: longer than the pools of usual clients keep theirs."""
MAX_HEAD_BYTES = 1 << 20
"""Request line and headers together; a client that sends more is cut off."""


class HttpServer(uvicorn.Server):
    """Serves one ASGI application; leaves signals to the caller and says when it has started.

    Args:
        drain_seconds: time that requests have to finish once `should_exit` is set.
    """

    def __init__(self, app: Any, drain_seconds: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_BoundedHead,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=max(1, round(drain_seconds)),
            )
        )
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: the process has other parts to stop too."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections and sets `listening`."""
        await super().startup(sockets)
        self.listening.set()


class _BoundedHead(HttpToolsProtocol):
    """httptools itself takes headers of any size."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:  # at most one read too much is counted, the one that ended the last request
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket whose connections send at once. Raises ValueError where the port is taken."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise ValueError(f"http_port: cannot listen on {host}:{port}: {error.strerror}") from None
    # Accepted connections inherit it. asyncio sets it only on sockets made with an explicit protocol number;
    # without it an answer's body waits up to 40 ms for the acknowledgement of its headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
