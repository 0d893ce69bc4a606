"""Starting and stopping, as a user does it: the command in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest

import opengem
from foundation.data.options import parse_config
from serving.app import Addresses, ServeConfig, running
from serving.http_server import MAX_HEAD_BYTES, listen
from tests.serving.clients import http
from tests.serving.model_folder import raw_request, write_model

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "opengem.py", "serve", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_file(process: subprocess.Popen[str], path: Path) -> dict[str, str]:
    end = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    addresses: dict[str, str] = json.loads(path.read_text())
    return addresses


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_answers_and_ends_cleanly_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    write_model(tmp_path / "models")
    ready = tmp_path / "ready.json"
    process = start(
        "--models", str(tmp_path / "models"), "--http_port", "0", "--grpc_port", "0", "--ready_file", str(ready)
    )
    try:
        addresses = wait_for_file(process, ready)
        assert http(addresses["http"], "POST", "/rank", raw_request(3)).status == 200
        process.send_signal(number)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert f"POST http://{addresses['http']}/rank" in out and addresses["grpc"] in out
    assert "feed/1" in out and "READY" in out
    assert "scheduling.queue: 64" in err  # the config in full
    assert "1 requests answered, 0 refused" in err
    assert "Traceback" not in err and not ready.exists()


def test_a_second_signal_does_not_wait_for_clients(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    ready = tmp_path / "ready.json"
    process = start(
        *("--models", str(tmp_path / "models"), "--http_port", "0", "--grpc_port", "0"),
        *("--ready_file", str(ready), "--drain_seconds", "600", "--http.read_seconds", "600"),
    )
    try:
        host, port = wait_for_file(process, ready)["http"].split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /rank HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            _wait_until_in_flight(host, int(port))
            process.send_signal(signal.SIGINT)
            assert "stopping" in "".join(iter(process.stderr.readline, _STOPPING)) + _STOPPING
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)  # the request in progress holds it
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0


_STOPPING = "stopping: requests in progress are being finished\n"


def _wait_until_in_flight(host: str, port: int) -> None:
    """The server has read the other connection's first bytes once it answers on a later one."""
    assert http(f"{host}:{port}", "GET", "/v2/health/live").status == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--models", "nothing"), "models: nothing is not a folder"),
        (("--models", ".", "--http_port", "99999"), "http_port: must be from 0 to 65535"),
        (("--models", ".", "--scheduling.queue", "0"), "scheduling.queue: must be at least 1"),
        (("--models", ".", "--scheduling.default_deadline_ms", "0"), "scheduling.default_deadline_ms"),
        (("--models", ".", "--http.max_body_bytes", "0"), "http.max_body_bytes: must be above 0"),
        (("--models", ".", "--limits.max_candidates", "0"), "limits.max_candidates: must be at least 1"),
        (("--models", ".", "--keep_versions", "0"), "keep_versions: must be at least 1"),
        (("--models", ".", "--drain_seconds", "-1"), "drain_seconds: must not be negative"),
        (("--models", ".", "--unknown_fields", "drop"), "unknown_fields"),
        ((), "models"),
    ],
)
def test_bad_options_are_one_clear_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert opengem.main(["serve", *arguments]) != 0
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_no_good_model_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "encoder.npz").unlink()
    config = ServeConfig(models=tmp_path, http_port=0, grpc_port=0)
    with pytest.raises(ValueError, match=r"can be served: feed/1: .*encoder.npz"), running(config):
        pass


def test_an_empty_folder_is_an_error_unless_allowed(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="can be served: it holds none"),
        running(ServeConfig(models=tmp_path, http_port=0, grpc_port=0)),
    ):
        pass
    with running(ServeConfig(models=tmp_path, http_port=0, grpc_port=0, allow_empty=True)) as server:
        assert http(server.http, "GET", "/v2/health/ready").status == 200
        assert http(server.http, "POST", "/rank", raw_request(1)).status == 404
        write_model(tmp_path)
        assert http(server.http, "POST", "/v2/repository/models/feed/load").status == 200
        assert http(server.http, "POST", "/rank", raw_request(1)).status == 200


@pytest.mark.parametrize("side", ["http_port", "grpc_port"])
def test_a_taken_port_is_named(models: Path, side: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"http_port": 0, "grpc_port": 0, side: taken.getsockname()[1]}
        with pytest.raises(ValueError, match=f"{side}: cannot listen on"), running(ServeConfig(models=models, **ports)):
            pass


def test_connections_send_without_waiting_for_acknowledgements() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_endless_headers_are_cut_off(server: Addresses) -> None:
    host, port = server.http.split(":")
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(b"POST /rank HTTP/1.1\r\nX: ")
        try:
            for _ in range(4 * MAX_HEAD_BYTES // 65536):
                connection.sendall(b"a" * 65536)
            closed = connection.recv(1) == b""
        except ConnectionError:
            closed = True
    assert closed
    assert http(server.http, "GET", "/v2/health/live").status == 200


def test_many_requests_on_one_connection_do_not_add_up_to_a_long_head(server: Addresses) -> None:
    host, port = server.http.split(":")
    connection = HTTPConnection(host, int(port), timeout=120)
    body = b" " * 100_000
    for _ in range(3 * MAX_HEAD_BYTES // len(body)):
        connection.request("POST", "/rank", body)
        assert connection.getresponse().read()
    connection.close()


def test_the_preset_states_the_defaults(models: Path) -> None:
    preset = str(ROOT / "configs" / "serving" / "default.yaml")
    arguments = ["--config", preset, "--models", str(models)]
    assert parse_config(ServeConfig, arguments, name="serve") == ServeConfig(models=models)


def test_the_default_address_is_loopback(models: Path) -> None:
    assert ServeConfig(models=models).host == "127.0.0.1"


def test_ipv6(models: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with running(ServeConfig(models=models, host="::1", http_port=0, grpc_port=0)) as server:
        assert server.http.startswith("[::1]:")
        assert http(server.http, "GET", "/v2/health/ready").status == 200
