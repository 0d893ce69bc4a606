"""Clients that cost little, so that the benchmark measures the server: HTTP/1.1 over plain streams, and gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc


class HttpPool:
    """Keep-alive connections to one `host:port`, as many as there are requests open."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def message(self, path: str, headers: str, body: bytes) -> bytes:
        """The bytes of a POST request; `headers` are whole lines."""
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        return head.encode() + body

    async def send(self, message: bytes) -> str:
        """Sends one request; "OK", or the HTTP status, or "broken" where the connection ended."""
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(message)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
            )
            await reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return "broken"
        self._idle.append((reader, writer))
        status = head.split(b" ", 2)[1].decode()
        return "OK" if status == "200" else status

    def close(self) -> None:
        """Closes the connections."""
        for _, writer in self._idle:
            writer.close()


async def grpc_call(channel: Any, request: Any, seconds: float) -> str:
    """One ModelInfer call with a deadline; "OK" or the name of the status."""
    try:
        await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=seconds)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"
