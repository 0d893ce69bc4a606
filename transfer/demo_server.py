"""The demo's server: a process of its own, asked through its public doors only."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton

START_SECONDS = 60.0
# Of each request. The demo measures latencies, so a slow answer must come, not be refused.
DEADLINE_MS = 30_000
STOP_SECONDS = 20.0


class ServerError(OSError):
    """The server did not start, or answered with an error; the message holds what it said."""


class RunningServer:
    """A server that answers; both connections stay open, so that a request's time is the server's.

    Args:
        http: address of the REST side, `host:port`.
        grpc: address of the gRPC side, `host:port`.
    """

    def __init__(self, http: str, grpc: str) -> None:
        self.http = http
        host, port = http.rsplit(":", 1)
        self._http = HTTPConnection(host, int(port), timeout=30)
        # A proxy of the environment has no business between two processes of one machine.
        self._grpc = triton.InferenceServerClient(grpc, channel_args=[("grpc.enable_http_proxy", 0)])

    def rank(self, body: dict[str, Any]) -> dict[str, Any]:
        """Sends one request to `/rank` and returns the answer.

        Raises:
            ServerError: any answer but 200.
        """
        self._http.request(
            "POST", "/rank", json.dumps({"deadline_ms": DEADLINE_MS, **body}), {"Content-Type": "application/json"}
        )
        answer = self._http.getresponse()
        text = answer.read().decode(errors="replace")
        if answer.status != 200:
            raise ServerError(f"/rank answered {answer.status}: {text}")
        return dict(json.loads(text))

    def infer(self, model: str, inputs: dict[str, np.ndarray], outputs: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Scores named inputs through `tritonclient.grpc`; one array per output.

        Raises:
            ServerError: the server refused.
        """
        names = {"int64": "INT64", "float32": "FP32"}
        tensors = []
        for name, value in inputs.items():
            tensor = triton.InferInput(name, list(value.shape), names[str(value.dtype)])
            tensor.set_data_from_numpy(np.ascontiguousarray(value))
            tensors.append(tensor)
        wanted = [triton.InferRequestedOutput(name) for name in outputs]
        try:
            answer = self._grpc.infer(model, tensors, outputs=wanted, timeout=DEADLINE_MS * 1000)
        except triton.InferenceServerException as error:
            raise ServerError(f"{model}: {error}") from error
        return {name: answer.as_numpy(name) for name in outputs}

    def close(self) -> None:
        """Closes the connections; the server goes on."""
        self._http.close()
        self._grpc.close()


@contextmanager
def running_server(models: Path, log: Path) -> Iterator[RunningServer]:
    """Starts `opengem serve` on free ports, yields it once it answers, and stops it at the end.

    Args:
        models: folder of exported models.
        log: file for what the server prints.

    Raises:
        ServerError: it ends, or does not answer within a minute; the message holds the end of the log.
    """
    ready = log.with_name(f"{log.name}.ready")
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "opengem", "serve", "--models", str(models)]
    command += ["--http_port", "0", "--grpc_port", "0", "--ready_file", str(ready)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait(process, ready, log)
            address = json.loads(ready.read_text())
            with closing(RunningServer(address["http"], address["grpc"])) as server:
                yield server
        finally:
            _stop(process)
            ready.unlink(missing_ok=True)


def _wait(process: subprocess.Popen[bytes], ready: Path, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if ready.exists():
            return
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode}: {_tail(log)}")
        time.sleep(0.05)
    raise ServerError(f"the server did not answer within {START_SECONDS:.0f} s: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:].strip() or "it printed nothing"


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
